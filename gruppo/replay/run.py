"""Replay a run: with other rewards, with another recipe, or with two recipes compared on the same rollouts."""

import math
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from gruppo.errors import DataError
from gruppo.replay.compute import Computed, advantages_of, compute
from gruppo.replay.measures import of_groups, of_update
from gruppo.replay.record import RecordedGeneration, RecordedUpdate, Recording, padded
from gruppo.replay.rescore import Rescorer, Rewards
from gruppo.replay.reward_changes import Rescored
from gruppo.replay.rows import RowTable
from gruppo.replay.settings import Settings
from gruppo.replay.weights import Policy
from gruppo.runs.read import Run

__all__ = ["Replay", "replay"]

SAME_LOSS = 1e-5  # tolerance of a recomputed loss, relative to max(1, |recorded loss|)
NOT_AGAIN = "The run is not reproduced"


@dataclass
class Replay:
    """The results of a replay as plain values, in the order of the updates.

    `updates` has one dict for each update, `groups` one for each group and update (if two recipes are compared).
    """

    first: str  # a description of the settings that were replayed
    second: str | None  # a description of the settings that they are compared with
    updates: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    rescored: dict[str, Any] | None = None
    weights: list[dict[str, Any]] = field(default_factory=list)  # gradients of the model's weights, one dict per group
    notes: list[str] = field(default_factory=list)
    rows: RowTable = field(default_factory=RowTable)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the rows, ready for JSON: None in place of NaN."""
        names = ("first", "second", "updates", "groups", "rescored", "weights", "notes")
        plain: dict[str, Any] = _plain({name: getattr(self, name) for name in names})
        return plain


def replay(
    run: str | os.PathLike[str] | Run,
    *,
    updates: Container[int] | None = None,
    rewards: Rewards | None = None,
    dataset: Any = None,
    changes: Mapping[str, Any] | None = None,
    against: Mapping[str, Any] | None = None,
    model: Any = None,
    groups: int = 4,
    keep_rows: bool = True,
) -> Replay:
    """Recompute advantages, loss and gradients of recorded rollouts, as they were or with changes.

    `rewards` score the completions again (with columns of `dataset`, if they need any). `changes` are settings that
    differ from the run's, including `recipe`. The changed run is compared with the original or, if `against` is given
    (a second set of changes), with that. With a `model` (a checkpoint, or a loaded model), gradients of its weights
    are compared as well, on `groups` groups in all: those with the largest gradient, from the first update on. Without
    `keep_rows`, the table of all rows, which has a value for each token, is not built.

    Example:
        found = replay("runs/demo", updates=range(3, 8), changes={"loss_type": "dr_grpo"}, against={"recipe": "gspo"})
        print([update["cosine"] for update in found.updates])
    """
    run = run if isinstance(run, Run) else Run(run)
    numbers = [number for number in run.updates if updates is None or number in updates]
    if not numbers:
        raise DataError(_nothing(run))
    config = run.config
    own, asked = Settings.of(config), Settings.of(config, changes)
    if against is not None:
        pair = [_Side(asked, anew=True), _Side(Settings.of(config, against), anew=True)]
    elif asked.changes or rewards is not None:
        pair = [_Side(own, anew=False), _Side(asked, anew=True)]
    else:
        pair = [_Side(own, anew=False)]
    rescorer = None if rewards is None else Rescorer(rewards, own, dataset)
    work = _Work(Recording(run, own.group_size, own.config.beta), own, pair, rescorer, keep_rows)
    if changes and not asked.changes and against is None:
        said = ", ".join(f"{name}={value}" for name, value in changes.items())
        work.result.notes.append(f"The run was already trained with {said}: this changes nothing.")
    work.result.notes += [note for side in pair if (note := side.settings.warning)]
    policy = None if model is None else Policy.of(model, config, groups)
    try:
        for number in numbers:
            work.replay(number, policy)
            policy = None if policy is None or policy.done else policy
    finally:
        work.close()
    return work.finish()


class _Side(NamedTuple):
    """One of the one or two settings that are replayed."""

    settings: Settings
    anew: bool  # whether the given rewards, if any, replace the recorded ones


class _Work:
    """A replay in progress."""

    def __init__(
        self,
        recording: Recording,
        own: Settings,
        sides: Sequence[_Side],
        rescorer: Rescorer | None,
        keep_rows: bool,
    ):
        self.recording, self.own, self.sides, self.rescorer = recording, own, sides, rescorer
        self.keep_rows = keep_rows
        self.rescored = Rescored()
        names = [
            side.settings.name + (", other rewards" if side.anew and rescorer is not None else "") for side in sides
        ]
        self.result = Replay(names[0], names[1] if len(names) > 1 else None)
        self._rewards: dict[int, Tensor] = {}

    def replay(self, number: int, policy: Policy | None) -> None:
        """Replay one update; an incomplete update is skipped with a note."""
        try:
            update = self.recording.update(number)
            generations = {g: self.recording.generation(g) for batch in update.micro_batches for g in batch.generation}
        except DataError as error:
            self.result.notes.append(f"Update {number} is left out: {error}")
            return
        computed = [compute(update, s.settings, self._advantages(generations, s)) for s in self.sides]
        again = self._again(update, generations, computed[0])
        self.result.updates.append(of_update(update, computed) | again)
        if len(computed) == 2:
            self.result.groups += of_groups(update, computed, self.own.group_size)
        if self.keep_rows:
            self.result.rows.add(update, generations, computed)
        if policy is not None:
            self.result.weights += policy.compare(update, generations, computed)

    def _advantages(self, generations: Mapping[int, RecordedGeneration], side: _Side) -> dict[int, Tensor]:
        found = {}
        for number, generation in generations.items():
            rewards_NR = self._scored(generation) if side.anew else None
            if generation.has_steps and rewards_NR is None and not side.settings.changes_advantages:
                found[number] = padded(generation.token_advantages, generation.width)
            else:
                found[number] = advantages_of(generation, side.settings, rewards_NR).advantages_B
        return found

    def _scored(self, generation: RecordedGeneration) -> Tensor | None:
        """The rewards of the given functions for a generation, computed once; None if there are no such functions."""
        if self.rescorer is None:
            return None
        if generation.number not in self._rewards:
            rewards_NR = self.rescorer.score(generation)
            self.rescored.add(generation, rewards_NR, self.own.weights(generation.names), self.own)
            self._rewards[generation.number] = rewards_NR
        return self._rewards[generation.number]

    def _again(
        self, update: RecordedUpdate, generations: Mapping[int, RecordedGeneration], first: Computed
    ) -> dict[str, float]:
        """How far the run's own settings are from reproducing the recorded values; adds a note if that is too far."""
        side = _Side(self.own, anew=False)
        own = first if self.sides[0] == side else compute(update, self.own, self._advantages(generations, side))
        worst = 0.0
        for generation in generations.values():
            if not generation.has_steps:
                again_N = advantages_of(generation, self.own).advantages_B
                worst = max(worst, float((again_N - generation.advantages_N).abs().max()))
        off = math.nan if update.loss is None else abs(own.loss - update.loss)
        # A loss that is unknown or not finite gives NaN, which never counts as different.
        differs = off > SAME_LOSS * max(1.0, abs(update.loss or 0.0)) or worst > SAME_LOSS
        if differs and not any(note.startswith(NOT_AGAIN) for note in self.result.notes):
            was = "not recorded" if update.loss is None else f"{update.loss:.6g}"
            self.result.notes.append(
                f"{NOT_AGAIN} in update {update.number}: with the settings of the run the loss is {own.loss:.6g}, and "
                f"it was {was}; advantages differ by up to {worst:.2g}. A subclass, a hook or a "
                "callback, which may set reward_weights, changed how they are computed."
            )
        return {"loss_difference": off, "advantage_difference": worst}

    def close(self) -> None:
        if self.rescorer is not None:
            self.rescorer.close()

    def finish(self) -> Replay:
        result = self.result
        if not result.updates:
            raise DataError("\n".join(["No update could be replayed.", *result.notes]))
        if assumed := sum(update["rows_assumed"] for update in result.updates):
            result.notes.append(
                f"{assumed} rows use log-probs of the sampler: the run left them out of its updates, or recorded "
                "only the sums that it needed."
            )
        if self.rescorer is not None:
            result.rescored = self.rescored.summary()
        return result


def _nothing(run: Run) -> str:
    """The reason why there is nothing to replay."""
    known = run.updates
    if known:
        return f"None of these updates is in {run.folder}: it has {known[0]} to {known[-1]}."
    kept = run.config.get("record")
    why = (
        f"it was trained with record={kept!r}"
        if kept != "all"
        else "an older version wrote it, or no update was finished"
    )
    return f"{run.folder} has no log-probs of updates: {why}. Runs with record='all' can be replayed."


def _plain(value: Any) -> Any:
    """The value as strict JSON permits it: None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
