"""A run's memory, phase by phase and term by term, each with its formula filled in.

A phase consists of what is always allocated (weights, optimizer state, a reference) and what the phase adds. The peak
of a run is its largest phase. `gruppo.plan.budgets` decides how much is sampled and trained on at once, as in the run.
"""

from collections.abc import Iterator
from functools import cached_property

from gruppo.plan.budgets import PARITY_TOKENS, PARITY_WIDE_COPIES
from gruppo.plan.measured import MEASURED
from gruppo.plan.standing import Standing
from gruppo.plan.terms import Phase, Term, plain, product

# As in gruppo.kernels.head: most logits and fewest columns per block.
_HEAD_LOGITS = {"cuda": 64 * 2**20, "cpu": 2**20}
_HEAD_COLUMNS, _HEAD_ALIGNED = 1024, 128


class Memory(Standing):
    """The forecast of a job's memory: its `phases`, the plans that they are based on, and the `peak`.

    Example:
        Memory(job).peak.name == "update"
    """

    # ---- how an update is split

    @cached_property
    def pack_tokens(self) -> int:
        """Tokens in the largest pass of an update."""
        job, plan = self.job, self.update_plan
        if not job.packed:
            return job.longest_row
        if job.group_tokens > plan.tokens:
            row = job.prompt_tokens + max(job.completion_tokens - 1, 1)
            limit = max(plan.tokens, plan.group_tokens)
            return job.group_tokens if job.group_tokens <= limit else max(limit, row)
        fit = plan.tokens // job.group_tokens
        packs = max(-(-job.update_groups * job.group_tokens // plan.tokens), -(-job.update_groups // fit))
        return -(-job.update_groups // packs) * job.group_tokens

    @property
    def scored_tokens(self) -> int:
        """Tokens in that pass whose log-probs are computed."""
        per_row = self.job.completion_tokens / (self.job.group_tokens / self.job.generations)
        return min(int(self.pack_tokens * per_row), self.pack_tokens) if self.job.packed else self.pack_tokens

    # ---- phases

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        found = [
            Phase("loading", (self.program, *self.standing_weights())),
            Phase("sampling", tuple(self._sampling())),
        ]
        if (check := self._parity_check()) is not None:
            found.append(check)
        if self.job.reference or self.job.old_logps:
            found.append(Phase("scoring", tuple(self._scoring())))
        found.append(Phase("update", tuple(self._update())))
        found.append(Phase("optimizer step", tuple(self._step())))
        return tuple(found)

    @property
    def _checks_parity(self) -> bool:
        """With sharded weights, the check is skipped if a process has no room for the whole model and its gradient."""
        if not self.job.parity or not self.job.packed:
            return False
        if self.job.shares == 1:
            return True
        held = sum(term.bytes for term in self.standing())
        return self.shadow is not None and self.capacity - held >= 3 * self.shadow.bytes

    def standing_weights(self) -> list[Term]:
        return [term for term in (self.weights, self.adapter, self.reference) if term is not None]

    def _sampling(self) -> Iterator[Term]:
        job, shape, plan = self.job, self.job.model.shape, self.rollout_plan
        yield self.program
        yield from self.standing()
        if self.shadow is not None and not self._keeps_shadow:
            yield self.shadow
        yield self.states  # from the second update on
        if job.sampler.startswith("vllm"):
            if self.sampler is not None and job.sampler_sleeps:
                yield self.sampler
            return
        yield self.pool
        width = shape.prefill_bytes(1, job.product_bytes)
        yield product("activations of prompts", (plan.prefill_tokens, "tokens"), (width, "B"))
        per_row = shape.logits_bytes(1, job.product_bytes, filtered=job.filtered)
        yield product("logits of a decoding step", (plan.rows, "rows"), (per_row, "B"))

    def _parity_check(self) -> Phase | None:
        """Falls back as the run does when memory is short: without a copy, then with short prompts, then no check."""
        if not self._checks_parity:
            return None
        for prompt_tokens in (self.job.prompt_tokens, min(self.job.prompt_tokens, PARITY_TOKENS)):
            for has_copy in (True, False):
                phase = Phase("parity check", tuple(self._parity(prompt_tokens, has_copy=has_copy)))
                if phase.bytes <= self.job.device.memory_bytes:
                    return phase
        return None

    def _parity(self, prompt_tokens: int, *, has_copy: bool) -> Iterator[Term]:
        """Rows of the first update in a wider dtype: a copy of the model, and one row's activations or gradient."""
        job = self.job
        yield self.program
        yield from self.standing()
        yield from self._pool_that_stays()
        wide = 4 if job.product_bytes == 2 else 8
        copy = product("the model in a wider dtype", (job.model.weights, "weights"), (wide, "B"))
        held = sum(term.bytes for term in self.standing())
        fits = has_copy and PARITY_WIDE_COPIES * copy.bytes <= self.capacity - held and job.bits is None
        if wide == job.weight_bytes:
            fits = True  # the model itself
        elif fits:
            yield copy
        if not fits:
            wide = job.weight_bytes
        yield self._parity_row(prompt_tokens, wide)

    def _parity_row(self, prompt_tokens: int, wide: int) -> Term:
        """One row's activations or its gradient, whichever is larger, in a dtype of `wide` bytes."""
        job, shape = self.job, self.job.model.shape
        row = prompt_tokens + min(job.completion_tokens, PARITY_TOKENS)
        # For wide dtypes there is no attention kernel that avoids the full score matrix.
        values = 6 * shape.hidden + 5 * shape.query_width + 4 * shape.intermediate + shape.heads * row
        per_token, said = shape.layers * values, f"{shape.layers} layers × {plain(values)}"
        if self.update_plan.checkpointing and job.shares == 1:  # weights gathered for the check are not checkpointed
            per_token = shape.layers * shape.hidden + values
            said = f"({shape.layers} layers × {plain(shape.hidden)} + {plain(values)})"
        head = job.model.head_weights * wide if job.trains_head else 0
        logits = 3 * (row - prompt_tokens + 1) * shape.vocabulary * wide
        kept = row * per_token * wide + head + logits
        gradient = job.trained * wide + (2 * head if job.model.tied else head)
        if kept >= gradient:
            return Term("one row's activations", kept, f"{plain(row)} tokens × {said} × {wide} B, and the head")
        said = f"{plain(job.trained)} weights × {wide} B, and twice the head's"
        return Term("one row's gradient", gradient, said)

    def _scoring(self) -> Iterator[Term]:
        """Log-probs under the sampling weights or the reference, without gradients."""
        job, shape = self.job, self.job.model.shape
        yield self.program
        yield from self.standing()
        yield from self._pool_that_stays()
        yield self.states
        width = shape.prefill_bytes(1, job.weight_bytes)
        yield product("activations", (self.pack_tokens, "tokens"), (width, "B"))
        if casts := shape.cast_bytes(job.passes):
            yield Term("cast weights", casts, f"{plain(shape.layer_weights)} weights × {job.product_bytes} B")
        yield self._head_blocks("head: blocks of logits")

    def _head_blocks(self, name: str) -> Term:
        """Blocks of logits; with 16-bit matmuls also a 16-bit copy for the gradient."""
        device = self.job.passes.device
        tokens, columns = self.scored_tokens, head_columns(self.scored_tokens, self.job.model.shape.vocabulary, device)
        width = 4 + (self.job.product_bytes if self.job.product_bytes < 4 and device == "cuda" else 0)
        return product(name, (tokens, "tokens"), (columns, "columns"), (width, "B"))

    def _update(self) -> Iterator[Term]:
        job, shape, plan, tokens = self.job, self.job.model.shape, self.update_plan, self.pack_tokens
        yield self.program
        yield from self.standing()
        yield from self._pool_that_stays()
        yield self.states
        yield self.gradients
        if job.shares > 1:
            gathered = 2 * shape.layer_weights // shape.layers + job.model.head_weights
            yield product("two gathered layers and the head", (gathered, "weights"), (job.product_bytes, "B"))
        if casts := shape.cast_bytes(job.passes):
            yield Term("cast weights", casts, f"{plain(shape.layer_weights)} weights × {job.product_bytes} B")
        layer = shape.layer_bytes(job.passes, mean=not plan.checkpointing)
        if plan.checkpointing:
            stream = shape.hidden * job.passes.stream
            yield product("inputs of layers", (tokens, "tokens"), (shape.layers, "layers"), (stream, "B"))
        else:
            yield product("activations of layers", (tokens, "tokens"), (shape.layers, "layers"), (layer, "B"))
        yield from self._widest_moment(layer if plan.checkpointing else 0)

    def _widest_moment(self, layer: int) -> list[Term]:
        """What the backward pass adds: in the LM head or in the first layer it reaches, whichever is larger."""
        job, shape, tokens = self.job, self.job.model.shape, self.pack_tokens
        weight = job.model.head_weights * job.weight_bytes if job.trains_head else 0
        gradient = Term("gradient of the head", weight, f"{plain(job.model.head_weights)} × {job.weight_bytes} B")
        if job.packed:
            states = 4 + job.weight_bytes + 2 * job.product_bytes
            inside = [
                self._head_blocks("head: blocks of logits and of their gradient"),
                product("head: hidden states", (self.scored_tokens, "tokens"), (shape.hidden * states, "B")),
            ]
        else:
            scored = job.micro_batch_rows * job.completion_tokens
            width = 2 * job.product_bytes if job.product_bytes < 4 else 8
            inside = [product("logits and their gradient", (scored, "tokens"), (shape.vocabulary * width, "B"))]
        working = layer + shape.backward_bytes(job.passes)
        name = "one layer, run again, and its gradients" if layer else "gradients inside a layer"
        layers = [product(name, (tokens, "tokens"), (working, "B"))]
        # The gradient of a tied head is held until the end, when the gradient of the embedding is added to it.
        after = [*layers, gradient] if job.model.tied and weight else layers
        during = [*inside, gradient] if weight else inside
        return max(during, after, key=lambda terms: sum(term.bytes for term in terms))

    def _step(self) -> Iterator[Term]:
        job = self.job
        yield self.program
        yield from self.standing()
        yield from self._pool_that_stays()
        yield self.states
        yield self.gradients
        if job.step_copies:
            yield product("temporary copies", (job.trained, "weights"), (job.trained_bytes, "B"), over=job.shares)

    # ---- the result

    @cached_property
    def between(self) -> Phase:
        """What stays allocated between phases after the first update."""
        return Phase("between phases", (self.program, *self.standing(), *self._pool_that_stays(), self.states))

    @cached_property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def gap(self) -> float:
        """Measured share of memory that the allocator reserves on top of what was requested."""
        return float(MEASURED["cpu" if self.job.on_cpu else "cuda"]["gap"])

    @property
    def device_bytes(self) -> int:
        """The peak as seen by the device: the program, plus the rest including allocator overhead."""
        return self.program.bytes + int((self.peak.bytes - self.program.bytes) * (1 + self.gap))

    @property
    def fits(self) -> bool:
        """Compares the requested memory only: the allocator can give up its overhead when memory is short."""
        gathers = self.job.shares > 1 and self.shadow is not None
        return self.peak.bytes <= self.job.device.memory_bytes and not (gathers and self.whole_weights is None)


def head_columns(tokens: int, vocabulary: int, device: str) -> int:
    """Vocabulary entries in one block of the LM head; computes the same as `gruppo.kernels.head.block_columns`."""
    most = max(_HEAD_LOGITS[device] // max(tokens, 1) // _HEAD_ALIGNED * _HEAD_ALIGNED, _HEAD_COLUMNS)
    even = -(-vocabulary // max(-(-vocabulary // most), 1))
    return -(-even // _HEAD_ALIGNED) * _HEAD_ALIGNED
