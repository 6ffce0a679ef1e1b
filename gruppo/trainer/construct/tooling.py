"""From the trainer's arguments to a toolset: checks, chat template, rewards and rows of environments."""

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from datasets import Dataset

from gruppo.data.prompts import require_conversation, sample_rows
from gruppo.data.templates import (
    add_response_schema,
    chosen_template,
    get_training_chat_template,
    shows_tools,
    supports_tool_calling,
)
from gruppo.errors import ConfigError, DataError
from gruppo.rewards.resolve import listed_rewards
from gruppo.tools.environments import COLUMN
from gruppo.tools.toolset import Toolset

logger = logging.getLogger(__name__)


def make_toolset(tools: Any, environment_factory: Any, args: Any) -> Toolset | None:
    """The tools that the model may call; None without tools and environments."""
    if not tools and environment_factory is None:
        return None
    toolset = Toolset(tools, environment_factory, timeout=args.tool_timeout, max_parallel=args.max_parallel_tools)
    if toolset.environments is not None and toolset.environments.several and args.remove_unused_columns:
        raise ConfigError(
            f"remove_unused_columns=True would remove the column `{COLUMN}`, which names the environment of each row. "
            "Set remove_unused_columns=False."
        )
    return toolset


def reject_shared_engines(args: Any) -> None:
    """Raise if processes must sample together but not all of them would have turns to sample."""
    size = args.vllm_tensor_parallel_size
    if args.world_size > 1 and args.max_tool_calling_iterations != 0 and size > 1:
        raise ConfigError(
            f"Tools cannot work with vllm_tensor_parallel_size={size}: the processes of an engine sample together, "
            "but only some have completions to continue. Use vllm_tensor_parallel_size=1 or vllm_mode='server', or "
            "set max_tool_calling_iterations=0."
        )


def template_for(toolset: Toolset | None, tokenizer: Any) -> str | None:
    """The chat template to train with (None: the tokenizer's own); ensures that calls can be rendered and parsed."""
    if toolset is None or not toolset.functions:
        return None
    chosen = chosen_template(tokenizer)
    if not tokenizer.chat_template or not supports_tool_calling(tokenizer, chosen):
        raise ConfigError(
            "The chat template does not show tool calls and their results, so the model cannot use tools. Set "
            "`tokenizer.chat_template` to one that renders messages with `tool_calls` and with the role `tool`; "
            "gruppo.data.templates.HERMES_TEMPLATE is one for models that were trained on ChatML."
        )
    add_response_schema(tokenizer, chosen)
    template = get_training_chat_template(tokenizer, chosen) or chosen
    if not shows_tools(tokenizer, template):
        logger.warning("The chat template does not list the tools, so the model does not know what it may call.")
    return template


def with_environment_rewards(
    toolset: Toolset | None, functions: Any, tokenizers: Any, weights: Sequence[float] | None
) -> tuple[list[Any], list[Any] | Any, list[float] | None]:
    """Reward functions, tokenizers and weights, extended by the environments that have `get_reward` (weight 1)."""
    listed = listed_rewards(functions)
    added = toolset.environments.rewards() if toolset is not None and toolset.environments is not None else []
    if not added:
        return listed, tokenizers, None if weights is None else list(weights)
    if weights is not None and len(weights) != len(listed):
        raise ConfigError(
            f"reward_weights has {len(weights)} entries for {len(listed)} reward functions; pass one per function. "
            "The rewards of environments have the weight 1."
        )
    if tokenizers is not None:
        tokenizers = [*(tokenizers if isinstance(tokenizers, list | tuple) else [tokenizers]), *([None] * len(added))]
    return [*listed, *added], tokenizers, None if weights is None else [*weights, *([1.0] * len(added))]


def rows_of_environment(toolset: Toolset | None, args: Any) -> Dataset | None:
    """The dataset of a run without one: rows with an empty user message, which the environment fills in."""
    if toolset is None or toolset.environments is None:
        return None
    if toolset.environments.several:
        raise ConfigError(
            "train_dataset=None works with one environment. With a dict of them, pass a dataset whose column "
            f"`{COLUMN}` says which one each row is for."
        )
    if args.max_steps <= 0:
        raise ConfigError("train_dataset=None: an environment has no length. Set max_steps.")
    count = args.prompts_per_generation
    return Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}] * count)


def check_tool_rows(toolset: Toolset | None, dataset: Any) -> None:
    """Raise if tools or environments cannot use the rows; the datasets of a dict are checked one by one."""
    if toolset is None or dataset is None:
        return
    if isinstance(dataset, Mapping):
        for part in dataset.values():
            check_tool_rows(toolset, part)
        return
    rows: Sequence[Mapping[str, Any]] = (
        sample_rows(dataset) if isinstance(dataset, Dataset) else list(islice(iter(dataset), 1))
    )
    for row in rows:
        require_conversation(row)
        if toolset.environments is not None and "environments" in row:
            raise DataError(
                "The dataset has a column `environments`, but reward functions get the environments under that name. "
                "Rename the column."
            )
    if toolset.environments is None:
        return
    if toolset.environments.several and isinstance(dataset, Dataset) and COLUMN in dataset.column_names:
        for name in dataset.unique(COLUMN):
            toolset.environments.name_of({COLUMN: name})
    for row in rows:
        toolset.environments.check_row(row)
