"""What stays in memory during a run, and the plans that the run will make for the rest."""

from functools import cached_property

from gruppo.plan.budgets import RolloutPlan, UpdatePlan, plan_rollout, plan_update, plan_whole_weights
from gruppo.plan.job import Job
from gruppo.plan.measured import MEASURED
from gruppo.plan.terms import Term, plain, product


class Standing:
    """The terms that several phases of a job share, and the job's plans."""

    def __init__(self, job: Job):
        self.job = job

    # ---- what stays

    @cached_property
    def weights(self) -> Term:
        job, model = self.job, self.job.model
        if job.bits is not None:
            packed = model.linear_weights - model.head_weights
            scales = {4: 0.5 + 4 / 64, 8: 1.0}[job.bits]  # 4 bits and a float32 scale for every 64 of them
            size = int(packed * scales) + (model.weights - packed) * job.weight_bytes
            said = f"{plain(packed)} weights × {scales:g} B + {plain(model.weights - packed)} × {job.weight_bytes} B"
            return Term("weights", size, said)
        width = 2 if job.sharding.startswith("zero") and job.autocast else job.weight_bytes
        return product("weights", (model.weights, "weights"), (width, "B"), over=job.shares)

    @cached_property
    def adapter(self) -> Term | None:
        job = self.job
        if job.adapter is None:
            return None
        return product("adapter", (job.trained, "weights"), (job.trained_bytes, "B"), over=job.shares)

    @cached_property
    def reference(self) -> Term | None:
        """A second set of weights; not needed with an adapter, as the reference is then the model without it."""
        if not self.job.reference or self.job.adapter is not None:
            return None
        return Term("reference", self.weights.bytes, f"as the weights: {self.weights.formula}")

    @cached_property
    def shadow(self) -> Term | None:
        """The copy of the weights that the engine samples from, if it does not use the weights themselves."""
        job = self.job
        if job.sampler != "builtin" or job.bits is not None:
            return None
        if job.shares > 1:
            return product("weights gathered for sampling", (job.model.weights, "weights"), (job.product_bytes, "B"))
        if job.product_bytes == job.weight_bytes:
            return None
        return product("cast weights for sampling", (job.model.linear_weights, "weights"), (job.product_bytes, "B"))

    @cached_property
    def gradients(self) -> Term:
        job = self.job
        zero = job.sharding.startswith("zero") and job.autocast
        of = job.processes if job.sharding in ("zero2", "zero3", "fsdp2") else 1
        return product("gradients", (job.trained, "weights"), (2 if zero else job.trained_bytes, "B"), over=of)

    @cached_property
    def states(self) -> Term:
        """Optimizer state. DeepSpeed's is float32, with float32 copies of 16-bit weights."""
        job = self.job
        name = f"state of {job.optimizer}"
        if job.sharding.startswith("zero"):
            return product(name, (job.trained, "weights"), (12 if job.autocast else 8, "B"), over=job.processes)
        of = job.processes if job.sharding == "fsdp2" else 1
        return product(name, (job.trained, "weights"), (job.state_bytes(), "B"), over=of)

    @cached_property
    def program(self) -> Term:
        """Memory in use before any weight is loaded: a CUDA context, or an interpreter with its libraries."""
        size = MEASURED["cpu" if self.job.on_cpu else "cuda"]["program_bytes"]
        what = "interpreter with torch, transformers, datasets" if self.job.on_cpu else "CUDA context and kernels"
        return Term("program", int(size), f"{what}, measured")

    @cached_property
    def sampler(self) -> Term | None:
        job = self.job
        if job.sampler != "vllm colocate":
            return None
        return product("vLLM", (job.sampler_share, "of"), (job.device.memory_bytes, "B"))

    def standing(self) -> list[Term]:
        """Weights and everything else that stays allocated for the whole run, except optimizer state."""
        kept = [self.weights, self.adapter, self.reference, self.shadow if self._keeps_shadow else None]
        if self.sampler is not None and not self.job.sampler_sleeps:
            kept.append(self.sampler)
        return [term for term in kept if term is not None]

    @cached_property
    def _keeps_shadow(self) -> bool:
        if self.shadow is None or self.job.shares == 1:
            return self.shadow is not None
        return self.whole_weights == "keep"

    @cached_property
    def whole_weights(self) -> str | None:
        """Whether weights gathered for a rollout are kept or freed afterwards; None: they do not fit."""
        assert self.shadow is not None
        held = self.weights.bytes + (self.reference.bytes if self.reference else 0)
        return plan_whole_weights(self.shadow.bytes, self.capacity - held - self.expected_training)

    # ---- what the run will decide

    @property
    def capacity(self) -> int:
        """Device memory for everything except the program itself."""
        return self.job.device.memory_bytes - self.program.bytes

    @property
    def expected_training(self) -> int:
        """Bytes that the budgets reserve for gradients and optimizer state, as `training_bytes` computes them."""
        return 3 * self.job.trained * self.job.trained_bytes // self.job.shares

    @cached_property
    def rollout_plan(self) -> RolloutPlan:
        job = self.job
        held = sum(term.bytes for term in self.standing())
        return plan_rollout(
            job.model.shape,
            prefix_lengths=[max(job.prompt_tokens - 1, 0)] * job.groups,
            completions=job.rows,
            max_new_tokens=job.completion_tokens,
            bytes_per_value=job.product_bytes,
            free_bytes=self.capacity - held - self.expected_training,
            device=job.passes.device,
            filtered=job.filtered,
        )

    @cached_property
    def update_plan(self) -> UpdatePlan:
        job = self.job
        held = sum(term.bytes for term in [*self.standing(), *self._pool_that_stays()])
        return plan_update(
            job.model.shape,
            job.passes,
            longest_row=job.longest_row,
            free_bytes=self.capacity - held - self.expected_training,
            checkpointing=job.checkpointing,
            tokens=job.tokens,
        )

    def _pool_that_stays(self) -> list[Term]:
        """The KV cache on a CPU, whose memory cannot be released during the update."""
        return [self.pool] if self.job.on_cpu and self.job.sampler == "builtin" else []

    @cached_property
    def pool(self) -> Term:
        job = self.job
        per_token = job.model.shape.kv_bytes_per_token(job.product_bytes)
        if job.sampler == "transformers":
            row = job.prompt_tokens + job.completion_tokens
            return product("KV cache", (job.rows * row, "tokens"), (per_token, "B"))
        return product("KV cache", (self.rollout_plan.kv_tokens, "slots"), (per_token, "B"))
