"""The built-in sampler: requests in, completions out, from the training weights themselves.

sample ─► work (distinct prompts, limits, noise keys) ─► plan (budgets) ─► borrow the module
       ─► loop: admit · prefill · decode a few steps · remove what has ended ─► completions in order
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gruppo.engine.cache import ATTENTION_NAME
from gruppo.engine.kv import KvPool, RangeAllocator
from gruppo.engine.lean import LeanModel, lean_model, untouched
from gruppo.engine.loop import Counters, Loop, collect
from gruppo.engine.rows import Results, Rows
from gruppo.engine.runner import Runner, kv_shapes
from gruppo.engine.sampling import few_bans, needs_filter, needs_seen
from gruppo.engine.scheduler import Scheduler
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.shadow import Shadow
from gruppo.engine.stopping import StopStrings
from gruppo.engine.turns import Turns, weights_of
from gruppo.engine.work import Work
from gruppo.errors import RolloutError
from gruppo.plan import ModelShape, RolloutPlan, batch_buckets, free_memory, plan_rollout, training_bytes
from gruppo.policy.adapters import adapter_states
from gruppo.policy.fusion import fused_swaps
from gruppo.policy.inplace import Swap, attention_swaps, swapped
from gruppo.policy.modes import sampling_mode, weights_version
from gruppo.policy.unwrap import inner_model
from gruppo.types import Completion, SampleRequest

logger = logging.getLogger(__name__)


class Engine:
    """Samples from a model in place.

    `policy` is called at every rollout, because wrapping a model for training replaces the module. Between calls the
    engine keeps its CUDA graphs, the cast weights (under autocast) and, where memory cannot be lent, its KV cache
    pool; `release` frees all of it.
    """

    def __init__(
        self,
        policy: Callable[[], nn.Module],
        *,
        autocast_dtype: torch.dtype | None = None,
        tokenizer: Any = None,
        context_length: int | None = None,
        plan: RolloutPlan | None = None,
        fuse: bool = True,
        graphs: bool = True,
        reserved: Callable[[], int] | None = None,
    ):
        self.policy = policy
        self.reserved = reserved  # returns the free bytes that training will need; None = estimate from the parameters
        self.autocast_dtype = autocast_dtype
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.plan = plan  # the current budgets, kept between rollouts
        self.may_grow = plan is None  # False if the budgets were passed in, or after a failed allocation
        self.fuse = fuse
        self.graphs = graphs
        self.counters = Counters()  # of the last call, or of the current block of turns
        self.last_call = self.counters
        self.weights_version: int | None = None  # of the weights last sampled from
        self.pause: Callable[[], None] = lambda: None  # called between steps; may raise to abandon the call
        self._in_turns = False
        self._least = 0  # places that the largest prompt and one completion of it need
        self._runner: Runner | None = None
        self._addresses: Any = None
        self._shadow: Shadow | None = None
        self._swaps: list[Swap] = []
        self._lean: LeanModel | None = None
        self._looked_for_lean = False
        self._kv: tuple[list[tuple[int, int, int]], torch.dtype] = ([], torch.float32)

    # ---- the call

    def sample(
        self, requests: Sequence[SampleRequest], settings: SamplingSettings, *, entropies: bool = False
    ) -> list[Completion]:
        """`count` completions for each request, flat and in order."""
        model = inner_model(self.policy())
        vocabulary = model.get_input_embeddings().weight.shape[0]
        settings.check_vocabulary(vocabulary)
        while True:
            work = Work.of(requests, settings.max_new_tokens, vocabulary, self.context_length)
            try:
                # Tensors created here are reused by later calls, so they must not be inference tensors.
                with torch.inference_mode(False), self._borrowed(model) as lean:
                    return self._run(model, lean, work, settings, entropies) if work.completions else []
            except torch.OutOfMemoryError:
                pass
            self._shrink()  # outside the handler: the traceback would keep the memory alive that must be freed

    def release(self) -> None:
        """Free the pool, the CUDA graphs and the cast weights. The next call recreates them."""
        self._runner, self._shadow, self._addresses, self._swaps = None, None, None, []
        self._lean, self._looked_for_lean = None, False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _shrink(self) -> None:
        """Halve the budgets after a failed allocation. The noise is independent of them, so a retry draws the same."""
        plan = self.plan
        self.release()
        if plan is None or (plan.rows == 1 and plan.kv_tokens <= self._least):
            raise RolloutError(
                "The device has no memory left to sample even one completion at a time. Lower max_completion_length "
                "or max_prompt_length."
            )
        self.plan, self.may_grow = plan.halved(), False
        logger.warning(f"Out of memory while sampling: continuing with half the budget ({self.plan}).")

    @contextmanager
    def turns(self) -> Iterator[None]:
        """A block of calls that continue each other's completions, whose KV cache stays in the pool between calls.

        A request continues a completion with the same noise key and sample number if its prompt begins with that
        completion's prompt and ids; then only the new tokens are encoded. `counters` cover all calls of the block.

        Example:
            with engine.turns():
                (first,) = engine.sample([SampleRequest([5, 6], 1, noise_key=3)], settings)
                longer = [5, 6, *first.ids, 7, 8]
                (second,) = engine.sample([SampleRequest(longer, 1, noise_key=3, turn=1)], settings)
        """
        if self._in_turns:
            raise RolloutError("A block of turns was started inside another one; end the outer one first.")
        self._in_turns = True
        self.counters = Counters(calls=0)
        try:
            yield
        finally:
            self._in_turns = False
            if self._runner is not None:
                self._runner.turns = None
                self._runner.pool.lend()

    # ---- preparation

    @contextmanager
    def _borrowed(self, model: Any) -> Iterator[LeanModel | None]:
        """Put the model into evaluation mode with the engine's attention; restore everything at the end, always.

        Yields the lean version of the model, or None.
        """
        with sampling_mode(model):
            self._notice_changes(model)
            if self._shadow is not None:
                self._shadow.refresh()
            self.weights_version = weights_version(model) - (0 if self._shadow is None else self._shadow.behind)
            lean = self._lean_model(model)
            try:
                with swapped([*attention_swaps(model, ATTENTION_NAME), *self._swaps]):
                    yield lean
            finally:
                if self._shadow is not None:
                    self._shadow.forget()

    def _notice_changes(self, model: Any) -> None:
        """Start over if the addresses of the weights or the active adapters have changed.

        CUDA graphs, cast weights and fused layers depend on both.
        """
        tensors = [*model.parameters(), *model.buffers()]
        addresses = (id(model), *(tensor.data_ptr() for tensor in tensors), *adapter_states(model))
        if addresses == self._addresses:
            return
        self.release()
        device = next(model.parameters()).device
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if self.autocast_dtype is not None and torch.float32 in dtypes:
            self._shadow = Shadow(model, self.autocast_dtype)
            dtypes.add(self.autocast_dtype)
        fused = fused_swaps(model, dtypes) if self.fuse else []
        self._swaps = [*fused, *(self._shadow.swaps() if self._shadow else [])]
        with swapped(attention_swaps(model, ATTENTION_NAME)):
            shapes, dtype = kv_shapes(model, device)
        self._kv = (shapes, self.autocast_dtype or dtype)
        self._addresses = addresses

    def _lean_model(self, model: Any) -> LeanModel | None:
        """The lean version of the model, if it has one and no submodule has a hook or forward it would bypass."""
        if not self.fuse or self.autocast_dtype is not None or not untouched(model):
            return None
        if not self._looked_for_lean:
            with swapped(attention_swaps(model, ATTENTION_NAME)):
                self._lean = lean_model(model, self._kv[0])
            self._looked_for_lean = True
        if self._lean is not None:
            self._lean.forget()
        return self._lean

    def _demand(self, model: Any, work: Work, settings: SamplingSettings, device: torch.device) -> RolloutPlan:
        """The budgets this call would like, within the free memory and the memory of the engine's own pool."""
        free = free_memory(device) + (0 if self._runner is None else self._runner.pool.held_bytes)
        if self.plan is None:  # only at first: later the optimizer has already allocated its memory
            free -= training_bytes(model.parameters()) if self.reserved is None else self.reserved()
        # In later turns each completion has its own prefix. Plan for it now: growing the pool then would lose the kept
        # KV cache.
        prefixes = [[prompt.prefix_length] * (len(prompt.owed) if self._in_turns else 1) for prompt in work.runnable]
        return plan_rollout(
            ModelShape.from_config(model.config),
            prefix_lengths=[length for lengths in prefixes for length in lengths],
            completions=sum(limit > 0 for limit in work.limits),
            max_new_tokens=work.mean_limit,
            bytes_per_value=self._kv[1].itemsize,
            free_bytes=free,
            device=device.type,
            filtered=needs_filter(settings) and not few_bans(settings, model.config.get_text_config().vocab_size),
        )

    def _prepare(self, model: Any, work: Work, settings: SamplingSettings, entropies: bool) -> Runner:
        """A runner with room for this work; the last call's runner is reused if it fits."""
        device = next(model.parameters()).device
        demand = self._demand(model, work, settings, device)
        if self.plan is None:
            self.plan = demand
        elif self.may_grow and not self.plan.covers(demand):
            self.plan = self.plan.grown(demand)
        self._least = max((p.prefix_length + p.tail_tokens for p in work.runnable), default=0)
        self.plan = self.plan.widened(self._least)
        runner = self._runner
        if (
            runner is None
            or (runner.pool.tokens, runner.rows.capacity) != (self.plan.kv_tokens, self.plan.rows)
            or not self._fits(runner, work, settings, entropies)
        ):
            self._runner = None  # free its memory first
            self._runner = runner = self._make_runner(model, work, settings, entropies, device)
        runner.rows.clear()
        runner.rows.results.clear()
        runner.set_temperature(settings.temperature)
        runner.prompt_tokens = work.shared_tokens
        runner.seen = self._seen(runner, model, settings, device)
        return runner

    def _fits(self, runner: Runner, work: Work, settings: SamplingSettings, entropies: bool) -> bool:
        same_stops = runner.rows.eos.tolist() == list(settings.stop_ids)
        return same_stops and runner.rows.results.fits(work.completions, settings.max_new_tokens, entropies)

    def _make_runner(
        self, model: Any, work: Work, settings: SamplingSettings, entropies: bool, device: torch.device
    ) -> Runner:
        assert self.plan is not None
        shapes, dtype = self._kv
        pool = KvPool(shapes, self.plan.kv_tokens, dtype=dtype, device=device)
        completions = max(work.completions, self.plan.rows)  # leave room for a larger rollout after a small one
        results = Results(completions, settings.max_new_tokens, entropies=entropies, device=device)
        return Runner(
            model,
            pool,
            Rows(self.plan.rows, results, scratch=pool.scratch, eos=settings.stop_ids, device=device),
            buckets=batch_buckets(self.plan.rows),
            autocast_dtype=self.autocast_dtype,
            use_graphs=self.graphs,
        )

    def _seen(self, runner: Runner, model: Any, settings: SamplingSettings, device: torch.device) -> Any:
        if not needs_seen(settings):
            return None
        if runner.seen_memory is None:
            vocabulary = model.get_input_embeddings().weight.shape[0]  # of the prompt tokens; some heads have fewer
            size = (self.plan.rows + 1, vocabulary)  # type: ignore[union-attr]
            runner.seen_memory = torch.zeros(size, dtype=torch.bool, device=device)
        return runner.seen_memory

    # ---- the rollout itself

    def _run(
        self, model: Any, lean: LeanModel | None, work: Work, settings: SamplingSettings, entropies: bool
    ) -> list[Completion]:
        runner = self._prepare(model, work, settings, entropies)
        runner.lean = lean
        assert self.plan is not None
        turns = self._turns_in(runner, model)
        runner.turns = None  # a failed call leaves nothing to continue from
        turns.hand_on(work)
        scheduler = Scheduler(work.prompts, turns.places, self.plan.rows, keeps=self._in_turns)
        captured = runner.captures, runner.capture_seconds
        start = time.perf_counter()
        stop_strings = StopStrings(self.tokenizer, settings.stop_strings) if settings.stop_strings else None
        loop = Loop(runner, scheduler, work, settings, self.plan.prefill_tokens, stop_strings, self.pause)
        with runner.pool.held(stay=self._in_turns):
            completions = collect(runner.rows.results, work, loop.run())
        if self._in_turns:
            turns.keep(scheduler.ended, work, completions)
            runner.turns = turns
        counters = loop.counters
        counters.kv_tokens, counters.kv_high_water = turns.places.size, turns.places.high_water
        counters.graph_captures = runner.captures - captured[0]
        counters.capture_seconds = runner.capture_seconds - captured[1]
        self.graphs = self.graphs and (runner.use_graphs or not runner.rows.state.is_cuda)
        counters.finish(time.perf_counter() - start, sum(len(c.ids) for c in completions))
        self.last_call = counters
        self.counters = self.counters.plus(counters) if self._in_turns else counters
        return completions

    def _turns_in(self, runner: Runner, model: Any) -> Turns:
        """The turns that earlier calls have kept in this runner's pool; none if the weights have changed since."""
        weights = weights_of(model)
        if runner.turns is not None and runner.turns.weights == weights:
            return runner.turns
        return Turns(RangeAllocator(runner.pool.tokens), weights)
