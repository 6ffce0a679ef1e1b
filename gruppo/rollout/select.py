"""Which backend samples."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import GenerationConfig

from gruppo.errors import ConfigError
from gruppo.policy.modes import autocast_dtype
from gruppo.policy.unwrap import inner_model
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
    images: bool = False,
) -> RolloutBackend:
    """The backend that the config asks for; "auto" takes the built-in engine, or says why it cannot.

    `policy` returns the module to sample from; `mixed_precision` is accelerate's word for how it is trained. `needed`
    is False in runs whose completions come from elsewhere: then "auto" does not try the engine. `entropies` asks for
    the entropy at each token, from a backend that can give it. `images` says that prompts may have some.
    """
    if images:
        reject_blind_backends(args)
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
        reasons = sharded(args) or (blind(policy()) if images else [])
        reasons = reasons or builtin.why_not(policy(), config, autocast_dtype=autocast_dtype(mixed_precision))
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


def reject_blind_backends(args: Any) -> None:
    """Raise for a backend that was asked for by name and that cannot be given images."""
    for asked, name in (
        (args.use_transformers_continuous_batching, "use_transformers_continuous_batching=True"),
        (args.use_vllm, "use_vllm=True"),
        (args.rollout_backend == "vllm", "rollout_backend='vllm'"),
    ):
        if asked:
            raise ConfigError(
                f"{name} cannot sample for a processor, whose prompts may have images: only transformers' generate "
                "is given them. Set rollout_backend='transformers', or pass the tokenizer to train on text."
            )


def blind(model: Any) -> list[str]:
    """Why the built-in engine cannot sample where prompts may have images."""
    return [f"prompts of {type(inner_model(model)).__name__} may have images, which it is not given"]


def sharded(args: Any) -> list[str]:
    """Why no single process has the weights to sample from, if that is so."""
    plugin = getattr(args, "deepspeed_plugin", None)
    if getattr(args, "fsdp", None):
        return ["FSDP spreads the weights over processes"]
    if plugin is not None and plugin.zero_stage == 3:
        return ["DeepSpeed ZeRO-3 spreads the weights over processes"]
    return []
