"""Collectives for rows, flags, errors and numbers. With a single process most return their input."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor


def gather_rows(accelerator: Accelerator, rows: Tensor) -> Tensor:
    """Concatenate the rows of all processes, in rank order; counts may differ."""
    if accelerator.num_processes == 1:
        return rows
    counts = accelerator.gather(torch.tensor([len(rows)], device=rows.device)).tolist()
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = accelerator.gather(padded).split(max(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is true on any process."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), reduction="sum") > 0)


@contextmanager
def raised_together(accelerator: Accelerator, kind: type[Exception]) -> Iterator[None]:
    """If one process raises inside, all of them raise, the others an error of this kind, so that none waits forever.

    All processes must enter this context, and the code inside must not wait for other processes.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # of any kind: it is raised below, once the other processes know of it
        error = raised
    if any_process(accelerator, error is not None) and accelerator.num_processes > 1:
        told = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
        first, reason = next((process, reason) for process, reason in enumerate(told) if reason is not None)
        if error is None:
            raise kind(f"On process {first}: {reason}")
    if error is not None:
        raise error


def from_main(accelerator: Accelerator, value: Any) -> Any:
    """The main process's value, broadcast to all processes."""
    if accelerator.num_processes == 1:
        return value
    return broadcast_object_list([value])[0]


def rows_in_batch(accelerator: Accelerator, count: int) -> range:
    """The positions of this process's rows in the batch of all processes."""
    counts = accelerator.gather(torch.tensor([count], device=accelerator.device)).tolist()
    first = sum(counts[: accelerator.process_index])
    return range(first, first + count)


def mean_of_processes(accelerator: Accelerator, numbers: Sequence[float]) -> list[float]:
    """The mean of each number over processes; not finite if any process's number is not, so that all act alike."""
    if accelerator.num_processes == 1:
        return list(numbers)
    means: list[float] = accelerator.reduce(
        torch.tensor(numbers, device=accelerator.device), reduction="mean"
    ).tolist()
    return means
