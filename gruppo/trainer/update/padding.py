"""Whether padded rows give the log-probs of the same rows alone, and whether they are sampled as they are scored.

Attention over all keys leaves padding out by its mask. Convolutions, recurrent states and attention that chooses its
keys have to leave it out by themselves, and not every model does; rotary frequencies may depend on the longest row of
a batch. So models whose layers are not known to be standard attention are compared on real
rows of the first generation, and again whenever rows are longer or have more padding than any before: what they choose
from, carry on or cut into chunks may begin to matter only there.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ParityError
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.modes import arithmetic_dtype, sampling_mode
from gruppo.policy.support import batch_of, padding_risks
from gruppo.policy.unwrap import inner_model
from gruppo.policy.widening import in_float32_if_half
from gruppo.trainer.processes.collectives import any_process, raised_together
from gruppo.types import TrainBatch

logger = logging.getLogger(__name__)

# Mean |difference| of a row's log-probs, in nats per token, that rounding may explain.
_LIMIT = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
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
    """Compares padded rows with single ones, for a model that needs it."""

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        *,
        active: bool,
        sharded: bool,
        autocast_dtype: torch.dtype | None,
    ):
        self.accelerator, self.sharded, self.autocast_dtype = accelerator, sharded, autocast_dtype
        self.layers = padding_risks(model) if active else []
        self.longest, self.padding = 0, -1  # of the rows compared so far
        self.alone = False  # rows must be run one at a time
        self._watched: nn.Module | None = None  # raises if rows are padded nevertheless
        self._told_coarse = False

    def check(self, model: nn.Module, batch: TrainBatch, sampler: Sampler | None, *, rows: int) -> None:
        """Raise if these rows are run wrongly in padded passes of `rows`; all processes call this together."""
        if not self.layers:
            return
        rows, answered = 1 if self.alone else rows, batch.completion_mask.any(1)
        longest, padding = _extent(batch.rows(answered), rows) if answered.any() else (0, -1)
        due = longest > self.longest or padding > self.padding
        if self.sharded:  # all processes share each pass
            due, sampler = any_process(self.accelerator, due), None
        needs_single = False
        with raised_together(self.accelerator, ParityError):
            if due:
                needs_single = self._compare(model, batch, sampler, rows)
        self.longest, self.padding = max(longest, self.longest), max(padding, self.padding)
        # Together: processes that make different numbers of passes would wait for each other.
        if any_process(self.accelerator, needs_single):
            self.alone = True
        if self.alone and self._watched is None:
            self._watched = inner_model(model)
            self._watched.register_forward_pre_hook(_refuse_padding, with_kwargs=True)

    def _compare(self, model: nn.Module, batch: TrainBatch, sampler: Sampler | None, rows: int) -> bool:
        """Whether rows must be run alone; raises if that does not help."""
        name = type(inner_model(model)).__name__
        if idle := not batch.completion_mask.any():  # only the other processes have tokens to compare
            batch = batch_of([([0], [0])] * 2, batch.prompt_ids.device)
        try:
            report = compare_padding(model, batch, sampler, rows=rows, autocast_dtype=self.autocast_dtype)
            self._say_if_coarse(report)
            if report.ok or idle:
                return False
            # What is sampled must be known to be what is scored.
            if rows == 1 or sampler is None or report.sampling is None:
                raise ParityError(_verdict(name, report, self.layers))
            alone = compare_padding(model, batch, _singly(sampler), rows=1, autocast_dtype=self.autocast_dtype)
        except torch.OutOfMemoryError:
            if self.sharded:
                raise  # the other processes are in the same pass
            logger.warning(
                "There is no memory to compare padded rows with the same rows alone: the run continues without it."
            )
            return False
        if not alone.ok:
            raise ParityError(_verdict(name, report, self.layers))
        logger.warning(
            f"{name} does not compute the log-probs of a row alone if rows are padded: {_wrong(report)} "
            f"({', '.join(self.layers)}). Rows are run one at a time, which is slower."
        )
        return True

    def _say_if_coarse(self, report: PaddingReport) -> None:
        if report.dtype in ("bfloat16", "float16") and not self._told_coarse:
            self._told_coarse = True
            logger.warning(
                f"Padded rows were compared with single ones in {report.dtype}, as this model cannot run in float32: "
                f"differences below {report.limit:g} nats per token cannot be told from rounding."
            )

    def state_dict(self) -> dict[str, Any]:
        """What was found so far. A run that is resumed with it makes the same passes."""
        return {"alone": self.alone, "longest": self.longest, "padding": self.padding}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.layers:  # otherwise nothing is checked any more
            self.alone, self.longest, self.padding = state["alone"], state["longest"], state["padding"]


def _refuse_padding(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the update runs padded rows in one pass: a subclass may run the model by itself."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if model.training and isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) > 1 and not mask.all():
        raise ParityError(
            f"Padding changes the log-probs of {type(model).__name__}, but the update runs {len(mask)} padded rows in "
            "one pass. An overridden method does so: let it call the trainer's _get_per_token_logps_and_entropies, "
            "which runs them one at a time, or set per_device_train_batch_size=1."
        )


def _singly(sampler: Sampler) -> Sampler:
    return lambda rows, last: torch.cat([sampler([row], last) for row in rows])


def _wrong(report: PaddingReport) -> str:
    wrong = []
    if report.scoring > report.limit:
        wrong.append(f"rows that are padded get log-probs that differ by {report.scoring:.2g} nats per token")
    if report.sampling is not None and report.sampling > report.limit:
        wrong.append(f"as they are sampled, tokens have log-probs that differ by {report.sampling:.2g} nats")
    return "; ".join(wrong)


def _verdict(name: str, report: PaddingReport, layers: Sequence[str]) -> str:
    lengths = " and ".join(map(str, sorted(set(report.lengths))))
    return (
        f"{name} does not compute the log-probs of a row alone: {_wrong(report)} ({lengths} tokens, in "
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
    """Compare rows of the bare model: in float32 where that is possible, else in its own dtype."""
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
        both, size = [0, 1, 2, 1], min(rows, 2)  # each of the others with the longest row, on which all may depend
        vision = None if batch.vision is None else [batch.vision[i] for i in both]
        padded = score_tokens(model, ids[both], mask[both], width, batch_size=size, trim=True, vision=vision).logps_BT
        scoring = max(_apart(ours[: len(exact[i])], exact[i]) for ours, i in zip(padded, both, strict=True))
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


def _extent(batch: TrainBatch, rows: int) -> tuple[int, int]:
    """The longest row and the most padding, of which a row has none if it is run alone."""
    return int(_lengths(batch).max()), int(_padding(batch).max()) if rows > 1 else 0


def _choose(batch: TrainBatch) -> Tensor:
    """The row with the most padding, the longest one, and the longest that has padding; of those with completions."""
    answered, padding = batch.completion_mask.any(1), _padding(batch)
    most = torch.where(answered, padding, -1).argmax()
    padded = answered & (padding > 0)
    longest, longest_padded = (
        torch.where(rows, _lengths(batch), -1).argmax() for rows in (answered, padded if padded.any() else answered)
    )
    return torch.stack([most, longest, longest_padded])
