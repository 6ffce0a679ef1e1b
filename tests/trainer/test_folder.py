"""The folder of a run: it stays where it was given, and one that cannot be written to is refused at once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import BEMACallback, GRPOConfig
from gruppo.config.folder import why_no_path
from gruppo.errors import ConfigError
from gruppo.trainer.construct.folder import own_folder
from tests.helpers import length_reward, prompts
from tests.trainer.runs import make

WHOLE = dict(
    save_strategy="steps",
    save_steps=1,
    eval_strategy="steps",
    eval_steps=1,
    log_completions=True,
    num_completions_to_print=0,
    load_best_model_at_end=True,
    metric_for_best_model="reward",
)


class Wanders:
    """A reward that changes the working directory."""

    __name__ = "wanders"

    def __init__(self, elsewhere: Path):
        self.elsewhere = elsewhere

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        os.chdir(self.elsewhere)
        return length_reward(completions=completions, **kwargs)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to wander to; the working directory is the folder above it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "elsewhere"


def wander(elsewhere: Path, resume: Any = None, **settings: Any) -> Any:
    os.chdir(elsewhere.parent)
    parts = dict(rewards=Wanders(elsewhere), eval_dataset=prompts(4), callbacks=[BEMACallback(update_freq=1)])
    trainer = make("run", **parts, **WHOLE | settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_what_leaves_the_machine_has_the_folder_as_it_was_given(elsewhere: Path) -> None:
    trainer = make("runs/../run", save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    trainer.save_model()
    assert trainer.args.output_dir == str(elsewhere.parent / "run")
    for file in ("training_args.bin", "checkpoint-1/training_args.bin"):
        content = (elsewhere.parent / "run" / file).read_bytes()
        assert str(elsewhere.parent).encode() not in content
        stored = torch.load(elsewhere.parent / "run" / file, weights_only=False)
        assert stored.output_dir == "runs/../run"
        assert stored.to_dict()["output_dir"] == "runs/../run"
    for shown in (trainer.args.to_dict(), trainer.args.to_sanitized_dict()):
        assert shown["output_dir"] == "runs/../run"
    assert str(elsewhere.parent) not in (elsewhere.parent / "run" / "config.yaml").read_text(encoding="utf-8")
    own_folder(trainer.args)  # as a second trainer with the same settings would
    assert trainer.args.to_dict()["output_dir"] == "runs/../run"
    trainer.args.output_dir = "another"
    assert trainer.args.to_dict()["output_dir"] == "another"


def test_a_relative_folder_stays_when_the_working_directory_changes(elsewhere: Path) -> None:
    trainer = wander(elsewhere)
    trainer.save_model()
    trainer.save_state()
    run = elsewhere.parent / "run"
    names = {path.name for path in run.iterdir()}
    assert {"checkpoint-1", "checkpoint-2", "completions", "bema", "metrics.jsonl", "model.safetensors"} <= names
    assert list(elsewhere.iterdir()) == []
    assert trainer.args.output_dir == str(run)


@pytest.mark.parametrize("asked", [True, "run/checkpoint-1"])
def test_a_run_resumes_from_a_relative_folder(elsewhere: Path, asked: Any) -> None:
    """And draws the same random numbers: their state is read after the first rewards."""
    wander(elsewhere, max_steps=3)
    run = elsewhere.parent / "run"
    whole = torch.load(run / "checkpoint-3" / "rng_state.pth", weights_only=False)
    weights = (run / "checkpoint-3" / "model.safetensors").read_bytes()
    if asked is True:
        os.rename(run / "checkpoint-3", elsewhere.parent / "aside")
    wander(elsewhere, asked, max_steps=3)
    assert (run / "checkpoint-3" / "model.safetensors").read_bytes() == weights
    resumed = torch.load(run / "checkpoint-3" / "rng_state.pth", weights_only=False)
    assert torch.equal(resumed["cpu"], whole["cpu"])
    assert list(elsewhere.iterdir()) == []


def test_a_working_directory_without_a_proper_name_is_no_reason(tmp_path: Path, monkeypatch: Any) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(odd)
    monkeypatch.chdir(os.fsdecode(odd))
    make("run", max_steps=1, save_strategy="steps", save_steps=1).train()
    assert os.path.exists(odd + b"/run/checkpoint-1/manifest.json")


@pytest.mark.parametrize("name", ["run\udcff", "r\ud800", "run\0"])
def test_a_folder_that_libraries_cannot_name_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="output_dir="):
        GRPOConfig(name, use_cpu=True, bf16=False)


def test_letters_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsencode", lambda path: str(path).encode("utf-8", "surrogateescape"))
    assert why_no_path("läufe/訓練") is None


@pytest.mark.medium
def test_a_folder_that_this_python_cannot_name_is_refused() -> None:
    code = "from gruppo.config.folder import why_no_path; print(why_no_path('l\\u00e4ufe'), why_no_path('runs'))"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | plain, capture_output=True, text=True)
    assert "PYTHONUTF8=1" in done.stdout, done.stderr
    assert done.stdout.endswith(" None\n")
