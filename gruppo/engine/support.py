"""Which models the engine can run: a structural check, and a trial that samples a few tokens."""

from typing import Any

import torch
from torch import nn

from gruppo.engine.engine import Engine
from gruppo.engine.settings import SamplingSettings
from gruppo.plan import RolloutPlan
from gruppo.policy import support
from gruppo.policy.unwrap import inner_model
from gruppo.types import SampleRequest, StopReason

_TRIAL_TOKENS = 6


def unsupported_model(model: nn.Module) -> list[str]:
    """What the engine lacks for this model, one sentence each; empty if nothing is known to be missing."""
    reasons = support.unsupported_model(model)
    inner = inner_model(model)
    config = getattr(inner, "config", None)
    if config is not None and (shared := getattr(config.get_text_config(), "num_kv_shared_layers", None)):
        reasons.append(f"its last {shared} layers attend to the keys and values of earlier ones")
    if isinstance(inner, nn.Module) and _is_wrapped(inner):
        reasons.append("it has a hook or a replaced forward, which the engine would bypass")
    return reasons


def _is_wrapped(model: Any) -> bool:
    """Whether the model itself has a hook, or a replaced forward that is not accelerate's."""
    by_accelerate = hasattr(model, "_hf_hook") or hasattr(model, "_original_forward")
    return bool(model._forward_hooks or model._forward_pre_hooks or ("forward" in vars(model) and not by_accelerate))


@torch.no_grad()
def trial(model: nn.Module, *, autocast_dtype: torch.dtype | None = None) -> str | None:
    """Sample a few tokens and check their log-probs against a plain forward pass; returns what is wrong, or None."""
    prompts = support.trial_prompts(model, _TRIAL_TOKENS)
    engine = Engine(lambda: model, autocast_dtype=autocast_dtype, plan=RolloutPlan(256, 4, 16), graphs=False)
    settings = SamplingSettings(max_new_tokens=_TRIAL_TOKENS)
    requests = [SampleRequest(ids, 2, noise_key=i) for i, ids in enumerate(prompts)]
    try:
        completions = engine.sample(requests, settings)
        if any(completion.stop is StopReason.NAN for completion in completions):
            return "in a trial its logits were not finite"
        rows = [prompts[i // 2] + list(completion.ids) for i, completion in enumerate(completions)]
        expected = support.plain_logps(model, rows, autocast_dtype)
        if (hidden := support.hidden_window(model)) is not None:
            return hidden
    except support.STUMBLES as error:
        return f"a trial of it failed: {type(error).__name__}: {error}"
    finally:
        engine.release()
    ours = [torch.tensor(completion.plain_logps) for completion in completions]
    difference = torch.cat([(a - b[-len(a) :]).abs() for a, b in zip(ours, expected, strict=True)]).mean().item()
    return support.too_far(model, difference, autocast_dtype)
