"""`gruppo plan`: estimate the memory and time of a run before it starts, with the arithmetic shown.

  gruppo plan run.yaml --device H100                        # a file for `gruppo train`
  gruppo plan --model qwen2-1.5b --device H200 --per-device-train-batch-size 64 --max-completion-length 512
  gruppo plan --model ./folder --device "RTX 4090" --dtype bfloat16 --lora-r 16 --prompt-tokens 800
  gruppo plan --model qwen2-7b --device H100 --gpus 8 --launch fsdp2 --json

The model is a public shape (qwen2-1.5b, llama3-8b, …), a folder with a config.json, or a name on the hub; its weights
are never read. Any field of GRPOConfig is an option, as for `gruppo train`; a file is the first argument. Completions
are assumed to have the maximum length, unless --mean-completion-length is set.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gruppo.cli.options import CommandParser
from gruppo.cli.parser import read_yaml
from gruppo.cli.plan_job import PROMPT_TOKENS, Asked
from gruppo.cli.plan_report import Forecast, print_forecast
from gruppo.cli.recipe import TRAINERS, RunFile, accelerate_options, make_parser, take_help, with_recipe
from gruppo.config.hints import RENAMED, nearest
from gruppo.errors import ConfigError
from gruppo.plan import DEVICES, Device, find_device, free_memory
from gruppo.plan.job import SHARDINGS, Job
from gruppo.plan.measured import MEASURED

USAGE = "gruppo plan [RUN.YAML] [--model MODEL] [--device NAME] [--gpus N] [--key value …]"


class PlanParser(CommandParser):
    """A parser whose options can be written with dashes or underscores."""

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        spelled = [f"--{name[2:].replace('-', '_')}" for name in names if name.startswith("--")]
        return super().add_argument(*dict.fromkeys([*names, *spelled]), **kwargs)


def parser() -> PlanParser:
    found = PlanParser(prog="gruppo plan", usage=USAGE, description=__doc__)
    found.add_argument(
        "--config", metavar="RUN.YAML", help="a file for `gruppo train`; may also be the first argument"
    )
    model = ("--model", "--model-name-or-path")
    found.add_argument(*model, help="a shape, a folder, or a name on the hub (default: the file's)")
    found.add_argument("--device", help="name of the GPU, or cpu (default: that of this machine)")
    found.add_argument("--gpus", "--nproc", type=int, metavar="N", help="processes (default: the file's, or 1)")
    found.add_argument(
        "--launch", choices=SHARDINGS[1:], help="how the processes share the work (default: the file's, or ddp)"
    )
    found.add_argument(
        "--prompt-tokens", type=int, metavar="N", help=f"length of a long prompt (default: {PROMPT_TOKENS})"
    )
    found.add_argument(
        "--mean-completion-length", type=int, metavar="N", help="for the time estimate (default: the maximum)"
    )
    dtypes = ("float32", "bfloat16", "float16")
    found.add_argument("--dtype", choices=dtypes, help="dtype of the weights (default: the file's, or float32)")
    found.add_argument("--lora-r", type=int, metavar="R", help="train an adapter of this rank")
    targets = ("--lora-targets", "--lora-target-modules")
    found.add_argument(*targets, nargs="+", metavar="NAME", help="projections with an adapter (default: all)")
    found.add_argument("--load-in-4bit", action="store_true", help="quantise the layers to 4 bits, with --lora-r")
    found.add_argument("--load-in-8bit", action="store_true", help="quantise the layers to 8 bits, with --lora-r")
    for name, unit in (("tflops", "TFLOP/s of matrix products"), ("bandwidth", "TB/s"), ("memory", "GiB")):
        found.add_argument(
            f"--{name}", type=float, help=f"of a device that is not in the table, or to override it: {unit}"
        )
    found.add_argument("--threads", type=int, help="threads of a CPU (default: its cores)")
    found.add_argument("--json", action="store_true", help="print numbers instead of tables")
    return found


# ---- the device


def find_one(options: argparse.Namespace, *, on_cpu: bool) -> Device:
    """The named device, or this machine's; options such as --memory override the values of the table."""
    name = "cpu" if options.device is None and on_cpu else options.device or _device_here()
    given = {"halves": options.tflops, "singles": options.tflops, "bandwidth": options.bandwidth}
    given |= {"memory": options.memory}
    given = {key: value for key, value in given.items() if value is not None}
    if name.lower() == "cpu":
        return dataclasses.replace(cpu(options.memory), **given)
    device = find_device(name)
    if device is None and len(given) < 4:
        raise ConfigError(
            f"The device {name!r} is not in the table ({', '.join(DEVICES)}).{nearest(name.upper(), DEVICES)} For "
            "another one set --tflops, --bandwidth (TB/s) and --memory (GiB)."
        )
    return dataclasses.replace(device or Device(name, 1, 1, 1, 1), **given)


def cpu(memory: float | None = None) -> Device:
    """A CPU device with the measured speed of one thread, and the free main memory of this machine."""
    import torch

    speed, free = MEASURED["cpu"]["tflops_per_thread"], free_memory(torch.device("cpu")) / 2**30
    return Device("CPU", speed, speed, MEASURED["cpu"]["bandwidth"], memory or round(free, 1), kind="cpu")


def _device_here() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here: name the one to plan for with --device, or use --device cpu.")
    return torch.cuda.get_device_name()


# ---- the run


def forecast_here(run: RunFile, prompt_tokens: int | None = None) -> Forecast | None:
    """The forecast of a run on this machine; None if it needs a GPU and there is no GPU, or an unknown one."""
    asked = Asked.of_run(run)
    if asked.on_cpu:
        return forecast_on(cpu(), run, prompt_tokens)
    import torch

    device = find_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if device is None else forecast_on(device, run, prompt_tokens)


def forecast_on(device: Device, run: RunFile, prompt_tokens: int | None = None) -> Forecast:
    """The forecast of a run on a device.

    Example:
        run = RunFile.of_another_machine(["recipes/grpo.yaml"])
        print("\\n".join(forecast_on(DEVICES["H100"], run, prompt_tokens=512).lines()))
    """
    asked = Asked.of_run(run)
    tokens = prompt_tokens or asked.args.max_prompt_length or PROMPT_TOKENS
    return Forecast(asked.job(device, prompt_tokens=tokens, threads=os.cpu_count() or 1))


def _read(options: argparse.Namespace, fields: Sequence[str]) -> RunFile:
    """Read the run from a file or from fields alone, as it will be on the machine where it is launched."""
    strings = list(fields)
    if options.config is not None:
        strings = [options.config, *strings]
    else:  # a forecast needs neither prompts nor rewards
        given = {_plain(string) for string in fields}
        for names in (("--dataset", "--dataset_name"), ("--reward", "--rewards", "--reward_funcs"), ("--output_dir",)):
            strings += [] if given & set(names) else [names[0], "unsaid"]
    if options.model is not None:
        strings += ["--model", options.model]
    if options.gpus is not None:
        strings += ["--nproc", str(options.gpus)]
    return RunFile.of_another_machine(strings, "plan")


def _plain(string: str) -> str:
    """`--top-p=0.9` as `--top_p`."""
    return "--" + string.partition("=")[0][2:].replace("-", "_")


def _refuse_unknown(fields: Sequence[str], own: CommandParser) -> None:
    """Raise for a flag that neither this command nor a run has, and suggest the nearest of both."""
    given = [string.partition("=")[0] for string in fields if string.startswith("--")]
    if not given:
        return
    known = {"--trainer"} | {flag for name in TRAINERS for flag in make_parser(name, "plan")._option_string_actions}
    unknown = [flag for flag in given if _plain(flag) not in known and flag not in known]
    if unknown := [flag for flag in unknown if _plain(flag)[2:] not in {*RENAMED, *accelerate_options()}]:
        close = nearest(_plain(unknown[0]), known | {_plain(flag) for flag in own._option_string_actions})
        raise ConfigError(f"`{unknown[0]}` is neither a field of a run nor an option of this command.{close}")


def _check(options: argparse.Namespace, fields: Sequence[str]) -> None:
    """Validate this command's own options, before any slow import."""
    sizes = ("gpus", "prompt_tokens", "mean_completion_length", "lora_r")
    for name in (*sizes, "tflops", "bandwidth", "memory", "threads"):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be positive.")
    if options.config is None and options.model is None:
        raise ConfigError("Name what to plan: a file for `gruppo train`, or --model with a shape, a folder or a name.")
    if not _speaks_of_cpu(options, fields):
        find_one(options, on_cpu=False)


def _speaks_of_cpu(options: argparse.Namespace, fields: Sequence[str]) -> bool:
    """Whether the device may turn out to be a CPU, which is known only once the run is read."""
    if options.device is not None:
        return False
    in_file = {} if options.config is None else read_yaml(Path(options.config))
    return "use_cpu" in in_file or "--use_cpu" in map(_plain, fields)


def _with_options(asked: Asked, options: argparse.Namespace) -> Asked:
    """The run's settings, overridden by the options of this command."""
    loading = dict(asked.loading)
    if options.dtype:
        loading["dtype"] = options.dtype
    if options.load_in_4bit or options.load_in_8bit:
        loading["quantization_config"] = {"load_in_4bit": options.load_in_4bit, "load_in_8bit": options.load_in_8bit}
    peft = None if asked.peft is None else dict(asked.peft)
    if options.lora_r:
        peft = {"target_modules": "all-linear"} | (peft or {}) | {"r": options.lora_r}
    if options.lora_targets:
        if peft is None:
            raise ConfigError("--lora-targets needs an adapter: set its rank with --lora-r.")
        peft["target_modules"] = options.lora_targets
    longest, mean = asked.args.max_completion_length, options.mean_completion_length
    if mean is not None and mean > longest:
        raise ConfigError(f"--mean-completion-length {mean} is more than max_completion_length, {longest}.")
    return dataclasses.replace(asked, loading=loading, peft=peft, launch=options.launch or asked.launch)


def read_job(options: argparse.Namespace, fields: Sequence[str] = ()) -> Job:
    """The job that a command line describes: options of this command, and strings for the run.

    Example:
        read_job(*parser().parse_known_args(["--model", "qwen2-1.5b", "--device", "H200", "--beta", "0.04"]))
    """
    _check(options, fields)
    _refuse_unknown(fields, parser())
    asked = _with_options(Asked.of_run(_read(options, fields)), options)
    return asked.job(
        find_one(options, on_cpu=asked.on_cpu),
        prompt_tokens=options.prompt_tokens or asked.args.max_prompt_length or PROMPT_TOKENS,
        mean_completion_tokens=options.mean_completion_length,
        threads=options.threads or os.cpu_count() or 1,
    )


def main(argv: Sequence[str] | None = None) -> int:
    _, argv = take_help(sys.argv[2:] if argv is None else argv, "plan")
    options, fields = parser().parse_known_args(with_recipe(argv))
    job = read_job(options, fields)
    assumed = []
    if options.prompt_tokens is None:
        assumed.append(f"prompts of {job.prompt_tokens} tokens are assumed: set their length with --prompt-tokens")
    if job.processes == 1 and job.sharding.startswith(("fsdp", "zero")) and options.gpus is None:
        assumed.append(f"one process is assumed, so {job.sharding} shards nothing: set the number with --gpus")
    forecast = Forecast(job, tuple(assumed))
    if options.json:
        print(json.dumps(forecast.to_dict(), indent=1))
    else:
        print_forecast(forecast)
    return 0 if forecast.memory.fits else 1
