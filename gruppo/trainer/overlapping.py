"""Generations that a server samples while updates run (`async_rollouts=1`); see `ahead.py` for the order of things."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.base import group_requests
from gruppo.rollout.vllm.inflight import InFlight
from gruppo.trainer.ahead import most_updates_of, next_generation
from gruppo.trainer.metrics import any_process
from gruppo.trainer.sampling import Sampling
from gruppo.types import Completion, SampleRequest, TrainBatch

logger = logging.getLogger(__name__)


class Overlapping(Sampling):
    """The part of the trainer that asks for the next generation before it is needed."""

    _ahead: InFlight | None = None  # asked for, and not yet trained on
    _batches_at_hand: Sequence[dict[str, Any]] = ()  # of the update under way, as they were cut

    def _rows_at_hand(self) -> list[TrainBatch]:
        """The micro-batches of the update under way, less what a subclass has put into them."""
        return [TrainBatch.from_dict(batch) for batch in self._batches_at_hand if "completion_mask" in batch]

    # ---- weights

    def _refresh_sampler(self) -> None:
        """Before a generation, on all processes: whoever samples from a copy of the weights gets those of now."""
        if not self.backend.has_own_weights:
            return
        if self._ahead is not None:
            start = time.perf_counter()
            with self.timer("wait_for_rollouts"):
                self._ahead.settle(self.backend.pause)
            if self.mode == "train":
                self.metrics.add("train", {"rollout/wait_seconds": time.perf_counter() - start})
        with self.timer("sync_weights"):
            self.backend.refresh()

    # ---- asking

    def _ask_ahead(self) -> None:
        """Ask for the generation after the one at hand, whose own samples are there, from the weights of now."""
        if not self.args.async_rollouts or self.mode != "train" or self._place is None or self._ahead is not None:
            return
        if (place := self._next_place()) is None:
            return
        rows = self.rows_ahead(*place)
        prompts = self.prompt_encoder(rows, tokenize=self._tokenize_prompts)
        key = self._noise_of((self._place[0], *place))
        own = self._rows_in_batch(len(rows))
        ids = [list(prompt.ids) for prompt in prompts]
        requests = group_requests(ids, group_size=self.group_size, first_row=own.start, key=key)
        self._ahead = self.backend.begin(requests)
        self.metrics.add("train", self.backend.metrics())

    def _next_place(self) -> tuple[int, int] | None:
        assert self._place is not None
        if self._stream is None:
            raise ConfigError(
                f"async_rollouts={self.args.async_rollouts} needs the trainer's own order of prompts, but "
                f"{type(self).__name__} brings a loader of rows. Set async_rollouts=0."
            )
        _, epoch, generation = self._place
        return next_generation(
            epoch,
            generation,
            per_epoch=self._stream.generations,
            micro_steps=self.args.micro_steps_per_generation,
            accumulation=self.args.gradient_accumulation_steps,
            updates_left=self.state.max_steps - self.state.global_step,
        )

    # ---- taking

    def _draw(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """What was asked for ahead, if it is what is asked for now; else the backend's, from the weights of now."""
        flight = self._ahead
        if flight is None or self.mode != "train" or self._place is None or self._under_way.attempt:
            return super()._draw(requests)
        flight.settle(self.backend.pause)
        self._ahead = None
        if flight.requests != list(requests):
            logger.warning(
                "Other prompts are due than were asked for ahead, as after an epoch that was ended early: the "
                "completions are thrown away, and these are sampled from the weights of now."
            )
            return super()._draw(requests)
        if (completions := flight.take()) is None:
            logger.warning(
                f"The server {flight.lost}: the generation that was asked for ahead is lost, and sampled once more "
                "from the weights of now."
            )
            return super()._draw(requests)
        self._check_age(flight)
        self._under_way.seconds_ahead += flight.seconds
        return [replace(completion, sampled_at=flight.sampled_at) for completion in completions]

    def _check_age(self, flight: InFlight) -> None:
        age, most = self.state.global_step - flight.sampled_at, self._most_updates
        if not 0 <= age <= most:
            raise RolloutError(
                f"The completions that are due are of weights {age} updates old; with async_rollouts="
                f"{self.args.async_rollouts} that must be {most} at most. Resume from the last checkpoint."
            )

    @property
    def _most_updates(self) -> int:
        """Updates that may come between sampling a generation and training on it; 0 if it is not asked for ahead."""
        if not self.args.async_rollouts:
            return 0
        return most_updates_of(self.args.micro_steps_per_generation, self.args.gradient_accumulation_steps)

    def _holds_older_rows(self) -> bool:
        """Whether rows of the update were sampled from weights before those that scored them."""
        if not self.args.async_rollouts:
            return False
        rows = self._rows_at_hand()
        older = [b.sampled_at < b.scored_at for b in rows if b.sampled_at is not None and b.scored_at is not None]
        return any_process(self.accelerator, any(bool(part.any()) for part in older))

    def _drop_ahead(self) -> None:
        """At the end of a run: nobody will train on it."""
        flight, self._ahead = self._ahead, None
        if flight is not None:
            flight.drop()
