"""What a run leaves on disk loads with plain transformers and peft, and gives the same logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from gruppo import GRPOConfig, GRPOTrainer
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.policy.experts import experts
from tests.policy.methods import METHODS
from tests.trainer.runs import SaveAt

IDS = torch.tensor([[9, 10, 11, 12]])

MODELS: dict[str, Callable[[], Any]] = {
    "full": lambda: tiny_model(hidden_size=32),
    "tied": lambda: tiny_model(hidden_size=32, tie_word_embeddings=True),
    "bfloat16": lambda: tiny_model(hidden_size=32).bfloat16(),
    "experts": lambda: experts("mixtral"),
}
KINDS = [*((name, None) for name in MODELS), ("full", "lora"), ("full", "dora"), ("full", "modules_to_save")]


@pytest.fixture
def base(tmp_path: Path) -> Callable[[str], str]:
    """A model in a folder, as one downloads it."""

    def saved(name: str) -> str:
        model, folder = MODELS[name](), str(tmp_path / "base")
        model.generation_config = GenerationConfig(
            eos_token_id=[1, 7], pad_token_id=0, temperature=0.5, do_sample=True
        )
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return saved


def trained(source: str, folder: Path, peft_config: Any, **settings: Any) -> Any:
    trainer = GRPOTrainer(
        model=source,
        reward_funcs=length_reward,
        args=GRPOConfig(**base_args(folder, learning_rate=0.05, model_init_kwargs={"dtype": "auto"}, **settings)),
        train_dataset=prompts(8),
        peft_config=peft_config,
        callbacks=[SaveAt(2)],
    )
    trainer.train()
    trainer.save_model(str(folder / "final"))
    return trainer


@pytest.mark.parametrize(("name", "method"), KINDS)
def test_plain_libraries_load_it(name: str, method: str | None, base: Any, tmp_path: Path) -> None:
    source = base(name)
    trainer = trained(source, tmp_path / "run", None if method is None else METHODS[method]())
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(input_ids=IDS).logits
        before = AutoModelForCausalLM.from_pretrained(source, dtype="auto")(input_ids=IDS).logits
    assert (expected.float() - before.float()).abs().max() > 1e-3
    loader = AutoModelForCausalLM if method is None else peft.AutoPeftModelForCausalLM
    for folder in (tmp_path / "run" / "checkpoint-2", tmp_path / "run" / "final"):
        loaded = loader.from_pretrained(folder, dtype="auto").eval()
        with torch.no_grad():
            assert (loaded(input_ids=IDS).logits.float() - expected.float()).abs().max() < 1e-5
        assert AutoTokenizer.from_pretrained(folder).encode("p0:") == tiny_tokenizer().encode("p0:")
        assert AutoTokenizer.from_pretrained(folder).chat_template == tiny_tokenizer().chat_template
        if method is None:
            assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 7]
            assert json.loads((folder / "config.json").read_text())["architectures"] == [type(trainer.model).__name__]
        else:
            assert not (folder / "model.safetensors").exists()
            assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == source


def test_a_merged_adapter_is_a_plain_model(base: Any, tmp_path: Path) -> None:
    trainer = trained(base("full"), tmp_path / "run", METHODS["lora"]())
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "final").merge_and_unload()
    loaded.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    trainer.model.eval()
    with torch.no_grad():
        assert (merged(input_ids=IDS).logits - trainer.model(input_ids=IDS).logits).abs().max() < 1e-5
