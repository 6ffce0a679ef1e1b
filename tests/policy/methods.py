"""Ways to adapt a tiny model with peft, one of each kind, each of which changes the model's output."""

from collections.abc import Callable
from typing import Any

import peft
import torch

from tests.engine.models import build

_LINEAR: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
_SQUARE: dict[str, Any] = {"target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"}


def _lora(**settings: Any) -> Any:
    return peft.LoraConfig(**({"r": 4} | _LINEAR | settings))


METHODS: dict[str, Callable[[], Any]] = {
    "lora": _lora,
    "rslora": lambda: _lora(use_rslora=True),
    "dora": lambda: _lora(use_dora=True),
    "pissa": lambda: _lora(init_lora_weights="pissa"),
    "olora": lambda: _lora(init_lora_weights="olora"),
    "lora_bias": lambda: _lora(lora_bias=True),
    "on embeddings": lambda: _lora(target_modules=["q_proj", "embed_tokens"]),
    "on the head": lambda: _lora(target_modules=["q_proj", "lm_head"]),
    "some tokens": lambda: _lora(trainable_token_indices=[9, 10, 11]),
    "modules_to_save": lambda: _lora(modules_to_save=["lm_head", "embed_tokens"]),
    "target_parameters": lambda: _lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
    "loha": lambda: peft.LoHaConfig(r=4, **_LINEAR),
    "lokr": lambda: peft.LoKrConfig(r=4, **_LINEAR),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "vera": lambda: peft.VeraConfig(r=4, **_SQUARE),
    "randlora": lambda: peft.RandLoraConfig(r=4, **_LINEAR),
    "vblora": lambda: peft.VBLoRAConfig(r=4, num_vectors=20, vector_length=8, topk=2, **_SQUARE),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, **_LINEAR),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, **_LINEAR),
    "hra": lambda: peft.HRAConfig(r=4, **_LINEAR),
    "miss": lambda: peft.MissConfig(r=4, **_LINEAR),
    "shira": lambda: peft.ShiraConfig(r=4, **_LINEAR),
    "c3a": lambda: peft.C3AConfig(block_size=16, **_LINEAR),
    "norms": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
}

# Methods that add virtual tokens in front of the prompt.
VIRTUAL: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
}


def adalora() -> Any:
    return peft.AdaLoraConfig(init_r=6, target_r=3, total_step=10, tinit=1, tfinal=2, **_LINEAR)


def adapted(method: str, base: Callable[[], Any] = lambda: build("llama"), seed: int = 3) -> Any:
    """A model with an adapter of this kind, with changed weights as after some training, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(base(), METHODS[method]())
        shake(model)
    return model.eval()


def shake(model: Any, scale: float = 0.2) -> None:
    """Add noise to all trainable weights."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * scale)
