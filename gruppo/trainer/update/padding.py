"""Whether padded rows give the log-probs of the same rows alone, and whether they are sampled as they are scored.

Attention over all keys leaves padding out by its mask. Convolutions, recurrent states and attention that chooses its
keys have to leave it out by themselves, and not every model does. So models with such layers are compared on real
rows of the first generation, and again whenever rows are longer or have more padding than any before: what they choose
from, carry on or cut into chunks may begin to matter only there.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ParityError
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.modes import arithmetic_dtype, sampling_mode
from gruppo.policy.support import unusual_layers
from gruppo.policy.unwrap import inner_model
from gruppo.policy.widening import in_float32_if_half
from gruppo.trainer.processes.collectives import any_process, raised_together
from gruppo.types import TrainBatch

logger = logging.getLogger(__name__)

# Mean |difference| of a row's log-probs, in nats per token, that rounding may explain.
_LIMIT = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# In float32 for weights that were rounded to half precision, or on a GPU, where kernels may multiply in TF32
_ROUGH_LIMIT = 1e-2
SAMPLED_TOKENS = 3  # at the end of each row, that are sampled again
# Log-probs (rows, SAMPLED_TOKENS) of the last tokens of some rows, as the sampler computes them.
Sampler = Callable[[Sequence[Sequence[int]], int], Tensor]


@dataclass(frozen=True)
class PaddingReport:
    """The largest of the rows' mean |differences| from the log-probs of each row alone."""

    scoring: float
    sampling: float | None  # None: not compared
    limit: float
    lengths: tuple[int, ...]
    dtype: str

    @property
    def ok(self) -> bool:
        return self.scoring <= self.limit and (self.sampling is None or self.sampling <= self.limit)


class PaddingGuard:
    """Compares padded rows with single ones, for a model that needs it; `rows` are run in one padded pass."""

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        *,
        active: bool,
        sharded: bool,
        rows: int,
        autocast_dtype: torch.dtype | None,
    ):
        self.accelerator, self.sharded, self.rows, self.autocast_dtype = accelerator, sharded, rows, autocast_dtype
        self.layers = unusual_layers(inner_model(model)) if active else []
        self.longest, self.padding = 0, -1  # of the rows compared so far
        self.alone = False  # rows must be run one at a time

    def check(self, model: nn.Module, batch: TrainBatch, sampler: Sampler | None) -> None:
        """Raise if these rows are run wrongly in padded passes; all processes call this together."""
        if not self.layers:
            return
        longest, padding = int(_lengths(batch).max()), int(_padding(batch).max())
        due = longest > self.longest or padding > self.padding
        if self.sharded:  # all processes share each pass
            due, sampler = any_process(self.accelerator, due), None
        with raised_together(self.accelerator, ParityError):
            if due:
                self._compare(model, batch, sampler)
        self.longest, self.padding = max(longest, self.longest), max(padding, self.padding)

    def _compare(self, model: nn.Module, batch: TrainBatch, sampler: Sampler | None) -> None:
        name = type(inner_model(model)).__name__
        try:
            report = compare_padding(model, batch, sampler, rows=self.rows, autocast_dtype=self.autocast_dtype)
            if report.ok:
                return
            alone = compare_padding(model, batch, sampler, rows=1, autocast_dtype=self.autocast_dtype)
        except torch.OutOfMemoryError:
            if self.sharded:
                raise  # the other processes are in the same pass
            logger.warning(
                "There is no memory to compare padded rows with the same rows alone: the run continues without it."
            )
            return
        if not alone.ok or alone.sampling is None:  # what is sampled must be known to be what is scored
            raise ParityError(_verdict(name, report, self.layers))
        self.alone, self.rows = True, 1
        logger.warning(
            f"{name} gives padded rows log-probs that differ by {report.scoring:.2g} nats per token from those of the "
            f"same rows alone ({', '.join(self.layers)}). Rows are run one at a time, which is slower."
        )


def _verdict(name: str, report: PaddingReport, layers: Sequence[str]) -> str:
    wrong = []
    if report.scoring > report.limit:
        wrong.append(f"rows that are padded get log-probs that differ by {report.scoring:.2g} nats per token")
    if report.sampling is not None and report.sampling > report.limit:
        wrong.append(f"as they are sampled, tokens have log-probs that differ by {report.sampling:.2g} nats")
    lengths = " and ".join(map(str, report.lengths))
    return (
        f"{name} does not compute the log-probs of a row alone: {'; '.join(wrong)} ({lengths} tokens, in "
        f"{report.dtype}, where {report.limit:g} is allowed). The cause: {', '.join(layers)}. In this version of "
        "transformers such layers depend on padding, or on whether there is a cache. Shorter rows may pass. With vLLM "
        "and per_device_train_batch_size=1 no row is padded. parity_check='off' skips the check."
    )


def compare_padding(
    model: nn.Module,
    batch: TrainBatch,
    sampler: Sampler | None,
    *,
    rows: int,
    autocast_dtype: torch.dtype | None = None,
) -> PaddingReport:
    """Compare two rows of the bare model: in float32 where that is possible, else in its own dtype."""
    part = batch.rows(_choose(batch))

    def run() -> tuple[float, float | None]:
        return _differences(model, part, sampler, rows)

    found, dtype = in_float32_if_half(model, run, autocast_dtype)
    rough = dtype is torch.float32 and (
        part.prompt_ids.is_cuda or arithmetic_dtype(model, autocast_dtype) is not dtype
    )
    limit = _ROUGH_LIMIT if rough else _LIMIT[dtype]
    return PaddingReport(*found, limit, tuple(_lengths(part).tolist()), str(dtype).removeprefix("torch."))


def _differences(
    model: nn.Module, batch: TrainBatch, sampler: Sampler | None, rows: int
) -> tuple[float, float | None]:
    """The largest mean differences from the log-probs of a row alone: of padded rows, and of sampled tokens."""
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
    width = batch.completion_ids.shape[1]
    exact, texts = [], []
    with sampling_mode(model):
        for i in range(len(batch)):
            row, count = ids[i][mask[i].bool()], int(batch.completion_mask[i].sum())
            vision = None if batch.vision is None else batch.vision[i : i + 1]
            exact.append(score_tokens(model, row[None], torch.ones_like(row[None]), count, vision=vision).logps_BT[0])
            texts.append(row.tolist())
        padded = score_tokens(model, ids, mask, width, batch_size=rows, vision=batch.vision).logps_BT
        scoring = max(_apart(ours[: len(one)], one) for ours, one in zip(padded, exact, strict=True))
        last = min(SAMPLED_TOKENS, *(len(one) for one in exact))
        if sampler is None or batch.vision is not None or not last:
            return scoring, None
        pairs = zip(sampler(texts, last), exact, strict=True)
        return scoring, max(_apart(ours, one[-last:]) for ours, one in pairs)


def _apart(a: Tensor, b: Tensor) -> float:
    """Mean |difference|; infinite where it is not a number."""
    return float((a.float() - b.float()).abs().mean().nan_to_num(torch.inf))


def _lengths(batch: TrainBatch) -> Tensor:
    return batch.prompt_mask.sum(1) + batch.completion_mask.sum(1)


def _padding(batch: TrainBatch) -> Tensor:
    """How far each row's prompt and completion are padded when all rows are run together."""
    prompts, completions = batch.prompt_mask.sum(1), batch.completion_mask.sum(1)
    return prompts.max() - prompts + completions.max() - completions


def _choose(batch: TrainBatch) -> Tensor:
    """The row with the most padding, and the longest one that has any; of rows that have completions."""
    answered, padding = batch.completion_mask.any(1), _padding(batch)
    most = torch.where(answered, padding, -1).argmax()
    padded = answered & (padding > 0)
    longest = torch.where(padded if padded.any() else answered, _lengths(batch), -1).argmax()
    return torch.stack([most, longest])
