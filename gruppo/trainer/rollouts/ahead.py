"""Sampling one generation ahead (`async_rollouts=1`): which one is next, how old it may be, how it is stored.

The policy has seen k updates. The server has its weights and samples generation g+1 from them, while the trainer makes
the updates on generation g:

    trainer   wait g │ send weights k │ ask g+1 │ rewards of g, updates on g → k+1 │ wait g+1 │ send k+1 │ ask g+2 │ …
    server    …──────┤                ├─ sample g+1 from weights k ────────────────┤          ├─ sample g+2 from k+1 …
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.errors import ConfigError
from gruppo.rollout.vllm.inflight import InFlight
from gruppo.trainer.hooks import overridden
from gruppo.trainer.resume.state import RunState
from gruppo.types import Completion, SampleRequest, StopReason

__all__ = ["most_updates_of", "next_generation", "pack_flight", "refuse_ahead", "unpack_flight"]

# Hooks that may ask for other prompts than the trainer's own order says, or for several turns.
HOOKS = ("_generate_single_turn", "rollout", "rows_of", "get_train_dataloader", "_generate_and_score_completions")


def refuse_ahead(trainer: Any, args: Any, rollout_func: Any) -> None:
    """Raise for what cannot be asked for before it is needed."""
    if not args.async_rollouts:
        return
    reasons = {
        "a rollout_func asks by itself": rollout_func is not None,
        "tools and environments take several turns": trainer.toolset is not None,
    }
    reasons |= {f"{type(trainer).__name__} overrides `{name}`": True for name in overridden(trainer, HOOKS)}
    if said := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"async_rollouts={args.async_rollouts} asks for the next prompts before they are needed, which cannot be "
            f"done here: {'; '.join(said)}. Set async_rollouts=0."
        )


def next_generation(
    epoch: int, generation: int, *, per_epoch: int | None, micro_steps: int, accumulation: int, updates_left: int
) -> tuple[int, int] | None:
    """Epoch and number of the generation after this one; None if the run ends before it.

    A generation serves `micro_steps` micro-steps, an update takes `accumulation` of them, or what the epoch has left.
    `updates_left` counts from the first update on this generation.

    Example, two updates for each of three generations of an epoch:
        next_generation(0, 1, per_epoch=3, micro_steps=2, accumulation=1, updates_left=4) -> (0, 2)
        next_generation(0, 2, per_epoch=3, micro_steps=2, accumulation=1, updates_left=4) -> (1, 0)
        next_generation(1, 0, per_epoch=3, micro_steps=2, accumulation=1, updates_left=2) -> None
    """
    began = generation * micro_steps // accumulation
    if per_epoch is None or generation + 1 < per_epoch:
        place, needed = (epoch, generation + 1), (generation + 1) * micro_steps // accumulation
    else:
        place, needed = (epoch + 1, 0), math.ceil(per_epoch * micro_steps / accumulation)
    return place if needed - began < updates_left else None


def most_updates_of(micro_steps: int, accumulation: int) -> int:
    """Updates that take rows of one generation, at most: by so many are the weights of the next one's sampler older.

    Example, one generation for each update; for every third update; three micro-steps where updates take four:
        most_updates_of(4, 4) == 1, most_updates_of(6, 2) == 3, most_updates_of(3, 4) == 2
    """
    # The latest that a generation can begin in an update: both divide what lies before it.
    latest = accumulation - math.gcd(micro_steps, accumulation)
    return (latest + micro_steps - 1) // accumulation + 1


# ---- checkpoints


def pack_flight(flight: InFlight) -> RunState | None:
    """A generation that landed, as plain values and tensors; None if it has no completions."""
    completions = flight.known
    if completions is None:
        return None
    logps = [list(completion.logps or []) for completion in completions]
    values = {
        "sampled_at": flight.sampled_at,
        "seconds": flight.seconds,
        "requests": [[request.count, request.noise_key, request.first_sample] for request in flight.requests],
        "stops": [str(completion.stop) for completion in completions],
        "without_logps": [i for i, completion in enumerate(completions) if completion.logps is None],
    }
    return RunState(
        {"ahead": values},
        {
            **_packed("prompts", [request.prompt_ids for request in flight.requests], torch.long),
            **_packed("completions", [completion.ids for completion in completions], torch.long),
            # Double: what JSON brought from the server comes back bit for bit.
            **_packed("logps", [[math.nan if x is None else x for x in row] for row in logps], torch.double),
        },
    )


def unpack_flight(state: RunState) -> InFlight | None:
    """The inverse of `pack_flight`; None if the checkpoint has no such generation."""
    values = state.values.get("ahead")
    if values is None:
        return None
    prompts, rows, logps = (_unpacked(name, state.tensors) for name in ("prompts", "completions", "logps"))
    requests = [
        SampleRequest(ids, count, noise_key=key, first_sample=first)
        for ids, (count, key, first) in zip(prompts, values["requests"], strict=True)
    ]
    completions = []
    for i, (ids, stop, row) in enumerate(zip(rows, values["stops"], logps, strict=True)):
        known = None if i in values["without_logps"] else [None if math.isnan(x) else x for x in row]
        completions.append(Completion(ids, StopReason(stop), known))
    return InFlight.landed(requests, values["sampled_at"], completions, values["seconds"])


def _packed(name: str, rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> dict[str, Tensor]:
    flat = [value for row in rows for value in row]
    return {
        f"ahead/{name}": torch.tensor(flat, dtype=dtype),
        f"ahead/{name}/lengths": torch.tensor([len(row) for row in rows], dtype=torch.long),
    }


def _unpacked(name: str, tensors: dict[str, Tensor]) -> list[list[Any]]:
    lengths = tensors[f"ahead/{name}/lengths"].tolist()
    return [part.tolist() for part in tensors[f"ahead/{name}"].split(lengths)] if lengths else []
