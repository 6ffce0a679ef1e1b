"""Processes that train together over NCCL, on a machine with a single GPU.

NCCL refuses two ranks on one GPU of a host. If each rank has a different host id, it accepts them, and they
communicate through sockets on loopback: slow, but the same code as on several GPUs.
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
    """How the processes ended: exit codes, output, and the seconds between the first exit and the last."""

    codes: tuple[int | None, ...]
    said: tuple[str, ...]
    seconds: float


def run_over_nccl(module: str, folder: Path, *arguments: str, world: int = 2, seconds: float = 240) -> Ended:
    """Run a module as a program in several processes; those that time out are killed, with exit code None."""
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
    """The variables of a launcher, and those that permit two ranks on one GPU; `LOCAL_RANK` is that GPU's index."""
    places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    apart = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    exact = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # required by torch's deterministic algorithms
    return {**os.environ, **{name: str(value) for name, value in places.items()}, **apart, **exact} | {
        "MASTER_ADDR": "127.0.0.1"
    }
