"""Tiny random models whose layers differ from each other, or are not all standard attention.

Sizes differ where published ones do, so that a size of the wrong layer is noticed.
"""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

VOCABULARY = 101
SIZE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS: dict[str, Any] = dict(
    num_local_experts=4, n_routed_experts=4, num_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1,
)  # fmt: skip
LATENT: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
# With so few heads several keys score exactly 0, and which of them is chosen depends on the width of the pass.
INDEXED: dict[str, Any] = dict(index_topk=5, index_head_dim=8, index_n_heads=1)
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
PER_LAYER = dict(vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8, num_kv_shared_layers=2)

# name: its config and model class, and what the config needs beside SIZE
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**PER_LAYER, **ALTERNATING, "global_head_dim": 16, "sliding_window": 8},
    ),
    "gemma4, wide": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**PER_LAYER, **ALTERNATING, "global_head_dim": 16, "use_double_wide_mlp": True},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **PER_LAYER,
            **ALTERNATING,
            "intermediate_size": [48, 48, 24, 24],
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 4,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", CONVOLUTIONS),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", {**EXPERTS, **CONVOLUTIONS, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM", {}),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {**EXPERTS, "block_size": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    ),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {**EXPERTS, **LATENT, **INDEXED}),
    "deepseek_v4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            **EXPERTS,
            **INDEXED,
            "index_n_heads": 32,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "partial_rotary_factor": 1.0,
            "sliding_window": 8,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", {**EXPERTS, **LATENT, **INDEXED}),
}
NAMES = tuple(_FAMILIES)


def family(name: str, **changes: Any) -> Any:
    """A random model in evaluation mode, or a skip where this version of transformers does not have it."""
    config_name, model_name, more = _FAMILIES[name]
    if not hasattr(tf, model_name):
        pytest.skip(f"this version of transformers has no {model_name}")
    kind = getattr(tf, config_name)
    known = set(kind().to_dict())
    sizes = {key: value for key, value in SIZE.items() if key in known or name != "mamba2"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(tf, model_name)(kind(**(sizes | more | changes))).eval()
        for key, parameter in model.named_parameters():
            _enlarge(key, parameter)
        with torch.no_grad():  # else 0, which hides that padding is read
            model.get_input_embeddings().weight[0].normal_(0, 0.5)
    return model


@torch.no_grad()
def _enlarge(key: str, parameter: nn.Parameter) -> None:
    """Fresh weights are so small, and some of them 0, that a row's tokens hardly depend on each other."""
    if not parameter.isfinite().all() or not parameter.any():
        parameter.normal_(0, 0.05)
    elif parameter.dim() > 1 and parameter.std() < 0.05:
        parameter.mul_(8)
