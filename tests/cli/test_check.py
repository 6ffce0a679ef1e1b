"""`gruppo check`: what it finds, and that one trouble does not hide the next."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gruppo import cli
from gruppo.cli import check_parts
from gruppo.cli.check import check
from gruppo.cli.findings import Findings
from gruppo.cli.recipe import RunFile
from gruppo.errors import ConfigError
from gruppo.plan import Device
from tests.trainer.test_parity import BROKEN


def levels(findings: Findings) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in findings.found:
        found.setdefault(finding.what, set()).add(finding.level)
    return found


def said(findings: Findings, what: str, level: str = "error") -> str:
    return "\n".join(each.text for each in findings.found if (each.what, each.level) == (what, level))


@pytest.fixture
def tries_rewards() -> None:
    """Asked for by tests that do."""


@pytest.fixture(autouse=True)
def _no_trial_of_rewards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process for every reward takes seconds; two tests have it."""
    if "tries_rewards" not in request.fixturenames:
        monkeypatch.setattr("gruppo.cli.check_parts.reward_scores", lambda parts, findings: None)


@pytest.mark.usefixtures("tries_rewards")
def test_a_run_that_works(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe()
    assert cli.main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split(maxsplit=2)[:2] for line in out.splitlines()[:-1]]
    ok = [what for level, what in rows if level == "ok"]
    assert ok == ["fields", "dataset", "reward", "model", "lengths", "parity", "plan", "folder"]
    assert "GRPOConfig: 2 prompts × 2 completions per generation, up to 4 tokens each" in out
    assert "8 rows with prompt, answer; prompts are plain text" in out
    assert "brevity: scores -" in out
    assert "prompts of 3 to 3 tokens (median 3); completions of up to 4; the context is 128" in out
    assert "warning  template   the prompts are plain text, so the chat template is not used" in out
    assert out.splitlines()[-1].endswith(f"Start it with: gruppo train {shlex.quote(str(path))}")


def test_everything_else_is_still_checked_without_the_model(recipe: Any) -> None:
    findings = check([str(recipe(model="no-one/nothing"))])
    assert "The model 'no-one/nothing' cannot be loaded" in said(findings, "model")
    assert levels(findings)["dataset"] == {"ok"}
    assert [each.what for each in findings.errors] == ["model"]


def test_everything_else_is_still_checked_with_a_wrong_field(recipe: Any, home: Path) -> None:
    path = recipe(num_generations=3, rewards=["acuracy_reward", f"{home}/own.py:wants_gold"], dataset="none.jsonl")
    findings = check([str(path)])
    assert "must be divisible by num_generations=3" in said(findings, "fields")
    assert "Did you mean `accuracy_reward`" in said(findings, "reward")
    assert "There is no file none.jsonl" in said(findings, "dataset")
    assert len(findings.errors) == 3


@pytest.mark.usefixtures("tries_rewards")
def test_rewards_without_rows_are_only_named(recipe: Any) -> None:
    findings = check([str(recipe(dataset="no-one/nothing"))])
    assert said(findings, "reward", "warning") == "brevity: loaded, but not tried: there are no rows."
    assert levels(findings)["model"] == {"ok"}


def test_an_unknown_key_does_not_end_it(recipe: Any) -> None:
    findings = check([str(recipe(learning_rat=1.0))])
    assert "Did you mean `learning_rate`" in said(findings, "fields")
    assert levels(findings)["model"] == {"warning"}


def test_a_long_prompt_among_many_is_found(recipe: Any, home: Path) -> None:
    """Not only among the thousand that are measured."""
    rows = [{"prompt": "x" * (200 if i == 3001 else 2)} for i in range(5000)]
    (home / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    findings = check([str(recipe(dataset=str(home / "many.jsonl")))])
    assert "Row 3001: A prompt has 200 tokens, which leaves no room" in said(findings, "lengths")
    assert "prompts of 2 to 2 tokens" in said(findings, "lengths", "ok")


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: [")
    assert cli.main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.count("is not valid YAML") == 1
    assert out.splitlines()[-1].startswith("1 error: this run would not work")


@pytest.mark.parametrize(
    ("changes", "what", "message"),
    [
        ({"rewards": ["{home}/own.py:wants_gold"]}, "reward", "missing a required argument: 'gold'"),
        ({"dataset": "{home}/questions.jsonl"}, "dataset", "has no `prompt` column.*question"),
        ({"per_device_train_batch_size": 64}, "dataset", "fewer than the 32 of one generation batch"),
        ({"tools": ["{home}/own.py:ask"]}, "tools", "ask"),
        ({"tools": ["{home}/own.py:add"]}, "dataset", "need prompts that are conversations"),
        ({"tools": ["{home}/own.py:add"], "dataset": "{home}/chats.jsonl"}, "template", "does not show tool calls"),
        ({"reward_weights": [1.0, 2.0]}, "reward", "reward_weights has 2 entries for 1 rewards"),
        ({"dataset": "{home}/long.jsonl"}, "lengths", "leaves no room for a completion"),
        ({"eval_strategy": "steps"}, "dataset", "no split to evaluate on"),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], what: str, message: str, recipe: Any, home: Path) -> None:
    rows = {"questions": '{"question": "x"}\n', "long": '{"prompt": "' + "x" * 200 + '"}\n'}
    rows["chats"] = '{"prompt": [{"role": "user", "content": "x"}]}\n'
    for name, text in rows.items():
        (home / f"{name}.jsonl").write_text(text * 8)
    filled = {
        key: [entry.format(home=home) if isinstance(entry, str) else entry for entry in value]
        if isinstance(value, list)
        else value.format(home=home)
        if isinstance(value, str)
        else value
        for key, value in changes.items()
    }
    findings = check([str(recipe(**filled))])
    assert re.search(message, said(findings, what), re.DOTALL), "\n".join(map(str, findings.found))


@pytest.mark.parametrize(
    ("changes", "what", "message"),
    [
        ({"max_prompt_length": 2}, "lengths", "max_prompt_length=2 cuts 8 of 8 prompts"),
        ({"max_completion_length": 126}, "lengths", "129 tokens, more than the context of 128"),
        ({"optim_args": "momentum=0.9"}, "fields", "optim_args='momentum=0.9' has no effect"),
        ({"loss_type": "dr_grpo"}, "fields", "is not Dr. GRPO"),
        ({"use_vllm": True}, "fields", 'use_vllm needs vllm, which is not installed here: pip install "vllm<'),
        (
            {"report_to": "dvclive"},
            "fields",
            "dvclive, which is not installed here: pip install dvclive",
        ),
        ({"use_peft": True, "load_in_8bit": True}, "parity", "quantised weights need a GPU"),
    ],
)
def test_what_is_doubtful(changes: dict[str, Any], what: str, message: str, recipe: Any) -> None:
    findings = check([str(recipe(**changes))])
    assert message in said(findings, what, "warning")
    assert not findings.errors


@pytest.mark.usefixtures("tries_rewards")
def test_rewards_are_tried_on_real_rows(recipe: Any, home: Path) -> None:
    fails = home / "fails.py"
    fails.write_text("def broken(completions, **_):\n    raise ValueError('no such thing')\n")
    rewards = ["gruppo.demo:exact_match", f"{fails}:broken", "some/reward-model"]
    findings = check([str(recipe(rewards=rewards)), "--answer_template", "A: {}"])
    error = said(findings, "reward")
    assert error.startswith("broken: never gives a score: fails on ")
    assert error.count("ValueError: no such thing") == 1, "not once for each completion"
    assert "more like it" in error
    assert "exact_match: scores 0 to 1 on" in said(findings, "reward", "ok")
    assert "some/reward-model: a reward model" in said(findings, "reward", "ok")


@pytest.mark.usefixtures("tries_rewards")
def test_a_reward_that_only_abstains(recipe: Any, home: Path) -> None:
    (home / "silent.py").write_text("def silent(completions, **_):\n    return [None] * len(completions)\n")
    findings = check([str(recipe(rewards=[f"{home / 'silent.py'}:silent"]))])
    assert said(findings, "reward") == "silent: never gives a score: returns None each time"


def test_a_chat_is_shown_and_its_tools_are_told(recipe: Any, home: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": [{"role": "user", "content": "hello"}]}\n' * 8)
    findings = check([str(recipe(dataset="chats.jsonl"))])
    assert "<assistant>" in said(findings, "template", "ok")


def test_a_wrong_fast_path_is_found(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN["gradient of log-probs"].patch(monkeypatch)
    assert "fused_head=False turns off the fused head" in said(check([str(recipe())]), "parity")


def test_a_model_that_cannot_be_packed_is_named(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN["target"].patch(monkeypatch)
    assert "rows will be padded, which is slow" in said(check([str(recipe())]), "parity", "warning")


def test_a_model_that_is_too_large_is_not_loaded(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gruppo.plan.free_memory", lambda device: 1000)
    findings = check([str(recipe())])
    assert "but 0 are free here. The run makes this check before its first update" in said(
        findings, "parity", "warning"
    )


def test_batches_are_those_of_all_processes(recipe: Any) -> None:
    path = recipe(per_device_train_batch_size=1, num_generations=4, num_processes=4)
    assert "1 prompts × 4 completions per generation on 4 processes" in said(check([str(path)]), "fields", "ok")


def test_an_earlier_run_in_the_folder_is_named(recipe: Any, tmp_path: Path) -> None:
    assert cli.main(["train", str(recipe()), "--max_steps", "1"]) == 0
    assert "holds the record of a run" in said(check([str(recipe())]), "folder", "warning")
    assert levels(check([str(recipe()), "--resume"]))["folder"] == {"ok"}


def test_the_plan_is_that_of_the_device_that_is_here(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(**changes: Any) -> tuple[str, str]:
        findings = Findings()
        check_parts.plan(check_parts.Parts(RunFile.read(recipe(**changes)), model=object(), longest=3), findings)
        (found,) = findings.found
        return found.level, found.text

    level, text = planned()
    assert level == "ok"
    assert "(CPU): fits; largest phase: " in text
    monkeypatch.setattr("gruppo.cli.plan.cpu", lambda: Device("CPU", 0.1, 0.1, 0.02, memory=0.1, kind="cpu"))
    assert planned()[0] == "error", "it does not fit"
    if not torch.cuda.is_available():
        assert "there is no GPU here; `gruppo plan` with --device estimates" in planned(use_cpu=False, bf16=None)[1]


def test_warnings_of_the_library_become_lines() -> None:
    import logging

    findings = Findings()
    with findings.about("fields"):
        logging.getLogger("gruppo.somewhere").warning("mind this")
        raise ConfigError("wrong")
    assert [str(each) for each in findings.found] == [
        "error    fields     wrong",
        "warning  fields     mind this",
    ]
    assert findings.summary == "1 error and 1 warning"
    assert Findings().summary == "Nothing to complain about"


@pytest.mark.parametrize("asked", [["--help"], ["-h"], ["--use_cpu", "-h"], ["--max_steps", "2", "-h"]])
def test_help_has_examples(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *asked]) == 0
    assert "  gruppo check recipes/grpo.yaml" in capsys.readouterr().out


def test_a_value_that_looks_like_a_request_for_help(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(recipe()), "--run_name", "-h"]) == 0
    command = capsys.readouterr().out.rpartition("Start it with: gruppo train ")[2]
    assert RunFile.read(shlex.split(command)).config.run_name == "-h"


def test_what_it_prints_at_the_end_is_a_run(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(recipe()), "--answer_template", "A: {}", "--beta", "0.1"]) == 0
    command = capsys.readouterr().out.rpartition("Start it with: gruppo train ")[2]
    assert RunFile.read(shlex.split(command)).config.beta == 0.1


@pytest.mark.parametrize(
    "template", [["--answer_template"], ["--answer_template", "--resume"], ["--answer-template="]]
)
def test_a_template_without_a_value(template: list[str], recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(recipe()), *template]) == 2
    assert "--answer_template needs the form of an answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "what", "message"),
    [
        (["--launch", "foo"], "fields", "--launch foo is not one of ddp"),
        (["--nproc", "2"], "fields", "--nproc 2 needs --launch"),
        (["--launch", "ddp", "--nproc", "-1"], "fields", "--nproc -1 must be at least 1"),
        (["--num_processes", "two"], "fields", "--num_processes two must be a whole number"),
        (["--report_to", "nonsense"], "fields", "report_to='nonsense' is not one of"),
        (["--output_dir", "{file}"], "folder", "{file} is a file; name a folder"),
        (["--output_dir", "{file}/run"], "folder", "{file} is a file; name a folder"),
        (["--reward", "{broken}:score"], "reward", "cannot be imported: SyntaxError"),
        (["--dataset", "{empty}"], "dataset", "has no rows"),
    ],
)
def test_what_train_refuses(flags: list[str], what: str, message: str, recipe: Any, tmp_path: Path) -> None:
    names = {name: tmp_path / f"{name}.{end}" for name, end in [("file", "x"), ("broken", "py"), ("empty", "jsonl")]}
    for path in names.values():
        path.write_text("def score(:\n" if path.suffix == ".py" else "")
    findings = check([str(recipe()), *(flag.format(**names) for flag in flags)])
    assert [each.what for each in findings.errors] == [what], "\n".join(map(str, findings.found))
    assert message.format(**names) in said(findings, what)


def test_what_nobody_foresaw_is_a_line(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(parts: Any, findings: Findings) -> None:
        raise ZeroDivisionError("x / 0")

    raises.__name__ = "reward_calls"
    monkeypatch.setattr(check_parts, "reward_calls", raises)
    findings = check([str(recipe())])
    assert re.match(r"ZeroDivisionError: x / 0 \(.*test_check.py:\d+\)", said(findings, "reward"))
    assert levels(findings)["model"] == {"ok"}


def test_advice_about_rewards_names_the_flag() -> None:
    findings = Findings()
    trial = SimpleNamespace(score=0.0, row=0)
    tried = SimpleNamespace(trials=[trial], warnings=["gives the same score to everything; pass template='A: {}'"])
    check_parts._judge("mine", tried, findings)
    assert said(findings, "reward", "warning").endswith("pass --answer_template 'A: {}'")
