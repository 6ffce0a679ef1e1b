"""Which models can run with this package's attention: structural checks and trials.

The structural checks name what is missing. A trial compares a few tokens with a plain forward pass of the same model:
behaviour that the checks do not anticipate (a custom mask, state outside the cache, positions that depend on the
batch) shows up as a difference.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gruppo.policy.inplace import Swap, attention_swaps, swapped
from gruppo.policy.loading import context_length, has_learned_positions
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.modes import arithmetic_dtype, sampling_mode, training_mode
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.packing import PackedRows, Packer
from gruppo.policy.unwrap import forward_arguments, inner_model, position_ids
from gruppo.policy.widening import NOT_IN_FLOAT32, can_widen, in_float32
from gruppo.types import TrainBatch

logger = logging.getLogger(__name__)

_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
# Layers whose cache can be copied from a prompt to its completions.
CACHED_LAYERS = _KNOWN_LAYERS | {"chunked_attention"}
# Rotary frequencies that depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# Maximum mean |difference| of log-probs in a trial, by the dtype of the arithmetic.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def unsupported_model(model: nn.Module) -> list[str]:
    """What is missing for this model, one sentence each; empty if nothing is known to be."""
    inner = inner_model(model)
    config = getattr(inner, "config", None)
    if config is None:
        return [f"{type(inner).__name__} is not a transformers model"]
    text = config.get_text_config()
    reasons = ["it is an encoder-decoder model"] if getattr(config, "is_encoder_decoder", False) else []
    reasons += _unknown_attention(inner) + unusual_layers(inner)
    reasons += _unknown_positions(model, text)
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in _adapters(model)):
        reasons.append("its adapter learns virtual prompt tokens")
    devices = sorted({str(parameter.device) for parameter in inner.parameters()})
    if len(devices) > 1:
        reasons.append(f"its weights are on several devices ({', '.join(devices)})")
    elif devices and torch.device(devices[0]).type not in ("cpu", "cuda"):
        reasons.append(f"there are no kernels for {devices[0]}")
    return reasons


def unusual_layers(inner: Any, known: frozenset[str] = _KNOWN_LAYERS) -> list[str]:
    """Why its layers are not all attention over all earlier keys or a window of them, one sentence each."""
    config = getattr(inner, "config", None)
    text = config.get_text_config() if config is not None else None
    kinds = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    reasons = ["it keeps a recurrent state"] if getattr(inner, "_is_stateful", False) else []
    return reasons + ([f"it has layers of the kind {', '.join(sorted(kinds - known))}"] if kinds - known else [])


def padding_risks(model: nn.Module) -> list[str]:
    """Why its layers are not known to be standard attention, which leaves padding out by its mask."""
    inner = inner_model(model)
    config = getattr(inner, "config", None)
    if config is None:  # not a model of transformers
        return []
    return _unknown_attention(inner) + unusual_layers(inner) + _unknown_positions(model, config.get_text_config())


def _unknown_attention(inner: Any) -> list[str]:
    if getattr(inner, "_supports_attention_backend", False):
        return []
    return [f"{type(inner).__name__} does not support custom attention functions"]


def _unknown_positions(model: nn.Module, text: Any) -> list[str]:
    """What else may make a token depend on its place in a batch, one sentence each."""
    reasons = []
    if missing := sorted({"past_key_values", "position_ids", "logits_to_keep"} - forward_arguments(model)):
        reasons.append(f"its forward takes no {', '.join(missing)}")
    if any(getattr(text, name, False) for name in ("use_bidirectional_attention", "prefix_lm", "is_prefix_lm")):
        reasons.append("its attention is not causal")
    if kinds := sorted(_rope_types(text) & _BATCH_DEPENDENT_ROPE):
        reasons.append(f"its rotary embedding ({', '.join(kinds)}) depends on the longest sequence of a batch")
    return reasons


def _adapters(model: nn.Module) -> list[Any]:
    """Configs of peft adapters, wherever in the wrappers they are."""
    found = [getattr(module, "peft_config", None) for module in model.modules()]
    return [adapter for adapters in found if isinstance(adapters, dict) for adapter in adapters.values()]


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary embedding, which a config names once or per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] if isinstance(rope, dict) else []
    return {str(part.get("rope_type", "default")) for part in [rope, *nested] if isinstance(part, dict)}


# Exceptions that a model, or the compiler of the kernels under it, may raise in a trial.
STUMBLES: tuple[type[Exception], ...] = (
    RuntimeError, LookupError, ValueError, TypeError, AttributeError, StopIteration,
)  # fmt: skip
with contextlib.suppress(ImportError):  # where there is no Triton, no kernel is compiled
    from triton.errors import TritonError

    STUMBLES = (*STUMBLES, TritonError)


WINDOWS = "gruppo_windows"


def _note_window(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    sliding_window: int | None = None,
    passed_windows: list[int | None] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function that only notes the sliding window that it is given."""
    if passed_windows is not None:
        passed_windows.append(sliding_window)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(WINDOWS, _note_window)


@torch.no_grad()
def hidden_window(model: nn.Module) -> str | None:
    """A sliding window that a model applies in its mask alone (Phi-MoE): the attention here gets no mask.

    The tokens of a trial are too few to notice it.
    """
    inner = inner_model(model)
    text = inner.config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    sliding = text.num_hidden_layers if kinds is None else list(kinds).count("sliding_attention")
    if not window or not sliding or getattr(text, "use_sliding_window", None) is False:
        return None
    passed: list[int | None] = []
    token = torch.zeros(1, 1, dtype=torch.long, device=next(inner.parameters()).device)
    with sampling_mode(inner), swapped(attention_swaps(inner, WINDOWS)):
        type(inner).forward(inner, input_ids=token, passed_windows=passed)
    if sum(width is not None for width in passed) >= sliding:
        return None
    return f"its attention is not told of its sliding window of {window} tokens, which only its mask applies"


def trial_prompts(model: nn.Module, tokens: int) -> list[list[int]]:
    """Random prompts of a few lengths that leave room for `tokens` more."""
    inner = inner_model(model)
    embeddings = (inner.get_input_embeddings(), inner.get_output_embeddings())
    vocabulary = min(part.weight.shape[0] for part in embeddings)
    generator = torch.Generator().manual_seed(0)
    context = context_length(inner) if has_learned_positions(inner) else None
    lengths = [n for n in (1, 7, 19) if context is None or n + tokens <= context]
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def why_not_packed(model: nn.Module, policy: PackedPolicy) -> list[str]:
    """Why a model cannot run on packed rows; empty if it can."""
    reasons = unsupported_model(model)
    if reasons:
        return reasons
    head = inner_model(model).get_output_embeddings()
    if any((head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)):
        return ["there is a hook on its head, which packed rows would bypass"]
    failure = packed_trial(model, policy)
    return [failure] if failure else []


@torch.no_grad()
def packed_trial(model: nn.Module, policy: PackedPolicy) -> str | None:
    """Score a few tokens in a pack and in separate rows; returns what is wrong with the pack, or None.

    A difference that rounding to half precision would hide is looked for in float32.
    """
    tokens = 6
    prompts = trial_prompts(model, tokens)
    # Two completions of each prompt have several tokens: one that directly follows its prompt would prove little.
    rows = _trial_rows(prompts, (1, tokens, tokens - 2))
    try:
        with policy.active(model), torch.random.fork_rng(), training_mode(model):
            policy.score(model, _one_pack(model, rows))  # raises if the model drops attention weights in training
        difference = _pack_error(model, policy, rows)
        if (hidden := hidden_window(model)) is not None:
            return hidden
    except STUMBLES as error:
        return f"a trial of it failed: {type(error).__name__}: {error}"
    failure = too_far(model, difference, policy.autocast_dtype)
    if failure or arithmetic_dtype(model, policy.autocast_dtype).itemsize > 2 or not can_widen(model):
        return failure
    try:
        with in_float32(model):
            wide = _pack_error(model, PackedPolicy(fused_layers=False), _trial_rows(prompts[1:] or prompts, (3, 6)))
    except NOT_IN_FLOAT32 as error:
        logger.warning(
            f"Packed rows were compared with separate ones in {arithmetic_dtype(model, policy.autocast_dtype)} alone, "
            f"as {type(inner_model(model)).__name__} does not run in float32: {type(error).__name__}: {error}"
        )
        return None
    return too_far(model, wide, torch.float32)


def _trial_rows(prompts: list[list[int]], lengths: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Completions of these lengths for each prompt."""
    completion = list(reversed(prompts[-1]))
    return [(prompt, completion[:n]) for prompt in prompts for n in lengths]


def _one_pack(model: nn.Module, rows: Sequence[tuple[list[int], list[int]]]) -> PackedRows:
    (pack,) = Packer(batch_of(rows, next(inner_model(model).parameters()).device)).packs(range(len(rows)), 10**9)
    return pack


def _pack_error(model: nn.Module, policy: PackedPolicy, rows: Sequence[tuple[list[int], list[int]]]) -> float:
    """The mean difference of log-probs of rows in a pack from those of each row alone."""
    pack = _one_pack(model, rows)
    with policy.active(model), torch.random.fork_rng(), sampling_mode(model):
        ours = pack.padded(policy.score(model, pack).logps).float().cpu()
    expected = plain_logps(model, [prompt + completion for prompt, completion in rows], policy.autocast_dtype)
    pairs = zip(ours, expected, rows, strict=True)
    differences = [(a[: len(row[1])] - b[-len(row[1]) :]).abs() for a, b, row in pairs]
    return torch.cat(differences).mean().item()


@torch.no_grad()
def why_not_routed(model: nn.Module, policy: PackedPolicy) -> list[str]:
    """Why the load-balancing loss of packed rows is not the model's own loss of padded rows; empty if it is."""
    prompts = trial_prompts(model, 4)
    rows = [(prompt, prompts[-1][:n]) for prompt in prompts for n in (1, 4)]
    batch = batch_of(rows, next(inner_model(model).parameters()).device)
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
    (pack,) = Packer(batch, whole=True).packs(range(len(rows)), 10**9)
    precision = torch.autocast(ids.device.type, policy.autocast_dtype, enabled=policy.autocast_dtype is not None)
    with sampling_mode(model), precision:
        padded = score_tokens(model, ids, mask, batch.completion_ids.shape[1], router_loss=True)
        assert padded.router_loss is not None
        expected = padded.router_loss.item()
        try:
            with policy.active(model):
                found = policy.score_routed(model, pack)[1].loss().item()
        except STUMBLES as error:
            return [f"its router's logits are not available in packed rows: {type(error).__name__}: {error}"]
    if abs(found - expected) <= _TOLERANCE[arithmetic_dtype(model, policy.autocast_dtype)] * abs(expected):
        return []
    return [f"its load-balancing loss is {expected:.4g}, but {found:.4g} with packed rows"]


def too_far(model: nn.Module, difference: float, computed_in: torch.dtype | None) -> str | None:
    """What is wrong if the log-probs of a trial differ by this much on average; None if it is only rounding.

    `computed_in` is the dtype of the arithmetic if that is not the weights' own.
    """
    if difference <= _TOLERANCE[arithmetic_dtype(model, computed_in)]:
        return None
    wide = " in float32" if computed_in is torch.float32 else ""
    return f"in a trial its log-probs{wide} differ from a plain forward pass by {difference:.2g} on average"


def batch_of(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> TrainBatch:
    """A batch of prompts and completions, padded.

    Example:
        batch_of([([1, 2], [3]), ([1], [4, 5])], device).completion_ids == [[3, 0], [4, 5]]
    """
    width, prompt_width = max(len(c) for _, c in rows), max(len(p) for p, _ in rows)

    def padded(values: list[int], size: int, left: bool) -> list[int]:
        blank = [0] * (size - len(values))
        return blank + values if left else values + blank

    def tensor(part: int, size: int, *, mask: bool, left: bool) -> Tensor:
        values = [[1] * len(row[part]) if mask else row[part] for row in rows]
        return torch.tensor([padded(value, size, left) for value in values], device=device)

    return TrainBatch(
        prompt_ids=tensor(0, prompt_width, mask=False, left=True),
        prompt_mask=tensor(0, prompt_width, mask=True, left=True),
        completion_ids=tensor(1, width, mask=False, left=False),
        completion_mask=tensor(1, width, mask=True, left=False),
    )


def full_attention(inner: Any) -> list[Swap]:
    """Swaps to eager attention for models with soft-caps or sinks, which torch's own attention does not support."""
    capped = getattr(inner.config.get_text_config(), "attn_logit_softcapping", None)
    has_sinks = any(name.endswith("sinks") for name, _ in inner.named_parameters())
    return attention_swaps(inner, "eager") if capped or has_sinks else []


@torch.no_grad()
def plain_logps(model: nn.Module, rows: list[list[int]], autocast_dtype: torch.dtype | None) -> list[Tensor]:
    """Log-probs of all tokens of each row but the first, row by row, with the model's own attention."""
    inner = inner_model(model)
    device = next(inner.parameters()).device
    logps = []
    precision = torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None)
    with sampling_mode(inner), swapped(full_attention(inner)), precision:
        for row in rows:
            ids = torch.tensor([row], device=device)
            mask = torch.ones_like(ids)
            logits = (
                type(inner).forward(inner, input_ids=ids, attention_mask=mask, position_ids=position_ids(mask)).logits
            )
            logp = logits[0, :-1].float().log_softmax(-1)
            logps.append(logp.gather(1, ids[0, 1:, None])[:, 0].cpu())
    return logps
