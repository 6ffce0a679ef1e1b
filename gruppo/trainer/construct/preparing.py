"""Preparation of the policy before it is passed to transformers.Trainer, and the prompt encoder."""

from typing import Any

import torch
from accelerate.utils import DistributedType

from gruppo.data.probing import inner_tokenizer
from gruppo.data.prompts import PromptEncoder
from gruppo.data.vision import VisionEncoder
from gruppo.errors import ConfigError
from gruppo.policy import adapters, loading
from gruppo.policy.checkpoints import enable_checkpointing, require_input_gradients
from gruppo.policy.float32_head import cast_head
from gruppo.policy.inplace import compiled_modules
from gruppo.policy.modes import has_reentrant_checkpoints
from gruppo.policy.quantised import keep_input_types, narrow_adapters, reject_adapter, reject_full_training
from gruppo.policy.routing import router_coefficient
from gruppo.policy.unwrap import forward_arguments, inner_model, is_noisy
from gruppo.trainer.construct import tooling


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
        reject_adapter(policy)
        narrow_adapters(policy)
        keep_input_types(policy)
        adapters.prepare_adapters(policy, is_new=peft_config is not None, has_reference=args.beta != 0)
        if args.sync_ref_model:
            raise NotImplementedError(
                "sync_ref_model=True is not available with adapters, whose reference is the base model itself; set it "
                "to False."
            )
    if args.gradient_checkpointing or has_reentrant_checkpoints(policy):
        require_input_gradients(policy, args)  # Trainer, or the creator of the model, turns checkpointing on
    reject_frozen(policy)
    if args.cast_lm_head_to_fp32:
        cast_head(policy)
    if args.fp16 and any(weight.requires_grad and weight.dtype is torch.float16 for weight in policy.parameters()):
        raise ConfigError(
            "fp16=True scales gradients, which needs float32 weights, but the model's are in torch.float16. Load it "
            "in float32 (model_init_kwargs={'dtype': 'float32'}), or train in bfloat16."
        )
    if args.disable_dropout:
        loading.disable_dropout_in_model(policy)
    reject_other_noise(policy, args)
    return policy


def reject_other_noise(policy: Any, args: Any) -> None:
    """Raise if a recomputed layer would drop other elements than the layer did: its gradients would be wrong."""
    options = args.gradient_checkpointing_kwargs or {}
    forgets = args.gradient_checkpointing is not False and options.get("preserve_rng_state") is False
    if forgets and is_noisy(policy, inner_model(policy)):
        raise ConfigError(
            "gradient_checkpointing_kwargs={'preserve_rng_state': False} recomputes layers with other random numbers, "
            "but this model draws some in training (dropout, say). Leave the option out, or set disable_dropout=True."
        )


def reject_frozen(policy: Any) -> None:
    """Raise for a policy without trainable weights."""
    if any(weight.requires_grad for weight in policy.parameters()):
        return
    how = (
        "Load its adapter with PeftModel.from_pretrained(…, is_trainable=True)."
        if adapters.is_peft_model(policy)
        else "Set requires_grad on the weights to train, or pass a peft_config."
    )
    raise ConfigError(f"No weight of the model is trainable: there is nothing to train. {how}")


def recompute_by_default(trainer: Any) -> None:
    """Under DeepSpeed, enable gradient checkpointing unless it is set: no plan knows what memory a process uses."""
    args = trainer.args
    if args.gradient_checkpointing is None and trainer.accelerator.distributed_type is DistributedType.DEEPSPEED:
        enable_checkpointing(trainer.model, args)


def make_prompt_encoder(toolset: Any, policy: Any, processing: Any, args: Any) -> PromptEncoder:
    """The encoder of rows into prompts: text only with a tokenizer, text and images with a processor."""
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
    tokens = loading.placeholder_ids(inner_model(policy))
    return VisionEncoder(processing, accepts=forward_arguments(policy), placeholders=tokens, **settings)
