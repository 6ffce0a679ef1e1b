"""`gruppo train`, `grpo` and `rloo`: that they train, what they show, and what they say at the end."""

import importlib
import os
import signal
from pathlib import Path
from shlex import quote, split
from types import SimpleNamespace
from typing import Any

import pytest

from gruppo import cli
from gruppo.cli.loading import load_named, make_trainer
from gruppo.cli.recipe import RunFile
from gruppo.errors import AuditError
from gruppo.runs.record import RunRecorder
from tests.runs import saving

ROOT = Path(__file__).parents[2]
train: Any = importlib.import_module("gruppo.cli.train")  # `gruppo.cli` has a function of that name


def test_a_file_is_a_run(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(recipe()), "--max_steps", "1"]) == 0
    assert (tmp_path / "run" / "model.safetensors").exists()
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("GRPO of ")
    assert "update 1/1  reward " in out
    assert "{'loss'" not in out, "transformers' dictionaries are replaced"
    run = tmp_path / "run"
    assert out.splitlines()[-1].startswith("Finished 1 updates in 0:0")
    assert out.splitlines()[-1].endswith(f"Model and record: {run}. Look at it: gruppo view {quote(str(run))}")


def test_flags_are_a_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    small = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--num_generations", "2", "--max_steps", "1"]
    small += ["--per_device_train_batch_size", "4", "--max_completion_length", "4", "--save_strategy", "no"]
    about = ["--model", "model", "--dataset", "rows.jsonl", "--reward", "own.py:brevity"]
    assert cli.main(["rloo", *about, "--output_dir", str(tmp_path), *small]) == 0
    assert (tmp_path / "model.safetensors").exists()


def test_adapters_and_evaluation_reach_the_trainer(recipe: Any, home: Path) -> None:
    changes = {"peft": {"r": 2}, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    path = recipe(eval_dataset=str(home / "rows.jsonl"), ignore_bias_buffers=True, **changes)
    trainer = make_trainer(RunFile.read(path))
    assert type(trainer.model).__name__.startswith("PeftModel")
    assert len(trainer.eval_dataset) == 8
    assert trainer.model._ddp_params_and_buffers_to_ignore == []


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo's model with a chat template that knows tools."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    model, tokenizer = load_named(f"{ROOT}/examples/tiny_chat.py:load", ROOT)()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_tools_reach_the_trainer(recipe: Any, chat_model: str, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": [{"role": "user", "content": "6*7"}], "answer": "42"}\n' * 4)
    calculator = ROOT / "examples" / "calculator.py"
    about = {"model": chat_model, "dataset": "chats.jsonl", "rewards": [f"{calculator}:exact_match"]}
    trainer = make_trainer(RunFile.read(recipe(tools=[f"{calculator}:calc"], max_steps=1, **about)))
    assert [tool.__name__ for tool in trainer.tools] == ["calc"]
    trainer.train()
    assert "tools/call_frequency" in trainer.state.log_history[0]


def test_environments_and_rollout_functions_reach_the_trainer(recipe: Any, chat_model: str, tmp_path: Path) -> None:
    game = ROOT / "examples" / "guessing_game.py"
    path = recipe(model=chat_model, dataset=None, rewards=None, environment_factory=f"{game}:GuessingGame")
    (tmp_path / "chats.jsonl").write_text('{"prompt": [{"role": "user", "content": "?"}], "number": 3}\n' * 4)
    trainer = make_trainer(RunFile.read([str(path), "--dataset", "chats.jsonl", "--reward", f"{game}:found"]))
    assert trainer.toolset.environments is not None
    (tmp_path / "sampler.py").write_text("def nothing(prompts, trainer):\n    raise NotImplementedError\n")
    trainer = make_trainer(RunFile.read(recipe(rollout_func="sampler.py:nothing")))
    assert trainer.custom_rollout is not None


def test_a_process_that_was_launched_starts_no_others(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(train, "train", lambda argv, command: begun.append(argv) or 0)
    path = str(recipe(num_processes=2, launch="ddp"))
    assert cli.main(["train", path]) == 0
    assert begun == [[path]]


def test_a_value_may_look_like_a_request_for_help(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(train, "train", lambda argv, command: begun.append(RunFile.read(argv, command)) or 0)
    assert cli.main(["train", str(recipe()), "--run_name", "-h", "--max_steps", "3"]) == 0
    assert [(run.config.run_name, run.config.max_steps) for run in begun] == [("-h", 3)]


def test_a_model_that_is_not_there(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(recipe(model="no-one/nothing"))]) == 2
    assert "The model 'no-one/nothing' cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "grpo", "rloo"])
def test_help_has_examples_and_fits_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"  gruppo {command} " in text
    assert max(map(len, text.splitlines())) <= 80
    assert cli.main([command, "--help-all"]) == 0
    everything = capsys.readouterr().out
    assert "--num_generations" in everything
    assert ("--loss_type" in everything) == (command != "rloo")
    assert cli.main([command]) == 2, "nothing to train"


# ---- the end


class FakeTrainer:
    """As much of a trainer as the last words need."""

    def __init__(self, ends: BaseException, output_dir: str = "runs/x") -> None:
        self.ends = ends
        self.args = SimpleNamespace(output_dir=output_dir, record="all", push_to_hub=False)
        self.state = SimpleNamespace(global_step=7)
        self.has_checkpoint = True

    def train(self, **_: Any) -> None:
        raise self.ends

    def is_world_process_zero(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        (SystemExit(75), 75, ["Stopped after update 7, which is saved. Resume with: gruppo train", "--resume"]),
        (SystemExit(74), 74, ["could NOT be saved. There is no checkpoint."]),
        (KeyboardInterrupt(), 130, ["Interrupted after update 7; there is no checkpoint. To start again"]),
        (AuditError("A loss is not finite."), 1, ["A loss is not finite.\nFailed after update 7", "no checkpoint"]),
        (ZeroDivisionError("x / 0"), 1, ["Traceback", "ZeroDivisionError: x / 0\nFailed after update 7"]),
    ],
)
def test_every_end_says_how_to_go_on(
    ends: BaseException,
    code: int,
    words: list[str],
    recipe: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "make_trainer", lambda run, callbacks: FakeTrainer(ends))
    assert cli.main(["train", str(recipe())]) == code
    err = capsys.readouterr().err
    assert all(word in err for word in words), err


def test_every_end_names_the_checkpoint_that_resume_would_take(tmp_path: Path) -> None:
    """Not the newer one of another run, nor one that was cut off."""
    recorder = RunRecorder(tmp_path)
    own = recorder.begin(config={}, environment={})
    recorder.close()
    saving.save(tmp_path, 5, run_id=own)
    saving.cut(saving.save(tmp_path, 6, run_id=own) / "model.safetensors")
    saving.save(tmp_path, 9, run_id="theirs")
    trainer, command = FakeTrainer(ValueError(), str(tmp_path)), "gruppo train r.yaml --resume"
    resume = f"Resume from {tmp_path / 'checkpoint-5'} with: {command}"
    assert resume in train.failed(trainer, ValueError("bad"), command)
    assert resume in train.stopped(trainer, 74, command)
    assert resume in train.interrupted(trainer, command)


def test_a_checkpoint_of_an_earlier_run_is_not_one_of_this(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    saving.save(tmp_path, 5, run_id=recorder.begin(config={}, environment={}))
    recorder.close()
    trainer = FakeTrainer(ValueError(), str(tmp_path))
    trainer.has_checkpoint = False
    assert "there is no checkpoint" in train.failed(trainer, ValueError("bad"), "gruppo train r.yaml")


def test_an_interrupt_while_things_are_loaded(
    recipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "make_trainer", interrupted)
    assert cli.main(["train", str(recipe())]) == 130
    assert "nothing was trained. To start again" in capsys.readouterr().err


STOPS = """
import os, signal

calls = []

def stops(completions, **_):
    calls.append(1)
    if len(calls) == 3:  # in the third update
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(len(c)) for c in completions]
"""


def test_a_run_that_is_stopped_goes_on_as_it_says(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    path = recipe(rewards=["stops.py:stops"], max_steps=4, save_strategy="steps", save_steps=1000)
    assert cli.main(["train", str(path)]) == 75
    last = capsys.readouterr().err.strip().splitlines()[-1]
    again = f"train {quote(str(path))} --resume"
    assert last == f"gruppo train: Stopped after update 2, which is saved. Resume with: gruppo {again}"
    assert cli.main(split(again)) == 0
    out = capsys.readouterr().out
    assert [line[:10] for line in out.splitlines() if line.startswith("update")] == ["update 3/4", "update 4/4"]


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ("r.yaml", "r.yaml --resume"),
        ("r.yaml --resume", "r.yaml --resume"),
        ("r.yaml --resume true --beta 0", "r.yaml --beta 0 --resume"),
        ("r.yaml --resume_allow_changes max_steps", "r.yaml --resume_allow_changes max_steps --resume"),
        ("r.yaml --resume_from_checkpoint run/checkpoint-2 --beta 0", "r.yaml --beta 0 --resume"),
        ("r.yaml --resume-from-checkpoint=run/checkpoint-2", "r.yaml --resume"),
        ("r.yaml --run_name ' --resume'", "r.yaml --run_name ' --resume' --resume"),
    ],
)
def test_the_command_that_goes_on(given: str, again: str) -> None:
    assert train.with_resume(f"gruppo train {given}") == f"gruppo train {again}"


def test_a_signal_while_things_are_loaded(
    recipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train, "make_trainer", lambda run, callbacks: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["train", str(recipe())]) == 143
    assert "Stopped while loading; nothing was trained." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_to_go_on_from(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(recipe()), "--resume"]) == 2
    assert (
        f"There is no checkpoint in {tmp_path / 'run'} to resume from: leave out --resume." in capsys.readouterr().err
    )


def test_a_file_in_the_place_of_the_folder(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").touch()
    assert cli.main(["train", str(recipe())]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


def test_a_finished_run_and_an_earlier_one_are_told(
    recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(recipe(save_strategy="steps", save_steps=1, max_steps=1))
    assert cli.main(["train", path]) == 0
    assert "earlier run" not in capsys.readouterr().out
    assert cli.main(["train", path, "--resume"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("Nothing was left to do: the run had already made its 1 updates. Model")
    monkeypatched = FakeTrainer(KeyboardInterrupt())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_trainer", lambda run, callbacks: monkeypatched)
        assert cli.main(["train", path]) == 130
    run = tmp_path / "run"
    assert f"The record of an earlier run in {run} moves to {run / 'earlier'}." in capsys.readouterr().out


def test_all_fields_are_those_of_the_files_algorithm(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(recipe(trainer="rloo")), "--help-all"]) == 0
    assert "--loss_type" not in capsys.readouterr().out
