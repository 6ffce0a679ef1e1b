"""Checks of the trainer's arguments that can run before a model is loaded.

explains_unknown_arguments   unknown keyword arguments, with what to use instead
check_early                  a dict of splits as the dataset, names of rewards, and rewards that cannot be called
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec

from datasets import Dataset

from gruppo.config.hints import nearest
from gruppo.errors import ConfigError
from gruppo.rewards.calling import check_arguments
from gruppo.rewards.resolve import function_name, is_reward_model, listed_rewards, refuse_shipped_name, unique_names
from gruppo.rewards.runner import OWN_COLUMNS
from gruppo.trainer.construct.optimization import check_optimization
from gruppo.trainer.hooks import PADDED_HOOKS, overridden

P = ParamSpec("P")

_REFERENCE = (
    "Leave it out: with beta > 0 the reference is a copy of the model as it was passed, or the model without its "
    "adapters."
)
_METRICS = (
    "Leave it out: evaluation reports rewards. A reward may call log_metric(name, value), a weight of 0 in "
    "reward_weights makes a reward a mere metric, and eval_benchmarks measures accuracy."
)
# Keywords of transformers.Trainer, of other trainers and of older releases, and what replaces them here.
INSTEAD = {
    "tokenizer": "Pass it as processing_class.",
    "config": "Pass it as args.",
    "policy": "Pass it as model.",
    "dataset": "Pass it as train_dataset.",
    "reward_func": "Pass it in reward_funcs.",
    "reward_model": "Pass it in reward_funcs, which takes functions, models and their names.",
    "ref_model": _REFERENCE,
    "ref_policy": _REFERENCE,
    "data_collator": "Leave it out: rewards get the columns of the dataset as they are. Change rows with dataset.map.",
    "compute_metrics": _METRICS,
    "preprocess_logits_for_metrics": _METRICS,
    "compute_loss_func": "Choose a loss_type in the config, or override `_compute_loss`.",
    "model_init": "Pass a model, or its name with model_init_kwargs in the config.",
    "optimizer_cls_and_kwargs": "Pass optimizers=(optimizer, scheduler), or set optim in the config.",
    "generation_config": "Set temperature, top_p, … and generation_kwargs in the config.",
}

# Methods that a subclass may override to pass more than the columns of the dataset to its rewards.
ADDING_HOOKS = (
    *PADDED_HOOKS,
    *("_generate_single_turn", "_calculate_rewards", "reward", "rollout", "collect"),
    *("get_train_dataloader", "get_eval_dataloader", "rows_of"),
)

# Hooks that may request prompts in another order than the trainer's, or several turns.
ORDER_HOOKS = (
    *("_generate_single_turn", "_generate_and_score_completions", "rollout"),
    *("rows_of", "get_train_dataloader"),
)


def explains_unknown_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Decorator of a trainer's `__init__`: an unknown keyword raises a TypeError that says what to do instead.

    Example:
        GRPOTrainer(model, tokenizer=tokenizer)
        TypeError: GRPOTrainer has no argument `tokenizer`. Pass it as processing_class.
    """
    names = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in names and args:
                kind: Any = type(args[0])
                hint = _hint(name, kind.config_class, names)
                raise TypeError(f"{kind.__name__} has no argument `{name}`.{hint}")
        init(*args, **kwargs)

    return checked


def _hint(name: str, config_class: Any, names: Sequence[str]) -> str:
    if name in INSTEAD:
        return f" {INSTEAD[name]}"
    if name in {field.name for field in fields(config_class)}:
        return f" It is a field of the config: args={config_class.__name__}({name}=…)."
    return nearest(name, names)


def check_early(
    trainer: Any,
    args: Any,
    reward_funcs: Any,
    train_dataset: Any,
    eval_dataset: Any,
    rollout_func: Any,
    optimizers: tuple[Any, Any],
) -> None:
    """Raise for mistakes that would otherwise surface only after the model is loaded or after the first generation."""
    if isinstance(train_dataset, Mapping):
        raise TypeError(_about_splits(train_dataset))
    refuse_ahead(trainer, args, rollout_func)
    check_optimization(trainer, args, optimizers)
    functions = listed_rewards(reward_funcs)
    for function in functions:
        if isinstance(function, str):
            refuse_shipped_name(function)
    environments = trainer.toolset is not None and trainer.toolset.environments is not None
    if rollout_func is not None or environments or overridden(trainer, ADDING_HOOKS):
        return  # rewards may get arguments that are not columns of the datasets
    for dataset in (train_dataset, *(_parts(eval_dataset) if args.eval_strategy != "no" else ())):
        check_calls(functions, columns_of(dataset, args))


def _about_splits(splits: Mapping[str, Any]) -> str:
    kind, names = type(splits).__name__, list(splits)
    chosen = "train" if "train" in names else names[0] if names else "train"
    return (
        f"train_dataset must be a datasets.Dataset or IterableDataset, not a {kind} of splits "
        f"({', '.join(map(str, names)) or 'none'}). Pass one of them: dataset[{chosen!r}]."
    )


def _parts(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Mapping):
        yield from dataset.values()
    else:
        yield dataset


def columns_of(dataset: Any, args: Any) -> list[str] | None:
    """The columns of every row that are passed to rewards; None if they are not known before rows are read.

    Example:
        columns_of(Dataset.from_dict({"prompt": ["2+2="], "answer": ["4"]}), args) == ["answer"]
    """
    if not isinstance(dataset, Dataset) or not len(dataset) or dataset.format["type"] == "custom":
        return None
    kept = ("image", "images") if args.remove_unused_columns else dataset[0]
    return [name for name in kept if name in dataset[0] and name not in OWN_COLUMNS]


def check_calls(functions: Sequence[Any], columns: Sequence[str] | None) -> None:
    """Raise for a reward function that cannot be called with these columns."""
    if columns is None:
        return
    arguments = dict.fromkeys([*columns, "prompts", "completions", "completion_ids", "trainer_state"])
    for function, name in zip(functions, unique_names([function_name(f) for f in functions]), strict=True):
        if callable(function) and not is_reward_model(function):
            check_arguments(function, name, arguments)


def refuse_ahead(trainer: Any, args: Any, rollout_func: Any) -> None:
    """Raise if `async_rollouts` is set but generations cannot be requested ahead of time."""
    if not args.async_rollouts:
        return
    reasons = {
        "a rollout_func makes its own requests": rollout_func is not None,
        "tools and environments take several turns": trainer.toolset is not None,
    }
    reasons |= {f"{type(trainer).__name__} overrides `{name}`": True for name in overridden(trainer, ORDER_HOOKS)}
    if said := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"async_rollouts={args.async_rollouts} requests the next completions before they are needed, which is not "
            f"possible here: {'; '.join(said)}. Set async_rollouts=0."
        )
