"""Load the objects that a run names: rewards, tools, data, adapters and finally the trainer."""

import dataclasses
import functools
import glob
import importlib
import importlib.util
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.cli.recipe import RunFile
from gruppo.config.hints import nearest
from gruppo.config.model import get_peft_config, get_quantization_config
from gruppo.config.script import DatasetConfig, DatasetMixtureConfig
from gruppo.errors import ConfigError, DataError, install_line

__all__ = ["load_datasets", "load_named", "load_reward", "load_rows", "make_trainer"]

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# A reward factory that TRL's command line accepts by its name alone, with these arguments.
READY_MADE = {"get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}


# ---- named objects


def load_named(entry: Any, folder: Path, what: str = "the entry") -> Any:
    """Load the object at `module:name`, `file.py:name` or a dotted path; a mapping of one to arguments calls it.

    Files and modules are searched in the working folder, then in `folder`.

    Example:
        load_named("gruppo.demo:exact_match", Path.cwd())
        load_named({"my_rewards.py:shorter_than": {"tokens": 512}}, Path.cwd())
    """
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        try:
            entry = json.loads(entry)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{what} has {entry!r}, which is not JSON: {error}.") from error
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, arguments),) = entry.items()
        return _made(load_named(name, folder, what), str(name), arguments)
    if not isinstance(entry, str):
        raise ConfigError(f"{what} has {entry!r}; write `module:name`, or one name with a mapping of arguments.")
    if entry.endswith(".py"):
        raise ConfigError(f"{what} has the file {entry}; name the function in it: {entry}:NAME")
    home, sign, name = entry.rpartition(":")
    if not sign:
        home, _, name = entry.rpartition(".")
    if not home:
        raise ConfigError(f"{what} has {entry!r}; write where it is: `module:{entry}` or `file.py:{entry}`.")
    module = _module(home, folder)
    if not hasattr(module, name):
        raise ConfigError(f"{entry!r}: {home} has no `{name}`.{nearest(name, dir(module))}")
    return getattr(module, name)


def _made(factory: Any, name: str, arguments: Any) -> Any:
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ConfigError(f"{name}: {arguments!r} must be a mapping of arguments.")
    try:
        return factory(**(arguments or {}))
    except TypeError as error:  # usually an argument that it does not have
        raise ConfigError(f"{name} cannot be created: {error}.") from error


def _module(home: str, folder: Path) -> Any:
    file = located(home, folder).resolve() if home.endswith(".py") else None
    places = [folder.resolve(), Path.cwd(), *([] if file is None else [file.parent])]  # a file may import its siblings
    for place in map(str, places):
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        return importlib.import_module(home) if file is None else _module_of_file(file)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's code runs here and may raise anything
        raise ConfigError(f"{home} cannot be imported: {_worded(error)}.{_place(error)}") from error


def _worded(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    words = str(error).strip().rstrip(".")
    return words if isinstance(error, ImportError) and words else f"{type(error).__name__}: {words}".rstrip(": ")


def _place(error: BaseException) -> str:
    """Where in the user's code the error was raised, as ' See file:line.'; empty if none of it was reached."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f" See {error.filename}:{error.lineno}."
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [each for each in frames if each[0] not in (__file__, importlib.__file__) and not each[0].startswith("<")]
    return f" See {own[-1][0]}:{own[-1][1]}." if own else ""


def _module_of_file(path: Path) -> Any:
    """The module of a file, executed only once however often it is named."""
    if not path.is_file():
        raise ConfigError(f"There is no file {path}.")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    name = path.stem if known is None else f"{path.stem}_of_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # later imports must not find a half-executed module
        raise
    return module


def located(name: str, folder: Path) -> Path:
    """The path of a file in the working folder or, if it is not there, in the recipe's folder."""
    path = Path(name).expanduser()
    return folder / path if not path.is_absolute() and not path.exists() else path


def load_reward(entry: Any, folder: Path) -> Any:
    """A reward: a function, or the name of a reward model.

    Example:
        load_reward("accuracy_reward", folder)                          # shipped
        load_reward("my_rewards.py:brevity", folder)
        load_reward({"get_length_reward": {"target": 100}}, folder)     # a function that makes one
        load_reward("some/reward-model", folder)                        # on the hub, or a folder
    """
    import gruppo.rewards

    shipped = [name for name in gruppo.rewards.__all__ if name != "check_reward"]
    if isinstance(entry, Mapping) and len(entry) == 1 and next(iter(entry)) in shipped:
        ((name, arguments),) = entry.items()
        return _made(getattr(gruppo.rewards, name), name, arguments)
    if isinstance(entry, str) and entry in READY_MADE:
        return getattr(gruppo.rewards, entry)(**READY_MADE[entry])
    if isinstance(entry, str) and entry in shipped:
        if entry.startswith("get_"):
            raise ConfigError(
                f"{entry} is a function that creates a reward: give it arguments, `{entry}: {{…}}` in the file."
            )
        return getattr(gruppo.rewards, entry)
    is_code = isinstance(entry, str) and (":" in entry or entry.endswith(".py"))
    if isinstance(entry, str) and not is_code and ("/" in entry or Path(entry).is_dir()):
        return entry
    if isinstance(entry, str) and not set(":.{") & set(entry):
        raise ConfigError(
            f"There is no shipped reward {entry!r}.{nearest(entry, shipped)} Your own is `module:name` or "
            "`file.py:name`; a reward model is a folder, or owner/name on the hub."
        )
    return load_named(entry, folder, "reward_funcs")


def load_rewards(run: RunFile) -> list[Any]:
    """All rewards of a run, the reward model first."""
    return [load_reward(entry, run.folder) for entry in run.rewards]


def load_tools(run: RunFile) -> dict[str, Any]:
    """The trainer's arguments for tools, environments and rollout_func; those not set are left out."""
    script = run.script
    found: dict[str, Any] = {}
    if script.tools:
        found["tools"] = [load_named(entry, run.folder, "tools") for entry in script.tools]
    factory: Any = script.environment_factory
    if isinstance(factory, Mapping):  # several, by the names in the column `environment`
        several = {name: load_named(entry, run.folder, "environment_factory") for name, entry in factory.items()}
        found["environment_factory"] = several
    elif factory is not None:
        found["environment_factory"] = load_named(factory, run.folder, "environment_factory")
    if script.rollout_func is not None:
        found["rollout_func"] = load_named(script.rollout_func, run.folder, "rollout_func")
    return found


# ---- data


def load_datasets(run: RunFile) -> tuple[Any, Any]:
    """The training and the evaluation dataset; None for a dataset that the run does not have."""
    script, evaluates = run.script, str(getattr(run.config.eval_strategy, "value", run.config.eval_strategy)) != "no"
    if script.eval_dataset is not None and not evaluates:
        raise ConfigError("eval_dataset is set, but nothing is evaluated: set eval_strategy to steps or epoch.")
    train = evaluation = None
    if run.mixture.datasets or script.dataset_name is not None:
        parts = _load(_mixture(run))
        train, evaluation = parts["train"], parts.get("test") if evaluates else None
    if script.eval_dataset is not None:
        evaluation = _load(_of_entry(run, script.eval_dataset, script.dataset_test_split, "test"))["train"]
    elif evaluates and evaluation is None and not run.config.eval_benchmarks and not run.mixture.datasets:
        evaluation = _load(_test_split(run))["train"]
    if script.dataset_map is not None:
        function = _mapper(load_named(script.dataset_map, run.folder, "dataset_map"), script.dataset_map)
        train, evaluation = (None if part is None else part.map(function) for part in (train, evaluation))
    return train, evaluation


def _mapper(function: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    """The function, with errors that name it and the row."""

    @functools.wraps(function)
    def mapped(row: Any) -> Any:
        try:
            made = function(row)
        except Exception as error:  # the user's code
            shown = textwrap.shorten(str(dict(row)), 200)
            raise DataError(f"dataset_map={name} failed with {type(error).__name__}: {error}, for {shown}") from error
        if not isinstance(made, Mapping):
            raise DataError(f"dataset_map={name} returned {made!r}; it must return the new row, a mapping.")
        return made

    return mapped


def load_rows(entry: str, folder: Path) -> Any:
    """Load a single dataset: a file, several files, a folder, or the train split of a hub dataset.

    Example:
        load_rows("prompts.jsonl", Path.cwd())
    """
    config = _with_files(DatasetConfig(path=entry), folder)
    return _load(DatasetMixtureConfig(datasets=[config]))["train"]


def _mixture(run: RunFile) -> DatasetMixtureConfig:
    """The training datasets as a mixture, possibly of a single dataset."""
    if run.mixture.datasets:
        listed = [_with_files(entry, run.folder) for entry in run.mixture.datasets]
        return dataclasses.replace(run.mixture, datasets=listed)
    mixture = _of_entry(run, run.script.dataset_name, run.script.dataset_train_split)
    return dataclasses.replace(mixture, test_split_size=run.mixture.test_split_size)


def _test_split(run: RunFile) -> DatasetMixtureConfig:
    """The test split of the training dataset."""
    named = run.script.dataset_name
    mixture = _of_entry(run, named, run.script.dataset_test_split, "test")
    if mixture.datasets[0].data_files is not None:
        raise ConfigError(
            f"{named} has no split to evaluate on: set eval_dataset to another file, or test_split_size to a fraction."
        )
    return mixture


def _of_entry(run: RunFile, entry: Any, split: str, usual: str = "train") -> DatasetMixtureConfig:
    streaming = run.mixture.streaming or run.script.dataset_streaming
    if not isinstance(entry, str):
        mixture = DatasetMixtureConfig(datasets=entry if isinstance(entry, list) else [entry], streaming=streaming)
        return dataclasses.replace(mixture, datasets=[_with_files(each, run.folder) for each in mixture.datasets])
    config = _with_files(DatasetConfig(path=entry, name=run.script.dataset_config, split=split), run.folder, usual)
    return DatasetMixtureConfig(datasets=[config], streaming=streaming)


def _with_files(config: DatasetConfig, folder: Path, usual: str = "train") -> DatasetConfig:
    """Convert file names to what `datasets` expects: format and paths. All rows of files are one split, `train`.

    `usual` is a second accepted name for that split, for evaluation datasets.
    """
    suffix = _suffix(config.path)
    if config.data_files is not None:
        return config
    if suffix not in FORMATS:
        local = located(config.path, folder)
        return dataclasses.replace(config, path=str(local)) if local.is_dir() else config
    found = sorted(glob.glob(os.path.expanduser(config.path))) or sorted(glob.glob(str(folder / config.path)))
    if not found:
        raise DataError(f"There is no file {config.path}.")
    named, sign, part = config.split.partition("[")
    if named not in ("train", usual):
        raise ConfigError(
            f"{config.path} has no split {config.split!r}: files have the split `train` only (`train[:100]` takes a "
            "part of it). Name the files of the split that you want."
        )
    split = f"train{sign}{part}"
    return dataclasses.replace(config, path=FORMATS[suffix], data_files=found, name=None, split=split)


def _suffix(path: str) -> str:
    plain = Path(path)
    return (plain.with_suffix("") if plain.suffix in COMPRESSED else plain).suffix


def _load(mixture: DatasetMixtureConfig) -> Any:
    from datasets.exceptions import DatasetsError

    from gruppo.data.mixture import get_dataset

    named = ", ".join(_named(entry) for entry in mixture.datasets)
    try:
        found = get_dataset(mixture)
        if hasattr(found["train"], "__len__") and not len(found["train"]):
            raise DataError(f"The dataset {named} has no rows.")
        return found
    except (ConfigError, DataError):
        raise
    except StopIteration as error:  # `datasets` raises this for an empty file
        raise DataError(f"The dataset {named} has no rows.") from error
    except (OSError, ValueError, DatasetsError) as error:  # missing, unreachable, no such split, unreadable
        if "corresponds to no data" in str(error):
            raise DataError(f"The dataset {named} has no rows.") from error
        where = (
            " A path is relative to the working folder or to the folder of the recipe; a name on the hub needs "
            "the network, or its files in the cache."
        )
        advice = where if isinstance(error, OSError) else ""
        cause = "" if error.__cause__ is None else f" ({_worded(error.__cause__)})"
        raise DataError(f"The dataset {named} cannot be loaded: {str(error).rstrip('.')}{cause}.{advice}") from error


def _named(entry: DatasetConfig) -> str:
    files = entry.data_files
    return ", ".join(map(str, files)) if isinstance(files, list) else str(files or entry.path)


# ---- the trainer


def load_adapter(run: RunFile) -> Any:
    """The LoraConfig of the run, from `peft` or from use_peft; None trains all weights."""
    wanted: Any = run.script.peft
    if wanted is None:
        try:
            return get_peft_config(run.model_args)
        except ImportError as error:
            raise ConfigError(str(error)) from error
    if run.model_args.use_peft:
        raise ConfigError("`peft` and use_peft both ask for an adapter; keep one of them.")
    if not isinstance(wanted, Mapping):
        raise ConfigError(f"peft={wanted!r} must be a mapping of fields of peft.LoraConfig, such as {{r: 16}}.")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(f"`peft` needs the package peft: {install_line('peft')}") from error
    known = [each.name for each in dataclasses.fields(LoraConfig)]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"peft.LoraConfig has no field `{name}`.{nearest(str(name), known)}")
    return LoraConfig(**{"task_type": "CAUSAL_LM", **wanted})


def check_model_is_there(run: RunFile) -> Any:
    """Load the model's config; raises if it is not available, before the trainer loads the weights."""
    from transformers import AutoConfig

    given = run.config.model_init_kwargs or {}
    known = {name: given[name] for name in ("revision", "cache_dir", "token") if name in given}
    try:
        return AutoConfig.from_pretrained(run.model, trust_remote_code=run.config.trust_remote_code, **known)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"The model {run.model!r} cannot be loaded: {first}. It is a folder with config.json, or a name on the "
            "hub, which needs the network or its files in the cache."
        ) from error


def make_trainer(run: RunFile, callbacks: Sequence[Any] | None = None) -> Any:
    """The trainer that a run describes.

    Example:
        make_trainer(RunFile.read(["recipes/grpo.yaml", "--max_steps", "2"])).train()
    """
    import gruppo

    kind = gruppo.GRPOTrainer if run.trainer == "grpo" else gruppo.RLOOTrainer
    rewards, tools, adapter = load_rewards(run), load_tools(run), load_adapter(run)  # before the data: they are quick
    train, evaluation = load_datasets(run)
    check_model_is_there(run)
    trainer = kind(
        model=run.model,
        reward_funcs=rewards,
        args=run.config,
        train_dataset=train,
        eval_dataset=evaluation,
        callbacks=None if callbacks is None else list(callbacks),
        quantization_config=get_quantization_config(run.model_args),
        peft_config=adapter,
        **tools,
    )
    if run.script.ignore_bias_buffers:
        import torch

        masks = [name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool]
        trainer.model._ddp_params_and_buffers_to_ignore = masks
    return trainer
