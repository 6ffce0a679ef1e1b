"""`gruppo train`: a run from one YAML file, on one process or on several.

    trainer: grpo                                   # or rloo
    model: Qwen/Qwen2.5-0.5B-Instruct               # or a folder
    dataset: prompts.jsonl                          # or a name on the hub, or {path: …, name: …, split: …}
    rewards: [gruppo.rewards:accuracy_reward, my_rewards.py:brevity]
    peft: {r: 16, target_modules: all-linear}       # fields of peft.LoraConfig; leave it out to train all weights
    output_dir: run                                 # this and everything else: fields of GRPOConfig or RLOOConfig
    learning_rate: 1.0e-6

`--launch fsdp2 --nproc 8` starts eight processes through accelerate's launcher. Without it the run is this process, or
one of those that `torchrun` or `accelerate launch` have started.
"""

import argparse
import importlib
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gruppo.config.hints import nearest
from gruppo.config.runs import RunConfig
from gruppo.errors import ConfigError, DataError

OWN_KEYS = ("trainer", "model", "dataset", "eval_dataset", "rewards", "peft")
TRAINERS = {"grpo": ("GRPOTrainer", "GRPOConfig"), "rloo": ("RLOOTrainer", "RLOOConfig")}

_COMMON: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def _deepspeed(stage: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "deepspeed_multinode_launcher": "standard",
        "zero_stage": stage,
        "zero3_init_flag": False,
    }
    if stage == 3:
        config |= {"zero3_init_flag": True, "zero3_save_16bit_model": True}
    offload = {"offload_optimizer_device": "none", "offload_param_device": "none"}
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": config | (offload if stage > 1 else {})}


# What recipes/accelerate/<name>.yaml say; `--launch` does not need the files.
LAUNCHES: dict[str, dict[str, Any]] = {
    "ddp": {"distributed_type": "MULTI_GPU", "gpu_ids": "all"},
    "fsdp2": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
            "fsdp_activation_checkpointing": False,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        },
    },
    **{f"zero{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
}


def launch_config(name: str, processes: int = 8) -> dict[str, Any]:
    """The accelerate config of a way to launch.

    Example:
        launch_config("fsdp2", 4)["fsdp_config"]["fsdp_version"] == 2
    """
    return _COMMON | LAUNCHES[name] | {"num_processes": processes}


# ---- the file


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_WORDS = ("yes", "no", "on", "off")


def _number(value: Any) -> Any:
    """The value; YAML reads 1e-5 as text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


@dataclass(frozen=True)
class Run:
    """What a file asks for."""

    trainer: str
    model: str
    dataset: Any
    rewards: list[Any]
    eval_dataset: Any = None
    peft: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: Path, changes: Sequence[str] = ()) -> "Run":
        """From a YAML file, with `field=value` pairs over it.

        Example:
            Run.read(Path("run.yaml"), ["learning_rate=1e-5", "model=./other"])
        """
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must be a mapping of names to values, not {type(values).__name__}.")
        values |= dict(_assignment(change) for change in changes)
        return cls.of({str(key): _number(value) for key, value in values.items()})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Run":
        own = {"trainer": "grpo", **{key: values[key] for key in OWN_KEYS if key in values}}
        for key in ("model", "dataset", "rewards"):
            if not own.get(key):
                close = nearest(key, [name for name in values if name not in OWN_KEYS])
                raise ConfigError(f"The run has no `{key}`.{close}")
        if own["trainer"] not in TRAINERS:
            raise ConfigError(f"trainer={own['trainer']!r} is not one of {', '.join(TRAINERS)}.")
        rewards = own.pop("rewards")
        settings = {key: value for key, value in values.items() if key not in OWN_KEYS}
        return cls(rewards=rewards if isinstance(rewards, list) else [rewards], settings=settings, **own)


def _assignment(change: str) -> tuple[str, Any]:
    name, sign, value = change.partition("=")
    if not sign or not name:
        raise ConfigError(f"--set {change!r} is not of the form field=value.")
    # A value that is a word is one, as in save_strategy=no; in a file it is quoted.
    return name.strip(), value if value in _WORDS else _number(yaml.safe_load(value))


def load_reward(entry: Any) -> Any:
    """A reward from the words of a file.

    "module:function" and "file.py:function" name a function; a mapping from such a name to arguments names one that
    makes it; any other string is the name or folder of a reward model.

    Example:
        load_reward("gruppo.rewards:accuracy_reward")
        load_reward({"my_rewards.py:shorter_than": {"tokens": 512}})
    """
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, arguments),) = entry.items()
        return load_reward(name)(**(arguments or {}))
    if not isinstance(entry, str):
        raise ConfigError(f"rewards has {entry!r}; an entry is a string, or one name with a mapping of arguments.")
    home, sign, function = entry.rpartition(":")
    if not sign:
        return entry
    module = _module(home)
    if not hasattr(module, function):
        raise ConfigError(f"{entry!r}: {home} has no `{function}`.{nearest(function, dir(module))}")
    return getattr(module, function)


def _module(home: str) -> Any:
    if home.endswith(".py"):
        path = Path(home).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigError(f"There is no file {home}.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(home)
    except ImportError as error:
        raise ConfigError(f"The module {home!r} cannot be imported: {error}.") from error


def load_rows(entry: Any, split: str) -> Any:
    """A dataset from the words of a file: JSON lines, a name on the hub, or the fields of `DatasetConfig`."""
    from gruppo.config.script import DatasetConfig, DatasetMixtureConfig
    from gruppo.data.mixture import get_dataset

    if isinstance(entry, str) and entry.endswith((".jsonl", ".json")):
        if not Path(entry).is_file():
            raise DataError(f"There is no file {entry}.")
        config = DatasetConfig(path="json", data_files=entry)
    elif isinstance(entry, str):
        config = DatasetConfig(path=entry, split=split)
    else:
        (config,) = DatasetMixtureConfig(datasets=[entry]).datasets
    return get_dataset(DatasetMixtureConfig(datasets=[config]))["train"]


def make_trainer(run: Run) -> Any:
    """The trainer that a file describes."""
    import gruppo

    trainer, config = (getattr(gruppo, name) for name in TRAINERS[run.trainer])
    peft_config = None
    if run.peft is not None:
        from peft import LoraConfig

        peft_config = LoraConfig(**{"task_type": "CAUSAL_LM", **run.peft})
    return trainer(
        model=run.model,
        reward_funcs=[load_reward(entry) for entry in run.rewards],
        args=config(**(run.settings or {})),
        train_dataset=load_rows(run.dataset, "train"),
        eval_dataset=None if run.eval_dataset is None else load_rows(run.eval_dataset, "test"),
        peft_config=peft_config,
    )


# ---- the command


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="gruppo train", description=(__doc__ or "").partition("\n")[0])
    found.add_argument("--config", type=Path, required=True, metavar="RUN.YAML", help="what to train, see the docs")
    found.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="over the file; repeatable")
    found.add_argument("--launch", choices=LAUNCHES, help="start several processes, which share the work so")
    found.add_argument("--nproc", type=int, metavar="N", help="how many, with --launch (default: the GPUs here)")
    found.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint in output_dir")
    return found


def launch_command(name: str, processes: int, arguments: Sequence[str], *, on_cpu: bool, folder: Path) -> list[str]:
    """The command that starts the processes; its config is written into `folder`."""
    program = ["-m", "gruppo", "train", *arguments]
    if on_cpu:  # accelerate starts several processes on CPUs through MPI only
        if name != "ddp":
            raise ConfigError(f"--launch {name} needs GPUs; with use_cpu: true there is --launch ddp.")
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [sys.executable, "-m", *torchrun, *program]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(launch_config(name, processes)), encoding="utf-8")
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), *program]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    run = Run.read(options.config, options.set)
    if options.launch is None:
        if options.nproc is not None:
            raise ConfigError(f"--nproc {options.nproc} needs --launch, which says how processes share the work.")
        trainer = make_trainer(run)
        trainer.train(resume_from_checkpoint=options.resume or None)
        trainer.save_model()
        return 0
    on_cpu = bool((run.settings or {}).get("use_cpu"))
    processes = options.nproc or _gpus()
    if processes < 1:
        raise ConfigError("There is no GPU here: say how many processes to start with --nproc.")
    arguments = ["--config", str(options.config), *(part for change in options.set for part in ("--set", change))]
    arguments += ["--resume"] * options.resume
    with tempfile.TemporaryDirectory(prefix="gruppo-launch-") as folder:
        command = launch_command(options.launch, processes, arguments, on_cpu=on_cpu, folder=Path(folder))
        return run_command(command, patience=(run.settings or {}).get("stop_timeout", RunConfig.stop_timeout))


def run_command(command: Sequence[str], patience: float | None = None) -> int:
    """Run a launcher to its end, and give it the SIGTERM that is meant for it; its exit code.

    It kills processes that have not ended soon after the signal, but not before `patience` seconds are over. SIGINT
    comes from a terminal, which sends it to the command as well.
    """
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: Any) -> None:
        if process is None:
            raise SystemExit(128 + number)
        process.send_signal(number)

    seconds = 24 * 3600 if patience is None else math.ceil(patience) + 60
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on)}
    try:
        process = subprocess.Popen(command, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds), **os.environ})
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # not earlier: it would be inherited
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
