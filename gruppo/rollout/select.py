"""Which backend samples."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import GenerationConfig

from gruppo.errors import ConfigError
from gruppo.policy.modes import autocast_dtype
from gruppo.rollout import builtin
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.continuous import ContinuousBatchingBackend
from gruppo.rollout.hf import TransformersBackend

logger = logging.getLogger(__name__)


def choose_backend(
    args: Any,
    policy: Callable[[], Any],
    config: GenerationConfig,
    *,
    stop_ids: Sequence[int],
    tokenizer: Any,
    mixed_precision: str = "no",
    needed: bool = True,
    entropies: bool = False,
) -> RolloutBackend:
    """The backend that the config asks for; "auto" takes the built-in engine, or says why it cannot.

    `policy` returns the module to sample from; `mixed_precision` is accelerate's word for how it is trained. `needed`
    is False in runs whose completions come from elsewhere: then "auto" does not try the engine. `entropies` asks for
    the entropy at each token, from a backend that can give it.
    """
    if args.samples_with_vllm:
        from gruppo.rollout.vllm.choose import vllm_backend

        return vllm_backend(args, policy, config, stop_ids=stop_ids, autocast_dtype=autocast_dtype(mixed_precision))
    if args.use_transformers_continuous_batching:
        return ContinuousBatchingBackend(
            policy,
            config,
            stop_ids=stop_ids,
            settings=args.transformers_continuous_batching_config,
            autocast_dtype=autocast_dtype(mixed_precision),
        )
    if args.rollout_backend == "builtin" or (args.rollout_backend == "auto" and needed):
        reasons = sharded(args) or builtin.why_not(policy(), config, autocast_dtype=autocast_dtype(mixed_precision))
        if not reasons:
            return builtin.BuiltinBackend(
                policy,
                config,
                stop_ids=stop_ids,
                tokenizer=tokenizer,
                autocast_dtype=autocast_dtype(mixed_precision),
                entropies=entropies,
            )
        _report(args, "; ".join(reason.rstrip(".") for reason in reasons))
    return TransformersBackend(
        policy, config, stop_ids=stop_ids, tokenizer=tokenizer, pad_to_multiple_of=args.pad_to_multiple_of
    )


def _report(args: Any, reasons: str) -> None:
    """Raise if the built-in engine was asked for by name; else say, once per run, that it is not used."""
    if args.rollout_backend == "builtin":
        raise ConfigError(
            f"rollout_backend='builtin' cannot sample here: {reasons}. Change that, or set rollout_backend to "
            "'transformers'."
        )
    if args.process_index == 0:
        logger.warning(
            f"The built-in engine cannot sample here: {reasons}. transformers does; rollout_backend='transformers' "
            "asks for it without this message."
        )


def sharded(args: Any) -> list[str]:
    """Why no single process has the weights to sample from, if that is so."""
    plugin = getattr(args, "deepspeed_plugin", None)
    if getattr(args, "fsdp", None):
        return ["FSDP spreads the weights over processes"]
    if plugin is not None and plugin.zero_stage == 3:
        return ["DeepSpeed ZeRO-3 spreads the weights over processes"]
    return []
