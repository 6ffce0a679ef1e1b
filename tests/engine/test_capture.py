"""A decoding step that cannot be captured: what torch leaves behind is put back. CUDA is played; see test_cuda.py."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gruppo.engine.runner import Runner
from gruppo.engine.settings import SamplingSettings

SETTINGS = SamplingSettings(max_new_tokens=4)


class Cuda:
    """torch.cuda as far as a capture goes: one stream is in use, and a recording may fail at its end.

    `users` counts the captures of every pool, as torch's allocator does: it frees a pool without any, and refuses to
    record into it again.
    """

    def __init__(self, error: Exception | None):
        self.error = error
        self.in_use = "default"
        self.capturing = False
        self.allocating: set[Any] = set()
        self.users: Counter[Any] = Counter()
        self.pools = 0
        self.default_generators = [self]

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.in_use = self.in_use, name
        try:
            yield
        finally:
            self.in_use = before

    def graph(self, graph: Any, memory: Any, stream: str, **options: Any) -> Any:
        return Recording(self, memory, stream)

    def end_allocation(self, device: int, memory: Any) -> None:
        if memory not in self.allocating:
            raise RuntimeError("not currently recording")
        self.allocating.remove(memory)

    def release(self, device: int, memory: Any) -> None:
        assert self.users[memory] > 0
        assert memory not in self.allocating
        self.users[memory] -= 1

    def new_pool(self) -> tuple[int, int]:
        self.pools += 1
        return 0, self.pools

    def clone_state(self) -> str:
        return "free"

    def graphsafe_set_state(self, state: str) -> None:
        self.capturing = False


class Recording:
    """Ends as torch's does: if that raises, stream, memory and random numbers stay those of the capture."""

    def __init__(self, cuda: Cuda, memory: Any, stream: str):
        self.cuda, self.memory, self.stream = cuda, memory, stream

    def __enter__(self) -> None:
        assert self.memory not in self.cuda.users or self.cuda.users[self.memory] > 0
        self.cuda.users[self.memory] += 1
        self.cuda.allocating.add(self.memory)
        self.before, self.cuda.in_use, self.cuda.capturing = self.cuda.in_use, self.stream, True

    def __exit__(self, *_: object) -> None:
        if self.cuda.error is not None:
            raise self.cuda.error
        self.cuda.allocating.remove(self.memory)
        self.cuda.in_use, self.cuda.capturing = self.before, False


def runner_on(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, list[str]]:
    """A runner whose steps note the stream that they are on."""
    for name in ("stream", "graph", "default_generators"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", cuda.new_pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "a graph")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_allocation)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", cuda.release)
    monkeypatch.setattr("gruppo.engine.runner._capture_stream", lambda device: Side("side"))
    steps: list[str] = []
    rows = SimpleNamespace(state=torch.zeros(3, 2), padding=torch.ones(3), device=torch.device("cuda", 0))
    runner = Runner.__new__(Runner)
    vars(runner).update(rows=rows, device=rows.device, use_graphs=True, captures=0, capture_seconds=0.0)
    vars(runner).update(_graphs={}, _memory=None, _stream=None, _shares_prompts=lambda bucket: False)
    runner._step = lambda bucket, settings: steps.append(cuda.in_use)  # type: ignore[method-assign]
    return runner, steps


class Side(str):
    def synchronize(self) -> None:
        pass


def test_a_capture_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(None)
    runner, steps = runner_on(cuda, monkeypatch)
    assert runner._graph(2, SETTINGS) == "a graph"
    assert steps == ["side", "side"], "once to compile, once to record"
    assert (cuda.in_use, cuda.capturing, cuda.allocating, runner.captures) == ("default", False, set(), 1)
    assert cuda.users == {(0, 1): 1}


def test_one_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda = Cuda(RuntimeError("operation failed due to a previous error during capture\nmore"))
    runner, _ = runner_on(cuda, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert runner._graph(2, SETTINGS) is None
    assert "runs slower: operation failed due to a previous error during capture" in caplog.text
    assert not runner.use_graphs
    assert (cuda.in_use, cuda.capturing, cuda.allocating) == ("default", False, set())
    assert torch.equal(runner.rows.state, torch.zeros(3, 2)), "rows are as they were"
    assert cuda.users == {(0, 1): 0}, "its memory can be freed"


def test_one_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(torch.OutOfMemoryError("no memory"))
    runner, _ = runner_on(cuda, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        runner._graph(2, SETTINGS)
    assert (cuda.in_use, cuda.capturing, cuda.allocating, runner.use_graphs) == ("default", False, set(), True)


def test_one_that_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(None)
    runner, _ = runner_on(cuda, monkeypatch)

    def fail(bucket: int, settings: SamplingSettings) -> None:
        raise RuntimeError("a step that fails")

    runner._step = fail  # type: ignore[method-assign, assignment]
    assert runner._graph(2, SETTINGS) is None
    assert (cuda.in_use, cuda.allocating, runner.use_graphs) == ("default", set(), False)
    assert cuda.users == {}, "nobody began"


def test_one_that_fails_before_there_is_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is what went wrong, not that there is nothing to clean up."""
    cuda = Cuda(None)
    runner, _ = runner_on(cuda, monkeypatch)

    def fail(device: Any = None) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, memory: len(memory))
    with pytest.raises(torch.OutOfMemoryError):
        runner._graph(2, SETTINGS)
    assert cuda.users == {}


@pytest.mark.parametrize("earlier", [0, 2])
def test_earlier_graphs_keep_their_memory(earlier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(None)
    runner, _ = runner_on(cuda, monkeypatch)
    for bucket in range(earlier):
        runner._graph(4 + bucket, SETTINGS)
    cuda.error = torch.OutOfMemoryError("no memory")
    for bucket in (2, 1):
        with pytest.raises(torch.OutOfMemoryError):
            runner._graph(bucket, SETTINGS)
    cuda.error = None
    assert runner._graph(1, SETTINGS) == "a graph"
    assert cuda.users == {(0, 1): earlier, (0, 2): 0, (0, 3): 1}
    assert len(runner._graphs) == earlier + 1


def test_a_capture_that_torch_ended_leaves_the_pool_to_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that does not end the recording itself: torch counts the graph until it is gone."""
    cuda = Cuda(None)
    runner, _ = runner_on(cuda, monkeypatch)

    def fail_while_recording(bucket: int, settings: SamplingSettings) -> None:
        if cuda.capturing:
            raise torch.OutOfMemoryError("no memory")

    runner._step = fail_while_recording  # type: ignore[method-assign, assignment]
    with pytest.raises(torch.OutOfMemoryError):
        runner._graph(2, SETTINGS)
    assert (cuda.allocating, cuda.users) == (set(), {(0, 1): 1})
