"""Which models the engine can run: reasons against, found in the config and by trying.

Two kinds of checks. The structural ones name what the engine does not have. The trial samples a few tokens and
compares their log-probs with a plain forward pass of the same model: whatever a model does that nobody thought of (a
mask of its own, state beside the cache, positions that depend on the batch) shows up as a difference.
"""

from typing import Any

import torch
from torch import nn

from gruppo.engine.engine import Engine
from gruppo.engine.settings import SamplingSettings
from gruppo.plan import RolloutPlan
from gruppo.policy.loading import context_length, has_learned_positions
from gruppo.policy.prefix import forward_arguments, inner_model, position_ids
from gruppo.types import SampleRequest, StopReason

_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
# Rotary frequencies that depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Mean |difference| of log-probs in the trial, by the type of the arithmetic.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_TRIAL_TOKENS = 6


def unsupported_model(model: nn.Module) -> list[str]:
    """What the engine lacks for this model, one sentence each; empty if nothing is known to be missing."""
    inner = inner_model(model)
    config = getattr(inner, "config", None)
    if config is None:
        return [f"{type(inner).__name__} is not a transformers model"]
    text = config.get_text_config()
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder model")
    if getattr(inner, "_is_stateful", False):
        reasons.append("it keeps a recurrent state")
    if not getattr(inner, "_supports_attention_backend", False):
        reasons.append(f"{type(inner).__name__} does not let its attention be chosen")
    if other := sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - _KNOWN_LAYERS):
        reasons.append(f"it has layers of the kind {', '.join(other)}")
    if missing := sorted({"past_key_values", "position_ids", "logits_to_keep"} - forward_arguments(model)):
        reasons.append(f"its forward takes no {', '.join(missing)}")
    if any(getattr(text, name, False) for name in ("use_bidirectional_attention", "prefix_lm", "is_prefix_lm")):
        reasons.append("its attention is not causal")
    if kinds := sorted(_rope_types(text) & _BATCH_DEPENDENT_ROPE):
        reasons.append(f"its rotary embedding ({', '.join(kinds)}) depends on the longest sequence of a batch")
    if _is_wrapped(inner):
        reasons.append("it has a hook or a forward of its own, which the engine would pass by")
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in _adapters(model)):
        reasons.append("its adapter learns virtual prompt tokens")
    devices = sorted({str(parameter.device) for parameter in inner.parameters()})
    if len(devices) > 1:
        reasons.append(f"its weights are on several devices ({', '.join(devices)})")
    elif devices and torch.device(devices[0]).type not in ("cpu", "cuda"):
        reasons.append(f"the engine has no kernels for {devices[0]}")
    return reasons


def _is_wrapped(model: Any) -> bool:
    """Whether something was put around the model as a whole, other than what accelerate puts there."""
    by_accelerate = hasattr(model, "_hf_hook") or hasattr(model, "_original_forward")
    return bool(model._forward_hooks or model._forward_pre_hooks or ("forward" in vars(model) and not by_accelerate))


def _adapters(model: nn.Module) -> list[Any]:
    """Configs of peft adapters, wherever in the wrappers they are."""
    found = [getattr(module, "peft_config", None) for module in model.modules()]
    return [adapter for adapters in found if isinstance(adapters, dict) for adapter in adapters.values()]


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary embedding, which a config names once or per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] if isinstance(rope, dict) else []
    return {str(part.get("rope_type", "default")) for part in [rope, *nested] if isinstance(part, dict)}


@torch.no_grad()
def trial(model: nn.Module, *, autocast_dtype: torch.dtype | None = None) -> str | None:
    """Sample a few tokens and check their log-probs against a plain forward pass; what is wrong, or None."""
    inner = inner_model(model)
    vocabulary = min(part.weight.shape[0] for part in (inner.get_input_embeddings(), inner.get_output_embeddings()))
    generator = torch.Generator().manual_seed(0)
    context = context_length(inner) if has_learned_positions(inner) else None
    lengths = [n for n in (1, 7, 19) if context is None or n + _TRIAL_TOKENS <= context]
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
    engine = Engine(lambda: model, autocast_dtype=autocast_dtype, plan=RolloutPlan(256, 4, 16), graphs=False)
    settings = SamplingSettings(max_new_tokens=_TRIAL_TOKENS)
    requests = [SampleRequest(ids, 2, noise_key=i) for i, ids in enumerate(prompts)]
    try:
        completions = engine.sample(requests, settings)
        if any(completion.stop is StopReason.NAN for completion in completions):
            return "in a trial its logits were not finite"
        rows = [prompts[i // 2] + list(completion.ids) for i, completion in enumerate(completions)]
        expected = _plain_logps(model, rows, autocast_dtype)
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:  # whatever it stumbles over
        return f"a trial of it failed: {type(error).__name__}: {error}"
    finally:
        engine.release()
    ours = [torch.tensor(completion.plain_logps) for completion in completions]
    difference = torch.cat([(a - b[-len(a) :]).abs() for a, b in zip(ours, expected, strict=True)]).mean().item()
    dtype = autocast_dtype or next(p.dtype for p in inner.parameters() if p.is_floating_point())
    if difference <= _TOLERANCE[dtype]:
        return None
    return f"in a trial its log-probs differ from a plain forward pass by {difference:.2g} on average"


def _plain_logps(model: nn.Module, rows: list[list[int]], autocast_dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Log-probs of each row's tokens but the first, row by row, with the model's own attention."""
    from gruppo.policy.modes import sampling_mode

    inner = inner_model(model)
    device = next(inner.parameters()).device
    logps = []
    with sampling_mode(inner), torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
        for row in rows:
            ids = torch.tensor([row], device=device)
            mask = torch.ones_like(ids)
            logits = (
                type(inner).forward(inner, input_ids=ids, attention_mask=mask, position_ids=position_ids(mask)).logits
            )
            logp = logits[0, :-1].float().log_softmax(-1)
            logps.append(logp.gather(1, ids[0, 1:, None])[:, 0].cpu())
    return logps
