"""The results of a run, in a form in which two runs can be compared byte for byte."""

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Keys whose values depend on timing: `time`, `step_time`, `train_runtime`, `rollout/seconds`, `ledger/seconds/prompt`,
# `train_steps_per_second`, `rollout/tokens_per_second`, `update/mfu`, `profiling/…`, `balance/slowest_rank`; but not
# `rewards/x/timeouts`. Also `train_loss`, which Trainer defines as the mean over the updates of one call of train().
BY_THE_CLOCK = re.compile(r"(^|_|/)(time|runtime|seconds|mfu)($|/)|per_second$|^profiling/|^train_loss$|^balance/s")


def timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without timing-dependent values."""
    return {key: value for key, value in record.items() if not BY_THE_CLOCK.search(key)}


def digest(value: Any) -> str:
    """A hash of tensors, numbers and texts in nested dicts and lists."""
    total = hashlib.sha256()
    for piece in _pieces(value):
        total.update(len(piece).to_bytes(8, "little") + piece)
    return total.hexdigest()[:16]


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        yield f"{plain.dtype}{tuple(plain.shape)}".encode()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pieces(item)
    else:
        yield repr(value).encode()


def of_trainer(trainer: Any) -> dict[str, Any]:
    """The state of a process at the end: weights, optimizer, schedule, reference, random numbers, history.

    The history is compared only on the main process, because checkpoints contain only that of the main process.
    """
    reference, is_main = trainer.ref_model, trainer.accelerator.is_main_process
    return {
        "updates": trainer.state.global_step,
        "weights": digest(trainer.accelerator.unwrap_model(trainer.model).state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "schedule": digest(trainer.lr_scheduler.state_dict()),
        "reference": None if reference is None else digest(reference.state_dict()),
        "random": digest([random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]),  # type: ignore[index]
        "history": [timeless(record) for record in trainer.state.log_history] if is_main else None,
    }


def of_folder(folder: Path) -> dict[str, Any]:
    """What a run recorded: every table file, and the lines of metrics.jsonl without timing-dependent values."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []

    def hashes(kind: str) -> dict[str, str]:
        files = sorted(path for path in (folder / kind).glob("**/*") if path.is_file())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}

    return {
        "rollouts": hashes("rollouts"),
        "recorded updates": hashes("updates"),
        "metrics": [timeless(json.loads(line)) for line in lines],
    }


def differences(straight: Mapping[str, Any], other: Mapping[str, Any], name: str = "") -> list[str]:
    """One line for every value that differs."""
    found: list[str] = []
    for key in sorted({*straight, *other}, key=str):
        a, b, path = straight.get(key), other.get(key), f"{name}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{path}: ")
        elif isinstance(a, list) and isinstance(b, list):
            items = [dict(enumerate(values)) for values in (a, b)]
            found += differences(*items, f"{path} ")
        elif a != b and not (a != a and b != b):  # two NaNs count as equal
            found.append(f"{path}: {a} straight through, {b} resumed")
    return found
