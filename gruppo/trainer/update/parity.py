"""The parity check: runs a few real rows on a fast and a slow path, and stops the run if they differ beyond rounding.

    fast path    packed rows with shared prompts, fused head, fused layers     what the update runs
    slow twin    `score_tokens`, one row at a time                             the model's own forward pass
    reference    the slow twin on a copy of the model in a wider dtype         what both should compute

The size of rounding errors depends on the model, so there is no fixed tolerance: the fast path may be at most twice as
far from the reference as the slow twin is, plus a small floor.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from gruppo.errors import ParityError
from gruppo.plan.budgets import PARITY_WIDE_COPIES, free_memory
from gruppo.policy.inplace import Swap, attention_swaps, swapped
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.modes import arithmetic_dtype, has_reentrant_checkpoints
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.packing import Packer
from gruppo.policy.support import full_attention
from gruppo.policy.unwrap import inner_model, is_noisy
from gruppo.trainer.resume.state import RandomState
from gruppo.trainer.update.parity_rows import choose
from gruppo.types import TrainBatch

LOGPS, ENTROPIES, GRADIENTS, SAMPLING = "log-probs", "entropies", "gradients", "sampling log-probs"

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
# The fast path's error may be at most this multiple of the slow twin's …
_TIMES = 2.0
# … plus this floor, for when both errors are tiny: in nats per token, and relative norms for gradients.
_FLOOR = {
    torch.float32: {LOGPS: 1e-6, ENTROPIES: 1e-6, GRADIENTS: 1e-5, SAMPLING: 1e-5},
    torch.bfloat16: {LOGPS: 2e-3, ENTROPIES: 2e-3, GRADIENTS: 1e-2, SAMPLING: 0.02},
    torch.float16: {LOGPS: 5e-4, ENTROPIES: 5e-4, GRADIENTS: 2e-3, SAMPLING: 0.02},
}
# The floor for half precision in mixture-of-experts models: at a near tie, rounding sends a token to another expert.
_ROUTED_FLOOR = {LOGPS: 0.1, ENTROPIES: 0.1, GRADIENTS: 0.5, SAMPLING: 0.2}
# Without a reference: the largest allowed difference between the fast path and the slow twin.
_DIRECT = {
    torch.float64: {LOGPS: 1e-6, ENTROPIES: 1e-6, GRADIENTS: 1e-6, SAMPLING: 1e-5},
    torch.float32: {LOGPS: 1e-4, ENTROPIES: 1e-4, GRADIENTS: 1e-3, SAMPLING: 1e-4},
    torch.bfloat16: {LOGPS: 0.1, ENTROPIES: 0.1, GRADIENTS: 0.2, SAMPLING: 0.1},
    torch.float16: {LOGPS: 0.02, ENTROPIES: 0.02, GRADIENTS: 0.05, SAMPLING: 0.04},
}
_PACK_TOKENS = 4096  # tokens in one pack, which may hold rows of two prompts
_CLASSES = 64  # the gradient of each parameter is reduced to this many numbers
_STRETCH = 1 << 22  # elements of a gradient that are processed at once; a multiple of _CLASSES


@dataclass(frozen=True)
class Comparison:
    """One line of the table: mean |error| in nats per token, or ‖error‖ / ‖gradient‖ for gradients."""

    what: str
    fast: float
    slow: float
    limit: float
    where: str = ""  # for gradients: the parameter with the largest error

    @property
    def ok(self) -> bool:
        """Whether the error is within its limit; NaN on the fast path fails unless the limit is not finite either."""
        return self.fast <= self.limit or not math.isfinite(self.limit)

    def __str__(self) -> str:
        unit = f"of their norm, most of it in {self.where}," if self.where else "nats per token"
        return f"{self.what} are off by {self.fast:.2g} {unit} where {self.limit:.2g} is allowed"


@dataclass(frozen=True)
class ParityReport:
    """The results of a check; `culprit` and `switch` are set if a comparison fails."""

    comparisons: tuple[Comparison, ...]
    rows: int
    tokens: int
    dtype: str
    reference: str  # what errors are measured against: a dtype, or the padded reference path
    culprit: str | None = None
    switch: str | None = None  # the config fields that turn the culprit off
    engine_difference: float | None = None  # mean |difference| of the engine's log-probs and the slow twin's

    @property
    def ok(self) -> bool:
        return all(comparison.ok for comparison in self.comparisons)

    def table(self) -> Table:
        title = f"Parity: {self.rows} rows, {self.tokens} tokens in {self.dtype}, errors against {self.reference}"
        table = Table("", "fast path", "padded reference", "allowed", "", title=title)
        for line in self.comparisons:
            verdict = "[green]ok" if line.ok else "[red]too large"
            table.add_row(line.what, f"{line.fast:.2g}", f"{line.slow:.2g}", f"{line.limit:.2g}", verdict)
        return table

    def __str__(self) -> str:
        errors = ", ".join(f"{line.what} {line.fast:.2g} of {line.limit:.2g}" for line in self.comparisons)
        verdict = "ok" if self.ok else f"not ok, {self.switch} turns off {self.culprit}"
        return f"parity of {self.rows} rows in {self.dtype} against {self.reference}: {errors}; {verdict}"


def enforce(report: ParityReport) -> None:
    """Raise if the fast path or the sampling engine differs by more than rounding."""
    if report.ok:
        return
    found = "; ".join(str(comparison) for comparison in report.comparisons if not comparison.ok)
    raise ParityError(
        f"The fast path differs from the padded reference path by more than rounding: {found} ({report.tokens} tokens "
        f"of {report.rows} rows in {report.dtype}, against {report.reference}). At fault: {report.culprit}. Set "
        f"{report.switch} to continue."
    )


def check_parity(
    model: nn.Module,
    packed: PackedPolicy,
    batch: TrainBatch,
    *,
    temperature: float,
    entropy_gradient: bool,
    rows: int = 4,
) -> ParityReport:
    """Compare the two paths of the bare model, in values and gradients, on up to `rows` rows of the batch.

    `batch.engine_logps` are compared too if present, so leave them out once the weights have changed. Modes, gradients
    and random states are restored afterwards, even if memory runs out.
    """
    dtype = arithmetic_dtype(inner_model(model), packed.autocast_dtype)
    name = str(dtype).removeprefix("torch.") + (" autocast" if packed.autocast_dtype else "")
    sample = choose(batch, rows)
    if sample is None:
        return ParityReport((), 0, 0, name, "padded reference path")
    case, wide = _Case(sample, temperature, entropy_gradient), _WIDER.get(dtype)
    with _unnoticed(model), swapped(_autocast(model, packed.autocast_dtype)):
        exact = None if wide is None else _run_reference(model, case, wide)
        slow = _run_slowly(model, case)
        judge = _Judge(model, dtype, slow, exact)
        comparisons = judge(_run_packed(model, packed, case, share=True))
        faults = [] if all(c.ok for c in comparisons) else [_find_culprit(model, packed, case, judge)]
    engine_difference = None
    if sample.engine_logps is not None:
        sampled = sample.engine_logps[case.scored].double().cpu()
        engine_difference = _error(SAMPLING, sampled, slow.logps, slow.norm)
        comparisons.append(judge.compare(SAMPLING, sampled, slow.logps, judge.target.logps))
        if not comparisons[-1].ok:
            faults.append(("the sampling engine", "rollout_backend='transformers'"))
    return ParityReport(
        comparisons=tuple(comparisons),
        rows=len(sample),
        tokens=len(slow.logps),
        dtype=name,
        reference="padded reference path" if exact is None else str(wide).removeprefix("torch."),
        culprit=" and ".join(culprit for culprit, _ in faults) or None,
        switch=" and ".join(switch for _, switch in faults) or None,
        engine_difference=engine_difference,
    )


# ---- three ways to run them


class _Case:
    """The input of all paths: rows, and a loss that sums their log-probs and entropies with random signs."""

    def __init__(self, batch: TrainBatch, temperature: float, entropy_gradient: bool):
        self.batch, self.entropy_gradient = batch, entropy_gradient
        self.options: dict[str, Any] = dict(temperature=temperature, entropy=True, entropy_gradient=entropy_gradient)
        self.scored = batch.loss_mask_BT.bool()  # (B, T)
        signs = torch.randint(2, (2, *self.scored.shape), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        self.signs = signs.to(self.scored.device) * self.scored  # (2, B, T)

    def loss(self, rows: Sequence[int], logps_bT: Tensor, entropy_bT: Tensor) -> Tensor:
        by_logp, by_entropy = self.signs[:, list(rows)]
        loss = (logps_bT * by_logp).sum()
        return loss + (entropy_bT * by_entropy).sum() if self.entropy_gradient else loss


class _Found(NamedTuple):
    """Scores of M tokens and the sketch of a gradient, as float64 on the host."""

    logps: Tensor
    entropies: Tensor
    sketch: Tensor  # (parameters, 64)
    norm: Tensor  # of the sketch or, if larger, of those of the passes together, in which nothing cancels; 0-d


def _run_slowly(model: nn.Module, case: _Case, *, wide: bool = False) -> _Found:
    """The slow twin. It runs one row at a time, so that only the logits of one row and one gradient are in memory."""
    batch, found = case.batch, []
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
    with swapped(_plain_modules(model, wide=wide)):
        for row in range(len(batch)):
            # Cut off padding, so that this is the plainest forward pass.
            first, *_, last = mask[row].nonzero()[:, 0].tolist()
            part, missing = (slice(row, row + 1), slice(first, last + 1)), mask.shape[1] - last - 1
            width = batch.completion_ids.shape[1] - missing
            scores = score_tokens(model, ids[part], mask[part], width, **case.options)
            padded = (functional.pad(score, (0, missing)) for score in scores if score is not None)
            found.append(_keep(model, case, [row], *padded))
    return _joined(found, range(len(batch)), case)


def _run_packed(model: nn.Module, packed: PackedPolicy, case: _Case, *, share: bool) -> _Found:
    """The fast path."""
    batch, found = case.batch, []
    # Completions of one prompt stay in one pack, however long the prompt is.
    tokens = max(_PACK_TOKENS, int(batch.prompt_mask.sum(1).max() + batch.completion_mask.sum()))
    packs = Packer(batch, share=share).packs(range(len(batch)), tokens)
    with packed.active(model):
        for pack in packs:
            padded = (pack.padded(score) for score in packed.score(model, pack, **case.options) if score is not None)
            found.append(_keep(model, case, pack.rows, *padded))
    return _joined(found, [row for pack in packs for row in pack.rows], case)


def _run_reference(model: nn.Module, case: _Case, wide: torch.dtype) -> _Found | None:
    """The slow twin in a wider dtype; None if there is no memory for a copy, or the model cannot be copied or run."""
    parameters, twin = list(model.parameters()), None
    if all(p.dtype == wide for p in parameters if p.is_floating_point()):
        return _run_slowly(model, case, wide=True)
    needed = PARITY_WIDE_COPIES * wide.itemsize * sum(p.numel() for p in parameters)
    if getattr(inner_model(model), "hf_quantizer", None) is not None or needed > free_memory(parameters[0].device):
        return None
    try:
        twin = copy.deepcopy(model).to(wide)
        return _run_slowly(twin, case, wide=True)
    except (TypeError, RuntimeError):  # some part cannot be copied, or has no kernel for the dtype
        return None
    finally:
        if twin is not None:
            twin.to("meta")  # frees its memory even if something still refers to it


def _keep(model: nn.Module, case: _Case, rows: Sequence[int], logps_bT: Tensor, entropy_bT: Tensor) -> _Found:
    """Scores (b, T) of some rows and the sketch of their gradient; graph and gradient are freed on return."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient = torch.autograd.grad(case.loss(rows, logps_bT, entropy_bT), trained, allow_unused=True)
    sketches = [_sketch(part, seed) for seed, part in enumerate(gradient)]
    sketch = torch.stack(sketches)
    return _Found(logps_bT.detach(), entropy_bT.detach(), sketch, sketch.norm())


def _joined(found: Sequence[_Found], rows: Sequence[int], case: _Case) -> _Found:
    """The scores of all rows, in order, and the sum of the sketches, which is the sketch of the summed gradient."""
    order = torch.tensor(rows).argsort().to(case.scored.device)
    logps, entropies = (torch.cat([part[i] for part in found])[order][case.scored] for i in (0, 1))
    sketches = torch.stack([part.sketch for part in found])
    total = sketches.sum(0)
    return _Found(logps.double().cpu(), entropies.double().cpu(), total, torch.maximum(total.norm(), sketches.norm()))


def _sketch(gradient: Tensor | None, seed: int) -> Tensor:
    """A gradient reduced to 64 float64 numbers whose sum of squares equals, in expectation, that of the gradient.

    Each element gets a random sign, which depends only on the seed, and every 64th element is added up. The difference
    of two sketches is thus the sketch of the difference, and the gradients need not be in memory at the same time.
    """
    if gradient is None:
        return torch.zeros(_CLASSES, dtype=torch.float64)
    generator = torch.Generator(gradient.device).manual_seed(seed)
    sums = torch.zeros(_CLASSES, dtype=torch.float64, device=gradient.device)
    for part in gradient.reshape(-1).split(_STRETCH):
        signs = torch.randint(2, part.shape, generator=generator, device=part.device, dtype=torch.int8).mul_(2).sub_(1)
        signed = part.to(torch.promote_types(part.dtype, torch.float32)) * signs
        sums += functional.pad(signed, (0, -len(part) % _CLASSES)).view(-1, _CLASSES).sum(0, dtype=torch.float64)
    return sums.cpu()


# ---- verdicts


class _Judge:
    """Compares the errors of a fast path with limits, which depend on the slow twin's errors against the reference."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, slow: _Found, exact: _Found | None):
        self.slow, self.target = slow, exact or slow
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        routed = dtype.itemsize == 2 and any(name.endswith("experts") for name, _ in model.named_modules())
        # Allowed in addition to twice the slow twin's error, which is 0 if the slow twin is itself the reference.
        self.floor = _ROUTED_FLOOR if routed else (_FLOOR if exact else _DIRECT)[dtype]

    def __call__(self, fast: _Found) -> list[Comparison]:
        return list(map(self.compare, (LOGPS, ENTROPIES, GRADIENTS), fast, self.slow, self.target))

    def compare(self, what: str, fast: Tensor, slow: Tensor, target: Tensor) -> Comparison:
        where = self.names[int((fast - target).norm(dim=1).argmax())] if what == GRADIENTS else ""
        error, own = (_error(what, values, target, self.target.norm) for values in (fast, slow))
        return Comparison(what, error, own, _TIMES * own + self.floor[what], where)


def _error(what: str, values: Tensor, target: Tensor, norm: Tensor) -> float:
    """The sketch alone may be rounding only: the gradients of equal rows with opposite signs add up to nothing."""
    if what == GRADIENTS:
        return ((values - target).norm() / norm.clamp(min=1e-300)).item()
    return (values - target)[target.isfinite()].abs().mean().item()


def _find_culprit(model: nn.Module, packed: PackedPolicy, case: _Case, judge: _Judge) -> tuple[str, str]:
    """The part of the fast path that causes the difference, and the setting that turns it off."""

    def agrees(*, head: bool = packed.fused_head, layers: bool = packed.fused_layers, share: bool = True) -> bool:
        other = PackedPolicy(fused_head=head, fused_layers=layers, autocast_dtype=packed.autocast_dtype)
        return all(comparison.ok for comparison in judge(_run_packed(model, other, case, share=share)))

    if packed.fused_layers and agrees(layers=False):
        return "the fused layers", "fused_layers=False"
    if packed.fused_head and agrees(head=False):
        return "the fused head", "fused_head=False"
    if packed.fused_layers and packed.fused_head and agrees(head=False, layers=False):
        return "the fused layers and the fused head", "fused_layers=False and fused_head=False"
    if agrees(head=False, layers=False, share=False):
        return "prompts that packed rows share", "packed_update=False"
    return "packed rows", "packed_update=False"


# ---- how the model is run


@contextmanager
def _unnoticed(model: nn.Module) -> Iterator[None]:
    """Enable gradients; restore modes and random states afterwards.

    The model is put in eval mode if it would draw noise or has reentrant checkpoints, which forbid `autograd.grad`.
    """
    modes = [(module, module.training) for module in model.modules()]
    noise = RandomState.now()
    try:
        if is_noisy(model, inner_model(model)) or has_reentrant_checkpoints(model):
            model.eval()
        with torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        noise.restore()


def _autocast(model: nn.Module, dtype: torch.dtype | None) -> list[Swap]:
    """Swaps that run the forward pass under autocast, as accelerate does, for a model that it has not prepared."""
    if dtype is None or "_original_forward" in vars(model):
        return []
    cast: Any = torch.autocast(next(model.parameters()).device.type, dtype)
    return [Swap(model, "_original_forward", model.forward), Swap(model, "forward", cast(model.forward))]


def _plain_modules(model: nn.Module, *, wide: bool) -> list[Swap]:
    """Swaps for the slow twin: the model's own attention, or eager where others would leave something out.

    If wide, also without autocast and without kernels that do not support the wide dtype.
    """
    inner = inner_model(model)
    text = inner.config.get_text_config()
    swaps = full_attention(inner)
    if not swaps and wide and text._attn_implementation not in ("eager", "sdpa"):
        swaps = attention_swaps(inner, "sdpa")
    if wide:
        swaps.append(Swap(text, "_experts_implementation_internal", "eager"))
        swaps.append(Swap(model, "forward", vars(model).get("_original_forward", model.forward)))
    return swaps
