"""Tiny random mixture-of-experts models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from packaging.version import Version

_SIZE: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
    initializer_range=0.2,
)
_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2)
_LOCAL: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)

EXPERTS: dict[str, Callable[..., Any]] = {
    "mixtral": lambda **kw: tf.MixtralForCausalLM(tf.MixtralConfig(**_SIZE, **_LOCAL, **kw)),
    "qwen2-moe": lambda **kw: tf.Qwen2MoeForCausalLM(
        tf.Qwen2MoeConfig(
            **_SIZE,
            **_EXPERTS,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            decoder_sparse_step=1,
            **kw,
        )
    ),
    "qwen3-moe": lambda **kw: tf.Qwen3MoeForCausalLM(  # with a layer that has no router
        tf.Qwen3MoeConfig(
            **_SIZE | {"num_hidden_layers": 3},
            **_EXPERTS,
            moe_intermediate_size=24,
            head_dim=16,
            mlp_only_layers=[1],
            **kw,
        )
    ),
    "olmoe": lambda **kw: tf.OlmoeForCausalLM(tf.OlmoeConfig(**_SIZE, **_EXPERTS, **kw)),
    "granite-moe": lambda **kw: tf.GraniteMoeForCausalLM(tf.GraniteMoeConfig(**_SIZE, **_LOCAL, **kw)),
}
_HIDDEN = Version(tf.__version__) < Version("5.18")  # before 5.18, GraniteMoE does not return its router logits


def _marks(name: str, *, router: bool) -> list[Any]:
    slower = [] if name == "mixtral" else [pytest.mark.medium]
    hidden = router and name == "granite-moe" and _HIDDEN
    return [*slower, pytest.mark.skipif(hidden, reason="shows no router logits")]


NAMES = [pytest.param(name, marks=_marks(name, router=False)) for name in EXPERTS]
SHOWS_ROUTER = [pytest.param(name, marks=_marks(name, router=True)) for name in EXPERTS]


def experts(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model in float32, evaluation mode, whose experts differ; for the tiny tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = EXPERTS[name](**changes).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    return model
