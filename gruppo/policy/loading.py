"""Loading and preparing the policy, the tokenizer and the reference."""

import copy
import inspect
import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from gruppo.data.probing import inner_tokenizer
from gruppo.errors import ConfigError
from gruppo.policy.adapters import is_peft_model
from gruppo.policy.quantised import is_quantised, with_quantisation
from gruppo.policy.sharding import is_tensor_parallel, shape_of
from gruppo.policy.unwrap import dropouts, functional_dropouts, inner_model

logger = logging.getLogger(__name__)


def load_policy(model: str | PreTrainedModel, args: Any, quantization_config: Any = None) -> PreTrainedModel:
    """The policy: an object is used as it is, a name or folder is loaded (in float32 unless configured otherwise)."""
    if not isinstance(model, str):
        model = compiled_in_place(model)
        if not isinstance(model, PreTrainedModel) and not is_peft_model(model):
            raise TypeError(f"model must be a name, a PreTrainedModel or a PeftModel, not {type(model).__name__}.")
        if is_tensor_parallel(model):
            raise ConfigError(
                f"The {type(model).__name__} is sharded over processes (tensor parallelism), which is not supported. "
                "Load it without tp_plan and distributed_config; FSDP2 (recipes/accelerate/fsdp2.yaml) is for models "
                "that do not fit on one device."
            )
        if args.model_init_kwargs:
            logger.warning("model_init_kwargs is ignored: the model was passed as an object, not by name.")
        if quantization_config is not None and not is_quantised(model):
            raise ConfigError(
                f"quantization_config was given, but the {type(model).__name__} was passed as an object, which is not "
                "quantised and would be trained as it is. Pass its name, or load it with quantization_config."
            )
        if quantization_config is not None:
            logger.warning("quantization_config is ignored: the model was passed as an object, not by name.")
        cast_image_features(model)
        return model
    reject_tensor_parallel(args.model_init_kwargs or {})
    kwargs = with_quantisation(dict(args.model_init_kwargs or {}), quantization_config)
    kwargs["dtype"] = resolve_dtype(kwargs.pop("torch_dtype", None) or kwargs.get("dtype", "float32"))
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    kwargs["device_map"] = _device_map(kwargs.get("device_map"), args)
    try:
        loaded = model_class(model, kwargs).from_pretrained(model, **kwargs)
    except TypeError as error:
        if not any(f"'{name}'" in str(error) for name in args.model_init_kwargs or {}):
            raise
        raise ConfigError(f"model_init_kwargs={args.model_init_kwargs!r} does not suit {model}: {error}.") from error
    cast_image_features(loaded)
    return loaded


def _device_map(asked: Any, args: Any) -> Any:
    """The `device_map` to load with: `asked` if given, else the only GPU; several in one process are refused earlier.

    None, in distributed runs and on a CPU, leaves the placement to Trainer. With one GPU, "auto" would leave layers in
    main memory if the GPU is partly in use; without it, loading raises.
    """
    processes = getattr(getattr(args, "distributed_state", None), "distributed_type", None)
    several = (DistributedType.MULTI_GPU, DistributedType.FSDP, DistributedType.DEEPSPEED)
    if processes in several or not torch.cuda.is_available() or getattr(args, "use_cpu", False):
        return None
    if asked is not None:
        return asked
    return {"": torch.cuda.current_device()}


def cast_image_features(model: nn.Module) -> None:
    """Cast image features to the dtype of the embeddings that they are merged into.

    Under autocast the two differ, and transformers 5.17 does not cast there for SmolVLM; later releases do.
    """
    module: Any
    for module in model.modules():
        merge = getattr(module, "inputs_merger", None)
        if type(module).__name__ == "SmolVLMModel" and inspect.ismethod(merge):
            module.inputs_merger = partial(_merge_alike, merge)


def _merge_alike(merge: Any, input_ids: Any, inputs_embeds: Tensor, image_hidden_states: Tensor) -> Tensor:
    merged: Tensor = merge(input_ids, inputs_embeds, image_hidden_states.to(inputs_embeds.dtype))
    return merged


def reject_tensor_parallel(kwargs: Mapping[str, Any]) -> None:
    """Raise for arguments that make transformers load a model with tensor parallelism."""
    for name in ("tp_plan", "tp_size", "device_mesh", "distributed_config"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"model_init_kwargs[{name!r}]={kwargs[name]!r} shards the model over processes while loading it, "
                "which is not supported. Leave it out; FSDP2 (recipes/accelerate/fsdp2.yaml) is for models that do "
                "not fit on one device."
            )


def compiled_in_place(model: Any) -> Any:
    """The model without `torch.compile` wrappers, of itself or its parts, whose names would have a prefix.

    What was wrapped is compiled in place in the same way.
    """
    model = _without_wrapper(model)
    for module in list(model.modules()) if isinstance(model, nn.Module) else ():
        for name, part in module.named_children():
            if (inside := _without_wrapper(part)) is not part:
                setattr(module, name, inside)
    return model


def _without_wrapper(model: Any) -> Any:
    if not hasattr(model, "_orig_mod") or not hasattr(model, "dynamo_ctx"):
        return model
    module: Any = model._orig_mod
    module._compiled_call_impl = model.dynamo_ctx(module._call_impl)
    return module


def resolve_dtype(dtype: Any) -> Any:
    """A torch dtype from its name; 'auto' keeps the checkpoint's."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(resolved, torch.dtype):
        raise ConfigError(
            f"model_init_kwargs['dtype']={dtype!r} is not a torch dtype; use 'auto', 'float32', 'bfloat16' or "
            "'float16'."
        )
    return resolved


def model_class(name: str, kwargs: dict[str, Any]) -> Any:
    """The class that the checkpoint names as its architecture, or AutoModelForCausalLM."""
    known = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
    architectures = AutoConfig.from_pretrained(name, **known).architectures or [""]
    return getattr(transformers, architectures[0], AutoModelForCausalLM)


def load_processing_class(processing_class: Any, model: PreTrainedModel, args: Any) -> Any:
    """The tokenizer or, for a vision-language model, the processor; pads on the left and has a pad token."""
    if processing_class is None:
        if not model_name(model):
            raise ConfigError(
                f"The {type(model).__name__} was not loaded from a name or folder, so its tokenizer is unknown: pass "
                "it as processing_class."
            )
        revision = (args.model_init_kwargs or {}).get("revision", "main")
        processing_class = AutoProcessor.from_pretrained(
            model_name(model),
            revision=revision,
            truncation_side="left",
            padding_side="left",
            trust_remote_code=args.trust_remote_code,
        )
    if not isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin):
        raise TypeError(
            f"processing_class must be a PreTrainedTokenizerBase or a ProcessorMixin, not {type(processing_class)}."
        )
    tokenizer = inner_tokenizer(processing_class)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no end-of-sequence token, so no completion could ever end. Set `tokenizer.eos_token`."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processing_class


def placeholder_ids(model: Any) -> list[int]:
    """Ids of tokens that a model replaces with image, video or audio features; text must not contain them.

    Example:
        placeholder_ids(qwen2_vl) == [151655, 151656]  # <|image_pad|>, <|video_pad|>
    """
    names = (f"{kind}_token_{form}" for kind in ("image", "video", "audio") for form in ("id", "index"))
    found = (getattr(model.config, name, None) for name in names)
    known = model.get_input_embeddings().weight.shape[0]  # a config may name tokens that its model does not have
    return sorted({token for token in found if isinstance(token, int) and 0 <= token < known})


def trained_vision_weights(model: Any) -> list[nn.Parameter]:
    """The trainable weights of a vision-language model that rows without images do not use; empty for a text model."""
    inner = inner_model(model)
    if not placeholder_ids(inner):
        return []
    text = (inner.get_decoder(), inner.get_input_embeddings(), inner.get_output_embeddings())
    used = {id(weight) for part in text if part is not None for weight in part.parameters()}
    return [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in used]


def model_name(model: Any) -> str:
    """The name or folder that a model was loaded from."""
    return getattr(model.config, "_name_or_path", "") or ""


def hub_name(model: Any) -> str | None:
    """The name on the hub of the model that was loaded; None if it came from a folder, which others need not know."""
    name = model_name(model)
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name, re.ASCII) is not None
    return name if is_name and not Path(name).exists() else None


def text_config(model: Any) -> Any:
    """The config of the language model; for a multimodal model, of its text part."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All ids that end a completion: the tokenizer's and those of the model's generation config."""
    config: GenerationConfig | None = getattr(model, "generation_config", None)
    ids = config.eos_token_id if config is not None else None
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return ids if tokenizer.eos_token_id in ids else [tokenizer.eos_token_id, *ids]


def align_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Mirror the tokenizer's pad id into the configs of the model."""
    text_config(model).pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens the model embeds, even if the embedding is sharded over processes."""
    return shape_of(model.get_input_embeddings().weight)[0]


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if the tokenizer has more tokens than the model embeds: it would fail deep inside a forward pass."""
    rows = vocabulary_size(model)
    if len(tokenizer) > rows:
        raise ConfigError(
            f"The tokenizer has {len(tokenizer)} tokens but the model embeds only {rows}. Pass the model's own "
            "tokenizer, or call model.resize_token_embeddings(len(tokenizer))."
        )


def context_length(model: PreTrainedModel) -> int | None:
    """The maximum number of positions that the model was built for, if its config specifies one."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def has_learned_positions(model: PreTrainedModel) -> bool:
    """Whether positions are looked up in a table (GPT-2, OPT), whose size limits the context."""
    names = ("wpe", "embed_positions", "position_embeddings")
    return any(
        isinstance(module, nn.Embedding) and name.rpartition(".")[2] in names for name, module in model.named_modules()
    )


def copy_as_reference(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of the policy in its current state, without loading anything a second time."""
    reference = copy.deepcopy(model)
    return reference.requires_grad_(False).eval()


def load_again(model: PreTrainedModel, args: Any) -> PreTrainedModel:
    """The model loaded a second time and frozen: a reference for weights that cannot be copied."""
    if not model_name(model):
        raise ConfigError(
            "beta > 0 needs a reference. Under ZeRO-3 it is loaded again, but the model was not loaded from a name or "
            "folder. Pass it by name, or set beta=0."
        )
    reference = load_policy(model_name(model), args)
    return reference.requires_grad_(False).eval()


def disable_dropout_in_model(model: nn.Module) -> None:
    """Set p = 0 on every dropout module, those of adapters included.

    Dropout that a submodule applies through a function instead stays active, with a warning.
    """
    for module in dropouts(model):
        module.p = 0.0
    if left := functional_dropouts(model):
        found = ", ".join(f"{name}={value}" for name, value in left.items())
        logger.warning(
            f"disable_dropout=True turns off dropout modules; {found} is not a module and stays on. Set it to 0 in "
            "the model's config when it is loaded (model_init_kwargs)."
        )


def is_saved_under_other_names(model: Any, folder: str) -> bool:
    """Whether some weights of a checkpoint must be converted: experts are saved one by one, but held as one tensor."""
    if is_peft_model(model) or not isinstance(model, PreTrainedModel):
        return False
    saved = saved_names(Path(folder))
    return bool(saved) and not saved <= model.state_dict().keys()


def saved_names(folder: Path) -> set[str]:
    """The names of the weights in a folder in the Hugging Face layout; none if there are no safetensors."""
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.exists():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not single.exists():
        return set()
    with safe_open(single, "pt") as file:
        return set(file.keys())


@torch.no_grad()
def load_converted_weights(model: PreTrainedModel, folder: str) -> None:
    """Load a checkpoint into an existing model as `from_pretrained` would; Trainer ignores names it does not know.

    Nothing is rounded: the intermediate copy is as wide as the widest weight.
    """
    wide = any(weight.dtype is torch.float32 for weight in model.parameters())
    loaded = type(model).from_pretrained(
        folder,
        config=copy.deepcopy(model.config),
        dtype=torch.float32 if wide else model.dtype,
        device_map=None,
        trust_remote_code=False,  # the class is already imported
    )
    weights = loaded.state_dict()
    for name, weight in model.state_dict().items():
        weight.copy_(weights[name])
