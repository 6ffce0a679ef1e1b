"""The process in which a reward function runs: `python -m gruppo.rewards.worker`, started by `pool.py`.

It receives the function once, then the arguments of each call, over a dedicated pipe, so that the output of a reward
does not interfere. It imports little, so that it starts quickly and the function accounts for most of its memory.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from typing import Any

from gruppo.errors import RewardError
from gruppo.rewards.calling import Log, Reply, call, end_fork, lost, packed_log
from gruppo.rewards.outcomes import Kind, clip
from gruppo.rewards.pipes import LARGEST_REPLY, receive, send

PR_SET_PDEATHSIG = 1


def main(requests: int, replies: int, parent: int) -> None:
    die_with_parent(parent)
    process = os.getpid()
    for pipe in (requests, replies):
        os.set_inheritable(pipe, False)  # not for processes that a reward starts
    try:
        setup = pickle.loads(receive(requests))
        function = load(setup)
        problem = None
    except BaseException as error:  # an import may exit
        end_fork(process, error)
        problem = clip(traceback.format_exc())
    end_fork(process)
    send(replies, pickle.dumps(problem))
    if problem is not None:
        return
    while True:
        try:
            request = receive(requests)
        except EOFError:  # the parent no longer needs this process
            return
        reply = answer(function, setup["name"], request)
        end_fork(process)
        send(replies, reply)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent dies; outside of Linux, the closed pipe must suffice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os._exit(1)


def load(setup: dict[str, Any]) -> Any:
    """Unpickle the function under the parent's import path, then set the memory limit on top of memory now used."""
    sys.path[:] = setup["path"]
    os.environ.pop("PYTHONPATH", None)
    if setup["python_path"] is not None:
        os.environ["PYTHONPATH"] = setup["python_path"]
    function = pickle.loads(setup["function"])
    if setup["memory_gb"] is not None:
        limit_memory(setup["memory_gb"])
    return function


def limit_memory(gigabytes: float) -> None:
    """Limit writable memory, not address space, of which libraries reserve a lot without using it."""
    import resource

    with open("/proc/self/status", encoding="utf-8", errors="replace") as lines:
        used_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    limit = used_kb * 1024 + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def answer(function: Any, name: str, request: bytes) -> bytes:
    """The pickled reply to a pickled request, whatever the reward does, unless it ends the process."""
    number, rows = 0, 0
    try:
        number, arguments, first, rows = pickle.loads(request)
        arguments = pickle.loads(arguments)
        reply = call(function, name, arguments, first)
    except RewardError as error:
        reply = Reply([], Log(0), broken=clip(str(error)))
    except BaseException as error:
        reply = lost(Kind.FAILURE, traceback.format_exc(), rows, spent=isinstance(error, MemoryError))
    with contextlib.suppress(Exception):  # a reward may have closed the streams
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        reply.number, reply.log = number, packed_log(reply.log)
        data = pickle.dumps(reply, protocol=5)
        if len(data) <= LARGEST_REPLY:
            return data
        text = f"The reward '{name}' logged so much that its reply has {len(data)} bytes (limit: {LARGEST_REPLY})."
    except Exception:
        text = f"What the reward '{name}' logged cannot be sent.\n{traceback.format_exc()}"
    reply = lost(Kind.FAILURE, text, rows)
    reply.number = number
    return pickle.dumps(reply, protocol=5)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
