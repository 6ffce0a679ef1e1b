"""What a run remembers between two updates beside weights, optimizer and schedule: plain values and tensors.

Each process has a state of its own. In a checkpoint it is two files that anyone can read and that execute nothing:

    run_state-00000.json          plans, counters, controllers, metrics that wait to be logged
    run_state-00000.safetensors   the micro-batches that wait to be trained on, and other tensors
"""

import json
import logging
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

logger = logging.getLogger(__name__)

MicroBatch = dict[str, Any]


@dataclass
class RunState:
    """Values that JSON can hold, and tensors by name."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path, rank: int) -> None:
        path = folder / f"run_state-{rank:05d}"
        path.with_suffix(".json").write_text(json.dumps(self.values), encoding="utf-8")
        # Copies: micro-batches are views of one generation, and views of one storage cannot be stored.
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors.items()}
        save_file(tensors, path.with_suffix(".safetensors"))

    @classmethod
    def load(cls, folder: Path, rank: int) -> "RunState | None":
        """None if the checkpoint is not one of ours."""
        path = folder / f"run_state-{rank:05d}"
        if not path.with_suffix(".json").exists():
            return None
        values = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return cls(values, load_file(path.with_suffix(".safetensors")))


def pack_queue(queue: Iterable[MicroBatch]) -> RunState | None:
    """The micro-batches of a queue, each stored once however often it waits; None if not all of it is tensors."""
    order: list[int] = []
    distinct: dict[int, int] = {}
    tensors: dict[str, Tensor] = {}
    for batch in queue:
        if not all(isinstance(value, Tensor) for value in batch.values()):
            return None  # a subclass puts other things into it
        if id(batch) not in distinct:
            distinct[id(batch)] = len(distinct)
            tensors |= {f"queue/{distinct[id(batch)]}/{name}": value for name, value in batch.items()}
        order.append(distinct[id(batch)])
    return RunState({"queue": order}, tensors)


def unpack_queue(state: RunState, device: torch.device) -> deque[MicroBatch]:
    """The inverse of `pack_queue`."""
    batches: dict[int, MicroBatch] = {number: {} for number in state.values["queue"]}
    for key, tensor in state.tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "queue":
            number, _, name = rest.partition("/")
            batches[int(number)][name] = tensor.to(device)
    return deque(batches[number] for number in state.values["queue"])


@dataclass
class RandomState:
    """Every generator that code may draw from without being given one."""

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
    """What each part has to remember, by name."""
    return {name: part.state_dict() for name, part in parts.items()}


def give_states(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Give each part what it remembered; parts that were not there then begin anew."""
    for name, part in parts.items():
        if states.get(name) is not None:
            part.load_state_dict(states[name])
