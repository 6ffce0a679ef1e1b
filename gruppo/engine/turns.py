"""Kept turns: within a block of calls, the KV cache of finished completions stays for calls that continue them.

    turn 0    prompt ─► completion                    the KV cache of prefix and tail stays where it is
    turn 1    prompt + completion + answer ─► …       it is copied to one range, and only the new tokens are encoded

Kept turns never block a call. A completion that the next call does not continue is freed when that call begins; a call
that lacks room gives up kept turns and encodes them again (see scheduler.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from gruppo.engine.kv import RangeAllocator
from gruppo.engine.scheduler import KeptTurn
from gruppo.engine.work import Name, Work
from gruppo.types import Completion


@dataclass
class Turns:
    """The places of one pool, and the completions kept in it, by name (noise key and sample number)."""

    places: RangeAllocator
    weights: list[int]  # `weights_of` the model that sampled them
    kept: dict[Name, KeptTurn] = field(default_factory=dict)

    def hand_on(self, work: Work) -> None:
        """Assign each kept turn to the prompt that begins with it, and free the rest."""
        for prompt in work.prompts:
            for name in (work.names[number] for number in prompt.owed):
                turn = None if name is None else self.kept.get(name)
                if name is not None and turn is not None and prompt.ids[: len(turn.ids)] == turn.ids:
                    prompt.kept = self.kept.pop(name)
                    break  # other completions of the prompt share its prefix
        for turn in self.kept.values():
            turn.free(self.places)
        self.kept.clear()

    def keep(self, ended: Mapping[int, KeptTurn], work: Work, completions: Sequence[Completion]) -> None:
        """Keep the turns that a call has left in the pool."""
        for number, turn in ended.items():
            name = work.names[number]
            if name is None or name in self.kept:
                turn.free(self.places)
            else:
                self.kept[name] = replace(turn, ids=(*turn.ids, *completions[number].ids))


def weights_of(model: nn.Module) -> list[int]:
    """Version numbers of all parameters and buffers, which change when a tensor is written to."""
    tensors = (*model.parameters(), *model.buffers())
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
