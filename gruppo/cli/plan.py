"""`gruppo plan`: memory and seconds of a run before it is started, with the arithmetic shown.

  gruppo plan run.yaml --device H100                        # a file of `gruppo train`
  gruppo plan --model qwen2-1.5b --device H200 --per-device-train-batch-size 64 --max-completion-length 512
  gruppo plan --model ./folder --device "RTX 4090" --dtype bfloat16 --lora-r 16 --prompt-tokens 800
  gruppo plan --model qwen2-7b --device H100 --gpus 8 --launch fsdp2 --json

The model is a public shape (qwen2-1.5b, llama3-8b, …), a folder with a config.json, or a name on the hub; its weights
are never read. Any field of GRPOConfig is an option. Completions are taken to be as long as they may be, unless
--mean-completion-length says otherwise.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gruppo.cli.plan_report import Forecast, print_forecast
from gruppo.cli.planning import PROMPT_TOKENS, Asked
from gruppo.cli.recipe import Run
from gruppo.config.hints import nearest
from gruppo.errors import ConfigError
from gruppo.plan import DEVICES, Device, find_device, free_memory
from gruppo.plan.job import SHARDINGS, Job
from gruppo.plan.measured import MEASURED


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="gruppo plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("recipe", nargs="?", type=Path, metavar="RUN.YAML", help="a file of `gruppo train`")
    found.add_argument("--model", help="instead of a file, or over it: a shape, a folder, or a name on the hub")
    found.add_argument("--device", help="name of the GPU, or cpu (default: the one here)")
    found.add_argument("--gpus", type=int, metavar="N", help="processes (default: what the file says, or 1)")
    found.add_argument("--launch", choices=SHARDINGS[1:], help="how they share the work (default: ddp)")
    found.add_argument("--prompt-tokens", type=int, metavar="N", help=f"of a long prompt (default: {PROMPT_TOKENS})")
    found.add_argument("--mean-completion-length", type=int, metavar="N", help="for seconds (default: the longest)")
    dtypes = ("float32", "bfloat16", "float16")
    found.add_argument("--dtype", choices=dtypes, help="of the weights (default: the file's, or float32)")
    found.add_argument("--lora-r", type=int, metavar="R", help="train an adapter of this rank")
    found.add_argument("--lora-targets", nargs="+", metavar="NAME", help="projections that have one (default: all)")
    found.add_argument("--load-in-4bit", action="store_true", help="quantised layers, with --lora-r")
    found.add_argument("--load-in-8bit", action="store_true", help="the same in 8 bits")
    for name, unit in (("tflops", "TFLOP/s of matrix products"), ("bandwidth", "TB/s"), ("memory", "GiB")):
        found.add_argument(f"--{name}", type=float, help=f"of a device that is not in the table, or over it: {unit}")
    found.add_argument("--threads", type=int, help="of a CPU (default: its cores)")
    found.add_argument("--json", action="store_true", help="print numbers instead of tables")
    return found


# ---- the device


def find_one(options: argparse.Namespace, *, on_cpu: bool) -> Device:
    """The device that was named, or the one that is here; with what was said over the table."""
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
            "another one say --tflops, --bandwidth (TB/s) and --memory (GiB)."
        )
    return dataclasses.replace(device or Device(name, 1, 1, 1, 1), **given)


def cpu(memory: float | None = None) -> Device:
    """One thread of a CPU as it was measured, with the main memory that is free here."""
    import torch

    speed, free = MEASURED["cpu"]["tflops_per_thread"], free_memory(torch.device("cpu")) / 2**30
    return Device("CPU", speed, speed, MEASURED["cpu"]["bandwidth"], memory or round(free, 1), kind="cpu")


def _device_here() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here: say which one to plan for with --device, or --device cpu.")
    return torch.cuda.get_device_name()


# ---- the run


def take_fields(argv: Sequence[str], own: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without those that are no options of this command, and these as fields of a config.

    Example:
        take_fields(["run.yaml", "--beta", "0.04"], {"--model"}) == (["run.yaml"], {"beta": 0.04})
    """
    kept: list[str] = []
    fields: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        option, sign, value = rest[0].partition("=")
        if not option.startswith("--") or option in own:
            kept.append(rest.pop(0))
            continue
        rest.pop(0)
        if not sign:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        fields[option.removeprefix("--").replace("-", "_")] = _value(value)
    return kept, fields


def _value(text: str) -> Any:
    """A value as YAML has it, and 1e-5 as a number, which YAML takes for text."""
    value = yaml.safe_load(text)
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def forecast_here(run: Run, prompt_tokens: int | None = None) -> Forecast | None:
    """The forecast of a run on the device that is here; None if it wants a GPU and none, or an unknown one, is."""
    asked = Asked.of_run(run)
    if asked.on_cpu:
        return forecast_on(cpu(), run, prompt_tokens)
    import torch

    device = find_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if device is None else forecast_on(device, run, prompt_tokens)


def forecast_on(device: Device, run: Run, prompt_tokens: int | None = None) -> Forecast:
    """The forecast of a run that was read.

    Example:
        run = Run.of_another_machine(["recipes/grpo.yaml"])
        print("\\n".join(forecast_on(DEVICES["H100"], run, prompt_tokens=512).lines()))
    """
    asked = Asked.of_run(run)
    tokens = prompt_tokens or asked.args.max_prompt_length or PROMPT_TOKENS
    return Forecast(asked.job(device, prompt_tokens=tokens, threads=os.cpu_count() or 1))


def _read(options: argparse.Namespace, fields: Mapping[str, Any]) -> Run:
    """The run of a file with fields over it, as it will be where it is started."""
    strings = [str(options.recipe), *(part for name, value in fields.items() for part in (f"--{name}", str(value)))]
    if options.gpus is not None:
        strings += ["--nproc", str(options.gpus), "--launch", options.launch or "ddp"]
    return Run.of_another_machine(strings, "plan")


def read_job(options: argparse.Namespace, fields: Mapping[str, Any]) -> Job:
    """The job that a command line describes: options of this command, and fields of the run's config."""
    for name in (
        "gpus",
        "prompt_tokens",
        "mean_completion_length",
        "lora_r",
        "tflops",
        "bandwidth",
        "memory",
        "threads",
    ):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be positive.")
    known: dict[str, Any] = {"processes": options.gpus or 1, "options": frozenset(vars(options))}
    if options.recipe is not None:
        asked = Asked.of_run(_read(options, fields))
    elif options.model is not None:
        asked = Asked.of_settings(options.model, fields, **known)
    else:
        raise ConfigError("Say what to plan: a file of `gruppo train`, or --model with a shape, a folder or a name.")
    loading = dict(asked.loading)
    if options.dtype:
        loading["dtype"] = options.dtype
    if options.load_in_4bit or options.load_in_8bit:
        loading["quantization_config"] = {"load_in_4bit": options.load_in_4bit, "load_in_8bit": options.load_in_8bit}
    peft = {"r": options.lora_r, "target_modules": options.lora_targets or "all-linear"} if options.lora_r else None
    asked = dataclasses.replace(
        asked,
        model=options.model or asked.model,
        loading=loading,
        peft=peft or asked.peft,
        launch=options.launch or asked.launch,
    )
    return asked.job(
        find_one(options, on_cpu=asked.on_cpu),
        prompt_tokens=options.prompt_tokens or asked.args.max_prompt_length or PROMPT_TOKENS,
        mean_completion_tokens=options.mean_completion_length,
        threads=options.threads or os.cpu_count() or 1,
    )


def main(argv: Sequence[str] | None = None) -> int:
    own = parser()
    rest, fields = take_fields(sys.argv[2:] if argv is None else argv, own._option_string_actions)
    options = own.parse_args(rest)
    job = read_job(options, fields)
    said = options.prompt_tokens is not None
    assumed = f"prompts of {job.prompt_tokens} tokens are assumed: --prompt-tokens says how long they are"
    forecast = Forecast(job, () if said else (assumed,))
    if options.json:
        print(json.dumps(forecast.to_dict(), indent=1))
    else:
        print_forecast(forecast)
    return 0 if forecast.memory.fits else 1
