"""Checks of the trainer's settings and datasets, each with a message that says what to do."""

import logging
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from gruppo.data.lengths import check_every_prompt
from gruppo.data.prompts import PromptEncoder, check_prompts, sample_rows
from gruppo.errors import ConfigError, DataError, warn_deprecated
from gruppo.policy.modes import may_recompute_reentrantly
from gruppo.policy.routing import check_router
from gruppo.policy.sharding import REPLICATED
from gruppo.policy.unwrap import bare_model

logger = logging.getLogger(__name__)

# ---- settings


def check_config(args: Any, config_class: Any) -> None:
    """Raise if the settings are not of this trainer's config class, or if one process sees several GPUs."""
    if not isinstance(args, config_class):
        raise TypeError(f"args must be a {config_class.__name__}, not {type(args).__name__}.")
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs are visible to one process. Launch one process per GPU (accelerate launch or "
            "torchrun), or set CUDA_VISIBLE_DEVICES to one of them."
        )


def warn_combinations(args: Any) -> None:
    """Warn about combinations of settings that work but rarely do what was intended, or that have no effect."""
    if args.process_index:
        logging.getLogger(__package__).setLevel(logging.ERROR)  # warnings about settings are left to the main process
    level, loss_type = args.importance_sampling_level, args.loss_type
    if loss_type == "luspo" and level != "sequence":
        logger.warning("loss_type='luspo' is meant for importance_sampling_level='sequence'.")
    if loss_type == "vespo" and level != "token":
        logger.warning("loss_type='vespo' is meant for importance_sampling_level='token'.")
    if level == "sequence" and loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        logger.warning(
            f"importance_sampling_level='sequence' with loss_type={loss_type!r} weights sequences by their length; "
            "for GSPO set loss_type='grpo'."
        )
    if loss_type == "dr_grpo" and args.scale_rewards != "none":
        logger.warning(
            f"loss_type='dr_grpo' with scale_rewards={args.scale_rewards!r} is not Dr. GRPO, which does not divide "
            "advantages by a standard deviation: set scale_rewards='none'."
        )
    if loss_type == "cispo" and args.upper_clip <= 1:
        logger.warning(
            f"loss_type='cispo' caps ratios at epsilon_high={args.upper_clip} itself, not at 1 + epsilon_high: every "
            "token is capped. The usual value is about 5."
        )
    if args.use_liger_kernel:
        warn_deprecated("`use_liger_kernel` is deprecated for this trainer.")


def warn_biased_sampling(trainer: Any) -> None:
    if biased := trainer.biased_sampling:
        logger.warning(
            f"{', '.join(biased)}: this changes what is sampled but not the training log-probs, so the ratios are "
            "biased. It is set in the config, in generation_kwargs or in model.generation_config."
        )


def check_router_loss(trainer: Any) -> None:
    """Raise if a load-balancing loss cannot be used; if only the model's config asks for it, leave it out and warn."""
    if not trainer.router_aux_loss_coef:
        return
    try:
        _check_router_loss(trainer)
    except ConfigError as reason:
        if trainer.args.router_aux_loss_coef is not None:
            raise
        own, trainer.router_aux_loss_coef = trainer.router_aux_loss_coef, 0.0
        if trainer.accelerator.is_main_process:
            logger.warning(f"The model's own router_aux_loss_coef={own:g} is not used: {reason}")


def _check_router_loss(trainer: Any) -> None:
    if may_recompute_reentrantly(trainer.model, trainer.args):
        raise ConfigError(
            "Gradient checkpointing with use_reentrant=True hides the router's logits from the load-balancing loss, "
            f"which would have no gradient (router_aux_loss_coef={trainer.router_aux_loss_coef}). Set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or router_aux_loss_coef=0."
        )
    whole = trainer.accelerator.distributed_type in REPLICATED
    check_router(bare_model(trainer.accelerator, trainer.model), run=whole)


# ---- datasets


def check_datasets(train: Any, evaluation: Any, args: Any, encoder: PromptEncoder, rollout_func: Any) -> None:
    """Check both datasets. With a rollout function prompts are not encoded, since it reads them itself."""
    used = encoder if rollout_func is None else None
    check_train_dataset(train, args, used, encoder.takes_images)
    check_eval_dataset(evaluation, args, used, encoder.takes_images)


def check_train_dataset(dataset: Any, args: Any, encoder: PromptEncoder | None, images: bool = False) -> None:
    """Check the training prompts: type, columns, size, and, with an encoder, that they can be encoded."""
    prompts = args.prompts_per_generation
    if dataset is None:
        raise ConfigError("train_dataset is missing: pass a datasets.Dataset with a `prompt` column.")
    if isinstance(dataset, IterableDataset):
        if args.max_steps <= 0:
            raise ConfigError("An iterable train_dataset has no length: set max_steps.")
        if args.accelerator_config is not None and args.accelerator_config.dispatch_batches:
            raise ConfigError("dispatch_batches=True cannot work: every process reads its own share of the stream.")
        check_first_row(dataset, encoder, "train_dataset", images)
    elif isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise DataError("train_dataset is empty.")
        check_rows(dataset, encoder, images)
        if len(dataset) < prompts:
            raise DataError(
                f"train_dataset has {len(dataset)} prompts, fewer than the {prompts} of one generation batch "
                f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}), so "
                "not a single step is possible. Lower the batch size or gradient accumulation, or add prompts."
            )
    else:
        raise TypeError(
            f"train_dataset must be a datasets.Dataset or IterableDataset, not {type(dataset).__name__}. "
            "A list of dicts becomes one with Dataset.from_list(rows)."
        )


def check_eval_dataset(
    dataset: Any, args: Any, encoder: PromptEncoder | None, images: bool = False, name: str = "eval_dataset"
) -> None:
    """Check the evaluation prompts, or a dict of them."""
    if dataset is None:
        if args.eval_strategy != "no" and not args.eval_benchmarks:
            raise ConfigError(f"eval_strategy={args.eval_strategy.value!r} needs an eval_dataset, or eval_benchmarks.")
        return
    if isinstance(dataset, Mapping):
        for key, part in dataset.items():
            check_eval_dataset(part, args, encoder, images, f"{name}[{key!r}]")
        if not dataset:
            raise DataError(f"{name} is an empty dict.")
    elif isinstance(dataset, IterableDataset):
        check_first_row(dataset, encoder, name, images)
    elif not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name} must be a datasets.Dataset, an IterableDataset or a dict of them, not {type(dataset).__name__}."
        )
    elif len(dataset) == 0:
        raise DataError(f"{name} is empty.")
    else:
        check_rows(dataset, encoder, images)


def check_rows(dataset: Dataset, encoder: PromptEncoder | None, images: bool) -> None:
    """Check a sample of the rows, and every prompt, so that no prompt can fail hours into a run.

    With images only the sample is checked: the number of their tokens is known only after reading them, which is slow.
    """
    sample = sample_rows(dataset) if encoder is None else sample_rows(dataset, encoder.sample_size)
    check_prompts(sample, None, takes_images=images)
    if encoder is not None:
        if not images:
            check_every_prompt(dataset, encoder)
        encoder(sample)


def check_first_row(dataset: IterableDataset, encoder: PromptEncoder | None, name: str, images: bool) -> None:
    row = next(iter(dataset), None)
    if row is None:
        raise DataError(f"{name} is empty.")
    check_prompts([row], encoder, takes_images=images)
