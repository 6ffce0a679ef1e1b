"""Checks of the trainer's arguments, each with an error that says what to do."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset

from gruppo.data.prompts import PromptEncoder, check_train_prompts, read_prompt, reject_images
from gruppo.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

# Methods that other trainers of this kind call but this one does not: overriding them would silently do nothing.
UNUSED_HOOKS = ("_generate", "_tool_call_loop")


def reject_unavailable(**features: Any) -> None:
    """Raise for constructor arguments whose feature is not built yet."""
    for name, value in features.items():
        if value:
            raise NotImplementedError(f"`{name}` is not available yet; leave it out.")


def reject_unused_hooks(trainer: Any, base: type) -> None:
    """Raise for overridden methods that are never called here."""
    for name in UNUSED_HOOKS:
        if any(name in vars(cls) for cls in type(trainer).__mro__ if cls not in base.__mro__):
            raise NotImplementedError(
                f"{type(trainer).__name__} overrides `{name}`, which is not called here. Override "
                "`_generate_single_turn` or `_generate_and_score_completions`, or pass a `rollout_func`."
            )


def check_train_dataset(dataset: Any, args: Any, encoder: PromptEncoder) -> None:
    """The training prompts: type, columns, size, and a sample of the rows."""
    prompts = args.generation_batch_size // args.num_generations
    if dataset is None:
        raise ConfigError("train_dataset is missing: pass a datasets.Dataset with a `prompt` column.")
    if isinstance(dataset, IterableDataset):
        if args.max_steps <= 0:
            raise ConfigError("An iterable train_dataset has no length: set max_steps.")
        if args.accelerator_config is not None and args.accelerator_config.dispatch_batches:
            raise ConfigError("dispatch_batches=True cannot work: every process reads its own share of the stream.")
        row = next(iter(dataset), None)
        if row is None:
            raise DataError("train_dataset is empty.")
        check_row(row, encoder)
    elif isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise DataError("train_dataset is empty.")
        check_train_prompts(dataset, encoder)
        if len(dataset) < prompts:
            raise DataError(
                f"train_dataset has {len(dataset)} prompts, fewer than the {prompts} of one generation batch "
                f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}), so "
                "not a single step could be made. Lower the batch size or gradient accumulation, or add prompts."
            )
    else:
        raise TypeError(
            f"train_dataset must be a datasets.Dataset or IterableDataset, not {type(dataset).__name__}. "
            "A list of dicts becomes one with Dataset.from_list(rows)."
        )


def check_eval_dataset(dataset: Any, args: Any, encoder: PromptEncoder) -> None:
    """The evaluation prompts, or a dict of them."""
    if dataset is None:
        if args.eval_strategy != "no":
            raise ConfigError(f"eval_strategy={args.eval_strategy!s} needs an eval_dataset.")
        return
    if isinstance(dataset, Mapping):
        for part in dataset.values():
            check_eval_dataset(part, args, encoder)
        return
    if isinstance(dataset, IterableDataset):
        row = next(iter(dataset), None)
        if row is not None:
            check_row(row, encoder)
    elif not isinstance(dataset, Dataset):
        raise TypeError(
            f"eval_dataset must be a datasets.Dataset, an IterableDataset or a dict of them, not "
            f"{type(dataset).__name__}."
        )
    elif len(dataset) == 0:
        raise DataError("eval_dataset is empty.")
    else:
        check_train_prompts(dataset, encoder)


def check_row(row: Mapping[str, Any], encoder: PromptEncoder) -> None:
    read_prompt(row)
    reject_images(row)
    encoder([row])


def warn_combinations(args: Any) -> None:
    """Settings that work but rarely mean what they seem to."""
    level, loss_type = getattr(args, "importance_sampling_level", None), getattr(args, "loss_type", None)
    if loss_type == "luspo" and level != "sequence":
        logger.warning("loss_type='luspo' is meant for importance_sampling_level='sequence'.")
    if loss_type == "vespo" and level != "token":
        logger.warning("loss_type='vespo' is meant for importance_sampling_level='token'.")
    if level == "sequence" and loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        logger.warning(
            f"importance_sampling_level='sequence' with loss_type={loss_type!r} weights sequences by their length; "
            "GSPO is loss_type='grpo' with it."
        )
    if loss_type == "cispo" and (args.epsilon_high or args.epsilon) <= 1:
        logger.warning(
            f"loss_type='cispo' caps ratios at epsilon_high={args.epsilon_high or args.epsilon} itself, not at 1 plus "
            "it: every token is cut. About 5 is the usual setting."
        )
    if args.top_k or args.top_p < 1 or args.min_p or args.repetition_penalty != 1:
        logger.warning(
            "top_k, top_p, min_p or repetition_penalty change what is sampled but not the training log-probs, so the "
            "ratios are biased."
        )
    if args.use_liger_kernel:
        warnings.warn("`use_liger_kernel` is deprecated for this trainer.", FutureWarning, stacklevel=4)
    if args.dataloader_num_workers:
        logger.warning("dataloader_num_workers has no effect: prompts are read directly.")
