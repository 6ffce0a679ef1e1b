"""Separate processes that start within a fraction of a second: a fork server has already imported the library.

Several processes can form a group, like those of a launcher:

    run_together(2, "tests.trainer.scripted", tmp_path)     # main(tmp_path) of that module, on both
"""

import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# The last one also sets state that forked processes inherit: one thread, and objects excluded from garbage collection.
# accelerate imports deepspeed in every run if it is installed.
PRELOADED = ["torch", "transformers", "peft", "pyarrow.parquet", "pytest", "deepspeed", "tests.resume.process"]

# Disables threads that would otherwise run in the server when it forks: those of numpy's BLAS and pyarrow's allocator.
WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


def context() -> Any:
    """The multiprocessing context whose fork server has imported the library."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        # The server does not inherit sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *([path] if path else [])]))
        patch.setenv("DS_ACCELERATOR", "cpu")  # read by deepspeed when it is imported
        for name, value in WITHOUT_THREADS.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def run_together(count: int, module: str, folder: Path, seconds: float = 240) -> None:
    """Run `main(folder)` of a module in `count` processes, which rendezvous through a file in `folder`.

    The module is imported after the ranks are assigned: it may read RANK and WORLD_SIZE from the environment.
    """
    logs = [folder / f"process{rank}.log" for rank in range(count)]
    places = [(module, folder, rank, count, log) for rank, log in enumerate(logs)]
    processes = [context().Process(target=_work, args=place) for place in places]
    for process in processes:
        process.start()
    exits = exits_of(processes, logs, seconds)
    assert not any(exits), f"exit codes {exits}\n{said(logs)}"


def run_apart(
    count: int, module: str, folder: Path, seconds: float = 90, store: str = "file"
) -> tuple[tuple[int, ...], list[str], float]:
    """Like `run_together`, but with any exit codes: return those, the outputs, and the seconds between exits.

    `store`: the rendezvous of the processes, a "file" or a "tcp" server in process 0, which ends with that process.
    """
    logs = [folder / f"process{rank}.log" for rank in range(count)]
    meeting = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{folder / 'meeting'}"
    processes = [
        context().Process(target=_work, args=(module, folder, rank, count, log, meeting))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    waiting, ends = {process.sentinel: process for process in processes}, []
    deadline = time.monotonic() + seconds
    while waiting:
        ended = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            for process in waiting.values():
                process.kill()
            raise AssertionError(f"not done within {seconds} s\n{said(logs)}")
        for sentinel in ended:
            waiting.pop(sentinel).join()  # type: ignore[call-overload]
        ends.append(time.monotonic())
    texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    return tuple(process.exitcode for process in processes), texts, ends[-1] - ends[0]


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def exits_of(
    processes: Sequence[Any], logs: Sequence[Path], seconds: float, fine: Collection[int] = (0,)
) -> tuple[int, ...]:
    """Wait for all processes; if one exits with a code that is not in `fine`, kill the others, as a launcher does."""
    waiting = {process.sentinel: process for process in processes}
    deadline = time.monotonic() + seconds
    while waiting:
        ended = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for sentinel in ended:
            waiting.pop(sentinel).join()  # type: ignore[call-overload]
        if not ended or any(process.exitcode not in (None, *fine) for process in processes):
            for process in waiting.values():
                process.kill()
        assert ended, f"not done within {seconds} s\n{said(logs)}"
    return tuple(process.exitcode for process in processes)


def said(logs: Sequence[Path]) -> str:
    """The end of the output of each process."""
    return "\n".join(log.read_text(errors="replace")[-6000:] for log in logs if log.exists())


# ---- in this process

_KEPT: list[Any] = []


@contextmanager
def wrapped_alone(model: Any) -> Iterator[Any]:
    """A model wrapped in DDP, with this process as the only rank.

    The wrapper is never freed: freeing it joins a thread of gloo while holding the GIL, and that thread may be waiting
    for the GIL to free the last reduction.
    """
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        _KEPT.append(DistributedDataParallel(model))
        yield _KEPT[-1]
    finally:
        distributed.destroy_process_group()


# ---- in the processes


def _work(module: str, folder: Path, rank: int, count: int, log: Path, meeting: str | None = None) -> None:
    write_to(log)
    faulthandler.enable()  # prints a traceback on a crash in C code
    try:
        join(rank, count, meeting or folder / "meeting")
        importlib.import_module(module).main(folder)
        import torch

        torch.distributed.barrier()
    except BaseException as end:  # whatever it is, it must be in the log
        traceback.print_exc()
        leave(end.code if isinstance(end, SystemExit) else 1)
    leave(0)


def write_to(path: Path) -> None:
    """Redirect the output of this process, including that of C libraries, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def join(rank: int, world: int, meeting: Path | str) -> None:
    """Join a process group; the default rendezvous is a file, which, unlike a port, no other program can occupy."""
    import torch

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in places.items()})
    where = meeting if isinstance(meeting, str) and "://" in meeting else f"file://{meeting}"
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"})
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=world)


def leave(code: Any) -> None:
    """Exit without waiting for the threads of gloo, which occasionally abort a process that exits normally."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
