"""`gruppo plan`: memory and seconds of a run before it is started, with the arithmetic shown.

    gruppo plan run.yaml --device H100                        # a file of `gruppo train`
    gruppo plan --model qwen2-1.5b --device H200 --num-generations 16 --max-completion-length 512
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
from gruppo.cli.train import LAUNCHES, TRAINERS, Run, _number
from gruppo.config.hints import nearest
from gruppo.errors import ConfigError
from gruppo.plan import DEVICES, Device, find_device, free_memory
from gruppo.plan.job import Adapter, Job, Model
from gruppo.plan.measured import MEASURED
from gruppo.plan.presets import PRESETS, preset

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROMPT_TOKENS = 256  # where nobody says
# What peft adapts of the usual decoders if a config names no targets.
_USUAL_TARGETS = ("q_proj", "v_proj")


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
    found.add_argument("--gpus", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    found.add_argument("--launch", choices=LAUNCHES, help="how they share the work (default: ddp)")
    found.add_argument("--prompt-tokens", type=int, metavar="N", help=f"of a long prompt (default: {_PROMPT_TOKENS})")
    found.add_argument("--mean-completion-length", type=int, metavar="N", help="for seconds (default: the longest)")
    found.add_argument("--dtype", choices=_WIDTHS, help="of the weights (default: the file's, or float32)")
    found.add_argument("--lora-r", type=int, metavar="R", help="train an adapter of this rank")
    found.add_argument("--lora-targets", nargs="+", metavar="NAME", help="projections that have one (default: all)")
    found.add_argument("--load-in-4bit", action="store_true", help="quantised layers, with --lora-r")
    found.add_argument("--load-in-8bit", action="store_true", help="the same in 8 bits")
    for name, unit in (("tflops", "TFLOP/s of matrix products"), ("bandwidth", "TB/s"), ("memory", "GiB")):
        found.add_argument(f"--{name}", type=float, help=f"of a device that is not in the table, or over it: {unit}")
    found.add_argument("--threads", type=int, help="of a CPU (default: its cores)")
    found.add_argument("--json", action="store_true", help="print numbers instead of tables")
    return found


# ---- the model


def find_model(name: str, *, trust_remote_code: bool = False) -> tuple[Model, Any]:
    """A model's numbers by the name of a shape, a folder or a hub id, and its config (None for a shape).

    Example:
        find_model("qwen2-1.5b")[0].weights == 1_543_714_304
    """
    if name in PRESETS:
        return preset(name), None
    from transformers import AutoConfig

    from gruppo.plan.reading import read_model

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        close = nearest(name, PRESETS)
        raise ConfigError(
            f"model={name!r} is no shape ({', '.join(PRESETS)}), no folder with a config.json, and no model that can "
            f"be had from the hub: {str(error).splitlines()[0]}{close}"
        ) from error
    try:
        return read_model(config, name), config
    except ValueError as error:
        raise ConfigError(f"model={name!r} cannot be planned with: {error}.") from error


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


def read_recipe(path: Path) -> Run:
    """The run of a file; the one place that knows how files are read."""
    return Run.read(path)


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
        fields[option.removeprefix("--").replace("-", "_")] = _number(yaml.safe_load(value))
    return kept, fields


def planning_config(settings: Mapping[str, Any], trainer: str, processes: int) -> Any:
    """The config of a run on so many processes, as one that can be made here, where there may be none of its devices.

    Precision is left out, which a config checks against the devices that are here, and all processes' completions are
    those of one.
    """
    import gruppo

    config_class = getattr(gruppo, TRAINERS[trainer][1])
    known = {field.name for field in dataclasses.fields(config_class)}
    if unknown := [name for name in settings if name not in known]:
        own = {action.dest for action in parser()._actions}
        raise ConfigError(
            f"`{unknown[0]}` is no field of {config_class.__name__} and no option of this command."
            f"{nearest(unknown[0], known | own)}"
        )
    left_out = ("bf16", "fp16", "tf32", "use_cpu", "deepspeed", "fsdp", "fsdp_config", "output_dir")
    kept = {key: value for key, value in settings.items() if key not in left_out}
    kept["per_device_train_batch_size"] = processes * kept.get("per_device_train_batch_size", 8)
    return config_class(**{"output_dir": "unused", "report_to": "none", **kept, "use_cpu": True, "bf16": False})


def make_job(
    model: Model,
    device: Device,
    args: Any,
    *,
    dtype: str = "float32",
    autocast: bool = True,
    adapter: Adapter | None = None,
    bits: int | None = None,
    prompt_tokens: int = _PROMPT_TOKENS,
    mean_completion_tokens: int | None = None,
    processes: int = 1,
    sharding: str = "none",
    threads: int = 1,
) -> Job:
    """What a forecast needs to know of a run.

    `args` is a config whose batch is that of all processes, as `planning_config` makes it.
    """
    sampler = "transformers" if args.rollout_backend == "transformers" else "builtin"
    if args.samples_with_vllm:
        sampler = f"vllm {args.vllm_mode}"
    corrects = args.samples_with_vllm and getattr(args, "vllm_importance_sampling_correction", False)
    updates = max(args.micro_steps_per_generation // args.num_iterations // args.gradient_accumulation_steps, 1)
    return Job(
        model,
        device,
        rows=max(args.generation_batch_size // processes, 1),
        generations=args.num_generations,
        prompt_tokens=prompt_tokens,
        completion_tokens=args.max_completion_length,
        mean_completion_tokens=mean_completion_tokens,
        weight_bytes=_WIDTHS[dtype],
        autocast=autocast,
        bits=bits,
        adapter=adapter,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        reference=args.beta != 0,
        old_logps=corrects or not args.rollouts_stay_on_policy,
        updates=updates,
        iterations=args.num_iterations,
        micro_batch_rows=max(args.per_device_train_batch_size // processes, 1),
        checkpointing=args.gradient_checkpointing,
        tokens=args.max_tokens_per_micro_batch,
        packed=args.packed_update,
        fused=args.fused_layers,
        filtered=bool(args.top_k) or args.top_p < 1 or bool(args.min_p),
        parity=args.parity_interval is not None,
        sampler=sampler,
        sampler_share=args.vllm_gpu_memory_utilization if sampler == "vllm colocate" else 0.0,
        sampler_sleeps=args.vllm_enable_sleep_mode,
        processes=processes,
        sharding=sharding,
        threads=threads,
    )


def find_adapter(peft: Mapping[str, Any] | None, model: Model) -> Adapter | None:
    """LoRA of a file's `peft`."""
    if peft is None:
        return None
    targets = peft.get("target_modules") or _USUAL_TARGETS
    names = model.projections if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
    if unknown := [name for name in names if name not in model.projections]:
        raise ConfigError(
            f"{model.name} has no projection {unknown[0]!r}; there are {', '.join(model.projections)}."
            f"{nearest(unknown[0], model.projections)}"
        )
    return Adapter(int(peft.get("r", 8)), frozenset(names))


def describe(
    model_config: Any,
    args: Any,
    device: Device,
    *,
    peft: Mapping[str, Any] | None = None,
    prompt_tokens: int = _PROMPT_TOKENS,
    name: str = "model",
) -> list[str]:
    """The plan of a run on this many processes in a few lines, from a transformers config and a GRPOConfig.

    Example:
        print("\\n".join(describe(AutoConfig.from_pretrained(folder), config, DEVICES["H100"], prompt_tokens=512)))
    """
    from gruppo.plan.reading import read_model

    model, loading = read_model(model_config, name), args.model_init_kwargs or {}
    job = make_job(
        model,
        device,
        args,
        dtype=_dtype(loading, model_config),
        autocast=bool(args.bf16 or args.fp16),
        adapter=find_adapter(peft, model),
        bits=_bits(loading),
        prompt_tokens=prompt_tokens,
        processes=args.world_size,
    )
    # A config knows its own process's part of the batch already.
    return Forecast(job.with_(micro_batch_rows=args.per_device_train_batch_size)).lines()


def _bits(loading: Mapping[str, Any]) -> int | None:
    asked = loading.get("quantization_config") or {}
    read = asked.get if isinstance(asked, Mapping) else lambda key: getattr(asked, key, False)
    return 4 if read("load_in_4bit") else 8 if read("load_in_8bit") else None


def _dtype(loading: Mapping[str, Any], config: Any) -> str:
    said = loading.get("dtype") or loading.get("torch_dtype") or "float32"
    name = str(getattr(config, "dtype", None) or "float32" if said == "auto" else said).removeprefix("torch.")
    if name not in _WIDTHS:
        raise ConfigError(f"dtype={name!r} is not one of {', '.join(_WIDTHS)}.{nearest(name, _WIDTHS)}")
    return name


def read_job(options: argparse.Namespace, fields: Mapping[str, Any]) -> Job:
    """The job that a command line describes: options of this command, and fields of the run's config."""
    run = None if options.recipe is None else read_recipe(options.recipe)
    if run is None and options.model is None:
        raise ConfigError("Say what to plan: a file of `gruppo train`, or --model with a shape, a folder or a name.")
    settings = {**(run.settings or {} if run is not None else {}), **fields}
    args = planning_config(settings, "grpo" if run is None else run.trainer, options.gpus)
    model, config = find_model(options.model or (run.model if run else ""), trust_remote_code=args.trust_remote_code)
    device = find_one(options, on_cpu=bool(settings.get("use_cpu")))
    peft = {"r": options.lora_r, "target_modules": options.lora_targets or "all-linear"} if options.lora_r else None
    adapter = find_adapter(peft or (run.peft if run else None), model)
    loading = dict(settings.get("model_init_kwargs") or {}) | ({"dtype": options.dtype} if options.dtype else {})
    bits = 4 if options.load_in_4bit else 8 if options.load_in_8bit else _bits(loading)
    if bits is not None and adapter is None:
        raise ConfigError(f"Weights in {bits} bits cannot be trained themselves: say --lora-r, or leave them whole.")
    on_cpu = device.kind == "cpu"
    asked = settings.get("bf16")
    autocast = bool(settings.get("fp16") or (not on_cpu or settings.get("use_cpu") if asked is None else asked))
    return make_job(
        model,
        device,
        args,
        dtype=_dtype(loading, config),
        autocast=autocast,
        adapter=adapter,
        bits=bits,
        prompt_tokens=options.prompt_tokens or args.max_prompt_length or _PROMPT_TOKENS,
        mean_completion_tokens=options.mean_completion_length,
        processes=options.gpus,
        sharding=options.launch or ("none" if options.gpus == 1 else "ddp"),
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
