"""Training with weights sharded over processes: how to sample from them, and what the processes must agree on.

find_sharding           how the weights are distributed
make_sharded_sampling   gathers all weights on every process for a rollout, or samples in lockstep
reject_together         rejects features in which only some processes sample if they must sample in lockstep
least_plan              the plan of an update that all processes can follow
"""

import logging
import os
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType, parse_flag_from_env

from gruppo.errors import ConfigError
from gruppo.plan import UpdatePlan, free_memory, plan_whole_weights, training_bytes
from gruppo.policy.loading import trained_vision_weights
from gruppo.policy.modes import looks_for_unused_weights, may_recompute_reentrantly
from gruppo.policy.quantised import is_quantised
from gruppo.policy.sharding import (
    REPLICATED,
    Sharding,
    WholeWeights,
    compute_dtype,
    describe,
    is_sharded,
    reduce_in_float32,
    sharding_of,
)
from gruppo.policy.unwrap import bare_model, dropouts, functional_dropouts, inner_model
from gruppo.rollout.select import ShardedSampling
from gruppo.trainer.processes.collectives import any_process, from_main

logger = logging.getLogger(__name__)

SAVES_WHOLE = "stage3_gather_16bit_weights_on_model_save"


def find_sharding(trainer: Any) -> Sharding:
    """How the weights are distributed over processes; raises if the settings do not work with sharded weights."""
    _reject_unused_engines(trainer)
    kind = sharding_of(trainer.accelerator)
    _reject_other_parallelism(trainer, kind)
    _warn_not_gathered(trainer, kind)
    if trainer.prompt_encoder.takes_images:
        _reject_images(trainer, kind)
    else:
        _reject_idle_vision(trainer)
    if not kind.is_sharded:
        _reject_search_for_unused(trainer)
        return kind
    if trainer.args.cast_lm_head_to_fp32:
        raise NotImplementedError(
            f"cast_lm_head_to_fp32=True is not available under {kind.value}, which gathers all weights in one dtype; "
            "set it to False."
        )
    if is_quantised(trainer.model):
        raise NotImplementedError(
            f"A quantised model is not available under {kind.value}: its weights cannot be gathered for sampling. "
            "Keep the whole model on every process (DDP), or load it without quantization_config."
        )
    if kind is Sharding.ZERO3:
        _save_whole_weights(trainer.accelerator)
    else:
        _reject_other_noise(trainer)
        if not (getattr(trainer.args, "fsdp_plugin_args", None) or {}).get("mixed_precision_policy"):
            reduce_in_float32(trainer.accelerator.state.fsdp_plugin)
    return kind


def _reject_images(trainer: Any, kind: Sharding) -> None:
    """Raise where a process without images would skip passes or sums of gradients that the others wait for."""
    is_deepspeed = trainer.accelerator.distributed_type is DistributedType.DEEPSPEED
    several, args = trainer.accelerator.num_processes > 1, trainer.args
    if kind.is_sharded or (is_deepspeed and several):
        where = kind.value if kind.is_sharded else "DeepSpeed with several processes"
        raise NotImplementedError(
            f"Prompts with images are not available under {where}: a process without images would skip passes or "
            "gradients that the others wait for. Keep the whole model on every process (DDP), or pass the tokenizer."
        )
    if several and may_recompute_reentrantly(trainer.model, args):
        raise NotImplementedError(
            "Gradient checkpointing with use_reentrant=True is not available for images on several processes: DDP "
            "would wait for gradients of a process without images. Use "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
    if several and args.ddp_find_unused_parameters is False:
        raise ConfigError(
            "ddp_find_unused_parameters=False is not available for images on several processes: DDP would wait for "
            "gradients of the vision weights from a process whose rows have no images. Leave it out."
        )


def _reject_idle_vision(trainer: Any) -> None:
    """Raise where DDP would wait for gradients of vision weights that text does not use."""
    model, processes = trainer.model, trainer.accelerator
    if (
        processes.distributed_type not in REPLICATED
        or processes.num_processes == 1
        or not trained_vision_weights(model)
    ):
        return
    if not looks_for_unused_weights(model, trainer.args):
        raise ConfigError(
            f"The {type(inner_model(model)).__name__} is trained on text, so its vision weights get no gradient, for "
            "which DDP would wait. Freeze them (requires_grad_(False)), train an adapter, or leave out "
            "use_reentrant=True and ddp_find_unused_parameters=False."
        )


def _reject_search_for_unused(trainer: Any) -> None:
    """Raise where DDP would search for weights without a gradient, which reentrant checkpoints do not allow."""
    args, processes = trainer.args, trainer.accelerator
    if processes.distributed_type not in REPLICATED or processes.num_processes == 1:
        return
    if args.ddp_find_unused_parameters and may_recompute_reentrantly(trainer.model, args):
        raise ConfigError(
            "ddp_find_unused_parameters=True cannot work with gradient checkpointing and use_reentrant=True. Leave "
            "the former out, or set gradient_checkpointing_kwargs={'use_reentrant': False}."
        )


def _reject_unused_engines(trainer: Any) -> None:
    """Raise if accelerate ignores the config of DeepSpeed or FSDP because of CPUs; it would train with DDP."""
    kind = trainer.accelerator.distributed_type
    fsdp = bool(getattr(trainer.args, "fsdp_plugin_args", None)) or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if fsdp and kind is DistributedType.MULTI_CPU:
        raise ConfigError(
            "FSDP was requested, but accelerate ignores it on CPUs and would train with DDP. Use GPUs, or leave out "
            "FSDP (`fsdp` of the config, or the launcher's)."
        )
    asked = getattr(trainer.args, "deepspeed_plugin", None) is not None
    if asked and kind is not DistributedType.DEEPSPEED:
        raise ConfigError(
            "DeepSpeed was requested, but accelerate ignores it with ACCELERATE_USE_CPU=true (`use_cpu: true` in its "
            "config, or --cpu). Leave that out; use_cpu=True in the training arguments is enough for CPUs."
        )


def _reject_other_parallelism(trainer: Any, kind: Sharding) -> None:
    """Raise if the launcher requests other parallelism, or the model is already sharded; the config checks its own."""
    asked = getattr(trainer.accelerator, "parallelism_config", None)
    found = [name for name in ("tp", "cp", "sp") if getattr(asked, f"{name}_enabled", False)]
    if found or (kind is Sharding.NONE and is_sharded(trainer.model)):
        what = f"{found[0]}_size above 1 (accelerate's parallelism config)" if found else "The model's weights"
        raise ConfigError(
            f"{what}: tensor, context and sequence parallelism cannot work here, because every process samples and "
            "trains its own rows. Pass a whole model and use data parallelism; FSDP2 (recipes/accelerate/fsdp2.yaml) "
            "is for models that do not fit on one device."
        )


def _reject_other_noise(trainer: Any) -> None:
    """Raise for dropout with accelerate's activation checkpointing, which recomputes with another random state."""
    plugin = trainer.accelerator.state.fsdp_plugin
    drops = any(module.p > 0 for module in dropouts(trainer.model)) or functional_dropouts(trainer.model)
    if drops and getattr(plugin, "activation_checkpointing", False):
        raise ConfigError(
            "fsdp_activation_checkpointing: true draws new dropout masks when it recomputes layers, so gradients are "
            "wrong. Set gradient_checkpointing=True instead, or train without dropout."
        )


def _warn_not_gathered(trainer: Any, kind: Sharding) -> None:
    if not trainer.args.ds3_gather_for_generation and kind is not Sharding.ZERO3:
        logger.warning("ds3_gather_for_generation=False has no effect: only DeepSpeed ZeRO-3 reads it.")


def _save_whole_weights(accelerator: Any) -> None:
    """Under ZeRO-3, save weights that transformers can load; by default DeepSpeed saves only each process's shard."""
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if zero.get(SAVES_WHOLE) is not True and accelerator.is_main_process:
        logger.warning(
            f"{SAVES_WHOLE} (zero3_save_16bit_model of accelerate) is turned on: without it a saved model would "
            "consist of weight shards, which from_pretrained cannot load."
        )
    zero[SAVES_WHOLE] = True


def make_sharded_sampling(trainer: Any, *, needed: bool) -> ShardedSampling | None:
    """How the run samples from sharded weights; None if they are not sharded, or if vLLM samples.

    The weights are gathered for the built-in engine, and under ZeRO-3 for `generate` as well. They stay sharded with
    `rollout_backend="transformers"` under FSDP2, and with ds3_gather_for_generation=False under ZeRO-3.
    """
    kind, args, accelerator = trainer.sharding, trainer.args, trainer.accelerator
    if kind is Sharding.NONE or args.samples_with_vllm:  # vLLM holds its own copy of the weights
        return None
    gathers = args.ds3_gather_for_generation if kind is Sharding.ZERO3 else args.rollout_backend != "transformers"
    whole = None
    if needed and gathers:
        _reject_offload(accelerator, kind)
        whole = WholeWeights(
            trainer.model,
            lambda: bare_model(accelerator, trainer.model_wrapped),
            dtype=compute_dtype(accelerator, kind),
            device=accelerator.device,
            clock=lambda: trainer.state.global_step,
        )
        whole.plan = lambda size: _plan(trainer, size)
    return ShardedSampling(
        kind,
        whole,
        reserved=lambda: training_bytes(trainer.model.parameters()),
        from_main=lambda value: from_main(accelerator, value),
    )


def _reject_offload(accelerator: Any, kind: Sharding) -> None:
    offloads = (
        kind is Sharding.FSDP2 and type(accelerator.state.fsdp_plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    )
    if offloads:
        raise ConfigError(
            "fsdp_offload_params: true keeps the weights in main memory, from which they cannot be gathered for the "
            "built-in engine. Set it to false, or rollout_backend='transformers', which samples from them as they are."
        )


def _plan(trainer: Any, size: int) -> str:
    """Whether to keep the gathered weights between rollouts or free them after each; the same on all processes."""
    accelerator = trainer.accelerator
    free = free_memory(accelerator.device) - training_bytes(trainer.model.parameters())
    if accelerator.device.type == "cpu":  # the processes of a host share its memory
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    least = int(accelerator.gather(torch.tensor([max(free, 0)], device=accelerator.device)).min())
    decision = plan_whole_weights(size, least)
    if decision is None:
        raise ConfigError(
            f"Sampling needs all weights on every process, {size / 2**30:.1f} GiB, but the fullest process has "
            f"{least / 2**30:.1f} GiB left for them during training. Sample from a vLLM server (use_vllm=True, "
            "vllm_mode='server'), use more processes, or set rollout_backend='transformers', which samples from "
            "sharded weights and is slow."
        )
    if accelerator.is_main_process:
        facts = {"decision": decision, "free": least}
        logger.warning(describe(trainer.backend.whole, trainer.sharding, facts))
        trainer.record_event("whole_weights", bytes=size, **facts)
    return decision


def why_no_parity_check(accelerator: Any, whole: WholeWeights | None) -> str | None:
    """Why some process cannot temporarily hold gradients of the full weights; None if all can."""
    short = whole is None or free_memory(accelerator.device) < 3 * whole.bytes
    if not any_process(accelerator, short):
        return None
    return "which are not gathered here" if whole is None else "for which there is not enough memory"


def reject_together(trainer: Any) -> None:
    """Raise if processes can only sample in lockstep but a feature would let only some of them sample."""
    args, backend = trainer.args, trainer.backend
    if not backend.lockstep or trainer.accelerator.num_processes == 1:
        return
    asked = {
        "dynamic_sampling=True": args.dynamic_sampling and trainer.custom_rollout is None,
        "eval_benchmarks": bool(args.eval_benchmarks),
        "tools (max_tool_calling_iterations other than 0)": trainer.tool_loop is not None
        and args.max_tool_calling_iterations != 0,
    }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"{', '.join(found)} cannot work with weights that are sharded over processes ({trainer.sharding.value}) "
            f"and {_in_step(trainer.sharding)}: all processes sample together, but only some have prompts to sample."
        )


def _in_step(kind: Sharding) -> str:
    if kind is Sharding.ZERO3:
        return "not gathered for sampling. Set ds3_gather_for_generation=True"
    return "sampled from by transformers. Set rollout_backend='builtin', which gathers them"


def least_plan(accelerator: Any, plan: UpdatePlan) -> UpdatePlan:
    """The smallest limits of any process, with gradient checkpointing if any process needs it.

    Recomputing a layer gathers its weights again, so all processes must do it together.
    """
    mine = torch.tensor([plan.tokens, plan.group_tokens, -int(plan.checkpointing)], device=accelerator.device)
    tokens, group_tokens, recomputed = accelerator.gather(mine[None]).amin(0).tolist()
    return replace(plan, tokens=tokens, group_tokens=group_tokens, checkpointing=bool(recomputed))
