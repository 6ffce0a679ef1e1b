"""What a block of calls keeps: the keys and values of completions that ended, for calls that go on from them.

    turn 0    prompt ─► completion                    keys and values stay where they are, prefix and tail
    turn 1    prompt + completion + answer ─► …       they are copied to one range, and only what is new is encoded

Keeping never stands in the way. A completion that the next call does not go on from is freed when that call begins;
where a call lacks room, it gives up what is kept and encodes it again (see scheduler.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from gruppo.engine.kv import RangeAllocator
from gruppo.engine.scheduler import Turn
from gruppo.engine.work import Name, Work
from gruppo.types import Completion


@dataclass
class Turns:
    """The places of one pool, and the completions kept in it under the names of their noise."""

    places: RangeAllocator
    weights: list[int]  # `weights_of` the model that sampled them
    kept: dict[Name, Turn] = field(default_factory=dict)

    def hand_on(self, work: Work) -> None:
        """Give what is kept to the prompts that begin with it, and free the rest."""
        for prompt in work.prompts:
            for name in (work.names[number] for number in prompt.owed):
                turn = None if name is None else self.kept.get(name)
                if name is not None and turn is not None and prompt.ids[: len(turn.ids)] == turn.ids:
                    prompt.kept = self.kept.pop(name)
                    break  # others of the same prompt share what is encoded
        for turn in self.kept.values():
            turn.free(self.places)
        self.kept.clear()

    def keep(self, ended: Mapping[int, Turn], work: Work, completions: Sequence[Completion]) -> None:
        """Take over what a call has left in the pool."""
        for number, turn in ended.items():
            name = work.names[number]
            if name is None or name in self.kept:
                turn.free(self.places)
            else:
                self.kept[name] = replace(turn, ids=(*turn.ids, *completions[number].ids))


def weights_of(model: nn.Module) -> list[int]:
    """Numbers that change when a weight is written to."""
    tensors = (*model.parameters(), *model.buffers())
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
