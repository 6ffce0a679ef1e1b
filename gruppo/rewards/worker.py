"""The process in which a reward function runs: `python -m gruppo.rewards.worker`, started by `pool.py`.

It gets a function once, then the arguments of one call after the other, over a pipe of their own: what a reward
prints goes elsewhere. It imports little, so that it starts quickly and its memory is that of the function.
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
        os.set_inheritable(pipe, False)  # processes that a reward starts have no business with them
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
        except EOFError:  # the parent has no further use for this process
            return
        reply = answer(function, setup["name"], request)
        end_fork(process)
        send(replies, reply)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent dies, however that happens; without such a signal, the closed pipe has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this took effect
        os._exit(1)


def load(setup: dict[str, Any]) -> Any:
    """The function, with the import path of the parent, and the memory limit on top of what it needs itself."""
    sys.path[:] = setup["path"]
    os.environ.pop("PYTHONPATH", None)
    if setup["python_path"] is not None:
        os.environ["PYTHONPATH"] = setup["python_path"]
    function = pickle.loads(setup["function"])
    if setup["memory_gb"] is not None:
        limit_memory(setup["memory_gb"])
    return function


def limit_memory(gigabytes: float) -> None:
    """Bound what can be written to, not the address space: libraries reserve much of that without using it."""
    import resource

    with open("/proc/self/status") as lines:
        used_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    limit = used_kb * 1024 + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def answer(function: Any, name: str, request: bytes) -> bytes:
    """The pickled reply to a pickled request, whatever the reward does short of ending the process."""
    number, rows = 0, 0
    try:
        number, arguments, first, rows = pickle.loads(request)
        arguments = pickle.loads(arguments)
        reply = call(function, name, arguments, first)
    except RewardError as error:
        reply = Reply([], Log(0), broken=clip(str(error)))
    except BaseException as error:
        reply = lost(Kind.FAILURE, traceback.format_exc(), rows, spent=isinstance(error, MemoryError))
    with contextlib.suppress(Exception):  # a reward may have closed them
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        reply.number, reply.log = number, packed_log(reply.log)
        data = pickle.dumps(reply, protocol=5)
        if len(data) <= LARGEST_REPLY:
            return data
        text = f"The reward '{name}' logged so much that its reply has {len(data)} bytes; {LARGEST_REPLY} are allowed."
    except Exception:
        text = f"What the reward '{name}' logged cannot be sent.\n{traceback.format_exc()}"
    reply = lost(Kind.FAILURE, text, rows)
    reply.number = number
    return pickle.dumps(reply, protocol=5)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
