"""A quantiser for the CPU, through transformers' interface: linear layers as 8-bit integers and a scale per row.

It stands in for bitsandbytes, which needs CUDA: as there, a layer is a subclass of `nn.Linear` whose weight is not a
floating-point tensor, and the head is not quantised.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "tiny_int8"


class PackedLinear(nn.Linear):
    """Multiplies by the dequantised weight, in the dtype of its input, or in that of autocast."""

    scale: Tensor

    @torch.no_grad()
    def pack(self) -> None:
        weight = self.weight.detach()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale.float())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.weight * self.scale).to(x.dtype), self.bias)


def packed(model: Any) -> Any:
    """Pack every linear layer of a model but its head, in place."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            module.__class__ = PackedLinear
            module.pack()
    model.is_loaded_in_4bit = True
    return model


@register_quantization_config(METHOD)
class TinyInt8Config(QuantizationConfigMixin):
    def __init__(self, **kwargs: Any):
        self.quant_method = METHOD  # type: ignore[assignment]


@register_quantizer(METHOD)
class TinyInt8Quantizer(HfQuantizer):
    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        return packed(model)

    def is_serializable(self, *args: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True
