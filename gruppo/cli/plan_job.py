"""Convert the settings of a run to the job of a forecast."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gruppo.cli.recipe import RunFile
from gruppo.cli.sharing import sharing_of
from gruppo.config.hints import nearest
from gruppo.errors import ConfigError
from gruppo.plan import Device
from gruppo.plan.job import Adapter, Job, Model
from gruppo.plan.presets import PRESETS, preset

PROMPT_TOKENS = 256  # if neither an option nor max_prompt_length gives it
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
# The modules that peft adapts in common decoders if a config names no targets.
_USUAL_TARGETS = ("q_proj", "v_proj")


def find_model(name: str, *, trust_remote_code: bool = False) -> tuple[Model, Any]:
    """The model for the name of a preset shape, a folder or a hub id, and its config (None for a shape).

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
            f"model={name!r} is not a shape ({', '.join(PRESETS)}), a folder with a config.json, or a model that can "
            f"be loaded from the hub: {str(error).splitlines()[0]}{close}"
        ) from error
    try:
        return read_model(config, name), config
    except ValueError as error:
        raise ConfigError(f"model={name!r} cannot be planned: {error}.") from error


def make_job(
    model: Model,
    device: Device,
    args: Any,
    *,
    dtype: str = "float32",
    autocast: bool = True,
    adapter: Adapter | None = None,
    bits: int | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    mean_completion_tokens: int | None = None,
    processes: int = 1,
    sharding: str = "none",
    threads: int = 1,
) -> Job:
    """The job of a forecast, from the settings of a run.

    `args` is the config of one process of the run, so its world_size is the number of processes.
    """
    sampler = "transformers" if args.rollout_backend == "transformers" else "builtin"
    if args.samples_with_vllm:
        sampler = f"vllm {args.vllm_mode}"
    corrects = bool(args.samples_with_vllm and args.vllm_importance_sampling_correction)
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
    """The LoRA adapter that a file's `peft` describes."""
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


@dataclass(frozen=True)
class Asked:
    """The settings of a run that a forecast needs."""

    model: str
    args: Any  # its config
    micro_batch_rows: int
    loading: Mapping[str, Any]  # model_init_kwargs
    peft: Mapping[str, Any] | None = None
    autocast: bool = True
    on_cpu: bool = False
    processes: int = 1
    launch: str | None = None

    @classmethod
    def of_config(
        cls, model: str, args: Any, *, peft: Mapping[str, Any] | None = None, launch: str | None = None
    ) -> "Asked":
        """From the config of one process of a run; its world_size is the number of processes.

        Example:
            Asked.of_config("qwen2-1.5b", GRPOConfig("run")).job(DEVICES["H100"])
        """
        return cls(
            model,
            args,
            micro_batch_rows=args.per_device_train_batch_size,
            loading=args.model_init_kwargs or {},
            peft=peft,
            autocast=bool(args.bf16 or args.fp16),
            on_cpu=bool(args.use_cpu),
            processes=args.world_size,
            launch=launch,
        )

    @classmethod
    def of_run(cls, run: RunFile) -> "Asked":
        """From a run that was read with its number of processes, so that a file is interpreted in one place only."""
        model, how = run.model_args, sharing_of(run.launching, run.accelerate)
        lora = {"r": model.lora_r, "target_modules": model.lora_target_modules} if model.use_peft else None
        asked = cls.of_config(run.model, run.config, peft=run.script.peft or lora, launch=how.launch)
        bits = {"load_in_4bit": model.load_in_4bit, "load_in_8bit": model.load_in_8bit}
        quantised = {"quantization_config": bits} if any(bits.values()) else {}
        return replace(asked, loading={**asked.loading, **quantised})

    def job(self, device: Device, **known: Any) -> Job:
        """The job on a device; `known` are further arguments of `make_job`."""
        model, config = find_model(self.model, trust_remote_code=self.args.trust_remote_code)
        bits, adapter = _bits(self.loading), find_adapter(self.peft, model)
        if bits is not None and adapter is None:
            raise ConfigError(
                f"Weights in {bits} bits cannot be trained: train an adapter with --lora-r, or do not quantise."
            )
        return make_job(
            model,
            device,
            self.args,
            dtype=_dtype(self.loading, config),
            autocast=self.autocast,
            adapter=adapter,
            bits=bits,
            processes=self.processes,
            sharding=self.launch or ("none" if self.processes == 1 else "ddp"),
            **known,
        ).with_(micro_batch_rows=self.micro_batch_rows)
