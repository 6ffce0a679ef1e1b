"""Launch several processes, and forward signals to them."""

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from gruppo.cli.arguments import LaunchArguments
from gruppo.cli.recipe import RunFile, accelerate_options, named_processes
from gruppo.config.hints import nearest
from gruppo.errors import ConfigError

__all__ = ["LAUNCHES", "check_launch", "last_words", "launch", "launch_command", "launch_config", "run_command"]

WORDS = "GRUPPO_LAST_WORDS"  # environment variable with the path of the file of `last_words`

# The names of TRL's `--accelerate_config`; single_gpu is one process.
ACCELERATE_NAMES = {"single_gpu": "ddp", "multi_gpu": "ddp"}

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


# The contents of recipes/accelerate/<name>.yaml, so that `--launch` does not need the files.
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
    """The accelerate config of a launch method.

    Example:
        launch_config("fsdp2", 4)["fsdp_config"]["fsdp_version"] == 2
    """
    return _COMMON | LAUNCHES[name] | {"num_processes": processes}


def launch(run: RunFile, command: str, argv: Sequence[str]) -> int:
    """Launch the processes that the run asks for, with this command; returns the launcher's exit code.

    Example:
        argv = ["run.yaml", "--launch", "fsdp2"]
        launch(RunFile.read(argv, build=False), "train", argv)
    """
    on_cpu = bool(run.config.use_cpu)
    name, file = check_launch(run)
    processes = run.launching.nproc or (1 if run.launching.accelerate_config == "single_gpu" else None)
    further = list(run.accelerate)
    if on_cpu:
        processes, further = _on_cpu(processes, further)
    if name is not None and processes is None and "--num_processes" not in further:
        processes = _gpus()
        if processes < 1:
            raise ConfigError("There is no GPU here: set the number of processes with --nproc.")
    program = ["-m", "gruppo", command, *_without_launching(argv)]
    with tempfile.TemporaryDirectory(prefix="gruppo-launch-") as folder:
        if name is not None:
            started = launch_command(name, processes, program, further, on_cpu=on_cpu, folder=Path(folder))
        else:
            configured = [] if file is None else ["--config_file", str(file)]
            counted = [] if processes is None else ["--num_processes", str(processes)]
            started = [*_ACCELERATE, *configured, *counted, *further, *program]
        return run_command(started, patience=run.config.stop_timeout)


_ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def check_launch(run: RunFile) -> tuple[str | None, Path | None]:
    """The name of the launch method, or an accelerate config file; raises for invalid or conflicting options.

    Example:
        check_launch(RunFile.read(["run.yaml", "--launch", "fsdp2"], build=False)) == ("fsdp2", None)
    """
    wanted = run.launching
    named_processes(run.accelerate)
    if wanted.nproc is not None and wanted.nproc < 1:
        raise ConfigError(f"--nproc {wanted.nproc} must be at least 1.")
    if wanted.nproc is not None and not (wanted.launch or wanted.accelerate_config or run.accelerate):
        raise ConfigError(f"--nproc {wanted.nproc} needs --launch, which sets how the processes share the work.")
    name, file = way_to_launch(wanted)
    if name is not None and run.config.use_cpu:
        _refuse_shards(name)
    return name, file


def _refuse_shards(name: str) -> None:
    """Raise for sharded weights on CPUs: accelerate supports only data parallelism there."""
    if name != "ddp":
        raise ConfigError(f"--launch {name} needs GPUs; with use_cpu: true use --launch ddp.")


def way_to_launch(launching: LaunchArguments) -> tuple[str | None, Path | None]:
    """The name of the launch method, or an accelerate config file."""
    asked, config = launching.launch, launching.accelerate_config
    if asked is not None and config is not None:
        raise ConfigError(f"--launch {asked} and --accelerate_config {config} both set how to launch; keep one.")
    if config is not None and Path(config).is_file():
        return None, Path(config)
    name = asked if config is None else ACCELERATE_NAMES.get(config, config)
    if name is not None and name not in LAUNCHES:
        old = " FSDP1 is not supported: use fsdp2." if name in ("fsdp", "fsdp1") else nearest(name, LAUNCHES)
        flag = "launch" if config is None else "accelerate_config"
        file = "" if config is None else ", nor a file"
        raise ConfigError(f"--{flag} {name} is not one of {', '.join(LAUNCHES)}{file}.{old}")
    return name, None


def _on_cpu(processes: int | None, further: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number of processes and the other options, of which none is allowed: torchrun launches on CPUs."""
    processes, rest, strings = processes or named_processes(further), [], iter(further)
    for string in strings:
        if string == "--num_processes":
            next(strings)
        else:
            rest.append(string)
    if rest:
        raise ConfigError(f"{' '.join(rest)}: accelerate's launcher is not used with use_cpu: true. Leave these out.")
    return processes, rest


def launch_command(
    name: str,
    processes: int | None,
    program: Sequence[str],
    further: Sequence[str] = (),
    *,
    on_cpu: bool,
    folder: Path,
) -> list[str]:
    """The command that starts the processes; its config is written into `folder`.

    Example:
        launch_command("ddp", 2, ["-m", "gruppo", "train", "run.yaml"], on_cpu=True, folder=folder)
    """
    if on_cpu:  # accelerate starts several processes on CPUs only through MPI
        _refuse_shards(name)
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [sys.executable, "-m", *torchrun, *program]
    path = folder / f"{name}.yaml"
    config = launch_config(name) if processes is None else launch_config(name, processes)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [*_ACCELERATE, "--config_file", str(path), *further, *program]


def _without_launching(argv: Sequence[str]) -> list[str]:
    """The arguments for a launched process: those of the command without the launch options."""
    flags = {f"--{name}": False for name in ("launch", "nproc", "accelerate_config")}
    known = flags | {f"--{name}": bare for name, bare in accelerate_options().items()}
    for own in ("--debug", "--gradient_accumulation_steps", "--env"):  # also options of the training commands
        known.pop(own, None)
    rest, strings = [], iter(argv)
    for string in strings:
        flag = "--" + string.partition("=")[0].lstrip("-").replace("-", "_")
        if not string.startswith("--") or flag not in known:
            rest.append(string)
        elif not known[flag] and "=" not in string:
            next(strings, None)
    return rest


def run_command(command: Sequence[str], patience: float | None = None) -> int:
    """Run a launcher to its end, and forward SIGTERM to it; returns its exit code.

    After the signal the launcher kills processes that do not end, but not before `patience` seconds have passed.
    SIGINT comes from a terminal, which sends it to the launcher as well, so it is ignored here.
    """
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: Any) -> None:
        if process is None:
            raise SystemExit(128 + number)
        process.send_signal(number)

    seconds = 24 * 3600 if patience is None else math.ceil(patience) + 60
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds), **os.environ, "GRUPPO_LAUNCHED": "1"}
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on)}
    try:
        process = subprocess.Popen(command, env=environment)
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # not earlier: it would be inherited
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


@contextmanager
def last_words() -> Iterator[Path]:
    """A file for the error message of the first process that fails; the launcher's own output would bury it.

    Example:
        with last_words() as path:
            code = launch(run, "train", argv)
            said = path.read_text() if path.exists() else ""
    """
    with tempfile.TemporaryDirectory(prefix="gruppo-words-") as folder:
        path = Path(folder) / "first"
        os.environ[WORDS] = str(path)
        try:
            yield path
        finally:
            del os.environ[WORDS]


def keep_words(text: str) -> None:
    """In a launched process: store its error message for the launching process, unless another was first."""
    path = os.environ.get(WORDS)
    if path is not None and Path(path).parent.is_dir():
        with suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            file.write(text)


def has_words() -> bool:
    """Whether a process of this launch has failed."""
    return Path(os.environ.get(WORDS) or os.devnull).is_file()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
