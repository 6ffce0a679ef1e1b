"""The state of the entropy bonus."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gruppo.algo.entropy import active_entropy_coef, next_entropy_coef
from gruppo.trainer.resume.forms import ENTROPY, check

STATE_FILE = "entropy_ctrl_state.json"


@dataclass
class EntropyControl:
    """The coefficient of the entropy bonus, fixed or adjusted after each update towards a target entropy."""

    coef: float = 0.0
    adaptive: bool = False
    target: float = 0.0
    delta: float = 0.0
    low: float = 0.0
    high: float = 0.0
    last_entropy: float = math.inf  # of the previous update; infinite before the first, which gets no bonus

    @classmethod
    def from_args(cls, args: Any) -> "EntropyControl":
        """Create it from the config; without an entropy bonus in the config, it is disabled."""
        if not (args.entropy_coef or args.use_adaptive_entropy):
            return cls()
        return cls(
            coef=args.entropy_coef,
            adaptive=args.use_adaptive_entropy,
            target=args.entropy_target,
            delta=args.entropy_coef_delta,
            low=args.entropy_coef_min,
            high=args.entropy_coef_max,
        )

    @property
    def enabled(self) -> bool:
        return self.coef != 0 or self.adaptive

    @property
    def active_coef(self) -> float:
        """The weight of the bonus in the current update."""
        return active_entropy_coef(self.coef, self.last_entropy, self.target, self.adaptive)

    def update(self, entropy: float | None) -> None:
        """End an update, given the mean entropy of its tokens; None if it had none."""
        if not self.adaptive or entropy is None:
            return
        self.last_entropy = entropy
        self.coef = next_entropy_coef(self.coef, self.last_entropy, self.target, self.delta, self.low, self.high)

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coef": self.coef, "last_world_entropy": self.last_entropy}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self.adaptive:  # a fixed coefficient is a setting, not a state
            self.coef, self.last_entropy = state["entropy_coef"], state["last_world_entropy"]

    def save(self, folder: Path) -> None:
        """Save the state in the file where TRL looks for it."""
        if self.adaptive:
            (folder / STATE_FILE).write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def load(self, folder: Path) -> None:
        path = folder / STATE_FILE
        if path.exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            check(state, ENTROPY, str(path))
            self.load_state_dict(state)
