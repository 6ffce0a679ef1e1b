"""Models, tokenizers and templates of strangers are loaded without running what comes with them."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from gruppo import DatasetMixtureConfig, GRPOConfig, GRPOTrainer, clone_chat_template, get_dataset
from gruppo.config.script import DatasetConfig
from gruppo.rewards import accuracy_reward, math_answer_reward
from tests.helpers import base_args, chats, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.security.strangers import WAYS, model_folder


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def trainer(folder: Path, model: Any = None, rewards: Any = length_reward, **parts: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model=tiny_model() if model is None else str(model),
        reward_funcs=rewards,
        args=GRPOConfig(**base_args(folder / "out", max_steps=1)),
        train_dataset=parts.pop("dataset", prompts(4)),
        **parts,
    )


def classifier() -> LlamaForSequenceClassification:
    settings = tiny_model().config.to_dict() | {"num_labels": 1}
    return LlamaForSequenceClassification(LlamaConfig(**settings))


def test_the_stranger_would_leave_a_mark(tmp_path: Path, mark: Path) -> None:
    folder = model_folder(tmp_path / "model", mark, "unheard-of")
    AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=True)
    assert mark.exists()


def test_a_policy_of_a_known_type_runs_with_our_code(tmp_path: Path, mark: Path) -> None:
    folder = model_folder(tmp_path / "model", mark, "llama")
    made = trainer(tmp_path, folder)
    made.train()
    assert type(made.model).__name__ == "LlamaForCausalLM"
    assert type(made.model).__module__.startswith("transformers.")
    assert type(made.processing_class).__module__.startswith("transformers")
    assert not mark.exists()


def test_a_policy_that_needs_code_of_its_own_is_refused(tmp_path: Path, mark: Path) -> None:
    folder = model_folder(tmp_path / "model", mark, "unheard-of")
    with pytest.raises(ValueError, match="trust_remote_code"):
        trainer(tmp_path, folder)
    assert not mark.exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_reward_model(known: bool, tmp_path: Path, mark: Path) -> None:
    folder = model_folder(tmp_path / "model", mark, "llama" if known else "unheard-of", classifier())
    if known:
        made = trainer(tmp_path, rewards=str(folder), processing_class=tiny_tokenizer())
        made.train()
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            trainer(tmp_path, rewards=str(folder), processing_class=tiny_tokenizer())
    assert not mark.exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_tokenizer_whose_template_is_taken(known: bool, tmp_path: Path, mark: Path) -> None:
    folder = model_folder(tmp_path / "model", mark, "llama" if known else "unheard-of")
    with nullcontext() if known else pytest.raises(ValueError, match="trust_remote_code"):
        clone_chat_template(tiny_model(), tiny_tokenizer(), str(folder))
    assert not mark.exists()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ["policy", "reward"])
def test_weights_in_a_pickle_are_not_run(part: str, way: str, tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "model"
    (tiny_model() if part == "policy" else classifier()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    WAYS[way](folder / "pytorch_model.bin", mark)
    loads = {"model": folder} if part == "policy" else {"rewards": str(folder), "processing_class": tiny_tokenizer()}
    with pytest.raises(Exception, match=r"[Ww]eights|pickle|load"):
        trainer(tmp_path, **loads)
    assert not mark.exists()


def test_a_chat_template_cannot_leave_its_sandbox(tmp_path: Path, mark: Path) -> None:
    attack = f"{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}"
    tokenizer = tiny_tokenizer(chat_template=attack)
    with pytest.raises(Exception, match=r"unsafe|undefined|template"):
        trainer(tmp_path, processing_class=tokenizer, dataset=chats(4)).train()
    assert not mark.exists()


@pytest.mark.parametrize("path", ["", "script.py"])
def test_a_loading_script_of_a_dataset_is_not_run(path: str, tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "script.py").write_text(f"open({str(mark)!r}, 'w')")
    with pytest.raises(Exception, match=r"(?i)script|data"):
        get_dataset(DatasetMixtureConfig(datasets=[DatasetConfig(path=str(folder / path))]))
    assert not mark.exists()


@pytest.mark.parametrize("reward", [accuracy_reward, math_answer_reward])
@pytest.mark.parametrize(
    "frame", ["\\boxed{{{}}}", "$\\boxed{{{}}}$", "$${}$$", "The final answer is ${}$. I hope it is correct.", "{}"]
)
def test_answers_and_golds_are_not_evaluated_as_python(reward: Any, frame: str, mark: Path) -> None:
    attack = frame.format(f"__import__('pathlib').Path('{mark}').touch()")
    golds = {"solution": ["$4$", attack], "answer": ["4", attack]}
    reward(completions=[attack, "\\boxed{4}"], **golds)
    assert not mark.exists()
