"""Checks of the trainer's arguments, each with an error that says what to do."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from transformers.debug_utils import DebugOption

from gruppo.data.lengths import check_every_prompt
from gruppo.data.probing import inner_tokenizer
from gruppo.data.prompts import PromptEncoder, check_prompts, sample_rows
from gruppo.data.vision import VisionEncoder
from gruppo.errors import ConfigError, DataError
from gruppo.policy import adapters, loading
from gruppo.policy.float32_head import cast_head
from gruppo.policy.inplace import compiled_modules
from gruppo.policy.modes import autocast_dtype, has_reentrant_checkpoints
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.quantised import narrow_adapters, reject_full_training
from gruppo.policy.routing import check_router, router_coefficient
from gruppo.policy.sharding import REPLICATED
from gruppo.policy.support import why_not_packed, why_not_routed
from gruppo.policy.unwrap import forward_arguments, inner_model
from gruppo.trainer import tooling
from gruppo.trainer.metrics import from_main

logger = logging.getLogger(__name__)

# Methods that TRL 1.16 calls but this trainer does not: overriding them would silently do nothing.
UNUSED_HOOKS = (
    "_generate",
    "_tool_call_loop",
    "get_high_entropy_mask",
    "get_off_policy_mask",
    "get_gamma_weights",
)


def check_config(args: Any, config_class: Any) -> None:
    """The settings must be those of the trainer at hand."""
    if not isinstance(args, config_class):
        raise TypeError(f"args must be a {config_class.__name__}, not {type(args).__name__}.")
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs are visible to one process. Launch one process per GPU (accelerate launch or "
            "torchrun), or set CUDA_VISIBLE_DEVICES to one of them."
        )


def reject_unused_hooks(trainer: Any) -> None:
    """Raise for overridden methods that are never called here."""
    for name in UNUSED_HOOKS:
        if any(hasattr(cls, name) for cls in type(trainer).__mro__) and overridden(trainer, [name]):
            raise NotImplementedError(
                f"{type(trainer).__name__} overrides `{name}`, which is not called here. Override `_compute_loss`, "
                "`_generate_single_turn` or `_generate_and_score_completions`, or pass a `rollout_func`."
            )


# Methods that see padded rows, one micro-batch at a time.
PADDED_HOOKS = (
    "_generate_and_score_completions",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "compute_loss",
    "training_step",
    "prediction_step",
    "get_batch_samples",
    "_prepare_inputs",
)

# Where packed rows were tried.
KNOWN = (*REPLICATED, DistributedType.FSDP)


def overridden(trainer: Any, names: Sequence[str]) -> list[str]:
    """Those of these methods that a subclass, or a patch of a class or of the trainer itself, brings from outside."""
    ours = ("gruppo.trainer.", "transformers.")
    return [name for name in names if not str(getattr(trainer, name).__module__).startswith(ours)]


def against_packing(trainer: Any) -> list[str]:
    """Settings and subclasses that work with padded rows only."""
    args, reasons = trainer.args, []
    if trainer.prompt_encoder.takes_images:
        model = type(inner_model(trainer.model)).__name__
        reasons.append(f"prompts of {model} may have images, which packed rows do not know")
    if hooks := overridden(trainer, PADDED_HOOKS):
        reasons.append(f"{type(trainer).__name__} overrides {', '.join(hooks)}, which sees padded rows")
    kind = trainer.accelerator.distributed_type
    if kind is DistributedType.DEEPSPEED:
        reasons.append("DeepSpeed takes a step of its own after each backward pass")
    elif kind not in KNOWN:
        reasons.append(f"{kind.value} was not tried with anything else")
    if args.torch_compile:
        reasons.append("torch_compile=True compiles the model for rows of their own")
    elif compiled_modules(trainer.model):
        reasons.append("the model was compiled, for rows of their own")
    if args.neftune_noise_alpha:
        reasons.append("NEFTune scales its noise by the length of a padded row")
    if "lomo" in args.optim or "layerwise" in args.optim:
        reasons.append(f"optim={str(args.optim)!r} takes a step in each backward pass")
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        reasons.append("debug='underflow_overflow' listens to every layer of padded rows")
    if args.pad_to_multiple_of is not None:
        reasons.append(f"pad_to_multiple_of={args.pad_to_multiple_of} asks for padding")
    return reasons


def packed_policy(trainer: Any) -> PackedPolicy | None:
    """How packed rows are run, or None, with a message, where they cannot be."""
    args = trainer.args
    policy = PackedPolicy(
        fused_head=args.fused_head,
        fused_layers=args.fused_layers,
        autocast_dtype=autocast_dtype(trainer.accelerator.mixed_precision),
    )
    if trainer.router_aux_loss_coef:
        check_router_loss(trainer)
    if not args.packed_update:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    reasons = against_packing(trainer) or why_not_packed(model, policy)
    if not reasons and trainer.router_aux_loss_coef:
        reasons = why_not_routed(model, policy)
    if trainer.sharding.spread:  # some launchers give only the main process weights to try
        reasons = from_main(trainer.accelerator, reasons)
    if not reasons:
        return policy
    if args.max_tokens_per_micro_batch is not None:
        raise ConfigError(
            f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} needs packed rows, but "
            f"{'; '.join(reasons)}. Leave it out, or change that."
        )
    if trainer.accelerator.is_main_process:
        logger.warning(
            f"Rows are padded and run one micro-batch at a time, which is slow: {'; '.join(reasons)}. "
            "packed_update=False asks for it without this message."
        )
    return None


def check_router_loss(trainer: Any) -> None:
    """The load-balancing loss of a mixture of experts must be there, and have a gradient."""
    args = trainer.args
    asked = args.gradient_checkpointing is not False and (args.gradient_checkpointing_kwargs or {}).get(
        "use_reentrant"
    )
    if asked or has_reentrant_checkpoints(trainer.model):
        raise ConfigError(
            "Gradient checkpointing with use_reentrant=True hides the router's logits from the load-balancing loss, "
            f"which would have no gradient (router_aux_loss_coef={trainer.router_aux_loss_coef}). Set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or router_aux_loss_coef=0."
        )
    if trainer.accelerator.distributed_type in REPLICATED:
        check_router(trainer.accelerator.unwrap_model(trainer.model))


def prepare_policy(policy: Any, tokenizer: Any, peft_config: Any, args: Any) -> Any:
    """Adapters, pad token, dropout: everything done to the module before Trainer sees it."""
    loading.align_pad_token(policy, tokenizer)
    loading.check_vocabulary(policy, tokenizer)
    router_coefficient(policy, args.router_aux_loss_coef)
    reject_full_training(policy, peft_config)
    if peft_config is not None and compiled_modules(policy):
        raise ConfigError(
            "peft_config was given, but the model was compiled without an adapter. Pass the plain model and set "
            "torch_compile=True."
        )
    if peft_config is not None:
        policy = adapters.add_adapter(policy, peft_config)
    if adapters.is_peft_model(policy):
        narrow_adapters(policy)
        adapters.prepare_adapters(policy, is_new=peft_config is not None, has_reference=args.beta != 0)
        if args.sync_ref_model:
            raise NotImplementedError("sync_ref_model=True with adapters: the reference is the base model itself.")
        if args.gradient_checkpointing:
            policy.enable_input_require_grads()
    reject_frozen(policy)
    if getattr(args, "cast_lm_head_to_fp32", False):
        cast_head(policy)
    if args.fp16 and any(weight.requires_grad and weight.dtype is torch.float16 for weight in policy.parameters()):
        raise ConfigError(
            "fp16=True scales gradients, which works on weights in float32, but the model's are in torch.float16. "
            "Load it in float32 (model_init_kwargs={'dtype': 'float32'}), or train in bfloat16."
        )
    if args.disable_dropout:
        loading.disable_dropout_in_model(policy)
    return policy


def make_prompt_encoder(toolset: Any, policy: Any, processing: Any, args: Any) -> PromptEncoder:
    """What turns rows into prompts: with a tokenizer text, with a processor text and images."""
    settings = {
        "max_prompt_length": args.max_prompt_length,
        "context_length": loading.context_length(policy),
        "room": args.max_completion_length if loading.has_learned_positions(policy) else 1,
        "chat_template_kwargs": args.chat_template_kwargs,
        "chat_template": tooling.template_for(toolset, processing),
        "tools": None if toolset is None else toolset.schemas,
    }
    if inner_tokenizer(processing) is processing:
        return PromptEncoder(processing, **settings)
    expect_unused_weights(args)
    tokens = loading.placeholder_ids(inner_model(policy))
    return VisionEncoder(processing, accepts=forward_arguments(policy), placeholders=tokens, **settings)


def expect_unused_weights(args: Any) -> None:
    """Let processes agree on gradients where one of them has no image, and so no use for the weights that see."""
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if args.ddp_find_unused_parameters is None and not (args.gradient_checkpointing and reentrant):
        args.ddp_find_unused_parameters = True


def reject_frozen(policy: Any) -> None:
    """Raise for a policy of which nothing is trained."""
    if any(weight.requires_grad for weight in policy.parameters()):
        return
    how = (
        "Load its adapter with PeftModel.from_pretrained(…, is_trainable=True)."
        if adapters.is_peft_model(policy)
        else "Set requires_grad of those weights that are to be trained, or pass a peft_config."
    )
    raise ConfigError(f"No weight of the model is trainable: there is nothing to train. {how}")


def recompute_by_default(trainer: Any) -> None:
    """Under DeepSpeed no plan knows what a process holds: gradient checkpointing is on unless it is turned off."""
    args = trainer.args
    if args.gradient_checkpointing is None and trainer.accelerator.distributed_type is DistributedType.DEEPSPEED:
        trainer.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs or {"use_reentrant": False})


def check_datasets(train: Any, evaluation: Any, args: Any, encoder: PromptEncoder, rollout_func: Any) -> None:
    """Both datasets; a rollout function reads the prompts itself."""
    used = encoder if rollout_func is None else None
    check_train_dataset(train, args, used, encoder.takes_images)
    check_eval_dataset(evaluation, args, used, encoder.takes_images)


def check_train_dataset(dataset: Any, args: Any, encoder: PromptEncoder | None, images: bool = False) -> None:
    """The training prompts: type, columns, size, and a sample of the rows (none without an encoder)."""
    prompts = args.generation_batch_size // args.num_generations
    if dataset is None:
        raise ConfigError("train_dataset is missing: pass a datasets.Dataset with a `prompt` column.")
    if isinstance(dataset, IterableDataset):
        if args.max_steps <= 0:
            raise ConfigError("An iterable train_dataset has no length: set max_steps.")
        if args.accelerator_config is not None and args.accelerator_config.dispatch_batches:
            raise ConfigError("dispatch_batches=True cannot work: every process reads its own share of the stream.")
        check_first_row(dataset, encoder, "train_dataset", images)
    elif isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise DataError("train_dataset is empty.")
        check_rows(dataset, encoder, images)
        if len(dataset) < prompts:
            raise DataError(
                f"train_dataset has {len(dataset)} prompts, fewer than the {prompts} of one generation batch "
                f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}), so "
                "not a single step could be made. Lower the batch size or gradient accumulation, or add prompts."
            )
    else:
        raise TypeError(
            f"train_dataset must be a datasets.Dataset or IterableDataset, not {type(dataset).__name__}. "
            "A list of dicts becomes one with Dataset.from_list(rows)."
        )


def check_eval_dataset(
    dataset: Any, args: Any, encoder: PromptEncoder | None, images: bool = False, name: str = "eval_dataset"
) -> None:
    """The evaluation prompts, or a dict of them."""
    if dataset is None:
        if args.eval_strategy != "no" and not args.eval_benchmarks:
            raise ConfigError(f"eval_strategy={args.eval_strategy.value!r} needs an eval_dataset, or eval_benchmarks.")
        return
    if isinstance(dataset, Mapping):
        for key, part in dataset.items():
            check_eval_dataset(part, args, encoder, images, f"{name}[{key!r}]")
        if not dataset:
            raise DataError(f"{name} is an empty dict.")
    elif isinstance(dataset, IterableDataset):
        check_first_row(dataset, encoder, name, images)
    elif not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name} must be a datasets.Dataset, an IterableDataset or a dict of them, not {type(dataset).__name__}."
        )
    elif len(dataset) == 0:
        raise DataError(f"{name} is empty.")
    else:
        check_rows(dataset, encoder, images)


def check_rows(dataset: Dataset, encoder: PromptEncoder | None, images: bool) -> None:
    """A sample of the rows, and every prompt: none may end a run that has been under way for hours.

    With images only a sample: how many tokens they have is not known before they are read, which takes long.
    """
    sample = sample_rows(dataset) if encoder is None else sample_rows(dataset, encoder.sample_size)
    check_prompts(sample, None, takes_images=images)
    if encoder is not None:
        if not images:
            check_every_prompt(dataset, encoder)
        encoder(sample)


def check_first_row(dataset: IterableDataset, encoder: PromptEncoder | None, name: str, images: bool) -> None:
    row = next(iter(dataset), None)
    if row is None:
        raise DataError(f"{name} is empty.")
    check_prompts([row], encoder, takes_images=images)


def warn_combinations(args: Any) -> None:
    """Settings that work but rarely mean what they seem to."""
    level, loss_type = getattr(args, "importance_sampling_level", None), getattr(args, "loss_type", None)
    if loss_type == "luspo" and level != "sequence":
        logger.warning("loss_type='luspo' is meant for importance_sampling_level='sequence'.")
    if loss_type == "vespo" and level != "token":
        logger.warning("loss_type='vespo' is meant for importance_sampling_level='token'.")
    if level == "sequence" and loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        logger.warning(
            f"importance_sampling_level='sequence' with loss_type={loss_type!r} weights sequences by their length; "
            "GSPO is loss_type='grpo' with it."
        )
    if loss_type == "dr_grpo" and args.scale_rewards != "none":
        logger.warning(
            f"loss_type='dr_grpo' with scale_rewards={args.scale_rewards!r} is not Dr. GRPO, which does not divide "
            "advantages by a deviation: set scale_rewards='none'."
        )
    if loss_type == "cispo" and args.upper_clip <= 1:
        logger.warning(
            f"loss_type='cispo' caps ratios at epsilon_high={args.upper_clip} itself, not at 1 plus "
            "it: every token is cut. About 5 is the usual setting."
        )
    if args.use_liger_kernel:
        warnings.warn("`use_liger_kernel` is deprecated for this trainer.", FutureWarning, stacklevel=4)
    unread = ("dataloader_num_workers", "dataloader_drop_last", "dataloader_prefetch_factor")
    if ineffective := [name for name in unread if getattr(args, name)]:
        logger.warning(f"{', '.join(ineffective)}: no effect, as prompts are read directly.")


def biased_sampling(trainer: Any) -> list[str]:
    """The settings that shape what is sampled but not the training log-probs, with their values.

    Those of the model's own generation config are among them.
    """
    found = trainer.backend.filters(trainer.temperature)
    if set(found.get("suppress_tokens") or ()) <= trainer.prompt_encoder.placeholders:
        found.pop("suppress_tokens", None)  # set by us: no model that was trained on images writes them
    return [f"{name}={value}" for name, value in found.items()]


def warn_biased_sampling(trainer: Any) -> None:
    if biased := biased_sampling(trainer):
        logger.warning(
            f"{', '.join(biased)}: this changes what is sampled but not the training log-probs, so the ratios are "
            "biased. It is set in the config, in generation_kwargs or in model.generation_config."
        )
