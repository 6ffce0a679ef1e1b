"""What the steps of an update tell each other past Trainer's loop, which calls them one by one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gruppo.types import TrainBatch


@dataclass
class UpdateUnderWay:
    """The update under way, or the last one."""

    batches: Sequence[dict[str, Any]] = ()  # micro-batches, as they were cut; none once the update is audited
    loss: Tensor | float = 0.0  # of those that were run
    grad_norm: float = math.nan
    means: Mapping[str, float | None] = field(default_factory=dict)  # of its loss tokens, for the audits
    costs: Sequence[int] = ()  # tokens that each process had to run, before rows were exchanged
    seconds: float = 0.0  # so far, of rollout and passes
    pass_seconds: float = 0.0  # of the passes alone
    ended: bool = False  # its gradients are there, and nobody has looked at it yet

    def rows(self) -> list[TrainBatch]:
        """The micro-batches, less what a subclass has put into them."""
        return [TrainBatch.from_dict(batch) for batch in self.batches if "completion_mask" in batch]
