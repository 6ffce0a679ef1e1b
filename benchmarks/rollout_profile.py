"""Where a decoding step spends its time: the built-in engine under torch's profiler, in the middle of a call."""

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.rollout_cases import Workload
from benchmarks.rollout_engines import Engine, synchronize

STEPS = 20
ROWS = 25


class Window:
    """A profiler that is active from tick `first` to tick `first + count`; a tick is a step of the engine."""

    def __init__(self, first: int, count: int):
        self.first, self.count, self.ticks = first, count, 0
        self.seconds = 0.0
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=activities)

    def tick(self) -> None:
        if self.ticks == self.first:
            synchronize()
            self.profiler.start()
            self.seconds = time.perf_counter()
        elif self.ticks == self.first + self.count:
            self.close()
        self.ticks += 1

    def close(self) -> None:
        synchronize()
        self.seconds = time.perf_counter() - self.seconds
        self.profiler.stop()

    @property
    def steps(self) -> int:
        return min(self.ticks - self.first, self.count)


@contextmanager
def on_each_step(policy: Any, tick: Callable[[], None]) -> Iterator[None]:
    """Call `tick` for every forward pass that Python runs and for every replay of a CUDA graph."""
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        tick()
        replay(graph)

    hook = policy.get_input_embeddings().register_forward_pre_hook(lambda *_: tick())
    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
        hook.remove()


def write_profile(workload: Workload, make: Callable[..., Engine], policy: Any, path: Path) -> None:
    """Profile steps halfway through a call with a fresh engine on the same weights, and write the longest kernels.

    The profiler is started once before the engine captures its CUDA graphs, because it may not see the kernels of
    graphs that were captured before its first start.
    """
    gc.collect()  # frees the previous engine
    torch.cuda.empty_cache()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + torch.cuda.is_available()]):
        torch.zeros(1, device=workload.case.device).add_(1)
    engine = make(workload, policy=policy)
    requests = workload.requests(0)
    engine.sample(requests)
    count = min(STEPS, max(1, workload.case.new_tokens // 4))
    window = Window(workload.case.new_tokens // 2, count)
    with on_each_step(policy, window.tick):
        engine.sample(requests)
    if window.ticks <= window.first:
        raise RuntimeError(f"The call had {window.ticks} steps; the profile was to begin after {window.first}.")
    if window.ticks <= window.first + window.count:
        window.close()
    path.write_text(table(window), encoding="utf-8")
    print(f"profile: {path.name}")


def table(window: Window) -> str:
    """Kernels by time, with their shares of the total; operators if there is no CUDA device."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    on_device = torch.cuda.is_available()
    for event in window.profiler.events():
        if (event.device_type == DeviceType.CUDA) == on_device and not getattr(event, "is_user_annotation", False):
            microseconds = event.self_device_time_total if on_device else event.self_cpu_time_total
            times[event.name] += microseconds
            counts[event.name] += 1
    steps, wall = max(window.steps, 1), window.seconds * 1e6
    busy = sum(times.values())
    lines = [
        f"{steps} steps in {wall / 1e3:.2f} ms: {wall / steps / 1e3:.3f} ms a step under the profiler, of which "
        f"{'kernels' if on_device else 'operators'} {busy / steps / 1e3:.3f} ms ({busy / wall:.0%})",
        "",
        f"{'us a step':>10} {'share':>6} {'calls':>6}  name",
    ]
    for name in sorted(times, key=lambda name: -times[name])[:ROWS]:
        share = times[name] / busy if busy else 0.0
        lines.append(f"{times[name] / steps:10.1f} {share:6.1%} {counts[name] / steps:6.1f}  {name[:140]}")
    return "\n".join(lines) + "\n"
