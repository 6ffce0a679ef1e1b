"""Settings without effect: those that only gruppo has raise, those that TRL scripts may contain cause a warning."""

import logging
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from gruppo.algo.recipes import LOSS_TYPES
from gruppo.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """The parts of a run that settings depend on."""

    tools: bool = False  # or environments
    workers: bool = False  # rewards in worker processes
    async_rewards: bool = False


@dataclass(frozen=True)
class Needs:
    """Fields that are read only under a condition."""

    names: tuple[str, ...]
    condition: Callable[[Any, Parts], bool]
    because: str  # completes "… has no effect: "
    raises: bool = False


ENTROPY = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")


def objective(args: Any) -> str:
    """The objective of GRPO's loss type; RLOO has a single loss, which is clipped."""
    return "clip" if args.loss_type is None else LOSS_TYPES[args.loss_type][0]


def never(args: Any, parts: Parts) -> bool:
    return False


TABLE = (
    Needs(VESPO, lambda args, parts: args.loss_type == "vespo", "only loss_type='vespo' reads it"),
    Needs(
        ("sapo_temperature_neg", "sapo_temperature_pos"),
        lambda args, parts: args.loss_type == "sapo",
        "only loss_type='sapo' reads it",
    ),
    Needs(("epsilon",), lambda args, parts: objective(args) == "clip", "this loss_type has no lower clip"),
    Needs(
        ("epsilon_high",),
        lambda args, parts: objective(args) in ("clip", "cispo"),
        "this loss_type has no upper clip",
    ),
    Needs(("delta",), lambda args, parts: objective(args) == "clip", "this loss_type does not clip two-sidedly"),
    Needs(ENTROPY, lambda args, parts: args.use_adaptive_entropy, "use_adaptive_entropy is off"),
    Needs(
        ("ref_model_mixup_alpha", "ref_model_sync_steps"),
        lambda args, parts: args.sync_ref_model,
        "sync_ref_model is off",
    ),
    Needs(("use_bias_correction_kl",), lambda args, parts: args.beta != 0, "beta is 0, so there is no KL"),
    Needs(
        ("scale_rewards",),
        lambda args, parts: args.multi_objective_aggregation == "sum_then_normalize",
        "multi_objective_aggregation='normalize_then_sum' scales each reward by its group",
    ),
    Needs(
        ("label_names", "include_for_metrics", "prediction_loss_only", "eval_accumulation_steps"),
        never,
        "an evaluation makes no predictions and has no labels",
    ),
    Needs(
        ("eval_do_concat_batches", "eval_use_gather_object"),
        never,
        "an evaluation makes no predictions to be gathered",
    ),
    Needs(("length_column_name",), never, "the prompt order is set by shuffle_dataset and seed"),
    Needs(
        ("average_tokens_across_devices",), never, "the loss is that of all tokens of an update, over all processes"
    ),
    Needs(
        (
            *("dataloader_num_workers", "dataloader_drop_last", "dataloader_prefetch_factor", "dataloader_in_order"),
            *("dataloader_persistent_workers", "dataloader_multiprocessing_context"),
        ),
        never,
        "prompts are read directly",
    ),
    # On a CPU transformers changes it itself.
    Needs(("dataloader_pin_memory",), lambda args, parts: args.use_cpu, "prompts are read directly"),
    Needs(
        ("optim_target_modules",),
        lambda args, parts: any(name in args.optim for name in ("galore", "apollo")),
        "only the optimizers galore_* and apollo_* read it",
    ),
    Needs(("max_tool_calling_iterations",), lambda args, parts: parts.tools, "there are no tools"),
    Needs(("tool_timeout", "max_parallel_tools"), lambda args, parts: parts.tools, "there are no tools", raises=True),
    Needs(
        ("reward_sample_timeout",),
        lambda args, parts: parts.workers or parts.async_rewards,
        "no reward runs in a worker, and none is an async function; set reward_timeout",
        raises=True,
    ),
    Needs(
        ("reward_workers", "worker_env"),
        lambda args, parts: parts.workers,
        "no reward runs in a worker; set reward_timeout",
        raises=True,
    ),
    Needs(("hub_record",), lambda args, parts: args.record != "off", "record='off' writes none", raises=True),
    Needs(
        ("stop_timeout",),
        lambda args, parts: args.save_on_signal and args.process_timeout is not None,
        "save_on_signal is off, or process_timeout is None",
        raises=True,
    ),
    Needs(
        ("reward_retries", "reward_concurrency"),
        lambda args, parts: parts.async_rewards,
        "no reward is an async function",
        raises=True,
    ),
)


def check_unused(args: Any, parts: Parts) -> None:
    """Raise or warn about settings that were changed and that nothing in this run reads."""
    changed = {each.name: getattr(args, each.name) for each in fields(args) if _is_changed(each, args)}
    for needs in TABLE:
        given = [f"{name}={changed[name]!r}" for name in needs.names if name in changed]
        if not given or needs.condition(args, parts):
            continue
        message = f"{', '.join(given)} has no effect: {needs.because}."
        if needs.raises:
            raise ConfigError(f"{message} Leave it out.")
        logger.warning(message)


def _is_changed(field: Any, args: Any) -> bool:
    if field.default is MISSING and field.default_factory is MISSING:
        return False
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(args, field.name) != default)
