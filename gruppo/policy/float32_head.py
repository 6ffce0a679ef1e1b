"""A language-model head in float32, whatever the layers before it compute in (`cast_lm_head_to_fp32`).

The head becomes an object of another class and keeps its weights, name and ties, so that everything that runs the
module runs it in float32: training, the reference, the sampling engine, `generate`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gruppo.errors import ConfigError
from gruppo.policy.unwrap import inner_model


class Float32Head(nn.Linear):
    """A linear layer that leaves mixed precision and multiplies in float32; in float64 if its weight is."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


@torch.no_grad()
def cast_head(model: Any) -> None:
    """Give a model a head in float32. Embeddings that are tied to it become float32; what they return does not.

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
            continue  # an earlier trainer's
        if type(linear) is not nn.Linear:
            kind = type(linear).__name__
            home = type(linear).__module__.partition(".")[0]
            raise ConfigError(
                f"cast_lm_head_to_fp32=True needs a head that is one matrix, but here it is a {kind} of {home}. "
                "Remove the head from the adapter's target_modules, or set cast_lm_head_to_fp32=False."
            )
        is_tied = linear.weight is getattr(embedding, "weight", None)
        linear.float()  # in place: what is tied to it follows
        linear.__class__ = Float32Head
        if is_tied and layers is not None and layers.dtype is not torch.float32:
            embedding.__class__ = _narrowing(embedding.__class__)
            embedding.layer_weight = (layers,)  # in a tuple, which is no part of the model's parameters


def _others(inner: nn.Module, head: nn.Module, embedding: nn.Module) -> list[nn.Parameter]:
    own = {id(weight) for part in (head, embedding) for weight in part.parameters()}
    return [weight for weight in inner.parameters() if id(weight) not in own]


def _linears(head: Any) -> list[Any]:
    """The head; of one that peft trains in full, the original and its copies."""
    if hasattr(head, "modules_to_save"):
        return [head.original_module, *head.modules_to_save.values()]
    return [head]


@cache
def _narrowing(original: Any) -> Any:
    """The class of embeddings whose weights are wide and whose output is as narrow as the weights of the layers."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = original.forward(self, *args, **kwargs)
        return out.to(self.layer_weight[0].dtype)  # read anew: a copy of the model may be in another type

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
