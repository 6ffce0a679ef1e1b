"""What the trainer really leaves, as the viewer reads it: its tokens can be told, and its numbers are shown."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.runs import Run
from gruppo.view.queries import Question
from gruppo.view.tokens import load_decoder
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.view import runs


def train(folder: Path, resume: bool = False, **settings: Any) -> None:
    args = GRPOConfig(**base_args(folder, save_strategy="steps", save_steps=1, parity_check="off", **settings))
    given: dict[str, Any] = dict(args=args, train_dataset=prompts(8), processing_class=tiny_tokenizer())
    trainer = GRPOTrainer(model=tiny_model(), reward_funcs=length_reward, **given)
    trainer.train(resume_from_checkpoint=resume)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder)
    return folder


def test_each_token_has_its_text(trained: Path) -> None:
    desk, run = runs.desk(trained), Run(trained)
    table = run.rollouts(["generation", "row", "completion_tokens", "logps", "advantage"]).to_pylist()
    assert len(table) == 8
    for line in table:
        asked = {"generation": [str(line["generation"])], "row": [str(line["row"])]}
        view = desk.answer("tokens", Question(asked))
        assert view["ids"] == line["completion_tokens"]
        decoded = tiny_tokenizer().decode(line["completion_tokens"], skip_special_tokens=False)
        assert "".join(view["texts"]) == decoded
        assert view["logp"] == pytest.approx(line["logps"], rel=1e-3, abs=1e-6)
        assert view["ratio"] == pytest.approx([1.0] * len(view["ids"]), abs=1e-3), (
            "one update, by the weights it was sampled from"
        )
    groups = desk.answer("groups", Question({"split": ["train"]}))
    assert (groups["total"], groups["completions"]) == (4, 8)
    assert desk.answer("state", Question({}))["runs"][0]["status"] == "finished"


def test_a_run_that_goes_on_keeps_its_tokenizer(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    before = (folder / "tokenizer" / "tokenizer.json").read_bytes()
    train(folder, resume=True, max_steps=3, resume_allow_changes=["max_steps"])
    assert [event["event"] for event in Run(folder).events() if event["event"] in ("resumed", "config_changed")] == [
        *("resumed", "config_changed"),
    ]
    assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == before
    shutil.rmtree(folder / "tokenizer")
    train(folder, resume=True, max_steps=4, resume_allow_changes=["max_steps"])
    assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == before, (
        "a run from before there was one has it now"
    )
    train(folder, record="metrics", max_steps=1)
    assert not (folder / "tokenizer").exists(), "no tokens, no tokenizer"
    assert (folder / "earlier" / "0001" / "tokenizer" / "tokenizer.json").read_bytes() == before
    assert load_decoder(Run(folder / "earlier" / "0001")) is not None
