"""The loop of a rollout: admit, encode prompts, decode a few steps, remove finished completions.

On CUDA the host runs ahead of the device. It launches a few steps and an asynchronous copy of the stop flags, and only
then reads the flags of the previous steps, so the device never waits. A completion that has ended in the meantime is
computed for a few more steps; its row is frozen (see rows.py), and these steps are counted as waste.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gruppo.engine.rows import STOPS, Results
from gruppo.engine.runner import Runner
from gruppo.engine.scheduler import Entry, Scheduler
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.stopping import StopStrings
from gruppo.engine.work import Work
from gruppo.types import Completion, StopReason

# Decoding steps between two looks at the stop flags. A look costs the device nothing, a late one wastes rows.
_STEPS_PER_LOOK = {"cuda": 4, "cpu": 1}


@dataclass
class Counters:
    """Statistics of a rollout."""

    calls: int = 1  # more than one in a block of turns
    prefill_tokens: int = 0
    kept_tokens: int = 0  # prompt tokens not encoded, because an earlier turn left their KV cache
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    computed_rows: int = 0  # batch rows, summed over all decoding steps
    wasted_rows: int = 0  # those that gave no token: the completion had ended, or the row only padded the batch
    kv_tokens: int = 0  # places in the pool
    kv_high_water: int = 0  # peak number of places in use
    graph_captures: int = 0
    capture_seconds: float = 0.0

    def finish(self, seconds: float, tokens: int) -> None:
        self.decode_tokens = tokens
        self.wasted_rows = self.computed_rows - tokens
        self.decode_seconds = max(seconds - self.prefill_seconds - self.capture_seconds, 0.0)

    def plus(self, other: "Counters") -> "Counters":
        """The counters of both together."""
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        places = {name: max(getattr(self, name), getattr(other, name)) for name in ("kv_tokens", "kv_high_water")}
        return Counters(**(sums | places))

    def to_dict(self) -> dict[str, float]:
        def rate(tokens: int, seconds: float) -> float:
            return tokens / seconds if seconds else 0.0

        return {
            **vars(self),
            "prefill_tokens_per_second": rate(self.prefill_tokens, self.prefill_seconds),
            "decode_tokens_per_second": rate(self.decode_tokens, self.decode_seconds),
        }


@dataclass(frozen=True)
class Look:
    """Stop flags, and with stop strings the newest tokens, being copied to the host."""

    stops: Tensor  # (C + 1,) on the host
    lengths: Tensor  # (C + 1,)
    fresh: Tensor | None  # (n, steps) tokens of `completions`, starting at `columns`
    completions: Sequence[int]
    columns: Sequence[int]
    ready: Callable[[], Any]


class Loop:
    """One rollout."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        work: Work,
        settings: SamplingSettings,
        prefill_tokens: int,
        stop_strings: StopStrings | None,
        pause: Callable[[], None] = lambda: None,
    ):
        self.runner = runner
        self.pause = pause
        self.rows = runner.rows
        self.scheduler = scheduler
        self.work = work
        self.settings = settings
        self.prefill_tokens = prefill_tokens
        self.stop_strings = stop_strings
        self.counters = Counters()
        self.order: list[int] = []  # the completion of each row
        self.entered: dict[int, int] = {}  # completion -> number of steps before it entered
        self.seats = list(range(self.scheduler.rows))[::-1]
        self.seat_of: dict[int, int] = {}
        self.cut: dict[int, int] = {}  # completions ended by a stop string, and their length
        self.on_cuda = runner.device.type == "cuda"
        self._prefill_marks: list[tuple[Any, Any]] = []

    def run(self) -> dict[int, int]:
        """Run until every completion has ended; returns the lengths of those that a stop string ended."""
        looks: deque[Look] = deque()
        waiting = 1 if self.on_cuda else 0  # on a GPU the next steps are queued before the results of the last ones
        while not self.scheduler.finished:
            self.pause()
            self._admit()
            steps = self._steps()
            if steps:
                looks.append(self._decode(steps))
            if looks and (len(looks) > waiting or not steps):
                self._take_out(looks.popleft())
        self.counters.prefill_seconds += sum(self._seconds(*mark) for mark in self._prefill_marks)
        return self.cut

    # ---- in

    def _admit(self) -> None:
        admission = self.scheduler.admit()
        if admission.prompts:
            start = self._mark()
            self.counters.kept_tokens += sum(prompt.past for prompt in admission.prompts)
            self.counters.prefill_tokens += self.runner.prefill(admission.prompts, self.prefill_tokens)
            self._prefill_marks.append((start, self._mark()))
        if admission.entries:
            self.rows.enter([self._column(entry) for entry in admission.entries])

    def _column(self, entry: Entry) -> list[int]:
        """The state of a row that enters, in the order of `rows.Field`: its first input is the prompt's last token."""
        number, prompt = entry.completion, entry.prompt
        seat = self.seat_of[number] = self.seats.pop()
        if self.runner.seen is not None:
            self.runner.seen[seat] = False
            self.runner.seen[seat, torch.tensor(prompt.ids, device=self.runner.device)] = True
        self.order.append(number)
        self.entered[number] = self.counters.decode_steps
        limit, key = self.work.limits[number], self.work.keys[number]
        start = prompt.start or 0
        return [prompt.ids[-1], start, prompt.prefix_length, entry.tail_start, 0, limit, key, number, seat, 0]

    # ---- steps

    def _column_of(self, completion: int) -> int:
        """The number of tokens that a running completion has so far."""
        return self.counters.decode_steps - self.entered[completion]

    def _steps(self) -> int:
        """Steps until the next look; 0 when every completion is known to have reached its limit."""
        left = max((self.work.limits[c] - self._column_of(c) for c in self.order), default=0)
        return min(_STEPS_PER_LOOK[self.runner.device.type], max(left, 0))

    def _decode(self, steps: int) -> Look:
        columns = [self._column_of(completion) for completion in self.order]
        self.counters.computed_rows += steps * self.runner.decode(self.settings, steps)
        self.counters.decode_steps += steps
        results = self.rows.results
        fresh = None
        if self.stop_strings is not None:
            rows = torch.tensor(self.order, device=self.runner.device)[:, None]
            index = torch.tensor(columns)[:, None] + torch.arange(steps)
            fresh = results.tokens[rows, index.clamp(max=results.tokens.shape[1] - 1).to(self.runner.device)]
        copies = [self._to_host(t) for t in (results.stops, results.lengths, fresh)]
        ready: Callable[[], Any] = (lambda: None) if not self.on_cuda else self._mark().synchronize
        return Look(copies[0], copies[1], copies[2], list(self.order), columns, ready)  # type: ignore[arg-type]

    def _to_host(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not self.on_cuda:
            return None if tensor is None else tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    # ---- out

    def _take_out(self, look: Look) -> None:
        """Remove the completions that had ended at the time of this look."""
        look.ready()
        live = self.scheduler.live
        stops = look.stops.tolist()
        self._find_stop_strings(look)
        ended = [c for c in look.completions if c in live and (stops[c] or c in self.cut)]
        if not ended:
            return
        lengths = look.lengths.tolist()
        for completion in ended:
            by_itself = STOPS[stops[completion]] is StopReason.EOS  # after LENGTH and NAN nothing is kept
            self.scheduler.finish(completion, self.cut.get(completion, lengths[completion] if by_itself else 0))
            self.seats.append(self.seat_of.pop(completion))
        kept = [row for row, completion in enumerate(self.order) if completion in live]
        self.order = [self.order[row] for row in kept]
        self.rows.keep(kept)

    def _find_stop_strings(self, look: Look) -> None:
        if self.stop_strings is None or look.fresh is None:
            return
        lengths = look.lengths.tolist()
        for completion, column, tokens in zip(look.completions, look.columns, look.fresh.tolist(), strict=True):
            if completion not in self.scheduler.live:
                continue
            new = tokens[: max(lengths[completion] - column, 0)]
            length = self.stop_strings.feed(completion, new)
            if length is not None:
                self.cut[completion] = length

    # ---- clocks

    def _mark(self) -> Any:
        """A timestamp on the device: a CUDA event, or the host clock on a CPU."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self.on_cuda else end - start


def collect(results: Results, work: Work, cut: dict[int, int]) -> list[Completion]:
    """Completions in the order in which they were asked for."""
    count = work.completions
    lengths, stops = results.lengths[:count].tolist(), results.stops[:count].tolist()
    widest = max([*lengths, 1])

    def on_host(values: Tensor) -> Any:
        # One copy of all rows; lists of the tokens only, as most rows may be much shorter than the longest.
        return values[:count, :widest].cpu().numpy()

    tokens, logps, plain = on_host(results.tokens), on_host(results.logps), on_host(results.plain_logps)
    entropies = None if results.entropies is None else on_host(results.entropies)
    completions = []
    for i in range(count):
        length, stop = lengths[i], STOPS[stops[i]]
        if i in cut:
            # If the token that completes the string is also an end-of-sequence token, EOS is the reason.
            length, stop = cut[i], stop if stop is StopReason.EOS and lengths[i] == cut[i] else StopReason.STOP_STRING
        if not work.limits[i]:
            length, stop = 0, StopReason.NO_ROOM
        assert stop is not None, f"completion {i} never ended"
        completions.append(
            Completion(
                tokens[i, :length].tolist(),
                stop,
                logps[i, :length].tolist(),
                plain_logps=plain[i, :length].tolist(),
                entropies=None if entropies is None else entropies[i, :length].tolist(),
            )
        )
    return completions
