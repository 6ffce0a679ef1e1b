"""The budgets that a run gives itself: how much is sampled and trained on at once, so that it fits.

Nothing here touches a device except `free_memory`, which asks it how much is left.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gruppo.plan.shape import ModelShape, Passes

# Of free memory: where a device cannot lend it, a pool of keys and values stays allocated beside the update.
_POOL_SHARE = 0.6
# Completions decoded together. Past this the matrix products are compute-bound and a larger batch gains nothing.
_MOST_ROWS = {"cuda": 1024, "cpu": 256}
# Prompt tokens in one forward pass: enough to keep the device busy, few enough that activations stay small.
_PREFILL_TOKENS = {"cuda": 8192, "cpu": 2048}
# Tokens in one forward and backward pass. More keep more activations and gain nothing once the device is busy longer
# than the host needs to give it work. That depends on the layers and not on the tokens: a GPU needs so many products
# of weights and tokens per layer, within these bounds.
_PRODUCTS_PER_LAYER = 4e11
_UPDATE_TOKENS = {"cuda": (8192, 32768), "cpu": (4096, 4096)}
# A single group may have so many times as many tokens: halves of it would keep a device less than busy.
_GROUP = 2
# With checkpointing a pass costs the host half as much again, and a token next to no memory.
_CHECKPOINTED = 2
# Of free memory: allocators leave gaps.
_UPDATE_SHARE = 0.8
# Of free memory: weights that are gathered for a rollout, if they stay afterwards, and if they do not.
_KEPT_SHARE, _FREED_SHARE = 0.3, 0.6
# Completion tokens of a row in the parity check, and those of its prompt where memory is short.
PARITY_TOKENS = 256
# Free memory that the parity check asks for, in models of the wider type: the copy, its gradient, and half as much for
# activations.
PARITY_WIDE_COPIES = 2.5
# Blocks of logits and of their gradients in the fused head.
_HEAD_WORKSPACE = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}


@dataclass(frozen=True)
class RolloutPlan:
    """The budgets of a sampling engine. With the same plan and weights it samples the same completions.

    Example:
        RolloutPlan(kv_tokens=270_000, rows=512, prefill_tokens=8192)
    """

    kv_tokens: int  # KV-cache slots
    rows: int  # most completions decoded together
    prefill_tokens: int  # most prompt tokens in one forward pass

    def halved(self) -> "RolloutPlan":
        """What to try after an allocation failed."""
        return RolloutPlan(max(self.kv_tokens // 2, 1), max(self.rows // 2, 1), max(self.prefill_tokens // 2, 16))

    def covers(self, demand: "RolloutPlan") -> bool:
        """Whether a rollout that would like `demand` runs well enough under this plan."""
        return 1.5 * self.kv_tokens >= demand.kv_tokens and 1.5 * self.rows >= demand.rows

    def grown(self, demand: "RolloutPlan") -> "RolloutPlan":
        """Enough for both; a plan never shrinks because a smaller rollout came by."""
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
    """Budgets for sampling `completions` completions of prompts that have these prefixes, each kept once.

    Everything is decoded together if it fits; otherwise as many completions as leave room for the activations.

    Example, 32 prompts of 200 tokens × 16 completions of 512 tokens, with memory to spare:
        kv_tokens = 32 · 199 · 1.25 + 512 · 512 = 270,104, rows = 512
    """
    prefill = min(_PREFILL_TOKENS[device], max(sum(prefix_lengths), 16))
    rows = max(min(_MOST_ROWS[device], completions), 1)
    working = shape.prefill_bytes(_PREFILL_TOKENS[device], bytes_per_value)
    working += shape.logits_bytes(rows, bytes_per_value, filtered=filtered)
    budget = int(max(free_bytes - working, 0) * _POOL_SHARE) // max(shape.kv_bytes_per_token(bytes_per_value), 1)
    # A quarter more for prompts: those of later batches are longer or shorter.
    wanted = int(1.25 * sum(prefix_lengths)) + rows * max_new_tokens
    least = max(prefix_lengths, default=0) + max_new_tokens
    return RolloutPlan(max(min(wanted, budget), least), rows, max(prefill, 16))


@dataclass(frozen=True)
class UpdatePlan:
    """How an update is cut.

    Example:
        UpdatePlan(tokens=8192, group_tokens=16384, checkpointing=False)
    """

    tokens: int  # most tokens of several groups in one forward and backward pass
    group_tokens: int  # and of a single group, which costs its prompt again to cut
    checkpointing: bool

    def halved(self) -> "UpdatePlan":
        """What to try after an allocation failed."""
        return replace(self, tokens=max(self.tokens // 2, 1), group_tokens=max(self.group_tokens // 2, 1))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_update(
    shape: ModelShape,
    passes: Passes,
    *,
    longest_row: int,
    free_bytes: int,
    checkpointing: bool | None = None,
    tokens: int | None = None,
) -> UpdatePlan:
    """The cut of an update whose longest row has so many tokens.

    `free_bytes` is what is left once gradients and optimizer have theirs. `checkpointing` None turns it
    on only if the smallest useful micro-batch would not fit without it: a single row, and on a GPU half of what keeps
    it busy, since less would take longer than computing layers twice. `tokens` sets the budget.
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


def batch_buckets(rows: int) -> list[int]:
    """Batch sizes that decoding is prepared for, about a quarter apart: a batch runs in the next one up.

    Example:
        batch_buckets(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
    while sizes[-1] < rows:
        sizes.append(sizes[-1] + 256)
    return [*(size for size in sizes if size < rows), rows]


def training_bytes(parameters: Any) -> int:
    """Gradients and two optimizer moments of parameters that are trained, if they are not allocated yet.

    Of parameters that are sharded over processes, this one's share.
    """
    trained = [p for p in parameters if p.requires_grad]
    if any(p.grad is not None for p in trained):
        return 0
    held = [p.to_local() if hasattr(p, "to_local") else getattr(p, "ds_tensor", p) for p in trained]  # FSDP2, ZeRO-3
    return 3 * sum(p.numel() * p.element_size() for p in held)


def plan_whole_weights(weights_bytes: int, free_bytes: int) -> str | None:
    """What becomes of weights that one process gathers for a rollout: "keep" them for the next one, or "free" them.

    Kept, they leave most of what is free to activations and to keys and values; freed, they share it with the latter
    only. None: they do not fit.

    Example:
        plan_whole_weights(14e9, 80e9) == "keep"
        plan_whole_weights(14e9, 30e9) == "free"
        plan_whole_weights(14e9, 20e9) is None
    """
    if weights_bytes <= _KEPT_SHARE * free_bytes:
        return "keep"
    return "free" if weights_bytes <= _FREED_SHARE * free_bytes else None


def free_memory(device: Any) -> int:
    """Bytes that can still be allocated on a torch device, what the allocator holds unused included."""
    if device.type != "cuda":
        return _free_ram()
    import torch

    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - allocated
    # A process may have been given a share only (torch.cuda.set_per_process_memory_fraction).
    return min(free, int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated)


def _free_ram() -> int:
    """Bytes of main memory for the taking; on Linux with what the page cache would give up."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
