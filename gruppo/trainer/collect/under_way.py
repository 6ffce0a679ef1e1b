"""The current rollout, and its position in the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gruppo.tools.loop import Turn
from gruppo.types import Prompt


@dataclass
class RolloutUnderWay:
    """State that the steps of the current or latest rollout share, as TRL's hook signatures leave no room for it.

    The random numbers of a completion are determined by the position of its generation in the run (`Place`,
    the same in a resumed run), the row's position in the batch of all processes, the round of replacements that put
    the row there, the turn (after the first), and, if a hook samples repeatedly, which of its requests this is.
    """

    own_rows: Sequence[int] = ()  # positions of this process's rows in the batch of all processes
    attempt: int = 0  # the round of replacements
    turn: Turn | None = None
    requests_made: int = 0
    prompts: Sequence[Prompt] = ()
    asked: bool = False  # whether the backend was called
    seconds_ahead: float = 0.0  # how long it took, if it was requested ahead of time
    work: Mapping[str, Any] = field(default_factory=dict)  # what the backend computed, for the ledger
    tool_counts: Mapping[str, float] = field(default_factory=dict)  # what tools did, on all processes


class Place(NamedTuple):
    """The position of a generation among all runs of this trainer."""

    run: int  # number of the call of `train`
    epoch: int
    generation: int
