"""Which data and rewards a training script uses."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gruppo.config.fields import option
from gruppo.config.hints import nearest
from gruppo.config.validate import rejects_unknown_fields
from gruppo.errors import ConfigError

__all__ = [
    "DatasetConfig",
    "DatasetMixtureConfig",
    "GRPOScriptArguments",
    "RLOOScriptArguments",
    "ScriptArguments",
]

IGNORED = "Ignored when `datasets` is given."


@rejects_unknown_fields
@dataclass
class ScriptArguments:
    """The dataset of a training script."""

    dataset_name: str | None = option(None, f"Hub id or local path of the dataset. {IGNORED}")
    dataset_config: str | None = option(None, f"Configuration of the dataset (`name` of `load_dataset`). {IGNORED}")
    dataset_train_split: str = option("train", f"Split to train on. {IGNORED}")
    dataset_test_split: str = option("test", f"Split to evaluate on. {IGNORED}")
    dataset_streaming: bool = option(False, f"Read the dataset as a stream instead of loading it. {IGNORED}")
    ignore_bias_buffers: bool = option(
        False, "Leave boolean buffers out of the synchronisation between processes (for old models with causal masks)."
    )


@rejects_unknown_fields
@dataclass
class GRPOScriptArguments(ScriptArguments):
    """The dataset and the rewards of a GRPO or RLOO script."""

    reward_model_name_or_path: str | None = option(None, "Hub id or local folder of a reward model.")
    reward_funcs: list[str] | None = option(
        None,
        "Reward functions: `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`, "
        "`get_soft_overlong_punishment` (1280 tokens, the last 256 punished), or dotted paths of your own.",
    )


RLOOScriptArguments = GRPOScriptArguments


@rejects_unknown_fields
@dataclass
class DatasetConfig:
    """One dataset of a mixture; the first five fields are arguments of `datasets.load_dataset`.

    Example:
        DatasetConfig(path="openai/gsm8k", name="main", columns=["question", "answer"], fraction=0.25)
    """

    path: str = field(metadata={"help": "Hub id, local path, or a format such as `json`."})
    name: str | None = option(None, "Configuration of the dataset.")
    data_dir: str | None = option(None, "Folder of the data inside the dataset.")
    data_files: str | list[str] | dict[str, str] | None = option(None, "Files of the data.")
    split: str = option("train", "Split to take.")
    columns: list[str] | None = option(None, "Columns to keep; None keeps all.")
    fraction: float | None = option(
        None, "Share of the mixture, relative to the other shares. Set for every dataset or for none."
    )

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 <= self.fraction < float("inf"):
            raise ConfigError(f"fraction={self.fraction!r} of dataset {self.path!r} must be a number of at least 0.")


@rejects_unknown_fields
@dataclass
class DatasetMixtureConfig:
    """Several datasets combined into one.

    Example, three quarters of the rows from the first:
        DatasetMixtureConfig(datasets=[{"path": "a", "fraction": 3}, {"path": "b", "fraction": 1}])
    """

    datasets: list[DatasetConfig] = field(
        default_factory=list, metadata={"help": "The datasets, each a mapping with at least `path`."}
    )
    streaming: bool = option(False, "Read the datasets as streams instead of loading them.")
    test_split_size: float | None = option(
        None, "Rows to set aside as a test split: a share below 1, or a number of rows. None sets none aside."
    )

    def __post_init__(self) -> None:
        self.datasets = [_as_dataset_config(d, i) for i, d in enumerate(self.datasets)]


def _as_dataset_config(entry: Any, index: int) -> DatasetConfig:
    """Convert an entry to a DatasetConfig: YAML files contain mappings, the command line paths."""
    if isinstance(entry, DatasetConfig):
        return entry
    if isinstance(entry, str):
        return DatasetConfig(path=entry)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"datasets[{index}]={entry!r} must be a mapping with at least `path`.")
    names = [f.name for f in fields(DatasetConfig)]
    for key in entry:
        if key not in names:
            raise ConfigError(f"datasets[{index}] has no field `{key}`.{nearest(str(key), names)}")
    if "path" not in entry:
        raise ConfigError(f"datasets[{index}]={dict(entry)!r} has no `path`.")
    return DatasetConfig(**entry)
