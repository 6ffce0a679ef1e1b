"""How long a step takes, part by part, from a device's peaks and the measured fraction of them that is reached.

The time of a decoding step is that of reading the weights and the KV cache, multiplying, and sampling from the logits,
plus a minimum kernel time per layer. The time of an update's pass is that of computing, or of launching each layer's
kernels on the host if that takes longer. Constants come from `gruppo.plan.measured`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gruppo.plan.budgets import shares_prompts
from gruppo.plan.job import Job
from gruppo.plan.measured import MEASURED
from gruppo.plan.memory import Memory

# Cost relative to a forward pass: the backward pass costs two more, and checkpointing runs the forward pass again.
_WITH_BACKWARD, _WITH_CHECKPOINTS = 3.0, 4.0
# Without the kernel that reads prompts once per group, each row reads its prompt again: the share of these reads that
# goes to the GPU's memory because its cache does not hold the prompt any more.
_READ_AGAIN = 0.5


@dataclass(frozen=True)
class Part:
    """A part of a step: its name, its seconds, and how they were computed."""

    name: str
    seconds: float
    formula: str


class Seconds:
    """The forecast of a job's step.

    Example:
        Seconds(job, Memory(job)).step
    """

    def __init__(self, job: Job, memory: Memory, measured: dict[str, Any] | None = None):
        self.job, self.memory = job, memory
        self.constants: dict[str, float] = (measured or MEASURED)["cpu" if job.on_cpu else "cuda"]

    @property
    def length(self) -> int:
        """Mean number of tokens of a completion."""
        return self.job.mean_completion_tokens or self.job.completion_tokens

    @property
    def peak(self) -> float:
        scale = self.job.threads if self.job.on_cpu else 1
        return self.job.device.peak(self.job.product_bytes) * scale

    # ---- sampling

    @cached_property
    def decode_step(self) -> dict[str, float]:
        """Seconds of one decoding step in the middle of a rollout, by cause."""
        job, shape, constants = self.job, self.job.model.shape, self.constants
        rows = self.rows_together
        bandwidth = job.device.bytes_per_second * constants["bandwidth_reached"]
        weights = job.model.multiplied * job.product_bytes / bandwidth
        products = 2 * rows * job.model.multiplied / (self.peak * constants["decode_reached"])
        own = rows * self.length / 2
        shared = job.prompt_tokens * rows / job.generations
        if not shares_prompts(rows, job.prompt_tokens):
            shared += _READ_AGAIN * job.prompt_tokens * rows * (1 - 1 / job.generations)
        keys = (own + shared) * shape.kv_bytes_per_token(job.product_bytes) / bandwidth
        return {
            "products": max(weights, products),
            "KV cache": keys,
            "drawing": rows * shape.vocabulary * constants["seconds_per_logit"],
            "kernels": shape.layers * constants["seconds_per_decoded_layer"],
        }

    @property
    def rows_together(self) -> float:
        """Mean number of completions decoded together: short ones end early, and the KV cache may be small."""
        plan, job = self.memory.rollout_plan, self.job
        places = plan.kv_tokens - job.groups * max(job.prompt_tokens - 1, 0)
        together = max(min(plan.rows, places // max(job.completion_tokens, 1)), 1)
        return max(together * self.length / job.completion_tokens, 1)

    @property
    def decode_steps(self) -> float:
        """Decoding steps of a rollout: the length limit, times the number of waves if rows do not fit at once."""
        return max(self.job.rows * self.length / self.rows_together, self.length)

    @cached_property
    def sampling(self) -> list[Part]:
        job, shape = self.job, self.job.model.shape
        step = self.decode_step
        each = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in step.items())
        took = f"{1e3 * sum(step.values()):.2f} ms ({each})"
        decoding = Part(
            "decoding",
            self.decode_steps * sum(step.values()),
            f"{self.decode_steps:,.0f} steps of {self.rows_together:,.0f} rows × {took}",
        )
        prompts = job.groups * job.prompt_tokens
        flops = shape.forward_flops(prompts, job.prompt_tokens / 2, 0)
        reached = self.peak * self.constants["update_reached"]
        prefill = Part("prompts", flops / reached, f"{flops / 1e12:,.1f} TFLOP / {reached / 1e12:,.3g} TFLOP/s")
        return [prefill, decoding]

    # ---- passes

    @cached_property
    def update_tokens(self) -> float:
        """Tokens that the update's passes over a generation process: only groups with reward spread count."""
        job = self.job
        moving = 1 - job.unmoved
        if not job.packed:
            return job.rows * (job.prompt_tokens + job.completion_tokens) * job.iterations * moving
        group = job.prompt_tokens + job.generations * max(self.length - 1, 1)
        return job.groups * group * job.iterations * moving

    def passes(self, name: str, times: float) -> Part:
        """Time of passes over the generation's rows that cost `times` a forward pass."""
        job, shape = self.job, self.job.model.shape
        tokens = self.update_tokens
        scored = min(job.rows * self.length * job.iterations * (1 - job.unmoved), tokens)
        context = job.prompt_tokens + self.length / 2
        flops = times * shape.forward_flops(tokens, context, scored)
        reached = self.peak * self.constants["update_reached"]
        packs = max(-(-tokens // self.memory.pack_tokens), 1)
        host = packs * shape.layers * self.constants["host_seconds_per_layer"] * times / _WITH_BACKWARD
        computing = flops / reached
        said = f"{flops / 1e12:,.1f} TFLOP / {reached / 1e12:,.3g} TFLOP/s"
        if host > computing:
            each = self.constants["host_seconds_per_layer"] * times / _WITH_BACKWARD
            return Part(name, host, f"{packs:,.0f} passes × {shape.layers} layers × {1e3 * each:.1f} ms on the host")
        return Part(name, computing, said)

    @cached_property
    def parts(self) -> list[Part]:
        job = self.job
        found = [] if job.sampler == "vllm server" else list(self.sampling)
        for asked, name in ((job.old_logps, "old log-probs"), (job.reference, "reference log-probs")):
            if asked:
                found.append(self.passes(name, 1.0))
        checkpointing = self.memory.update_plan.checkpointing
        found.append(self.passes("update", _WITH_CHECKPOINTS if checkpointing else _WITH_BACKWARD))
        each = self.constants["host_seconds_per_completion"]
        found.append(Part("the rest", job.rows * each, f"{job.rows} completions × {1e3 * each:.2f} ms on the host"))
        return found

    @property
    def step(self) -> float:
        """Seconds of a generation and all its updates, without the rewards, whose time is unknown here."""
        return sum(part.seconds for part in self.parts)
