"""Quantised models: packed weights stay as they are, an adapter is trained on top (https://arxiv.org/abs/2305.14314)."""

from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ConfigError
from gruppo.policy.adapters import is_peft_model
from gruppo.policy.inplace import compiled_modules
from gruppo.policy.unwrap import inner_model

MAGNITUDES = "lora_magnitude_vector"  # of DoRA
_LORA = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.")


def is_quantised(model: Any) -> bool:
    """Whether some of the model's weights are packed by a quantiser."""
    inner = inner_model(model)
    return getattr(inner, "hf_quantizer", None) is not None or bool(getattr(inner, "is_quantized", False))


def with_quantisation(kwargs: dict[str, Any], asked: Any) -> dict[str, Any]:
    """The arguments of `from_pretrained` with the trainer's `quantization_config`, which must come from one place."""
    if asked is None:
        return kwargs
    if kwargs.get("quantization_config") is not None:
        raise ConfigError("quantization_config was given to the trainer and in model_init_kwargs. Remove one of them.")
    return kwargs | {"quantization_config": asked}


def reject_full_training(model: Any, peft_config: Any) -> None:
    """Raise if a quantised model cannot be trained: packed weights have no gradient, so it needs an adapter."""
    if not is_quantised(model):
        return
    if is_on_cpu(model, "Linear4bit"):
        raise ConfigError(
            "bitsandbytes cannot train through 4-bit weights on a CPU: after sampling it keeps them in a layout "
            "without gradients, and only warns. Train on a CUDA device, or use load_in_8bit=True."
        )
    if compiled_modules(model):
        raise ConfigError("A quantised model was compiled, which peft cannot train. Pass it without torch.compile.")
    aware = getattr(getattr(inner_model(model), "hf_quantizer", None), "is_qat_trainable", False)
    if peft_config is None and not is_peft_model(model) and not aware:
        raise ConfigError(
            f"The {type(inner_model(model)).__name__} is quantised, so its own weights cannot be trained. Pass a "
            "peft_config (LoRA), or load it without quantization_config."
        )


def reject_adapter(model: Any) -> None:
    """Raise for an adapter that needs the base weights if bitsandbytes cannot restore them."""
    if is_on_cpu(model, "Linear8bitLt") and any(MAGNITUDES in name for name, _ in model.named_parameters()):
        raise ConfigError(
            "DoRA on 8-bit weights does not work on a CPU: it needs the weights themselves, and bitsandbytes loses "
            "their scales once they are used. Train on a CUDA device, or with use_dora=False."
        )


def is_on_cpu(model: Any, layer: str) -> bool:
    """Whether bitsandbytes' layers of this name hold weights in main memory."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return layer in kinds and next(model.parameters()).device.type == "cpu"


def narrow_adapters(model: Any) -> None:
    """Cast trained matrices on a 4-bit or 8-bit model to bfloat16, including all of LoRA's, whatever their rank.

    Vectors keep their dtype: magnitudes of DoRA, scales of (IA)³ and norms are near 1, where bfloat16 has a resolution
    of 0.4% and smaller optimizer steps would be lost. So do modules that are trained in full: their inputs have the
    dtype of the modules that they replace.
    """
    inner = inner_model(model)
    if not (getattr(inner, "is_loaded_in_4bit", False) or getattr(inner, "is_loaded_in_8bit", False)):
        return
    for name, weight in model.named_parameters():
        # By name: at rank 1 a LoRA matrix has the shape of a scale, and its bias must have the matrix's dtype.
        is_wide = any(part in name for part in _LORA) or weight.numel() > max(weight.shape, default=1)
        is_whole_module = ".modules_to_save." in name
        if weight.requires_grad and weight.is_floating_point() and is_wide and not is_whole_module:
            weight.data = weight.data.to(torch.bfloat16)


def keep_input_types(model: Any) -> None:
    """Make (IA)³ on quantised layers return the dtype of its input: peft computes in float32 there and returns that.

    Otherwise, next to projections without an adapter, queries, keys and values would have different dtypes.
    """
    for module in model.modules():
        if type(module).__module__ == "peft.tuners.ia3.bnb":
            module.register_forward_hook(_as_input)


def _as_input(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(inputs[0].dtype)
