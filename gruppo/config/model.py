"""Which model a script trains and how it is loaded: precision, LoRA, quantisation."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gruppo.config.fields import option
from gruppo.config.validate import in_range, one_of, rejects_unknown_fields
from gruppo.errors import ConfigError, install_line

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig

__all__ = ["ModelConfig", "get_kbit_device_map", "get_peft_config", "get_quantization_config"]

DTYPES = ["auto", "bfloat16", "float16", "float32"]
QUANT_TYPES = ["fp4", "nf4"]


@rejects_unknown_fields
@dataclass
class ModelConfig:
    """The model arguments of a training script."""

    model_name_or_path: str | None = option(None, "Hub id or local folder of the model.")
    model_revision: str = option("main", "Branch, tag or commit of the model repository.")
    dtype: str | None = field(
        default="float32",
        metadata={
            "help": "Precision in which the weights are loaded; `auto` takes the checkpoint's.",
            "choices": DTYPES,
        },
    )
    attn_implementation: str | None = option(
        None, "Attention implementation, such as `sdpa`, `eager` or `flash_attention_2`; None leaves it to the model."
    )
    use_peft: bool = option(False, "Train a LoRA adapter instead of all weights.")
    lora_r: int = option(16, "Rank of the adapter matrices.")
    lora_alpha: int = option(32, "Scale of the adapter: its output is multiplied by lora_alpha / lora_r.")
    lora_dropout: float = option(0.05, "Dropout on the adapter's input.")
    lora_target_modules: list[str] | None = option(
        None, "Names of the modules that get an adapter; `all-linear` or one regular expression also work."
    )
    lora_target_parameters: list[str] | None = option(
        None, "Names of parameters that get an adapter without being a module, such as expert weights."
    )
    lora_modules_to_save: list[str] | None = option(None, "Modules that are trained in full beside the adapter.")
    lora_task_type: str = option("CAUSAL_LM", "Task type of the adapter; `SEQ_CLS` for a reward model.")
    use_rslora: bool = option(False, "Rank-stabilised LoRA: scale by lora_alpha / √lora_r.")
    use_dora: bool = option(False, "DoRA: learn the magnitude of each weight column apart from its direction.")
    load_in_8bit: bool = option(False, "Load the base model in 8 bits (bitsandbytes); train it through LoRA.")
    load_in_4bit: bool = option(False, "Load the base model in 4 bits (bitsandbytes); train it through LoRA.")
    bnb_4bit_quant_type: str = field(
        default="nf4", metadata={"help": "Number format of 4-bit weights.", "choices": QUANT_TYPES}
    )
    use_bnb_nested_quant: bool = option(False, "Quantise the quantisation constants of 4-bit weights too.")
    bnb_4bit_quant_storage: str | None = option(
        None, "Data type that stores packed 4-bit weights, such as `bfloat16` (FSDP needs it); None is uint8."
    )

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit=True and load_in_4bit=True exclude each other; set one of them.")
        if self.dtype is not None:
            one_of(self, "dtype", DTYPES)
        one_of(self, "bnb_4bit_quant_type", QUANT_TYPES)
        in_range(self, "lora_r", 1)
        in_range(self, "lora_dropout", 0, 1)
        self.lora_target_modules = _module_names_or_pattern(self.lora_target_modules)


def _module_names_or_pattern(targets: Any) -> Any:
    """Unwrap a single entry that is `all-linear` or a regular expression: PEFT expects those as a plain string.

    A single module name stays a list, because PEFT matches a string against the whole path: `q_proj` would match
    nothing.
    """
    if isinstance(targets, str):
        return targets if _is_pattern(targets) else [targets]
    if targets is not None and len(targets) == 1 and _is_pattern(targets[0]):
        return targets[0]
    return targets


def _is_pattern(target: str) -> bool:
    return target == "all-linear" or re.fullmatch(r"[\w.]+", target) is None


def get_peft_config(model_args: ModelConfig) -> "PeftConfig | None":
    """The LoRA config that `model_args` describes, or None without `use_peft`."""
    if not model_args.use_peft:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError(f"use_peft=True needs the package peft: {install_line('peft')}") from error

    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(model_args: ModelConfig) -> "BitsAndBytesConfig | None":
    """The bitsandbytes config that `model_args` describes, or None without `load_in_4bit` or `load_in_8bit`."""
    if not (model_args.load_in_4bit or model_args.load_in_8bit):
        return None
    import torch
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if model_args.dtype == "auto":
        raise ConfigError(
            "dtype='auto' does not determine the precision in which 4-bit weights are multiplied; set "
            "dtype='bfloat16'."
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=None if model_args.dtype is None else getattr(torch, model_args.dtype),
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """The `device_map` of a quantised model: all of it on this process's GPU; None without CUDA.

    Scripts for earlier releases of TRL import this function; gruppo places such a model by itself.
    """
    import torch
    from accelerate import PartialState

    return {"": PartialState().local_process_index} if torch.cuda.is_available() else None
