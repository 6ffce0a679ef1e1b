"""The choice of the rollout backend."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from gruppo.errors import ConfigError
from gruppo.policy.modes import autocast_dtype
from gruppo.policy.sharding import Sharding, WholeWeights, is_sharded
from gruppo.policy.unwrap import inner_model
from gruppo.rollout import builtin
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.continuous import ContinuousBatchingBackend
from gruppo.rollout.hf import TransformersBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardedSampling:
    """How a run samples from weights that are sharded over processes."""

    kind: Sharding
    whole: WholeWeights | None  # gathered for the duration of a rollout; None: the processes sample in lockstep
    reserved: Callable[[], int]  # bytes that training will need on this process
    from_main: Callable[[Any], Any]  # returns the main process's value


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
    sharded: ShardedSampling | None = None,
    images: bool = False,
) -> RolloutBackend:
    """The backend that the config asks for; "auto" takes the built-in engine, or logs why it cannot.

    `policy` returns the module to sample from; `mixed_precision` is accelerate's setting for its training. `needed`
    is False in runs whose completions come from elsewhere: then "auto" does not try the engine. `entropies` requests
    the entropy at each token, from backends that can return it. `sharded` is given if the weights are sharded over
    processes, `images` if prompts may have images.
    """
    _check_asked(args, sharded, images)
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
    whole = None if sharded is None else sharded.whole
    sampled = policy if whole is None else lambda: whole.module
    if args.rollout_backend == "builtin" or (args.rollout_backend == "auto" and needed):
        # A sharded model computes in the dtype it is gathered in.
        dtype = autocast_dtype(mixed_precision) if sharded is None else None
        reasons = blind(policy()) if images else _against_builtin(policy, config, dtype, sharded)
        if not reasons:
            return builtin.BuiltinBackend(
                sampled,
                config,
                stop_ids=stop_ids,
                tokenizer=tokenizer,
                autocast_dtype=dtype,
                entropies=entropies,
                whole=whole,
                reserved=None if sharded is None else sharded.reserved,
            )
        _report(args, "; ".join(reason.rstrip(".") for reason in reasons))
    return TransformersBackend(
        sampled,
        config,
        stop_ids=stop_ids,
        tokenizer=tokenizer,
        pad_to_multiple_of=args.pad_to_multiple_of,
        whole=whole,
        lockstep=sharded is not None and whole is None,
    )


def _check_asked(args: Any, sharded: ShardedSampling | None, images: bool) -> None:
    """Raise if a backend that was requested by name cannot sample in this run."""
    if images:
        reject_blind_backends(args)
    if args.use_transformers_continuous_batching and sharded is not None:
        raise ConfigError(
            f"use_transformers_continuous_batching=True cannot sample from weights that are sharded over processes "
            f"({sharded.kind.value}). Set it to False."
        )


def _against_builtin(policy: Callable[[], Any], config: Any, dtype: Any, sharded: ShardedSampling | None) -> list[str]:
    """Why the built-in engine cannot sample; with sharded weights, the main process decides for all."""
    if sharded is None:
        return builtin.why_not(policy(), config, autocast_dtype=dtype)
    if sharded.whole is None:
        return [f"ds3_gather_for_generation=False leaves the weights sharded ({sharded.kind.value})"]
    model = policy()
    # Under ZeRO-3 the weights are already sharded here, so there is no trial.
    reasons = builtin.missing(model, config) if is_sharded(model) else builtin.why_not(model, config)
    found: list[str] = sharded.from_main(reasons)
    return found


def _report(args: Any, reasons: str) -> None:
    """Raise if the built-in engine was requested by name; otherwise warn, once per run, that it is not used."""
    if args.rollout_backend == "builtin":
        raise ConfigError(
            f"rollout_backend='builtin' cannot sample here: {reasons}. Change that, or set rollout_backend to "
            "'transformers'."
        )
    if args.process_index == 0:
        logger.warning(
            f"The built-in engine cannot sample here: {reasons}. transformers is used instead; set "
            "rollout_backend='transformers' to hide this message."
        )


def reject_blind_backends(args: Any) -> None:
    """Raise if a backend that cannot take images was requested by name."""
    for asked, name in (
        (args.use_transformers_continuous_batching, "use_transformers_continuous_batching=True"),
        (args.use_vllm, "use_vllm=True"),
        (args.rollout_backend == "vllm", "rollout_backend='vllm'"),
    ):
        if asked:
            raise ConfigError(
                f"{name} cannot be used with a processor, whose prompts may have images: only transformers' generate "
                "receives them. Set rollout_backend='transformers', or pass the tokenizer to train on text."
            )


def blind(model: Any) -> list[str]:
    """Why the built-in engine cannot sample where prompts may have images."""
    return [f"prompts of {type(inner_model(model)).__name__} may have images, which it does not support"]
