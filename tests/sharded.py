"""Helpers for models that FSDP2 or DeepSpeed shards over CPU processes."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from gruppo.policy.sharding import plain_name

FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def as_on_gpus() -> None:
    """Make accelerate believe that there are several GPUs, because only then it reads its FSDP settings.

    torch itself shards on CPUs as well. To be called between creating a config and its trainer, because a config
    resets accelerate's state.
    """
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The full (unsharded) weights by name; a collective call of all processes."""
    return {plain_name(name): whole(weight) for name, weight in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()  # type: ignore[no-any-return]
    value: Tensor = tensor.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def set_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load full weights into a model that may be sharded."""
    if any(hasattr(weight, "ds_id") for weight in model.parameters()):
        import deepspeed

        for name, weight in model.named_parameters():
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.copy_(state[name])
    elif any(hasattr(weight, "full_tensor") for weight in model.parameters()):
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state)


def is_sharded(model: nn.Module) -> bool:
    return all(isinstance(weight, torch.distributed.tensor.DTensor) for weight in model.parameters())
