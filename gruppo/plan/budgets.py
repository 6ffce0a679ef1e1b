"""Budgets of a run: how much to sample and to train on at once so that it fits into memory.

Nothing here touches a device except `free_memory`, which queries how much memory is left.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gruppo.plan.shape import MeasuredShape, ModelShape, Passes

# Share of free memory for the KV cache. It leaves room for the update: where a device cannot release the memory of the
# KV cache between rollouts, the cache stays allocated during the update.
_POOL_SHARE = 0.6
# Most completions decoded together. Beyond this the matmuls are compute-bound and a larger batch gains nothing.
_MOST_ROWS = {"cuda": 1024, "cpu": 256}
# Prompt tokens in one forward pass: enough to keep the device busy, few enough that activations stay small.
_PREFILL_TOKENS = {"cuda": 8192, "cpu": 2048}
# Tokens in one forward and backward pass. More tokens keep more activations and gain nothing once the device needs
# longer than the host takes to launch the kernels. Launch time depends on the number of layers, not of tokens: a GPU
# is busy with _PRODUCTS_PER_LAYER multiplications (weights × tokens) per layer. _UPDATE_TOKENS bounds the result.
_PRODUCTS_PER_LAYER = 4e11
_UPDATE_TOKENS = {"cuda": (8192, 32768), "cpu": (4096, 4096)}
# A single group may have this many times as many tokens: half a group would not keep the device busy.
_GROUP = 2
# Factor on the tokens with gradient checkpointing: the host launches the forward kernels twice, and a token takes
# hardly any memory.
_CHECKPOINTED = 2
# Share of free memory for the update: the allocator fragments memory.
_UPDATE_SHARE = 0.8
# Share of free memory that weights gathered for a rollout may take if they are kept afterwards, and if they are freed.
_KEPT_SHARE, _FREED_SHARE = 0.3, 0.6
# Most completion tokens per row in the parity check; where memory is short, also the most prompt tokens.
PARITY_TOKENS = 256
# Free memory that the parity check requires, in sizes of the model in the wider dtype: one for the copy, one for its
# gradient, and half of one for activations.
PARITY_WIDE_COPIES = 2.5
# Bytes for the blocks of logits and of their gradients in the fused LM head.
_HEAD_WORKSPACE = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}


@dataclass(frozen=True)
class RolloutPlan:
    """The budgets of the sampling engine. With the same plan and weights it samples the same completions.

    Example:
        RolloutPlan(kv_tokens=270_000, rows=512, prefill_tokens=8192)
    """

    kv_tokens: int  # KV-cache slots
    rows: int  # most completions decoded together
    prefill_tokens: int  # most prompt tokens in one forward pass

    def halved(self) -> "RolloutPlan":
        """The plan to try after an allocation failed."""
        return RolloutPlan(max(self.kv_tokens // 2, 1), max(self.rows // 2, 1), max(self.prefill_tokens // 2, 16))

    def covers(self, demand: "RolloutPlan") -> bool:
        """Whether a rollout whose ideal plan is `demand` runs well enough under this plan."""
        return 1.5 * self.kv_tokens >= demand.kv_tokens and 1.5 * self.rows >= demand.rows

    def grown(self, demand: "RolloutPlan") -> "RolloutPlan":
        """A plan large enough for both: a smaller rollout never shrinks the plan."""
        return RolloutPlan(
            max(self.kv_tokens, demand.kv_tokens),
            max(self.rows, demand.rows),
            max(self.prefill_tokens, demand.prefill_tokens),
        )

    def widened(self, kv_tokens: int) -> "RolloutPlan":
        return replace(self, kv_tokens=max(self.kv_tokens, kv_tokens))

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def plan_rollout(
    shape: ModelShape,
    *,
    prefix_lengths: Sequence[int],
    completions: int,
    max_new_tokens: int,
    bytes_per_value: int,
    free_bytes: int,
    device: str,
    filtered: bool = False,
) -> RolloutPlan:
    """Budgets for sampling `completions` completions of prompts with these prefix lengths; each prefix is cached once.

    All completions are decoded together if they fit; otherwise as many as leave room for the activations.

    Example, 32 prompts of 200 tokens × 16 completions of 512 tokens, with memory to spare:
        kv_tokens = 32 · 199 · 1.25 + 512 · 512 = 270,104, rows = 512
    """
    prefill = min(_PREFILL_TOKENS[device], max(sum(prefix_lengths), 16))
    rows = max(min(_MOST_ROWS[device], completions), 1)
    working = shape.prefill_bytes(_PREFILL_TOKENS[device], bytes_per_value)
    working += shape.logits_bytes(rows, bytes_per_value, filtered=filtered)
    budget = int(max(free_bytes - working, 0) * _POOL_SHARE) // max(shape.kv_bytes_per_token(bytes_per_value), 1)
    # A quarter more for prompts, since those of later batches may be longer.
    wanted = int(1.25 * sum(prefix_lengths)) + rows * max_new_tokens
    least = max(prefix_lengths, default=0) + max_new_tokens
    return RolloutPlan(max(min(wanted, budget), least), rows, max(prefill, 16))


@dataclass(frozen=True)
class UpdatePlan:
    """How an update is split into passes.

    Example:
        UpdatePlan(tokens=8192, group_tokens=16384, checkpointing=False)
    """

    tokens: int  # most tokens of several groups in one forward and backward pass
    group_tokens: int  # and of a single group: splitting it would process its prompt again
    checkpointing: bool

    def __str__(self) -> str:
        recomputed = ", with gradient checkpointing" if self.checkpointing else ""
        return f"passes of up to {self.tokens:,} tokens ({self.group_tokens:,} of a single group){recomputed}"

    def halved(self) -> "UpdatePlan":
        """The plan to try after an allocation failed."""
        return replace(self, tokens=max(self.tokens // 2, 1), group_tokens=max(self.group_tokens // 2, 1))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_update(
    shape: ModelShape | MeasuredShape,
    passes: Passes,
    *,
    longest_row: int,
    free_bytes: int,
    checkpointing: bool | None = None,
    tokens: int | None = None,
) -> UpdatePlan:
    """How to split an update whose longest row has `longest_row` tokens.

    `free_bytes` is what is left after gradients and optimizer state. With `checkpointing` None, gradient checkpointing
    is turned on only if the smallest useful micro-batch would not fit without it. That is a single row, and on a GPU
    at least half the tokens that keep it busy, since fewer would take longer than computing the layers twice.
    `tokens` overrides the token budget.
    """

    def kept(checkpointing: bool) -> int:
        return shape.update_bytes(passes, checkpointing=checkpointing)

    device = passes.device
    head = 2 * shape.vocabulary * shape.hidden * passes.stream + _HEAD_WORKSPACE[device]
    room = int(max(free_bytes * _UPDATE_SHARE - head - shape.cast_bytes(passes), 0))
    least, most = _UPDATE_TOKENS[device]
    enough = max(least, min(int(_PRODUCTS_PER_LAYER * shape.layers / shape.layer_weights), most))
    if checkpointing is None:
        useful = max(longest_row, enough // 2 if device == "cuda" else 0)
        checkpointing = room // kept(False) < (useful if tokens is None else max(min(tokens, useful), longest_row))
    if tokens is not None:
        return UpdatePlan(tokens, tokens, checkpointing)
    fits = room // kept(checkpointing)
    if checkpointing:
        enough *= _CHECKPOINTED
    return UpdatePlan(max(min(fits, enough), longest_row), max(min(fits, _GROUP * enough), longest_row), checkpointing)


def shares_prompts(rows: float, prompt_tokens: float) -> bool:
    """Whether a kernel that reads each prompt once for several rows pays off at this mean prompt length.

    Short prompts come from the GPU's cache for all rows but the first, and a second kernel costs more than that.
    """
    return rows >= 64 and prompt_tokens >= 256


def batch_buckets(rows: int) -> list[int]:
    """Batch sizes that decoding is prepared for, large ones about a quarter apart; a batch runs in the next size up.

    Example:
        batch_buckets(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
    while sizes[-1] < rows:
        sizes.append(sizes[-1] + 256)
    return [*(size for size in sizes if size < rows), rows]


def training_bytes(parameters: Any) -> int:
    """Bytes of gradients and two optimizer moments of the trainable parameters, 0 once gradients are allocated.

    Of sharded parameters only the share of this process counts.
    """
    trained = [p for p in parameters if p.requires_grad]
    if any(p.grad is not None for p in trained):
        return 0
    held = [p.to_local() if hasattr(p, "to_local") else getattr(p, "ds_tensor", p) for p in trained]  # FSDP2, ZeRO-3
    return 3 * sum(p.numel() * p.element_size() for p in held)


def plan_whole_weights(weights_bytes: int, free_bytes: int) -> str | None:
    """Whether to "keep" the weights that a process gathers for a rollout until the next one, or to "free" them.

    Kept weights must leave most of the free memory to activations and the KV cache. Freed ones share it with the KV
    cache only. None: they do not fit.

    Example:
        plan_whole_weights(14e9, 80e9) == "keep"
        plan_whole_weights(14e9, 30e9) == "free"
        plan_whole_weights(14e9, 20e9) is None
    """
    if weights_bytes <= _KEPT_SHARE * free_bytes:
        return "keep"
    return "free" if weights_bytes <= _FREED_SHARE * free_bytes else None


def free_memory(device: Any) -> int:
    """Bytes that can still be allocated on a torch device, including what the allocator has reserved but not used."""
    if device.type != "cuda":
        return _free_ram()
    import torch

    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - allocated
    # A process may be limited to a share (torch.cuda.set_per_process_memory_fraction).
    return min(free, int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated)


def _free_ram() -> int:
    """Bytes of available main memory; on Linux including what the page cache would give up."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
