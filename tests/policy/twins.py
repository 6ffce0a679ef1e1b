"""The same rows scored in two ways, with gradients: in packs, and one by one (the slow twin); and models for it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from gruppo.policy.logprobs import score_tokens
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.packing import Packer
from gruppo.types import TrainBatch
from tests.engine.models import BUILDERS, VOCABULARY, build

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def in_double() -> Iterator[None]:
    """Inside this context float64 tensors stay float64: casts to a narrower dtype are redirected to float64.

    transformers' norms, routers and eager attention round to float32 internally, whatever their input; so do gruppo's
    fused norms. Without that rounding, two ways to compute the same result differ only by the order of additions,
    about 1e-15.
    """

    def widening(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.dtype is torch.float64 or not x.dtype.is_floating_point:  # positions meet float64 frequencies
                args = tuple(_widened(arg) for arg in args)
                kwargs = {name: _widened(value) for name, value in kwargs.items()}
            return function(x, *args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:  # a torch function mode would not be active in backward passes
        patch.setattr(Tensor, "to", widening(Tensor.to))
        patch.setattr(Tensor, "type", widening(Tensor.type))
        patch.setattr(Tensor, "float", lambda x: Tensor.to(x, torch.float32))
        patch.setattr(functional, "softmax", widening(functional.softmax))
        yield


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def exact(model: Any) -> Any:
    """The model in float64, with layers and norms that always compute in float64; this also holds for its copies."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__.endswith("RMSNorm"):
            module.__class__ = _exact_class(type(module))
    return model.double()


@cache
def _exact_class(original: Any) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with in_double():
            return original.forward(self, *args, **kwargs)

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


# ---- rows


class Rows(NamedTuple):
    """Prompts and completions, as lists and as padded tensors, and weights (2, B, T) for log-probs and entropies."""

    pairs: list[tuple[list[int], list[int]]]
    batch: TrainBatch
    weights: Tensor


def rows_of(groups: Sequence[tuple[int, Sequence[int]]], device: str = "cpu", vocabulary: int = VOCABULARY) -> Rows:
    """Random rows; `groups` gives the length of each prompt and the lengths of its completions."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

    pairs = []
    for prompt_length, lengths in groups:
        prompt = draw(prompt_length)
        pairs += [(prompt, draw(length)) for length in lengths]
    prompt_width, width = (max(len(pair[part]) for pair in pairs) for part in (0, 1))
    batch = TrainBatch(
        prompt_ids=_padded([prompt for prompt, _ in pairs], prompt_width, left=True).to(device),
        prompt_mask=_padded([[1] * len(prompt) for prompt, _ in pairs], prompt_width, left=True).to(device),
        completion_ids=_padded([completion for _, completion in pairs], width, left=False).to(device),
        completion_mask=_padded([[1] * len(completion) for _, completion in pairs], width, left=False).to(device),
    )
    weights = torch.randn(2, len(pairs), width, generator=generator, dtype=torch.float64).to(device)
    return Rows(pairs, batch, weights)


def _padded(rows: Sequence[list[int]], width: int, *, left: bool) -> Tensor:
    blank = [[0] * (width - len(row)) for row in rows]
    return torch.tensor([b + row if left else row + b for row, b in zip(rows, blank, strict=True)])


# Sliding windows have five tokens: prompts of that length, longer and shorter ones, completions of one to nine tokens.
RAGGED = rows_of([(12, (1, 7, 3)), (2, (9, 1)), (5, (6, 2)), (1, (4,)), (7, (1,))])


# ---- two ways to score them


class Found(NamedTuple):
    """Log-probs and entropies (M,) in row order, and the gradient of their weighted sum for every parameter."""

    logps: Tensor
    entropies: Tensor
    gradients: dict[str, Tensor]


def run_slowly(
    model: nn.Module, rows: Rows = RAGGED, *, entropy_gradient: bool = True, temperature: float = 0.7
) -> Found:
    """Score one row at a time, with nothing padded or shared."""
    model.zero_grad(set_to_none=True)
    logps, entropies = [], []
    for i, (prompt, completion) in enumerate(rows.pairs):
        ids = torch.tensor([prompt + completion], device=rows.weights.device)
        options: dict[str, Any] = dict(temperature=temperature, entropy=True, entropy_gradient=entropy_gradient)
        scores = score_tokens(model, ids, torch.ones_like(ids), len(completion), **options)
        assert scores.entropy_BT is not None
        logps.append(scores.logps_BT[0])
        entropies.append(scores.entropy_BT[0])
        by_logp, by_entropy = rows.weights[:, i, : len(completion)]
        loss = (logps[-1] * by_logp).sum() + (entropies[-1] * by_entropy).sum()
        loss.backward()
    return Found(torch.cat(logps).detach(), torch.cat(entropies).detach(), gradients_of(model))


def run_packed(
    model: nn.Module,
    policy: PackedPolicy,
    rows: Rows = RAGGED,
    *,
    budget: int = 10**6,
    share: bool = True,
    entropy_gradient: bool = True,
    temperature: float = 0.7,
) -> Found:
    """Score through the fast path, in packs of at most `budget` tokens."""
    model.zero_grad(set_to_none=True)
    scored = rows.batch.loss_mask_BT.bool()
    found = torch.full((2, *scored.shape), torch.nan, dtype=torch.float64, device=scored.device)
    with policy.active(model):
        for pack in Packer(rows.batch, share=share).packs(range(len(rows.batch)), budget):
            options: dict[str, Any] = dict(temperature=temperature, entropy=True, entropy_gradient=entropy_gradient)
            scores = policy.score(model, pack, **options)
            assert scores.entropies is not None
            both = torch.stack([pack.padded(scores.logps), pack.padded(scores.entropies)])
            (both * rows.weights[:, list(pack.rows)]).sum().backward()
            found[:, list(pack.rows)] = both.detach().double()
    logps, entropies = found[:, scored]
    return Found(logps, entropies, gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of all trainable parameters that have one."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    return {name: gradient.detach().clone() for name, gradient in named if gradient is not None}


def assert_same(fast: Found, slow: Found, bound: float) -> None:
    """Compare values, and the gradient of each parameter relative to its norm."""
    assert (fast.logps - slow.logps).abs().max() <= bound
    assert (fast.entropies - slow.entropies).abs().max() <= bound
    assert fast.gradients.keys() == slow.gradients.keys() != set()
    total = flat(slow).norm()
    for name, expected in slow.gradients.items():
        # Some gradients are 0 except for rounding, such as that of a router without a choice.
        floor = 1e-12 * total if expected.norm() < 1e-12 * total else 0.0
        assert (fast.gradients[name] - expected).norm() <= bound * expected.norm() + floor, name


def distance(fast: Found, slow: Found) -> float:
    """‖difference‖ / ‖gradient‖ over all parameters together."""
    return ((flat(fast) - flat(slow)).norm() / flat(slow).norm()).item()


def flat(found: Found) -> Tensor:
    return torch.cat([found.gradients[name].double().flatten() for name in sorted(found.gradients)])


# ---- models


def altered(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model of `BUILDERS` with changes to its config, with random weights like those of `build`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        template = BUILDERS[name]()
        for field, value in changes.items():
            setattr(template.config, field, value)
        model = type(template)(template.config).eval()
        stir(model)
    if name in ("gemma2", "gpt-oss"):
        model.set_attn_implementation("eager")
    return model


def stir(model: nn.Module) -> None:
    """Randomize norms and biases: their initial values, one and zero, would hide mistakes."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))


_SIZE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
    initializer_range=0.2,
)

# Models with different treatments of the logits, or different locations of the head's weight.
HEADS: dict[str, Callable[[], Any]] = {
    "tied": lambda: altered("llama", tie_word_embeddings=True),
    "bias": lambda: tf.PhiForCausalLM(tf.PhiConfig(**_SIZE)),
    "scaled": lambda: tf.CohereForCausalLM(tf.CohereConfig(**_SIZE, logit_scale=0.3)),
    "divided": lambda: tf.GraniteForCausalLM(
        tf.GraniteConfig(**_SIZE, logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5)
    ),
    "capped": lambda: altered("gemma2", final_logit_softcapping=2.0),
}

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "every layer": {"target_modules": "all-linear"},
    "own head": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "on the head": {"target_modules": ["v_proj", "lm_head"]},
}


def made(kind: str) -> Any:
    """A model by name: of `BUILDERS`, of `HEADS`, or a Llama with an adapter of `ADAPTERS` that changes its output."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if kind in HEADS:
            model = HEADS[kind]().eval()
            stir(model)
        elif kind in ADAPTERS:
            adapter = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[kind])
            model = get_peft_model(build("llama"), adapter)
            for name, weight in model.named_parameters():
                if "modules_to_save" in name:  # initially a copy of the module that it replaces
                    weight.data.mul_(1.3)
        else:
            model = build(kind)
    if kind == "gpt-oss":  # torch's grouped matrix products of experts support only half precision and float32
        model.set_experts_implementation("eager")
    return model
