"""A run, looked at again: other rewards, another recipe, and how far apart two recipes are on the same rollouts."""

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

SAME_LOSS = 1e-5  # of its size, or of 1: how far a loss computed again may be from the recorded one
NOT_AGAIN = "The run is not reproduced"


@dataclass
class Replay:
    """What came of a replay; plain numbers, in the order of the updates.

    `updates` has one dict for each update, `groups` one for each group and update (if two recipes are compared).
    """

    first: str  # the settings that were replayed, in words
    second: str | None  # what they are compared with
    updates: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    rescored: dict[str, Any] | None = None
    weights: list[dict[str, Any]] = field(default_factory=list)  # of parameter gradients, by group
    notes: list[str] = field(default_factory=list)
    rows: RowTable = field(default_factory=RowTable)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the rows, as JSON has it: null in the place of NaN."""
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
    """Compute advantages, loss and gradients of recorded rollouts again: as they were, or with something changed.

    `rewards` score the completions anew (with columns of `dataset`, if they need some). `changes` are settings that
    differ from the run's, `recipe` among them. What is changed is compared with what was; or, with `against`, which
    are changes too, with a second recipe. With a `model` (a checkpoint, or a loaded one), gradients of its weights are
    compared as well, on so many `groups` of the first update, those with the largest gradient. Without `keep_rows`,
    the table of all rows, with a number for each token, is not made.

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
    """One of the recipes that are replayed."""

    settings: Settings
    anew: bool  # with the given rewards, if there are some


class _Work:
    """A replay under way."""

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
        """One update; what is not whole is left out, and noted."""
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
        """The rewards that the given functions have for a generation, asked once."""
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
        """How far what the settings of the run give is from what it had; noted if that is far."""
        side = _Side(self.own, anew=False)
        own = first if self.sides[0] == side else compute(update, self.own, self._advantages(generations, side))
        worst = 0.0
        for generation in generations.values():
            if not generation.has_steps:
                again_N = advantages_of(generation, self.own).advantages_B
                worst = max(worst, float((again_N - generation.advantages_N).abs().max()))
        off = math.nan if update.loss is None else abs(own.loss - update.loss)
        # A loss that nobody knows, or that is not finite, cannot be compared.
        differs = off > SAME_LOSS * max(1.0, abs(update.loss or 0.0)) or worst > SAME_LOSS
        if differs and not any(note.startswith(NOT_AGAIN) for note in self.result.notes):
            was = "not recorded" if update.loss is None else f"{update.loss:.6g}"
            self.result.notes.append(
                f"{NOT_AGAIN} in update {update.number}: with the settings of the run the loss is {own.loss:.6g}, and "
                f"it was {was}; advantages differ by up to {worst:.2g}. A subclass or a hook computed them "
                "differently."
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
    """Why there is nothing to replay."""
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
    """As strict JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
