"""The generation that a server samples while updates run (`async_rollouts=1`).

After k updates the server receives the policy's weights and samples generation g+1 from them, while the trainer runs
the updates on generation g:

    trainer   wait g │ send weights k │ ask g+1 │ rewards of g, updates on g → k+1 │ wait g+1 │ send k+1 │ ask g+2 │ …
    server    …──────┤                ├─ sample g+1 from weights k ────────────────┤          ├─ sample g+2 from k+1 …
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.errors import RolloutError
from gruppo.rollout.vllm.inflight import InFlight
from gruppo.trainer.resume.state import RunState
from gruppo.types import Completion, SampleRequest, StopReason

logger = logging.getLogger(__name__)

Pause = Callable[[], None]  # called periodically during a wait; may raise


class RolloutsAhead:
    """Holds the generation that was requested ahead of time and is not yet trained on: one at most.

    `most_updates` is the largest number of updates between the weights that sample a generation and the training on
    it; 0 if nothing is requested ahead.

    Example:
        ahead.flight = backend.begin(requests)      # the server samples, the trainer trains
        ahead.wait(pause)                           # before the server gets other weights
        flight = ahead.take(requests, now, pause)   # when they are due; None if they must be sampled now
    """

    def __init__(self, args: Any) -> None:
        self.enabled = bool(args.async_rollouts)
        micro_steps, accumulation = args.micro_steps_per_generation, args.gradient_accumulation_steps
        self.most_updates = most_updates_of(micro_steps, accumulation) if self.enabled else 0
        self.flight: InFlight | None = None

    def wait(self, pause: Pause) -> None:
        if self.flight is not None:
            self.flight.settle(pause)

    def take(self, requests: Sequence[SampleRequest], now: int, pause: Pause) -> InFlight | None:
        """The generation requested ahead, if it matches the `requests` that are due after `now` updates, else None.

        The held generation is discarded in either case.
        """
        self.wait(pause)
        flight, self.flight = self.flight, None
        if flight is None:
            return None
        if flight.requests != list(requests):
            logger.warning(
                "The prompts to train on now are not those that were requested ahead, as after an epoch that was "
                "ended early: the completions are discarded, and the prompts are sampled with the current weights."
            )
            return None
        if flight.take() is None:
            logger.warning(
                f"The server {flight.lost}: the generation that was requested ahead is lost and is sampled again with "
                "the current weights."
            )
            return None
        self._check_age(now - flight.sampled_at)
        return flight

    def _check_age(self, age: int) -> None:
        if not 0 <= age <= self.most_updates:
            raise RolloutError(
                f"The completions to train on were sampled with weights {age} updates old; with async_rollouts=1 that "
                f"must be at most {self.most_updates}. Resume from the last checkpoint."
            )

    def drop(self) -> None:
        """Discard the pending generation at the end of a run, since it will not be trained on."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.drop()


def next_generation(
    epoch: int,
    generation: int,
    *,
    begins: int,
    steps: int | None,
    micro_steps: int,
    accumulation: int,
    updates_left: int,
) -> tuple[int, int] | None:
    """Epoch and number of the generation after this one; None if the run ends before it.

    A generation provides `micro_steps` micro-steps; this one begins at the micro-step `begins` of an epoch of `steps`.
    An update uses `accumulation` of them, or fewer at the end of an epoch. `updates_left` counts from the first update
    on this generation.

    Example, two updates for each of three generations of an epoch:
        next_generation(0, 1, begins=2, steps=6, micro_steps=2, accumulation=1, updates_left=4) -> (0, 2)
        next_generation(0, 2, begins=4, steps=6, micro_steps=2, accumulation=1, updates_left=4) -> (1, 0)
        next_generation(1, 0, begins=0, steps=6, micro_steps=2, accumulation=1, updates_left=2) -> None
    """
    following = begins + micro_steps
    if steps is None or following < steps:
        place, needed = (epoch, generation + 1), following // accumulation
    else:
        place, needed = (epoch + 1, 0), math.ceil(steps / accumulation)
    return place if needed - begins // accumulation < updates_left else None


def most_updates_of(micro_steps: int, accumulation: int) -> int:
    """The most updates that use rows of one generation, and thus the largest age of the weights that sample the next.

    Example, one generation for each update; for every third update; three micro-steps where updates take four:
        most_updates_of(4, 4) == 1, most_updates_of(6, 2) == 3, most_updates_of(3, 4) == 2
    """
    # The last micro-step of an update at which a generation can begin: a multiple of the greatest common divisor.
    latest = accumulation - math.gcd(micro_steps, accumulation)
    return (latest + micro_steps - 1) // accumulation + 1


# ---- checkpoints


def with_flight(state: RunState, flight: InFlight | None, pause: Pause) -> RunState:
    """Wait for the generation requested ahead and add it to the state of a run.

    A generation that failed is left out: the resumed run samples it again from the weights it then has.
    """
    if flight is None:
        return state
    flight.settle(pause)
    packed = pack_flight(flight)
    if packed is None:
        logger.warning("The generation that was requested ahead has failed: the checkpoint is saved without it.")
        return state
    return RunState(state.values | packed.values, state.tensors | packed.tensors)


def pack_flight(flight: InFlight) -> RunState | None:
    """A finished generation as plain values and tensors; None if it has no completions."""
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
            # Double, so that the values that the server sent as JSON are restored bit for bit.
            **_packed("logps", [[math.nan if x is None else x for x in row] for row in logps], torch.double),
        },
    )


def unpack_flight(state: RunState) -> InFlight | None:
    """The inverse of `pack_flight`; None if the checkpoint has no generation requested ahead."""
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
