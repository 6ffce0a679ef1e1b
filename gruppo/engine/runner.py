"""Forward passes of the engine: prompts in packed chunks, and decoding steps, run eagerly or as CUDA graphs."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.engine import ops
from gruppo.engine.cache import DecodeLayout, EngineCache, PrefillLayout, ShapeProbe
from gruppo.engine.kv import KvPool
from gruppo.engine.reference import Workspace
from gruppo.engine.rows import Field, Rows
from gruppo.engine.sampling import choose
from gruppo.engine.scheduler import PromptWork
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.turns import Turns
from gruppo.plan.budgets import shares_prompts
from gruppo.policy.inplace import autocast, without_collection

logger = logging.getLogger(__name__)

LeanForward = Callable[[Tensor, Tensor, EngineCache, bool], Tensor]


def forward(model: nn.Module, ids: Tensor, positions: Tensor, cache: Any, **options: Any) -> Tensor:
    """Logits of packed tokens (N,).

    Calls the forward of the class: that of the instance may be wrapped for training, which would cast logits to
    float32.
    """
    output = type(model).forward(
        model,
        input_ids=ids[None],
        position_ids=positions[None],
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
        engine_cache=cache,
        **options,
    )
    return output.logits[0]


def kv_shapes(model: nn.Module, device: torch.device) -> tuple[list[tuple[int, int, int]], torch.dtype]:
    """Head count and sizes of every layer's keys and values, and their dtype, observed in a pass over one token."""
    probe = ShapeProbe()
    zero = torch.zeros(1, dtype=torch.long, device=device)
    forward(model, zero, zero, probe, logits_to_keep=1)
    return [probe.shapes[i] for i in range(len(probe.shapes))], probe.dtype


def prompt_chunks(prompts: Sequence[PromptWork], budget: int) -> Iterator[list[tuple[PromptWork, int, int]]]:
    """Prefixes in batches of at most `budget` tokens, as (prompt, from, to); a longer one is cut into chunks.

    Tokens whose KV cache is copied from an earlier turn are left out.

    Example, prefixes of 5 and 3 tokens with a budget of 4:
        [(a, 0, 4)], [(a, 4, 5), (b, 0, 3)]
    """
    batch: list[tuple[PromptWork, int, int]] = []
    room = budget
    for prompt in prompts:
        done = prompt.past
        while done < prompt.prefix_length:
            take = min(room, prompt.prefix_length - done)
            batch.append((prompt, done, done + take))
            done, room = done + take, room - take
            if not room:
                yield batch
                batch, room = [], budget
    if batch:
        yield batch


def _length_matters(settings: SamplingSettings) -> int:
    return settings.max_new_tokens if settings.forced_eos_token_id else 1


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for all captures: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)


def clean_up_capture(device: torch.device, memory: Any) -> None:
    """Clear the state that torch leaves behind when a CUDA graph capture fails.

    The random number generator still waits for the end of the capture, so the next dropout would raise. The allocator
    still asks the deleted graph whether an allocation belongs to it, does not reuse memory that was used on several
    streams, and counts the capture as a user of `memory`, the graphs' pool, which is freed only without users.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    if memory is None:  # the capture failed before there was a pool
        return
    with suppress(RuntimeError):  # the capture had not begun, or torch ended it and its graph releases the pool
        torch._C._cuda_endAllocateToPool(index, memory)
        torch._C._cuda_releasePool(index, memory)  # for this capture; earlier graphs hold their own references


class Runner:
    """Runs one model over one pool and one batch of rows."""

    def __init__(
        self,
        model: nn.Module,
        pool: KvPool,
        rows: Rows,
        *,
        buckets: Sequence[int],
        autocast_dtype: torch.dtype | None,
        use_graphs: bool,
    ):
        self.model = model
        self.pool = pool
        self.rows = rows
        self.buckets = list(buckets)
        self.autocast_dtype = autocast_dtype
        self.device = rows.device
        self.use_graphs = use_graphs and self.device.type == "cuda"
        self.inverse_temperature = torch.ones(1, device=self.device)
        self.seen: Tensor | None = None  # (rows + 1, V): tokens that occur in a completion or its prompt, by seat
        self.seen_memory: Tensor | None = None  # kept even if a call does not use it: captured graphs refer to it
        self.lean: LeanForward | None = None  # replaces the model's own forward
        self.workspace = Workspace()
        self.turns: Turns | None = None  # what the calls of a block keep in the pool
        self.prompt_tokens = 0.0  # mean prefix length of the current prompts; 0 if they are hardly shared
        self.captures = 0
        self.capture_seconds = 0.0
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._memory: Any = None  # the memory pool that all graphs share: they never run concurrently
        self._stream: Any = None

    def _forward(self, ids: Tensor, positions: Tensor, cache: EngineCache, *, logits: bool = True) -> Tensor:
        """Logits of packed tokens; with `logits=False` only their keys and values matter."""
        if self.lean is not None:
            return self.lean(ids, positions, cache, logits)
        with autocast(self.device, self.autocast_dtype):
            return forward(self.model, ids, positions, cache, logits_to_keep=0 if logits else 1)

    # ---- prompts

    def prefill(self, prompts: Sequence[PromptWork], budget: int) -> int:
        """Encode the prefixes of these prompts; returns the number of tokens."""
        self._copy_turns(prompts, budget)  # before anything is written to the places they are copied from
        tokens = 0
        for batch in prompt_chunks(prompts, budget):
            ids, positions, layout = self._packed(batch)
            tokens += len(ids)
            self._forward(ids, positions, EngineCache(self.pool, layout), logits=False)
        return tokens

    def _copy_turns(self, prompts: Sequence[PromptWork], budget: int) -> None:
        """Copy the KV cache kept from earlier turns to the prefixes of these prompts, `budget` tokens at a time.

        The order of the prompts matters: a prefix may be placed where an earlier prompt's KV cache was kept.
        """
        parts = [(prompt, start, length) for prompt in prompts for start, length in prompt.copied]
        if not parts:
            return
        sources = torch.cat([torch.arange(start, start + length) for _, start, length in parts])
        targets = torch.cat([torch.arange(prompt.past) + (prompt.start or 0) for prompt in prompts if prompt.copied])
        for source_part, target_part in zip(sources.split(budget), targets.split(budget), strict=True):
            source, target = self._upload(source_part, target_part)
            for keys, values in zip(self.pool.keys, self.pool.values, strict=True):
                ops.write_kv(keys[source], values[source], keys, values, target)

    def _packed(self, batch: Sequence[tuple[PromptWork, int, int]]) -> tuple[Tensor, Tensor, PrefillLayout]:
        ids = [token for prompt, low, high in batch for token in prompt.ids[low:high]]
        positions = [i for _, low, high in batch for i in range(low, high)]
        starts = [prompt.start or 0 for prompt, _, _ in batch]
        lengths = [high - low for _, low, high in batch]
        places = [start + i for start, (_, low, high) in zip(starts, batch, strict=True) for i in range(low, high)]
        past = [low for _, low, _ in batch]
        id_s, position_s, place_s, start_s, past_s = self._upload(ids, positions, places, starts, past)
        (cu_query,) = self._upload([0, *accumulate(lengths)])
        return id_s, position_s, PrefillLayout(place_s, start_s, past_s, cu_query.int(), max(lengths))

    def _upload(self, *lists: Sequence[int] | Tensor) -> list[Tensor]:
        """Copy lists to the device in one transfer, each 16-byte aligned, as kernels are compiled for."""
        sizes = [-(-len(values) // 2) * 2 for values in lists]
        host = torch.zeros(sum(sizes), dtype=torch.long)
        for part, values in zip(host.split(sizes), lists, strict=True):
            part[: len(values)] = torch.as_tensor(values, dtype=torch.long)
        flat = host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host
        return [part[: len(values)] for part, values in zip(flat.split(sizes), lists, strict=True)]

    # ---- decoding

    def set_temperature(self, temperature: float) -> None:
        self.inverse_temperature.fill_(1 / (temperature or 1.0))  # 0 stands for greedy decoding

    def decode(self, settings: SamplingSettings, steps: int) -> int:
        """Sample `steps` more tokens for every row; returns the size of the batch that was run."""
        bucket = next(size for size in self.buckets if size >= self.rows.count)
        graph = self._graph(bucket, settings) if self.use_graphs else None
        rows = bucket if graph is not None else self.rows.count
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:
                self._step(rows, settings)
        return rows

    def _step(self, bucket: int, settings: SamplingSettings) -> None:
        """One token for the first `bucket` rows. Nothing here waits for the device."""
        state = self.rows.state[:, :bucket]
        fields = state.unbind()
        prompt_len, tail_start, tail_len = (fields[f] for f in (Field.PROMPT_LEN, Field.TAIL_START, Field.TAIL_LEN))
        layout = DecodeLayout(
            places=tail_start + tail_len,
            prompt_start=fields[Field.PROMPT_START],
            prompt_len=prompt_len,
            tail_start=tail_start,
            tail_len=tail_len + 1,
            splits=ops.choose_splits(bucket, self.pool.shapes[0][0]),
            shared=self._shares_prompts(bucket),
            workspace=self.workspace,
        )
        logits = self._forward(fields[Field.TOKEN], prompt_len + tail_len, EngineCache(self.pool, layout))
        seats = fields[Field.SEAT]
        choice = choose(
            logits,
            settings,
            keys=fields[Field.KEY],
            positions=tail_len,
            inverse_temperature=self.inverse_temperature,
            generated=tail_len,
            seen=None if self.seen is None else self.seen[seats][:, : logits.shape[-1]],
            entropy=self.rows.results.entropies is not None,
            prompt_lengths=prompt_len + 1,
        )
        if self.seen is not None:
            self.seen[seats, choice.tokens.clamp(min=0)] = True
        self.rows.record(state, choice)

    def _shares_prompts(self, bucket: int) -> bool:
        return shares_prompts(bucket, self.prompt_tokens)

    # ---- graphs

    def _graph(self, bucket: int, settings: SamplingSettings) -> torch.cuda.CUDAGraph | None:
        """The captured step for a batch of this size; None if the model cannot be captured."""
        # Settings that are not part of the captured step: the temperature is read from memory, limits are per row.
        shared = self._shares_prompts(bucket)
        key = (
            bucket,
            shared,
            replace(settings, temperature=1.0, stop_strings=(), max_new_tokens=_length_matters(settings)),
        )
        if key not in self._graphs:
            start = time.perf_counter()
            saved = self.rows.state.clone()
            try:
                self._graphs[key] = self._capture(bucket, settings)
            except RuntimeError as error:
                clean_up_capture(self.device, self._memory)
                self._memory = None  # it may be freed without users, and torch accepts no more captures into it
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.use_graphs = False
                reason = str(error).split("\n")[0]
                logger.warning(f"The decoding step cannot be captured as a CUDA graph and runs slower: {reason}")
                return None
            finally:
                self.rows.state.copy_(saved)
            torch.cuda.synchronize(self.device)
            self.captures += 1
            self.capture_seconds += time.perf_counter() - start
        return self._graphs[key]

    def _capture(self, bucket: int, settings: SamplingSettings) -> torch.cuda.CUDAGraph:
        """Capture a step over `bucket` rows. It first runs once on padding rows, to compile its kernels."""
        self.rows.state.copy_(self.rows.padding[:, None].expand_as(self.rows.state))
        torch.cuda.synchronize(self.device)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = _capture_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local")
        with torch.cuda.stream(self._stream):  # around the capture too: a failed one leaves its stream current
            self._step(bucket, settings)
            self._stream.synchronize()
            with without_collection(), recording:
                self._step(bucket, settings)
        return graph
