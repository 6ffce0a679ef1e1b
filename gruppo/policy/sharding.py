"""Weights sharded over processes: how sharding is detected, and how a process gathers all weights.

Under FSDP2 and DeepSpeed ZeRO-3 a process holds a shard of every weight, and each forward pass requires communication
between all processes. A sampler runs thousands of passes, as many as its longest completion has tokens, and that
number differs between processes. So before a rollout every process gathers the weights into a local module.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from gruppo.errors import ConfigError
from gruppo.policy.modes import autocast_dtype

# Every process holds the whole model, and accelerate leaves it as it is.
REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
# Name components that wrappers around a layer add.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Sharding(Enum):
    """How weights are distributed: every process holds all of them, or a shard."""

    NONE = "none"
    FSDP2 = "FSDP2"
    ZERO3 = "DeepSpeed ZeRO-3"

    @property
    def is_sharded(self) -> bool:
        return self is not Sharding.NONE


def sharding_of(accelerator: Any) -> Sharding:
    """How the weights of a run are distributed; raises for FSDP1.

    It reads the accelerator, because the launcher may have chosen and not the config.
    """
    kind = accelerator.distributed_type
    if kind is DistributedType.FSDP:
        if accelerator.state.fsdp_plugin.fsdp_version != 2:
            raise ConfigError(
                "FSDP1 (fsdp_version: 1) flattens weights, which is not supported. Set `fsdp_version: 2` under "
                "`fsdp_config` of the accelerate config, or fsdp_config={'version': 2} of the training arguments; "
                "recipes/accelerate/fsdp2.yaml is a config that works."
            )
        return Sharding.FSDP2
    if kind is DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage == 3:
        return Sharding.ZERO3
    return Sharding.NONE


def shard_reference(accelerator: Any, sharding: Sharding, model: nn.Module) -> nn.Module:
    """Shard a frozen model over the processes like the policy; if the policy is not sharded, neither is the model."""
    if sharding is Sharding.FSDP2:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        return fsdp2_prepare_model(accelerator, model)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        return _with_deepspeed(accelerator, model)
    return accelerator.prepare_model(model, evaluation_mode=True)


def _with_deepspeed(accelerator: Any, model: nn.Module) -> nn.Module:
    """Initialise a model without an optimizer under the policy's DeepSpeed config; only stage 3 shards it."""
    import deepspeed

    config = inference_config(accelerator.state.deepspeed_plugin.deepspeed_config, _hidden_size(model))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def inference_config(training: Mapping[str, Any], hidden_size: int | None) -> dict[str, Any]:
    """The DeepSpeed config of a model that is not trained: no optimizer, no schedule, and stage 3 or 0.

    Example:
        inference_config({"zero_optimization": {"stage": 2}, "optimizer": {…}}, 64)
        -> {"zero_optimization": {"stage": 0}}
    """
    config = {name: copy.deepcopy(value) for name, value in training.items() if name not in ("optimizer", "scheduler")}
    zero = {k: v for k, v in (config.get("zero_optimization") or {}).items() if k != "offload_optimizer"}
    if zero.get("stage") != 3:
        zero = {"stage": 0}
    elif hidden_size is not None:
        zero |= {
            "reduce_bucket_size": hidden_size * hidden_size,
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        }
    return config | {"zero_optimization": zero}


def _hidden_size(model: Any) -> int | None:
    config = getattr(model, "config", None)
    if config is None:
        return None
    sizes = getattr(config, "hidden_sizes", None)
    size: int | None = max(sizes) if sizes else getattr(config.get_text_config(), "hidden_size", None)
    return size


def own_class(module: nn.Module) -> type:
    """The original class of a module, which FSDP2 replaces with a subclass."""
    kind = type(module)
    return kind.__mro__[2] if is_fsdp_module(module) else kind


def is_fsdp_module(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, no module is one
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters of the model are sharded."""
    return any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters()) or any(
        is_fsdp_module(module) for module in model.modules()
    )


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether the model was loaded with tensor parallelism (`tp_plan`), as opposed to FSDP2 or ZeRO-3."""
    return any(hasattr(p, "full_tensor") for p in model.parameters()) and not any(map(is_fsdp_module, model.modules()))


def shape_of(parameter: Tensor) -> torch.Size:
    """The shape of the full parameter; under ZeRO-3 the local tensor is flat or empty."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def compute_dtype(accelerator: Any, sharding: Sharding) -> torch.dtype | None:
    """The dtype in which a sharded model computes; None if it is the dtype in which its weights were loaded.

    FSDP2 casts the weights that it gathers; DeepSpeed casts the model when training begins.
    """
    if sharding is Sharding.ZERO3:
        return autocast_dtype(accelerator.mixed_precision)
    if sharding is not Sharding.FSDP2:
        return None
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    dtype: torch.dtype | None = getattr(policy, "param_dtype", None)
    return dtype


def reduce_in_float32(plugin: Any) -> None:
    """Make FSDP2 reduce gradients in float32, as DDP does with float32 weights, and not in the compute dtype.

    It reduces after each pack, so rounding errors would accumulate. Module outputs stay in the compute dtype: the head
    computes in it anyway, and log-probs are computed in float32 from its output. A mixed-precision policy other than
    the one that accelerate derives from `mixed_precision` is left unchanged. Call this before the model is prepared.
    """
    policy: Any = getattr(plugin, "mixed_precision_policy", None)
    dtype = getattr(policy, "param_dtype", None)
    if dtype in (torch.bfloat16, torch.float16) and (policy.reduce_dtype, policy.output_dtype) == (dtype, dtype):
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)


def reshard(model: nn.Module) -> None:
    """Reshard the weights that a forward pass without a backward pass has left gathered."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()  # type: ignore[operator]


class WholeWeights:
    """All weights of a sharded model, gathered into a module local to this process.

    Create it while the model is still whole: it copies the model's structure. `source` returns the model in training.
    `plan` decides whether the weights are kept between rollouts or freed (`drop`); it is called with their size before
    they are first gathered. `refresh` is collective: all processes call it together. `clock` changes with each update,
    because some optimizers write weights without changing their version counters.

    Example:
        whole = WholeWeights(model, lambda: trainer.model, dtype=torch.bfloat16, device=device)
        whole.refresh()
        whole.module(input_ids)  # without a word to the other processes
    """

    def __init__(
        self,
        model: nn.Module,
        source: Callable[[], nn.Module],
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        clock: Callable[[], int] = lambda: 0,
    ):
        self.source, self.device, self.clock = source, device, clock
        self.module = _form_of(model, dtype)
        self.version: int | None = None  # of the weights last gathered
        self._gathered_at: int | None = None
        self.plan: Callable[[int], str] = lambda size: "keep"
        self.decision: str | None = None
        # The owners of each parameter: a tied one has several.
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.module.modules():
            for name, parameter in module.named_parameters(recurse=False):
                owners.setdefault(id(parameter), []).append((module, name))
        self._places = {name: owners[id(parameter)] for name, parameter in self.module.named_parameters()}

    def _put(self, name: str, device: torch.device | str) -> nn.Parameter:
        """Replace a parameter with an uninitialised one on this device."""
        (module, own), *_ = places = self._places[name]
        before = module.get_parameter(own)
        made = nn.Parameter(torch.empty_like(before, device=device), requires_grad=before.requires_grad)
        for module, own in places:
            setattr(module, own, made)
        return made

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    @property
    def is_held(self) -> bool:
        return all(not p.is_meta for p in self.module.parameters())

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather the weights, unless they are held and have not changed since the last time."""
        source = self.source()
        reshard(source)
        version = sum(parameter._version for parameter in source.parameters())
        if self.is_held and (version, self.clock()) == (self.version, self._gathered_at):
            return
        if self.decision is None:
            self.decision = self.plan(self.bytes)
        parameters = {plain_name(name): parameter for name, parameter in source.named_parameters()}
        for name, target in list(self.module.named_parameters()):
            if target.is_meta:
                target = self._put(name, self.device)
            target.copy_(full_value(parameters[name], target.dtype))
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(self.device)
        self.version, self._gathered_at = version, self.clock()

    def drop(self) -> None:
        """Free the memory of the weights."""
        for name in self._places:
            self._put(name, "meta")


def full_value(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The full value of a parameter. For sharded parameters this is collective: all processes call it together.

    DTensors are cast to `dtype` before they are gathered, which may save communication, ZeRO-3 parameters afterwards.
    Unsharded parameters are returned as they are.
    """
    dtype = dtype or parameter.dtype
    if hasattr(parameter, "full_tensor"):
        cast: Any = parameter.detach().to(dtype)
        value: Tensor = cast.full_tensor()
        return value
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().to(dtype, copy=True)
    return parameter.detach()


def plain_name(name: str) -> str:
    """The name of a parameter in the model without wrappers."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _form_of(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a model's structure, with parameters on the meta device."""

    def empty(parameter: nn.Parameter) -> nn.Parameter:
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        return nn.Parameter(
            torch.empty(shape_of(parameter), dtype=kind, device="meta"), requires_grad=parameter.requires_grad
        )

    memo: dict[int, Any] = {id(parameter): empty(parameter) for parameter in model.parameters()}
    for module in model.modules():  # shared with the copy: changes that a user makes during a run apply to it too
        if getattr(module, "generation_config", None) is not None:
            memo[id(module.generation_config)] = module.generation_config
    return copy.deepcopy(model, memo)


@contextmanager
def ready(whole: WholeWeights | None, before_drop: Callable[[], None]) -> Iterator[None]:
    """Context in which the whole weights are up to date; `before_drop` releases what refers to them."""
    if whole is None:
        yield
        return
    whole.refresh()
    try:
        yield
    finally:
        if whole.decision == "free":
            before_drop()
            whole.drop()


def describe(whole: WholeWeights, sharding: Sharding, facts: Mapping[str, Any]) -> str:
    """A log message about what happens to the whole weights."""
    size = whole.bytes / 2**30
    kept = (
        "kept between rollouts" if facts["decision"] == "keep" else "freed after each (decoding runs without graphs)"
    )
    return (
        f"{sharding.value}: for a rollout every process gathers the whole weights ({size:.2f} GiB, of "
        f"{facts['free'] / 2**30:.2f} GiB that the fullest process has free); they are {kept}."
    )
