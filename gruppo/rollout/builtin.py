"""Sampling with the built-in engine, from the training weights themselves."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from gruppo.engine.engine import Engine
from gruppo.engine.settings import SamplingSettings, merged_config, unsupported
from gruppo.engine.support import trial, unsupported_model
from gruppo.plan import RolloutPlan
from gruppo.plan.budgets import free_memory
from gruppo.plan.shape import ModelShape
from gruppo.policy.loading import context_length, has_learned_positions
from gruppo.policy.sharding import WholeWeights
from gruppo.policy.unwrap import inner_model
from gruppo.rollout.base import RolloutBackend
from gruppo.types import Completion, SampleRequest, StopReason

logger = logging.getLogger(__name__)


def why_not(model: Any, config: GenerationConfig, *, autocast_dtype: torch.dtype | None = None) -> list[str]:
    """The reasons why the engine cannot sample from this model with these settings; empty if it can.

    If no reason is known in advance, a trial of a few tokens is compared with the model's own forward pass.
    """
    if reasons := missing(model, config):
        return reasons
    failure = trial(model, autocast_dtype=autocast_dtype)
    return [failure] if failure else []


def missing(model: Any, config: GenerationConfig) -> list[str]:
    """The reasons that are known without a trial."""
    inner = inner_model(model)
    return unsupported(merged_config(config, getattr(inner, "generation_config", None))) + unsupported_model(model)


class BuiltinBackend(RolloutBackend):
    """Samples with an engine that runs the training module in place; see `gruppo.engine.engine`."""

    policy: Callable[[], Any]
    name = "builtin"

    def __init__(
        self,
        policy: Callable[[], nn.Module],
        config: GenerationConfig,
        *,
        stop_ids: Sequence[int],
        tokenizer: Any = None,
        autocast_dtype: torch.dtype | None = None,
        entropies: bool = False,
        whole: WholeWeights | None = None,
        reserved: Callable[[], int] | None = None,
    ):
        self.policy, self.whole = policy, whole
        self.config = config
        self.stop_ids = tuple(sorted(stop_ids))
        self.entropies = entropies
        model = inner_model(policy())
        # Rotary positions work beyond the length in the config, as in transformers; learned positions do not.
        context = context_length(model) if has_learned_positions(model) else None
        self.engine = Engine(
            policy, autocast_dtype=autocast_dtype, tokenizer=tokenizer, context_length=context, reserved=reserved
        )

    def metrics(self) -> dict[str, float]:
        """How well the engine was used, from its counters."""
        counters = self.counters
        metrics = {
            "rollout/tokens_per_second": counters["decode_tokens_per_second"],
            "rollout/wasted_ratio": counters["wasted_rows"] / max(counters["computed_rows"], 1),
            "rollout/kv_used_ratio": counters["kv_high_water"] / max(counters["kv_tokens"], 1),
        }
        if counters["calls"] > 1:
            prompt_tokens = counters["kept_tokens"] + counters["prefill_tokens"]
            metrics["rollout/kept_ratio"] = counters["kept_tokens"] / max(prompt_tokens, 1)
        return metrics

    def work(self, prompts: Sequence[int], completions: Sequence[int]) -> dict[str, Any]:
        return {
            "prompt_tokens": self.engine.last_call.prefill_tokens,
            "padding_tokens": self.engine.last_call.wasted_rows,
            "speed_is_logged": True,
        }

    def turns(self) -> AbstractContextManager[None]:
        return self.engine.turns()

    def release(self) -> None:
        self.engine.release()

    @property
    def counters(self) -> dict[str, float]:
        """The counters of the last call, or of all calls of the last block of turns."""
        return self.engine.counters.to_dict()

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """`count` completions for each request, flat and in order."""
        self.engine.pause = self.pause
        with self.ready():
            if self.whole is not None and self.whole.decision == "free":
                self.engine.graphs = False  # CUDA graphs would be captured again for every rollout
            completions = self.engine.sample(requests, self._settings(), entropies=self.entropies)
        self.weights_version = self.engine.weights_version if self.whole is None else self.whole.version
        return [self._ended_by_padding(completion) for completion in completions]

    def _settings(self) -> SamplingSettings:
        """Built for each call, since a callback may have changed the config."""
        config = merged_config(self.config, inner_model(self.policy()).generation_config)
        return SamplingSettings.from_generation_config(config, stop_ids=self.stop_ids)

    def _ended_by_padding(self, completion: Completion) -> Completion:
        # If the model itself wrote a padding token last, that counts as an end, as with the other backends.
        if completion.stop is StopReason.LENGTH and completion.ids[-1] == self.config.pad_token_id:
            return replace(completion, stop=StopReason.EOS)
        return completion

    def state_dict(self) -> dict[str, Any]:
        """The current plan. A run that is resumed with it samples the same completions."""
        plan = self.engine.plan
        return {"plan": None if plan is None else plan.to_dict(), "may_grow": self.engine.may_grow}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "plan" in state:  # another backend may have written the checkpoint
            self.engine.plan = self._affordable(state["plan"])
            self.engine.may_grow = state["may_grow"]

    def _affordable(self, plan: Mapping[str, int] | None) -> RolloutPlan | None:
        """A saved plan; None if it needs more memory than this device has free, as one of another machine may."""
        if plan is None:
            return None
        model = inner_model(self.policy())
        weight = next(model.parameters())
        needed = plan["kv_tokens"] * ModelShape.from_config(model.config).kv_bytes_per_token(weight.element_size())
        if needed > (free := free_memory(weight.device)):
            logger.warning(
                f"The checkpoint's plan for sampling needs {needed:,} bytes and {free:,} are free: a new one is made."
            )
            return None
        return RolloutPlan(**plan)
