"""The generation that a server samples while updates run (`async_rollouts=1`); `ahead.py` has the order of things."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gruppo.errors import RolloutError
from gruppo.rollout.vllm.inflight import InFlight
from gruppo.trainer.resume.state import RunState
from gruppo.trainer.rollouts.ahead import most_updates_of, pack_flight
from gruppo.types import SampleRequest

logger = logging.getLogger(__name__)

Pause = Callable[[], None]  # called now and then while one waits; may raise


class RolloutsAhead:
    """What was asked for before it is needed, and is not yet trained on: one generation at most.

    `most_updates` may come between sampling a generation and training on it; 0 if none is asked for ahead.

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
        """What was asked for ahead, if it is what is asked for after `now` updates; it is gone in any case."""
        self.wait(pause)
        flight, self.flight = self.flight, None
        if flight is None:
            return None
        if flight.requests != list(requests):
            logger.warning(
                "Other prompts are due than were asked for ahead, as after an epoch that was ended early: the "
                "completions are thrown away, and these are sampled from the weights of now."
            )
            return None
        if flight.take() is None:
            logger.warning(
                f"The server {flight.lost}: the generation that was asked for ahead is lost, and sampled once more "
                "from the weights of now."
            )
            return None
        self._check_age(now - flight.sampled_at)
        return flight

    def _check_age(self, age: int) -> None:
        if not 0 <= age <= self.most_updates:
            raise RolloutError(
                f"The completions that are due are of weights {age} updates old; with async_rollouts=1 that must be "
                f"{self.most_updates} at most. Resume from the last checkpoint."
            )

    def drop(self) -> None:
        """At the end of a run: nobody will train on it."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.drop()


def with_flight(state: RunState, flight: InFlight | None, pause: Pause) -> RunState:
    """The state of a run with the generation that was asked for ahead, which is waited for.

    One that failed is left out: a resumed run samples it from its own weights.
    """
    if flight is None:
        return state
    flight.settle(pause)
    packed = pack_flight(flight)
    if packed is None:
        logger.warning("The generation that was asked for ahead has failed: the checkpoint is without it.")
        return state
    return RunState(state.values | packed.values, state.tensors | packed.tensors)
