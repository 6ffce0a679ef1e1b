"""Tiny random models of many architectures, of the same shape as far as their configs allow."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCABULARY = 64
_SIZE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
    initializer_range=0.2,  # large enough that every token and position visibly affects the output
)
_HEADS = dict(head_dim=16)

BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SIZE)),
    "llama-mha": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**(_SIZE | dict(num_key_value_heads=4)))),
    "llama-mqa": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**(_SIZE | dict(num_key_value_heads=1)))),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SIZE)),
    "qwen2-sliding": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**_SIZE, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_SIZE, **_HEADS)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_SIZE, sliding_window=5)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**_SIZE, **_HEADS, sliding_window=5, query_pre_attn_scalar=16, attn_logit_softcapping=2.0)
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            **_SIZE,
            **_HEADS,
            sliding_window=5,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_SIZE)),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**{k: v for k, v in _SIZE.items() if k != "num_key_value_heads"})
    ),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_SIZE)),
    "gpt-oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(
            **(_SIZE | dict(num_local_experts=2, num_experts_per_tok=1)),
            **_HEADS,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=128,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            initializer_range=0.3,
        )
    ),
}


def build(name: str, seed: int = 0) -> Any:
    """A random model in float32, evaluation mode. Soft-capped models and those with sinks use eager attention."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BUILDERS[name]().eval()
        for parameter in model.parameters():  # norms and biases are initialized to one and zero, which hides mistakes
            if parameter.dim() == 1:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    if name in ("gemma2", "gpt-oss"):
        model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    return model
