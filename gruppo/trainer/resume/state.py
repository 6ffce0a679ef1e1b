"""The state of a run between two updates besides weights, optimizer and schedule: plain values and tensors.

Each process has its own state. In a checkpoint it is two files in open formats that cannot execute code when loaded:

    run_state-00000.json          plans, counters, controllers, metrics not yet logged
    run_state-00000.safetensors   micro-batches not yet trained on, and other tensors
"""

import json
import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gruppo.data.course import SavedCourse, is_reached
from gruppo.errors import CheckpointError
from gruppo.rollout.vllm.inflight import InFlight
from gruppo.trainer.resume.forms import COURSE, RUN_STATE, check
from gruppo.trainer.resume.loaded import reading
from gruppo.types import Vision

MicroBatch = dict[str, Any]
VISION = "vision"  # the one entry of a micro-batch that is not a tensor


@dataclass
class RunState:
    """Values that JSON can hold, and tensors by name."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path, rank: int) -> None:
        path = folder / f"run_state-{rank:05d}"
        path.with_suffix(".json").write_text(json.dumps(self.values), encoding="utf-8")
        # Clone: micro-batches are views of one generation, and safetensors cannot save views of a shared storage.
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors.items()}
        save_file(tensors, path.with_suffix(".safetensors"))

    @classmethod
    def load(cls, folder: Path, rank: int) -> "RunState | None":
        """Load the state of a rank; None if the checkpoint was not written by gruppo."""
        path = folder / f"run_state-{rank:05d}"
        if not path.with_suffix(".json").exists():
            return None
        values = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return cls(values, load_file(path.with_suffix(".safetensors")))


def checked_state(folder: Path, rank: int, most: int | None) -> RunState | None:
    """The state of a rank in a checkpoint, which must have the form of one, for at most so many prompts."""
    state = RunState.load(folder, rank)
    if state is None:
        return None
    check(state.values, RUN_STATE, str(folder / f"run_state-{rank:05d}.json"))
    cursor = state.values["parts"].get("prompts")
    if cursor is not None and most is not None and not is_reached(cursor, most):
        raise CheckpointError(
            f"The position in the prompts in {folder}, {cursor['consumed']}, is none that its run can have: resume "
            "from another checkpoint."
        )
    return state


def updates_of(folder: Path) -> int:
    """How many updates the run of a checkpoint had made."""
    with reading("state of the trainer", folder):
        return int(json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])


def read_course(folder: Path, most: int) -> SavedCourse | None:
    """Where a checkpoint's run was in its prompts, of which it took at most so many; None if it does not say."""
    path = folder / "run_state-00000.json"
    with reading("state of the run", folder):
        saved = json.loads(path.read_text(encoding="utf-8")).get("course") if path.exists() else None
    check(saved, COURSE, f"{path}: course")
    course = None if saved is None else SavedCourse.from_json(saved)
    if course is not None and not course.is_possible(updates_of(folder), most):
        raise CheckpointError(f"The numbers of `course` in {path} do not agree: resume from another checkpoint.")
    return course


def pack_queue(queue: Iterable[MicroBatch]) -> RunState | None:
    """The micro-batches of a queue, each stored once even if queued several times.

    None if an entry other than `vision` is not a tensor.
    """
    order: list[int] = []
    distinct: dict[int, int] = {}
    seen: dict[int, Vision] = {}
    tensors: dict[str, Tensor] = {}
    for batch in queue:
        if not all(isinstance(value, Tensor) for name, value in batch.items() if name != VISION):
            return None  # a subclass has added other objects
        if id(batch) not in distinct:
            distinct[id(batch)] = len(distinct)
            stored = batch if VISION not in batch else batch | {VISION: _places(batch[VISION], seen)}
            tensors |= {f"queue/{distinct[id(batch)]}/{name}": value for name, value in stored.items()}
        order.append(distinct[id(batch)])
    for number, vision in enumerate(seen.values()):
        for kind in ("pixels", "types"):
            tensors |= {f"{VISION}/{number}/{kind}/{name}": value for name, value in getattr(vision, kind).items()}
    return RunState({"queue": order}, tensors)


def _places(visions: Iterable[Vision | None], seen: dict[int, Vision]) -> Tensor:
    """For each prompt, the number of its images among the distinct ones in `seen`, which is extended; -1 for none."""
    for vision in visions:
        if vision is not None:
            seen.setdefault(id(vision), vision)
    numbers = {key: number for number, key in enumerate(seen)}
    return torch.tensor([-1 if vision is None else numbers[id(vision)] for vision in visions])


def unpack_queue(state: RunState, device: torch.device) -> deque[MicroBatch]:
    """The inverse of `pack_queue`."""
    known = _stored_visions(state)
    batches: dict[int, MicroBatch] = {number: {} for number in state.values["queue"]}
    for key, tensor in state.tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "queue":
            number, _, name = rest.partition("/")
            batches[int(number)][name] = tensor.to(device)
    for batch in batches.values():
        if VISION in batch:
            batch[VISION] = [known.setdefault(i, Vision({}, {})) if i >= 0 else None for i in batch[VISION].tolist()]
    return deque(batches[number] for number in state.values["queue"])


def _stored_visions(state: RunState) -> dict[int, Vision]:
    found: dict[int, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in state.tensors.items():
        if key.startswith(f"{VISION}/"):
            _, number, kind, name = key.split("/", 3)
            found.setdefault(int(number), {"pixels": {}, "types": {}})[kind][name] = tensor
    return {number: Vision(**parts) for number, parts in found.items()}


@dataclass
class RandomState:
    """The state of every global random generator."""

    python: Any
    numpy: Any
    torch: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> "RandomState":
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def gather_states(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each part, by name."""
    return {name: part.state_dict() for name, part in parts.items()}


def give_states(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Load the state of each part; parts without a saved state keep their initial state."""
    for name, part in parts.items():
        if states.get(name) is not None:
            part.load_state_dict(states[name])


@dataclass
class Boundary:
    """The state of a run between two updates, which is saved if the next update is abandoned."""

    state: RunState
    random: RandomState
    position: dict[str, Any] | None  # in the record
    tokens_seen: float
    flops: float
    ahead: InFlight | None  # the generation requested ahead; waited for only if the boundary is saved
