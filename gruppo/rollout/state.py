"""What every process must remember for a resumed run to go on as a straight one would: plans that are in force."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

STATE_FILE = "rollout_state.json"
UPDATE_FILE = "update_plan.json"


def save_states(path: Path, states: Sequence[dict[str, Any] | None]) -> None:
    """Write the states of all processes, in the order of their ranks."""
    if any(state is not None for state in states):
        path.write_text(json.dumps(list(states)), encoding="utf-8")


def load_state(path: Path, owner: Any, *, rank: int, world: int) -> None:
    """Give an object the state it had. One that was not saved, or by another number of processes, is made anew."""
    if not path.exists():
        return
    states = json.loads(path.read_text(encoding="utf-8"))
    if len(states) != world:
        logger.warning(
            f"The checkpoint was written by {len(states)} processes and is read by {world}: {path.name} is not used, "
            "the plan is made anew."
        )
    elif states[rank] is not None:
        owner.load_state_dict(states[rank])
