"""State shared by the steps of an update, which the training loop of transformers.Trainer calls one by one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gruppo.types import TrainBatch


@dataclass
class UpdateUnderWay:
    """The current update, or the last one."""

    batches: Sequence[dict[str, Any]] = ()  # its micro-batches; empty once the update is audited
    loss: Tensor | float = 0.0  # of the micro-batches that were run
    grad_norm: float = math.nan
    means: Mapping[str, float | None] = field(default_factory=dict)  # over its loss tokens, for the audits
    costs: Sequence[int] = ()  # tokens of each process, before rows were exchanged
    padded: list[TrainBatch] = field(default_factory=list)  # micro-batches of padded rows that were run
    seconds: float = 0.0  # of rollout and passes so far
    pass_seconds: float = 0.0  # of the passes alone
    ended: bool = False  # its backward passes are done, and what follows the optimizer's step is still due

    def micro_batches(self) -> list[TrainBatch]:
        """The micro-batches, without entries that a subclass has added."""
        return [TrainBatch.from_dict(batch) for batch in self.batches if "completion_mask" in batch]
