"""Processes that train together over NCCL, on a machine with a single GPU.

NCCL refuses two ranks on one GPU of a host. If each is told that it is on a host of its own, they go on, and talk
through sockets on loopback: slow, but the code that several GPUs run.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.processes import ROOT, free_port


class Ended(NamedTuple):
    """How the processes ended: their codes, what they said, and the seconds between the first end and the last."""

    codes: tuple[int | None, ...]
    said: tuple[str, ...]
    seconds: float


def run_over_nccl(module: str, folder: Path, *arguments: str, world: int = 2, seconds: float = 240) -> Ended:
    """Run a module as a program, on several processes; those that are not done in time are killed: None."""
    command, port = [sys.executable, "-m", module, str(folder), *arguments], free_port()
    logs = [folder / f"process{rank}.log" for rank in range(world)]
    with ExitStack() as stack:
        files = [stack.enter_context(log.open("w")) for log in logs]
        processes = [
            subprocess.Popen(command, cwd=ROOT, env=environment(rank, world, port), stdout=file, stderr=file)
            for rank, file in enumerate(files)
        ]
    ends: dict[int, float] = {}
    deadline = time.monotonic() + seconds
    while len(ends) < world and time.monotonic() < deadline:
        time.sleep(0.05)
        ended = [rank for rank, process in enumerate(processes) if process.poll() is not None]
        ends |= {rank: time.monotonic() for rank in ended if rank not in ends}
    codes = tuple(process.poll() for process in processes)
    for process in processes:
        process.kill()
        process.wait()
    apart = max(ends.values(), default=0.0) - min(ends.values(), default=0.0)
    return Ended(codes, tuple(log.read_text(errors="replace") for log in logs), apart)


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher sets, and what makes two ranks on one GPU possible; `LOCAL_RANK` is the number of that GPU."""
    places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    apart = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    exact = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # which torch's deterministic algorithms ask for
    return {**os.environ, **{name: str(value) for name, value in places.items()}, **apart, **exact} | {
        "MASTER_ADDR": "127.0.0.1"
    }
