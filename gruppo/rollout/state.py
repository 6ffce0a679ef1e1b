"""What a rollout backend must remember for a resumed run to sample as a straight one would."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

STATE_FILE = "rollout_state.json"


def backend_state(backend: Any) -> dict[str, Any] | None:
    """The state of a backend that has one: for the built-in engine the plan in force."""
    return backend.state_dict() if hasattr(backend, "state_dict") else None


def save_states(folder: Path, states: Sequence[dict[str, Any] | None]) -> None:
    """Write the states of all processes, in the order of their ranks."""
    if any(state is not None for state in states):
        (folder / STATE_FILE).write_text(json.dumps(list(states)), encoding="utf-8")


def load_state(folder: Path, backend: Any, *, rank: int, world: int) -> None:
    """Give a backend the state it had. One that was not saved, or by another number of processes, is made anew."""
    path = folder / STATE_FILE
    if not path.exists() or not hasattr(backend, "load_state_dict"):
        return
    states = json.loads(path.read_text(encoding="utf-8"))
    if len(states) != world:
        logger.warning(
            f"The checkpoint was written by {len(states)} processes and is read by {world}: the plan of the rollouts "
            "is made anew."
        )
    elif states[rank] is not None:
        backend.load_state_dict(states[rank])
