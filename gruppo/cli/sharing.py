"""How the processes of a run share the work and how many there are, from every place that can specify it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gruppo.cli.arguments import LaunchArguments
from gruppo.cli.parser import read_yaml
from gruppo.cli.recipe import named_processes
from gruppo.errors import ConfigError

__all__ = ["Sharing", "sharing_of"]

_TRUE = ("true", "1", "yes")


class Sharing(NamedTuple):
    """What a run specifies about its processes; None for what it does not specify."""

    launch: str | None  # ddp, fsdp2, zero1, zero2 or zero3
    processes: int | None  # on all machines; the GPUs of this machine are not counted


def sharing_of(launching: LaunchArguments, accelerate: Sequence[str] = ()) -> Sharing:
    """From `launch` and `nproc`, from `accelerate_config`, which is a name or a file, and from accelerate's options.

    Options override the file, as in accelerate.

    Example:
        sharing_of(LaunchArguments(accelerate_config="zero3"), ["--num_processes", "8"]) == Sharing("zero3", 8)
    """
    from gruppo.cli.launching import way_to_launch

    name, file = way_to_launch(launching)
    said = {} if file is None else _of_file(file)
    said |= _of_options(accelerate)
    counted = named_processes(accelerate) or _number("num_processes", said.get("num_processes"))
    if launching.accelerate_config == "single_gpu":
        counted = 1
    processes = launching.nproc if launching.nproc is not None else counted
    return Sharing(name or _launch(said), processes)


def _of_file(path: Path) -> dict[str, Any]:
    """The settings of an accelerate config file, under the names of accelerate's options."""
    values = read_yaml(path)
    parts = [values.get(name) for name in ("fsdp_config", "deepspeed_config")]
    kind = str(values.get("distributed_type", "NO")).upper()
    said = {name: value for part in parts if isinstance(part, Mapping) for name, value in part.items()}
    said |= {"use_fsdp": kind == "FSDP", "use_deepspeed": kind == "DEEPSPEED", "multi_gpu": kind.startswith("MULTI_")}
    return said | {name: values[name] for name in ("num_processes",) if name in values}


def _of_options(strings: Sequence[str]) -> dict[str, Any]:
    """`--name value` and bare flags as a mapping."""
    said: dict[str, Any] = {}
    for place, string in enumerate(strings):
        if string.startswith("--"):
            following = strings[place + 1] if place + 1 < len(strings) else "--"
            said[string[2:]] = True if following.startswith("--") else following
    return said


def _launch(said: Mapping[str, Any]) -> str | None:
    """The launch method that accelerate's settings describe."""
    if _is_true(said.get("use_deepspeed")):
        stage = _number("zero_stage", said.get("zero_stage"))
        if said.get("deepspeed_config_file"):
            stage = _stage_of_file(Path(said["deepspeed_config_file"]))
        stage = 2 if stage is None else stage  # accelerate's default
        return f"zero{stage}" if stage in (1, 2, 3) else "ddp"
    if _is_true(said.get("use_fsdp")):
        if _number("fsdp_version", said.get("fsdp_version", 1)) != 2:
            raise ConfigError("FSDP1 is not supported: set `fsdp_version: 2` in the accelerate config.")
        return "fsdp2"
    return "ddp" if _is_true(said.get("multi_gpu")) else None


def _stage_of_file(path: Path) -> int | None:
    """The ZeRO stage of a DeepSpeed config file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return _number("stage", values.get("zero_optimization", {}).get("stage", 0))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"deepspeed_config_file {path} cannot be read: {error}") from error


def _is_true(value: Any) -> bool:
    return str(value).lower() in _TRUE


def _number(name: str, value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={value!r} must be a whole number.") from error
