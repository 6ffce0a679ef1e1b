"""A language-model head in float32, whatever dtype the layers before it compute in (`cast_lm_head_to_fp32`).

The class of the head object is changed in place. The head keeps its weights, name and ties, so that everything that
runs the module runs it in float32: training, the reference, the sampling engine, `generate`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gruppo.errors import ConfigError
from gruppo.policy.unwrap import inner_model


class Float32Head(nn.Linear):
    """A linear layer that disables autocast and multiplies in float32, or in float64 if its weight is float64."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


@torch.no_grad()
def cast_head(model: Any) -> None:
    """Cast the head of a model to float32. Tied embeddings become float32 too, but their output keeps its dtype.

    Example:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")
        cast_head(model)
        assert model(ids).logits.dtype == torch.float32
    """
    inner = inner_model(model)
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    layers = next((weight for weight in _others(inner, head, embedding) if weight.is_floating_point()), None)
    for linear in _linears(head):
        if type(linear) is Float32Head:
            continue  # cast by an earlier trainer
        if type(linear) is not nn.Linear:
            kind = type(linear).__name__
            home = type(linear).__module__.partition(".")[0]
            raise ConfigError(
                f"cast_lm_head_to_fp32=True needs a head that is one matrix, but this model's is a {kind} from "
                f"{home}. Remove the head from the adapter's target_modules, or set cast_lm_head_to_fp32=False."
            )
        is_tied = linear.weight is getattr(embedding, "weight", None)
        linear.float()  # in place, so that it stays tied
        linear.__class__ = Float32Head
        if is_tied and layers is not None and layers.dtype is not torch.float32:
            embedding.__class__ = _narrowing(embedding.__class__)
            embedding.layer_weight = (layers,)  # in a tuple, so that it is not registered as a parameter


def _others(inner: nn.Module, head: nn.Module, embedding: nn.Module) -> list[nn.Parameter]:
    own = {id(weight) for part in (head, embedding) for weight in part.parameters()}
    return [weight for weight in inner.parameters() if id(weight) not in own]


def _linears(head: Any) -> list[Any]:
    """The head; if peft trains it in full (modules_to_save), the original and its copies."""
    if hasattr(head, "modules_to_save"):
        return [head.original_module, *head.modules_to_save.values()]
    return [head]


@cache
def _narrowing(original: Any) -> Any:
    """A subclass of embeddings with float32 weights whose output has the dtype of the layers' weights."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = original.forward(self, *args, **kwargs)
        return out.to(self.layer_weight[0].dtype)  # read at each call: a copy of the model may have another dtype

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
