"""Where a run is in its prompts, whatever its batches are.

Trainer counts micro-steps. They say which prompts are next only as long as a run keeps its batches. So a checkpoint
says how many prompts of the epoch its run has finished, and a resumed run goes on after them:

    saved after two generations of two prompts, resumed with four in each

    epoch 0     p0 p1 | p2 p3 ‖ p4 p5 p6 p7 | p8 p9 p10 p11 | …
    micro-step   0      1        1             2

The micro-steps of the epoch in which a run is resumed are counted back from its end, so that epochs end where they
would have ended in a run with the new batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Batches:
    """How prompts become micro-steps."""

    prompts: int  # per generation
    group_size: int
    slices: int  # of a generation
    micro_steps: int  # per generation: its slices, in each pass over it


@dataclass(frozen=True)
class Spot:
    """The generation that is under way or next; its number is unique in its epoch."""

    epoch: int = 0
    generation: int = 0
    taken: int = 0  # prompts of the epoch before it; of an endless stream, prompts of all epochs
    used: int = 0  # micro-steps of it that were trained on


class Course:
    """Translates micro-steps to generations and prompts.

    `available` is the number of prompts of an epoch that generations may use; None for an endless stream.

    Example, ten prompts in generations of three, each for two micro-steps:
        course = Course(Batches(3, 4, 2, 2), available=10)
        course.locate(0, 3) == (1, 1)
        course.first(0, 1) == 3
    """

    def __init__(self, batches: Batches, available: int | None):
        self.batches, self.available = batches, available
        self.began, self.first_step = Spot(), 0  # a generation, and the micro-step of its epoch that is its first
        self.resumed_at = 0  # micro-step
        self.next = Spot()
        self._next_step = 0

    @property
    def whole(self) -> int | None:
        """The micro-steps of an epoch from its beginning."""
        if self.available is None:
            return None
        return self.available // self.batches.prompts * self.batches.micro_steps

    # ---- going on

    def locate(self, epoch: int, step: int) -> tuple[int, int]:
        """The generation of a micro-step, and how many micro-steps of it come before."""
        if epoch != self.began.epoch:
            return divmod(step, self.batches.micro_steps)
        generations, phase = divmod(step - self.first_step, self.batches.micro_steps)
        return self.began.generation + generations, phase

    def first(self, epoch: int, generation: int) -> int:
        """How many prompts of the epoch come before a generation."""
        if epoch != self.began.epoch:
            return generation * self.batches.prompts
        return self.began.taken + (generation - self.began.generation) * self.batches.prompts

    def begins(self, epoch: int, generation: int) -> int:
        """The micro-step with which a generation begins, or, if the run was resumed inside it, would have begun."""
        if epoch != self.began.epoch:
            return generation * self.batches.micro_steps
        return self.first_step + (generation - self.began.generation) * self.batches.micro_steps

    def steps(self, epoch: int) -> int | None:
        """The number at which the micro-steps of an epoch end."""
        if self.whole is None or epoch != self.began.epoch:
            return self.whole
        return self.first_step + self._left(self.began.taken) * self.batches.micro_steps

    def enter(self, epoch: int) -> None:
        """Begin an epoch: with its first prompts, or where the epoch before left an endless stream."""
        if epoch != self.began.epoch:
            self.began, self.first_step = Spot(epoch, 0, self._taken_in_all() if self.available is None else 0), 0

    def took(self, epoch: int, step: int) -> None:
        """Note that a micro-step was taken."""
        self._next_step = step + 1
        generation, used = self.locate(epoch, step + 1)
        self.next = Spot(epoch, generation, self.first(epoch, generation), used)

    def end_early(self) -> None:
        """Note that the epoch ends here."""
        self.next = Spot(self.next.epoch + 1, 0, self._taken_in_all() if self.available is None else 0)

    @property
    def epoch_is_over(self) -> bool:
        steps = self.steps(self.began.epoch)
        return steps is not None and self._next_step >= steps

    def _taken_in_all(self) -> int:
        return self.next.taken + (self.batches.prompts if self.next.used else 0)

    def _left(self, taken: int) -> int:
        assert self.available is not None
        return max(0, (self.available - taken) // self.batches.prompts)

    # ---- resuming

    def resume(self, spot: Spot, step: int, accumulation: int) -> None:
        """Begin at a spot. `step` is Trainer's own micro-step there, which counts only for an endless stream."""
        if self.available is not None and not self._left(spot.taken):
            spot = Spot(spot.epoch + 1)  # what is left of the epoch does not fill a generation
        if self.whole is not None:
            step = self.whole - self._left(spot.taken) * self.batches.micro_steps + spot.used
            step -= step % accumulation  # an update begins there
        self.began, self.next = spot, spot
        self.first_step, self.resumed_at, self._next_step = step - spot.used, step, step

    def updates_left(self, accumulation: int) -> int | None:
        """Updates of the epoch from where the run was resumed; None for an endless stream."""
        steps = self.steps(self.began.epoch)
        return None if steps is None else math.ceil((steps - self.resumed_at) / accumulation)

    def length(self, done: int, *, accumulation: int, epochs: float, max_steps: int) -> tuple[int, int]:
        """Epochs and updates of a run that was resumed after `done` updates with other batches.

        `max_steps` is 0 or less where the number of epochs decides.
        """
        left, per_epoch = self.updates_left(accumulation), math.ceil((self.whole or 0) / accumulation)
        assert left is not None
        if max_steps > 0:
            return self.began.epoch + 1 + math.ceil(max(0, max_steps - done - left) / per_epoch), max_steps
        return math.ceil(epochs), done + max(0, math.ceil(left + (epochs - self.began.epoch - 1) * per_epoch))


@dataclass(frozen=True)
class SavedCourse:
    """What a checkpoint says about the prompts of its run."""

    spot: Spot
    batches: Batches
    updates: int
    accumulation: int  # micro-steps of an update
    available: int | None
    per_epoch: int  # prompts of an epoch in the order of a `PromptCursor`; 0 for an endless stream
    cursor: Mapping[str, int] | None  # its state; None if generations are not changed by dynamic sampling

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "SavedCourse":
        return cls(**{**saved, "spot": Spot(**saved["spot"]), "batches": Batches(**saved["batches"])})

    def is_possible(self, updates: int, most: int) -> bool:
        """Whether its numbers agree for a run of so many updates that took at most so many prompts.

        Those of a damaged checkpoint may not.
        """
        if self.available is None:
            counted = self.spot.taken <= most and self.per_epoch == 0
        else:  # an order by prompts leaves out those that do not fill a generation
            counted = self.spot.taken <= self.available and self.per_epoch <= self.available < 2 * self.per_epoch
        under_way = self.spot.used < self.batches.micro_steps and self.spot.epoch <= self.updates == updates
        return counted and under_way and (self.cursor is None or is_reached(self.cursor, most))

    def starts_over(self, batches: Batches) -> bool:
        """Whether the generation under way begins again in a run with these batches, which cuts it differently."""
        return self.spot.used > 0 and batches != self.batches

    def spot_for(self, batches: Batches, *, has_cursor: bool) -> Spot:
        """Where a run with these batches goes on."""
        spot = replace(self.spot, used=0) if self.starts_over(batches) else self.spot
        if self.cursor is None or has_cursor:
            return spot
        position = self.cursor["generation_began_at" if self.spot.used else "consumed"]
        epoch, taken = divmod(position, self.per_epoch) if self.per_epoch else (spot.epoch, position)
        return replace(spot, epoch=epoch, taken=taken)


OTHER_SIZES = 64  # how many times as large the batches of an earlier part of a run may have been


def most_taken(updates: int, batches: Batches, *, accumulation: int, rounds: int, per_epoch: int) -> int:
    """More prompts than a run can have taken in so many updates, each of which may have begun an epoch.

    `rounds` is how often dynamic sampling may replace a prompt. Whoever claims more would let a resumed run read on
    without end.
    """
    per_update = batches.prompts * math.ceil(accumulation / batches.micro_steps)
    return (updates + 2) * (OTHER_SIZES * per_update * (rounds + 1) + per_epoch)


def is_reached(cursor: Mapping[str, int], most: int) -> bool:
    """Whether a cursor can have the position of this state, after at most so many prompts."""
    return cursor["generation_began_at"] <= cursor["consumed"] <= most


# The settings that decide how prompts become batches, and their order; a part of a name stands for all that follow.
OF_BATCHES = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    *("num_generations", "num_iterations", "processes"),
}
OF_THE_ORDER = {"shuffle_dataset", "seed", "data_seed", "train_dataset"}


def going_on(saved: SavedCourse | None, course: Course, changed: Sequence[str]) -> str:
    """What a run resumed with the changed settings of these names does about its prompts; empty if all stays."""
    names = {name.partition(".")[0] for name in changed}
    said = []
    if saved is None and names & OF_BATCHES:
        said.append(
            "The checkpoint does not say how many prompts its run has finished, so the place in the data is the "
            "number of updates with the new batches: prompts may come again or be left out."
        )
    elif saved is not None and saved.batches != course.batches:
        said.append(
            f"The run goes on after the {saved.spot.taken} prompts of epoch {saved.spot.epoch} that it has finished."
        )
        if saved.starts_over(course.batches):
            said.append(
                f"{saved.batches.prompts} prompts are trained on again: {saved.spot.used} of the "
                f"{saved.batches.micro_steps} micro-steps on their generation were made."
            )
        left = 0 if course.available is None else (course.available - saved.spot.taken) % course.batches.prompts
        if left:
            said.append(f"The last {left} prompts of this epoch do not fill a generation and are left out.")
    if order := sorted(names & OF_THE_ORDER):
        said.append(
            f"With {', '.join(order)} changed the order of prompts may be another: in this epoch prompts may come "
            "again and others be left out."
        )
    return " ".join(said)


def left_over(prompts: int, per_generation: int, *, shuffled: bool) -> str | None:
    """A sentence about the prompts at the end of an epoch that do not fill a generation; None if there are none."""
    left = prompts % per_generation
    if not left:
        return None
    which = "others in each epoch, as they are shuffled" if shuffled else "in every epoch the same, the last ones"
    return (
        f"{left} of {prompts} prompts are left out of every epoch, because they do not fill a generation of "
        f"{per_generation}: {which}. To train on all of them, choose a generation batch of which {prompts} is a "
        "multiple."
    )
