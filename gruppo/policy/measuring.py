"""What a pass of a model keeps in memory, measured."""

from typing import Any

import torch
from torch import Tensor, nn

from gruppo.plan import MeasuredShape
from gruppo.policy.loading import context_length
from gruppo.policy.modes import evaluation_mode
from gruppo.policy.sharding import shape_of
from gruppo.policy.unwrap import inner_model

# Longer than the chunks that recurrent layers fill up, so that one token more takes one token's memory more.
_TOKENS = 512


def measured_shape(model: nn.Module, autocast_dtype: torch.dtype | None = None) -> MeasuredShape:
    """The shape of a model whose config does not give its layers' sizes, from two passes over random rows."""
    inner = inner_model(model)
    text = inner.config.get_text_config()
    ends = [inner.get_input_embeddings().weight, inner.get_output_embeddings().weight]
    weights = {id(p): shape_of(p).numel() for p in inner.parameters()}
    tokens = min(context_length(inner) or _TOKENS, _TOKENS)
    more, fewer = (kept_bytes(model, n, autocast_dtype) for n in (tokens, tokens // 2))
    return MeasuredShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        layer_weights=max(sum(weights.values()) - sum(weights[key] for key in {id(p) for p in ends}), 1),
        kept=max((more - fewer) // (tokens - tokens // 2), 1),
    )


def kept_bytes(model: nn.Module, tokens: int, autocast_dtype: torch.dtype | None = None) -> int:
    """Bytes that a forward pass over one row keeps for its backward pass, weights included."""
    inner: Any = inner_model(model)
    device = inner.get_input_embeddings().weight.device
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(tokens, device=device)[None] % inner.config.get_text_config().vocab_size
    precision = torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with evaluation_mode(model), torch.enable_grad(), precision, hooks:
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)  # kept alive until counted
        total = sum(found.values())
    del output
    return total
