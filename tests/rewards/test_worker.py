"""A worker process: what it is sent, what it sends back, and how it ends."""

import contextlib
import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import ConfigError
from gruppo.rewards import get_soft_overlong_punishment, think_format_reward
from gruppo.rewards.calling import Reply
from gruppo.rewards.marks import in_worker, wants_worker
from gruppo.rewards.outcomes import Kind
from gruppo.rewards.pipes import receive, send
from gruppo.rewards.pool import packed_function, packed_setup
from gruppo.rewards.process import LoadError, LostCallError, Worker

ARGUMENTS = {"prompts": ["p", "q"], "completions": ["a", "bc"], "completion_ids": [[1], [1, 2]]}


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_running(pid)


@contextlib.contextmanager
def working(function: Any, memory_gb: float | None = None) -> Any:
    worker = Worker(packed_setup(function, "mine", memory_gb))
    try:
        yield worker
    finally:
        worker.kill()


def ask(worker: Worker, seconds: float = 30.0, **more: Any) -> Reply:
    arguments = ARGUMENTS | more
    return worker.ask(pickle.dumps(arguments), 0, len(arguments["completions"]), seconds)


def values(reply: Reply) -> list[float]:
    return [outcome.value for outcome in reply.outcomes]


# ---- functions of every kind

FACTOR = 2.0


def scaled(completions: list[str], **kwargs: Any) -> list[float]:
    return [FACTOR * len(completion) for completion in completions]


class Scaled:
    def __init__(self, factor: float):
        self.factor = factor

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [self.factor * len(completion) for completion in completions]


def closure(factor: float) -> Any:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [factor * len(completion) for completion in completions]

    return reward


def scaled_by(factor: float, completions: list[str], **kwargs: Any) -> list[float]:
    return [factor * len(completion) for completion in completions]


@pytest.mark.parametrize(
    "function",
    [
        scaled,
        Scaled(2.0),
        Scaled(2.0).__call__,
        closure(2.0),
        functools.partial(scaled_by, 2.0),
        lambda completions, **kwargs: [2.0 * len(completion) for completion in completions],
    ],
    ids=["function", "object", "method", "closure", "partial", "lambda"],
)
def test_functions_are_sent_by_value(function):
    with working(function) as worker:
        assert values(ask(worker)) == [2.0, 4.0]


def test_a_function_is_sent_as_it_is_here_and_now(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    with working(scaled) as worker:
        assert values(ask(worker)) == [5.0, 10.0]


def imported(completions: list[str], **kwargs: Any) -> list[float]:
    return [float("torch" in sys.modules), float("pytest" in sys.modules)]


def test_a_worker_imports_little():
    with working(imported) as worker:
        assert values(ask(worker)) == [0.0, 0.0]


def test_shipped_rewards_run_in_workers():
    for function in (think_format_reward, get_soft_overlong_punishment(4, 2)):
        assert wants_worker(function)
        assert wants_worker(functools.partial(function))
        with working(function) as worker:
            assert len(values(ask(worker))) == 2
    assert not wants_worker(scaled)
    assert wants_worker(in_worker(closure(1.0)))


def test_local_modules_are_found_and_their_own_imports_too(tmp_path, monkeypatch):
    (tmp_path / "my_helper.py").write_text("def length(text): return float(len(text))")
    (tmp_path / "my_rewards.py").write_text(
        "import threading\nfrom my_helper import length\nLOCK = threading.Lock()\n"
        "def by_value(completions, **kw): return [length(c) for c in completions]\n"
        "def by_name(completions, **kw):\n    with LOCK: return [length(c) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_rewards  # type: ignore[import-not-found]

    for function in (my_rewards.by_value, my_rewards.by_name):  # the second has a global that cannot be copied
        with working(function) as worker:
            assert values(ask(worker)) == [1.0, 2.0]


def test_a_function_that_cannot_be_sent_is_named():
    lock = threading.Lock()

    def locked(completions: list[str], **kwargs: Any) -> list[float]:
        with lock:
            return [1.0] * len(completions)

    with pytest.raises(ConfigError, match=r"'locked' cannot be sent to a worker.*lock.*leave reward_timeout at None"):
        packed_function(locked, "locked")


class Unloadable:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return []

    def __setstate__(self, state: Any) -> None:
        raise ModuleNotFoundError("No module named 'only_here'")

    def __getstate__(self) -> Any:
        return {"x": 1}


def test_a_function_that_cannot_be_loaded_says_why():
    with working(Unloadable()) as worker, pytest.raises(LoadError, match="No module named 'only_here'"):
        ask(worker)


# ---- what goes wrong in a call


def prints(completions: list[str], **kwargs: Any) -> list[float]:
    print("to stdout" * 1000)
    os.write(1, b"to the descriptor")
    os.system("echo from a child")
    sys.stdout.close()
    return [1.0, 2.0]


def test_what_a_reward_prints_is_no_part_of_the_reply(capfd):
    with working(prints) as worker:
        assert values(ask(worker)) == [1.0, 2.0]
        worker.kill()
    out, err = capfd.readouterr()
    assert out == ""
    assert "from a child" in err


def raises(completions: list[str], **kwargs: Any) -> list[float]:
    raise {"value": ValueError, "exit": SystemExit, "interrupt": KeyboardInterrupt}[kwargs["how"]]("mine")


@pytest.mark.parametrize("how", ["value", "exit", "interrupt"])
def test_an_exception_is_reported_and_the_worker_lives(how):
    with working(raises) as worker:
        reply = ask(worker, how=how)
        assert reply.lost
        assert [outcome.kind for outcome in reply.outcomes] == [Kind.FAILURE] * 2
        assert "mine" in reply.outcomes[0].error
        assert "in raises" in reply.outcomes[0].error, "with its traceback"
        assert worker.alive()
        assert ask(worker, how=how).lost


def wrong(completions: list[str], **kwargs: Any) -> Any:
    return kwargs["output"]


def test_a_broken_contract_is_reported_as_such():
    with working(wrong) as worker:
        assert "'mine' returned 1 rewards for 2 completions" in str(ask(worker, output=[1.0]).broken)
        assert values(ask(worker, output=[1.0, 2.0])) == [1.0, 2.0]


def returns_a_lock(completions: list[str], **kwargs: Any) -> Any:
    return [threading.Lock()] * len(completions)


def test_results_that_cannot_be_pickled():
    with working(returns_a_lock) as worker:
        assert "lock" in str(ask(worker).broken)


def crash(completions: list[str], **kwargs: Any) -> Any:
    if kwargs["how"] == "exit":
        os._exit(0)
    if kwargs["how"] == "child":  # it holds the pipe open when its parent has ended
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("how", "message"),
    [("signal", "was ended by SIGSEGV"), ("exit", "ended with exit code 0"), ("child", "ended with exit code 3")],
)
def test_a_crash_is_a_failure(how, message):
    with working(crash) as worker:
        with pytest.raises(LostCallError, match=message) as caught:
            ask(worker, seconds=60.0, how=how)
        assert caught.value.kind is Kind.FAILURE
        assert not worker.alive()


def never_returns(completions: list[str], **kwargs: Any) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    Path(kwargs["file"]).write_text(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(1)


def test_what_overruns_is_killed_with_its_children(tmp_path):
    with working(never_returns) as worker:
        start = time.monotonic()
        with pytest.raises(LostCallError, match=r"longer than [12]\.?\d* s and was killed") as caught:
            ask(worker, seconds=1.0, file=str(tmp_path / "pids"))
        assert time.monotonic() - start < 30
        assert caught.value.kind is Kind.TIMEOUT
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            assert gone(pid)


def stops_itself(completions: list[str], **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_worker_that_reads_nothing_does_not_hang_the_sender():
    with working(stops_itself) as worker, pytest.raises(LostCallError, match="longer than"):
        ask(worker, seconds=1.0)
    with working(scaled) as worker:
        assert values(ask(worker)) == [2.0, 4.0]
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(LostCallError, match="longer than"):
            ask(worker, seconds=1.0, padding="x" * 10_000_000)


def eats_memory(completions: list[str], **kwargs: Any) -> list[float]:
    eaten = []
    for _ in range(kwargs["megabytes"]):
        eaten.append(bytearray(2**20))
    return [float(len(eaten))] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_memory_limit_is_a_failure_and_the_worker_is_replaced():
    with working(eats_memory, memory_gb=0.1) as worker:
        assert values(ask(worker, megabytes=50)) == [50.0, 50.0]
        reply = ask(worker, megabytes=4000)
        assert reply.lost
        assert "MemoryError" in reply.outcomes[0].error
        assert not worker.alive()


# ---- how it ends


def test_a_worker_ends_with_its_handle():
    gc.collect()  # of other tests
    worker = Worker(packed_setup(scaled, "mine", None))
    assert values(ask(worker)) == [2.0, 4.0]
    pid, descriptors = worker.process.pid, len(os.listdir("/proc/self/fd"))
    del worker
    gc.collect()
    assert gone(pid)
    assert not Path(f"/proc/{pid}").exists(), "no zombie either"
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2


PARENT = """
    import os, signal, sys, time
    from gruppo.rewards.pool import packed_setup
    from gruppo.rewards.process import Worker

    def reward(completions, **kwargs):
        return [1.0]

    worker = Worker(packed_setup(reward, "mine", None))
    worker._loading.join()
    print(worker.process.pid, flush=True)
    if sys.argv[1] == "end":
        sys.exit(0)
    if sys.argv[1] == "fork":
        if os.fork() == 0:
            sys.exit(0)  # runs what is registered for the end of a process
        os.wait()
        print("alive" if worker.alive() else "dead", flush=True)
        sys.exit(0)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background inherits that it is ignored
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    finally:
        print("interrupted" if worker.alive() else "dead", flush=True)
"""


@pytest.mark.parametrize("how", ["end", "kill", "interrupt", "fork"])
def test_no_worker_outlives_its_parent(how):
    parent = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARENT), how], capture_output=True, text=True, timeout=120
    )
    pid, *rest = parent.stdout.split()
    assert gone(int(pid))
    assert rest == {"end": [], "kill": [], "interrupt": ["interrupted"], "fork": ["alive"]}[how], parent.stderr


# ---- messages


def test_messages_of_every_size():
    out, into = os.pipe()
    os.set_blocking(into, False)
    sent = [b"", b"x", os.urandom(3_000_000)]
    writer = threading.Thread(target=lambda: [send(into, message, time.monotonic() + 60) for message in sent])
    writer.start()
    assert [receive(out) for _ in sent] == sent
    writer.join()
    os.close(into)
    with pytest.raises(EOFError):
        receive(out)
    os.close(out)


def test_half_a_message_is_not_waited_for_for_ever():
    out, into = os.pipe()
    os.write(into, (100).to_bytes(8, "big") + b"half")
    with pytest.raises(TimeoutError):
        receive(out, time.monotonic() + 0.2)
    os.close(out)
    os.close(into)
