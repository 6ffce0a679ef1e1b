"""What a layer is said to keep, against what autograd keeps; and the numbers of presets against real modules."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    Mamba2Config,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
)

from gruppo.plan import ModelShape, Passes
from gruppo.plan.presets import PRESETS, preset
from gruppo.plan.reading import read_model
from gruppo.policy.adapters import adapted_projections
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.packing import Packer
from gruppo.types import TrainBatch
from tests.engine.models import BUILDERS, build
from tests.policy.families import family

SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=384, num_attention_heads=8, num_key_value_heads=2, vocab_size=128,
    tie_word_embeddings=True,
)  # fmt: skip


def kept_bytes(layers: int, dtype: torch.dtype, autocast: torch.dtype | None, **how: Any) -> tuple[int, int, Any]:
    """Bytes that a packed forward pass keeps beside weights, its tokens, and the model."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_hidden_layers=layers)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if how.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=how["lora"], task_type="CAUSAL_LM")).train()
    prompts = torch.randint(128, (2, 32)).repeat_interleave(4, 0)
    completions = torch.randint(128, (8, 33))
    batch = TrainBatch(prompts, torch.ones_like(prompts), completions, torch.ones_like(completions))
    packed = PackedPolicy(fused_layers=how.get("fused", True), autocast_dtype=autocast)
    (pack,) = Packer(batch).packs(range(8), 10_000)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    casting = torch.autocast("cpu", autocast) if autocast else nullcontext()
    with packed.active(model), casting, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed.score(model, pack, entropy=True)
    return sum(t.untyped_storage().nbytes() for t in found.values()), len(pack.input_ids), model


@pytest.mark.parametrize(
    ("dtype", "autocast", "how"),
    [
        (torch.float32, None, {}),
        (torch.float32, None, {"fused": False}),
        (torch.float32, torch.bfloat16, {}),
        (torch.bfloat16, torch.bfloat16, {}),
        (torch.float32, None, {"lora": "all-linear"}),
        (torch.bfloat16, torch.bfloat16, {"lora": "all-linear"}),
        (torch.float32, torch.bfloat16, {"lora": ["q_proj", "v_proj"]}),
    ],
    ids=["float32", "not fused", "mixed", "bfloat16", "LoRA", "LoRA on bfloat16", "LoRA on two, mixed"],
)
def test_a_layer_keeps_what_the_plan_says(
    dtype: torch.dtype, autocast: torch.dtype | None, how: dict[str, Any]
) -> None:
    """On a CPU; two more layers keep twice what one does."""
    few, tokens, model = kept_bytes(2, dtype, autocast, **how)
    many, _, _ = kept_bytes(4, dtype, autocast, **how)
    passes = Passes(
        stream=dtype.itemsize,
        product=(autocast or dtype).itemsize,
        fused=how.get("fused", True),
        device="cpu",
        adapted=adapted_projections(model),
    )
    shape = ModelShape.from_config(model.config)
    copies = shape.cast_bytes(passes) // shape.layers if passes.mixed else 0
    assert tokens * shape.layer_bytes(passes) + copies == pytest.approx((many - few) / 2, rel=0.08)


def test_the_layers_of_a_gpu_counted_by_hand() -> None:
    """28 layers of 1536, of 12 heads of 128 with 2 for keys, and an MLP of 8960."""
    shape = preset("qwen2-1.5b").shape
    half = Passes(stream=2, product=2)
    # Two inputs of norms, two normalised; queries and what they attended to, keys and values; gate and up.
    assert shape.layer_bytes(half) == 2 * (4 * 1536 + 2 * 1536 + 2 * 256 + 2 * 8960) == 55_296
    mixed = Passes(stream=4, product=2)
    # Norms in float32; five casts; and gate × up, which is not made again in another type.
    assert shape.layer_bytes(mixed) == 4 * 2 * 1536 + 2 * (5 * 1536 + 2 * 1536 + 2 * 256 + 3 * 8960)
    # Frozen layers keep no operand but the adapters'.
    frozen = Passes(stream=2, product=2, adapted=frozenset())
    assert shape.layer_bytes(frozen) == 2 * (2 * 1536 + 2 * 1536 + 2 * 256 + 2 * 8960)
    assert shape.layer_bytes(Passes(2, 2, adapted=frozenset({"down_proj"}))) == shape.layer_bytes(frozen) + 2 * 8960


_KINDS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.mark.parametrize("name", ["smollm2-135m", "llama3-1b", "qwen2-0.5b", "qwen2-7b", "qwen3-0.6b", "qwen3-8b"])
def test_presets_have_the_weights_of_the_real_modules(name: str) -> None:
    model = preset(name)
    shape = model.shape
    config = _KINDS.get(name.partition("-")[0], LlamaConfig)(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=model.tied,
    )
    read = read_model(config, name)
    assert (read.shape, read.weights, read.tied) == (model.shape, model.weights, model.tied)
    assert read.projections == model.projections


@pytest.mark.parametrize("name", BUILDERS)
def test_weights_are_counted_without_memory_for_them(name: str) -> None:
    model = build(name)
    read = read_model(model.config, name)
    assert read.weights == sum(parameter.numel() for parameter in model.parameters())
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    assert read.linear_weights == sum(part.weight.numel() for part in linears), "layers and head"


def test_models_that_see_are_read_and_those_without_a_head_are_refused() -> None:
    seeing = Qwen2VLConfig(text_config=dict(SIZES, num_hidden_layers=2), vision_config=dict(depth=1, embed_dim=32))
    assert read_model(seeing).shape == ModelShape(2, 128, 384, 8, 2, 16, 128)
    with pytest.raises(ValueError, match="no class of a language model for CLIPVisionConfig"):
        read_model(CLIPVisionConfig())


def test_a_model_whose_layers_have_no_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="not known: Mamba2Config has no num_attention_heads"):
        read_model(Mamba2Config(num_hidden_layers=1, hidden_size=64, num_heads=8, head_dim=16, vocab_size=64))


def test_a_shape_with_layers_of_several_sizes() -> None:
    model = family("gemma4, wide")
    read = read_model(model.config)
    assert read.weights == sum(parameter.numel() for parameter in model.parameters())
    assert [layer.head_dim for layer in read.shape.per_layer] == [8, 16, 8, 16]


def test_presets_are_as_large_as_their_names_say() -> None:
    for name in PRESETS:
        said = name.rpartition("-")[2]
        size = float(said[:-1]) * (1e6 if said.endswith("m") else 1e9)
        assert preset(name).weights == pytest.approx(size, rel=0.25), name
    assert preset("qwen2-1.5b").weights == 1_543_714_304


def test_experts_count_whole_in_memory_and_active_in_time() -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=100,
    )  # fmt: skip
    model = read_model(config)
    assert model.shape.intermediate == 2 * 32
    assert model.weights > 2 * 8 * 3 * 64 * 32, "all experts of both layers"
