"""Processes of their own that begin within a fraction of a second: a server has imported the library and forks them.

Several can work together, as those of a launcher do:

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
# The last one also sets what forked processes take over: one thread, and objects that are not walked for garbage.
# accelerate imports deepspeed in every run, where it is installed.
PRELOADED = ["torch", "transformers", "peft", "pyarrow.parquet", "pytest", "deepspeed", "tests.resume.process"]

# What else would run in the server when it forks: threads of numpy's BLAS, and one of pyarrow's allocator.
WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


def context() -> Any:
    """The context whose server has imported the library."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        # The server does not take over sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *([path] if path else [])]))
        patch.setenv("DS_ACCELERATOR", "cpu")  # which deepspeed looks for when it is imported
        for name, value in WITHOUT_THREADS.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def run_together(count: int, module: str, folder: Path, seconds: float = 240) -> None:
    """Run `main(folder)` of a module on `count` processes, which find each other in `folder`.

    The module is imported when a process knows its place: it may read RANK and WORLD_SIZE from the environment.
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
    """As `run_together`, but each may end as it likes: exit codes, what they said, and the seconds between two ends.

    `store`: what the processes meet at, a "file" or a "tcp" server in process 0, which ends with it.
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
    """One that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def exits_of(
    processes: Sequence[Any], logs: Sequence[Path], seconds: float, fine: Collection[int] = (0,)
) -> tuple[int, ...]:
    """Wait for all; when one ends with a code that is not `fine`, the others are killed, as a launcher does."""
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
    """The end of what each process wrote."""
    return "\n".join(log.read_text(errors="replace")[-6000:] for log in logs if log.exists())


# ---- in this process

_KEPT: list[Any] = []


@contextmanager
def wrapped_alone(model: Any) -> Iterator[Any]:
    """A model under DDP, whose only process is this one.

    The wrapper is kept for good: freeing it joins a thread of gloo's while the GIL is held, and that thread may be
    waiting for the GIL to free the last reduction.
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
    faulthandler.enable()  # a crash in C says where it was
    try:
        join(rank, count, meeting or folder / "meeting")
        importlib.import_module(module).main(folder)
        import torch

        torch.distributed.barrier()
    except BaseException as end:  # whatever it is, the log is where it can be read
        traceback.print_exc()
        leave(end.code if isinstance(end, SystemExit) else 1)
    leave(0)


def write_to(path: Path) -> None:
    """What this process says, its C libraries included, goes to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def join(rank: int, world: int, meeting: Path | str) -> None:
    """Become one of several processes that meet at a file, which no other program can take as it could a port."""
    import torch

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in places.items()})
    where = meeting if isinstance(meeting, str) and "://" in meeting else f"file://{meeting}"
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"})
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=world)


def leave(code: Any) -> None:
    """Without waiting for threads of gloo, which now and then abort a process that ends in the ordinary way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
