"""Whether rows are packed or padded, and the reasons for the latter."""

import logging
from typing import Any

from accelerate.utils import DistributedType
from transformers.debug_utils import DebugOption

from gruppo.errors import ConfigError
from gruppo.policy.inplace import compiled_modules
from gruppo.policy.modes import autocast_dtype
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.sharding import REPLICATED
from gruppo.policy.support import why_not_packed, why_not_routed
from gruppo.policy.unwrap import bare_model, inner_model
from gruppo.trainer.hooks import PADDED_HOOKS, overridden
from gruppo.trainer.processes.collectives import from_main

logger = logging.getLogger(__name__)

# Distributed types that packed rows were tested with.
KNOWN = (*REPLICATED, DistributedType.FSDP)


def packed_policy(trainer: Any) -> PackedPolicy | None:
    """The policy that runs packed rows; None if rows are to be padded, with a warning if that was not requested."""
    args = trainer.args
    policy = PackedPolicy(
        fused_head=args.fused_head,
        fused_layers=args.fused_layers,
        autocast_dtype=autocast_dtype(trainer.accelerator.mixed_precision),
    )
    if not args.packed_update:
        return None
    model = bare_model(trainer.accelerator, trainer.model)
    reasons = against_packing(trainer) or why_not_packed(model, policy)
    if not reasons and trainer.router_aux_loss_coef:
        reasons = why_not_routed(model, policy)
    if trainer.sharding.is_sharded:  # with some launchers only the main process has weights to test with
        reasons = from_main(trainer.accelerator, reasons)
    if not reasons:
        return policy
    if args.max_tokens_per_micro_batch is not None:
        raise ConfigError(
            f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} needs packed rows, but "
            f"{'; '.join(reasons)}. Leave it out, or change that."
        )
    if trainer.accelerator.is_main_process:
        logger.warning(
            f"Rows are padded and run one micro-batch at a time, which is slow: {'; '.join(reasons)}. Set "
            "packed_update=False to silence this message."
        )
    return None


def against_packing(trainer: Any) -> list[str]:
    """The settings, models and overridden hooks of this trainer that work with padded rows only."""
    args, reasons = trainer.args, []
    if trainer.prompt_encoder.takes_images:
        model = type(inner_model(trainer.model)).__name__
        reasons.append(f"prompts of {model} may have images, which packed rows do not support")
    if hooks := overridden(trainer, PADDED_HOOKS):
        reasons.append(f"{type(trainer).__name__} overrides {', '.join(hooks)}, which expects padded rows")
    kind = trainer.accelerator.distributed_type
    if kind is DistributedType.DEEPSPEED:
        reasons.append("DeepSpeed calls its own step after each backward pass")
    elif kind not in KNOWN:
        reasons.append(f"packed rows are untested with {kind.value}")
    if args.torch_compile:
        reasons.append("torch_compile=True compiles the model for padded rows")
    elif compiled_modules(trainer.model):
        reasons.append("the model was compiled for padded rows")
    if args.neftune_noise_alpha:
        reasons.append("NEFTune scales its noise by the length of a padded row")
    if "lomo" in args.optim or "layerwise" in args.optim:
        reasons.append(f"optim={str(args.optim)!r} takes optimizer steps during the backward pass")
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        reasons.append("debug='underflow_overflow' hooks every layer and expects padded rows")
    if args.pad_to_multiple_of is not None:
        reasons.append(f"pad_to_multiple_of={args.pad_to_multiple_of} requests padding")
    return reasons
