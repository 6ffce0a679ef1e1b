"""What an evaluation keeps, and what it goes on from."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.store import EvaluationFolder
from gruppo.evaluation.types import Attempt, GradedAttempt, Problem, ToolUse
from gruppo.grading import Grade, Rule, Rung
from gruppo.types import StopReason

PROBLEMS = {
    "set/0": Problem("set/0", "1 + 1 = ?", ("2",), level="1", subject="sums"),
    "set/1": Problem("set/1", "roots of x² = 4?", ("2", "-2"), answers_mode="all"),
}
IDENTITY = {"weights": "abc", "mode": "cot", "temperature": 0.0}


def scored(problem: str, sample: int = 0, correct: bool = True, tools: ToolUse | None = None) -> GradedAttempt:
    return GradedAttempt(
        Attempt(problem, sample, "so \\boxed{2} 答", 7, StopReason.EOS, tools, (("model", "so"), ("output", "1"))),
        Grade(correct, Rung.NUMBER, gold="2", answer="2", rule=Rule.BOX),
        paper=True,
        program=None if tools is None else False,
        vote=0,
    )


def test_what_is_added_comes_back(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    tools = ToolUse(rounds=2, executions=1, errors=1, timeouts=0, output=None)
    first, second = [scored("set/0")], [scored("set/1", correct=False, tools=tools)]
    folder.add("set", "greedy", PROBLEMS, first, IDENTITY)
    folder.add("set", "greedy", PROBLEMS, second, IDENTITY)
    assert EvaluationFolder(tmp_path).kept("set", "greedy", PROBLEMS, IDENTITY) == first + second
    assert list(folder.passes()) == [("set", "greedy")]
    assert folder.scores("set", "greedy") == {"set/0": [True], "set/1": [False]}


def test_samples_are_in_order_whatever_order_they_came_in(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    rows = [scored("set/0", 2, correct=False), scored("set/0", 0), scored("set/0", 1, correct=False)]
    folder.add("set", "sampled", PROBLEMS, rows, IDENTITY)
    assert folder.scores("set", "sampled") == {"set/0": [True, False, False]}


def test_the_files_say_what_they_are_of(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    folder.add("set", "greedy", PROBLEMS, [scored("set/1")], IDENTITY)
    (path,) = tmp_path.rglob("*.parquet")
    table = pq.read_table(path)
    assert json.loads(table.schema.metadata[b"gruppo.evaluation"]) == {"format": 1, **IDENTITY}
    row = table.to_pylist()[0]
    assert (row["question"], row["gold"], row["text"]) == ("roots of x² = 4?", ["2", "-2"], "so \\boxed{2} 答")


@pytest.mark.parametrize(
    ("identity", "problems", "message"),
    [
        ({**IDENTITY, "temperature": 0.7}, PROBLEMS, r"temperature: 0.0, now 0.7"),
        ({**IDENTITY, "shots": 8}, PROBLEMS, r"shots: None, now 8"),
        ({**IDENTITY, "grader": "gruppo 9"}, PROBLEMS, r"grader: None, now 'gruppo 9'"),
        (IDENTITY, {"set/0": Problem("set/0", "1 + 1 = ?", ("3",))}, "another question or answer for set/0"),
        (IDENTITY, {"set/0": replace(PROBLEMS["set/0"], answers_mode="any")}, "another answers_mode for set/0"),
    ],
    ids=["other settings", "a further one", "another grader", "other data", "other answers"],
)
def test_attempts_of_something_else_are_refused(tmp_path: Path, identity: dict, problems: dict, message: str) -> None:
    folder = EvaluationFolder(tmp_path)
    folder.add("set", "greedy", PROBLEMS, [scored("set/0")], IDENTITY)
    with pytest.raises(ConfigError, match=message):
        folder.kept("set", "greedy", problems, identity)


def test_another_version_of_the_grader_grades_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = EvaluationFolder(tmp_path)
    for name in PROBLEMS:
        folder.add("set", "greedy", PROBLEMS, [scored(name)], {**IDENTITY, "grader": "gruppo 1"})
    given: list[Problem] = []

    def regrade(problems: Mapping[str, Problem], attempts: Sequence[Attempt]) -> list[GradedAttempt]:
        given.extend(problems[each.problem] for each in attempts)
        return [scored(each.problem, correct=False) for each in attempts]

    some, now = {"set/0": PROBLEMS["set/0"]}, {**IDENTITY, "grader": "gruppo 2"}
    assert folder.kept("set", "greedy", some, now, regrade) == [scored("set/0", correct=False)]
    assert given == list(PROBLEMS.values()), "those of a larger set too: a folder has one grader"
    assert "graded again (grader: 'gruppo 1', now 'gruppo 2')" in caplog.text
    assert folder.scores("set", "greedy") == {"set/0": [False], "set/1": [False]}
    assert folder.identity("set", "greedy")["grader"] == "gruppo 2"
    assert len(folder.kept("set", "greedy", PROBLEMS, now, regrade)) == len(given) == 2, "once"
    with pytest.raises(ConfigError, match=r"temperature: 0.0, now 0.7; grader: 'gruppo 2', now 'gruppo 3'"):
        folder.kept("set", "greedy", PROBLEMS, {**now, "temperature": 0.7, "grader": "gruppo 3"}, regrade)


def test_the_problems_come_back(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    folder.add("set", "greedy", PROBLEMS, [scored("set/0"), scored("set/1")], IDENTITY)
    assert folder.problems("set", "greedy") == PROBLEMS


def test_problems_of_a_larger_set_are_left_alone(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    folder.add("set", "greedy", PROBLEMS, [scored("set/0"), scored("set/1")], IDENTITY)
    some = {"set/0": PROBLEMS["set/0"]}
    assert folder.kept("set", "greedy", some, IDENTITY) == [scored("set/0")]
    assert set(folder.scores("set", "greedy")) == {"set/0", "set/1"}


def test_restart_forgets_everything(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    for decoding in ("greedy", "sampled"):
        folder.add("set", decoding, PROBLEMS, [scored("set/0")], IDENTITY)
    folder.write_results({"format": 1}, {"results.md": "| 1 |", "results.tex": "1"})
    assert folder.identity("set", "greedy") == {"format": 1, **IDENTITY}
    folder.restart()
    assert folder.kept("set", "greedy", PROBLEMS, IDENTITY) == []
    assert list(folder.passes()) == []
    assert folder.results() is None
    assert folder.identity("set", "greedy") == {}
    assert not list(tmp_path.glob("results.*"))


@pytest.mark.parametrize(
    "name",
    [
        "completions",
        "completions/set",
        "completions/set/greedy",
        "completions/set/greedy/00000.parquet",
        "results.json",
    ],
)
def test_nothing_is_written_or_removed_through_links(tmp_path: Path, name: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    folder = EvaluationFolder(here)
    folder.add("set", "greedy", PROBLEMS, [scored("set/0")], IDENTITY)
    folder.write_results({"format": 1}, {})
    os.rename(here / name, there)
    (here / name).symlink_to(there)
    before = {path: path.read_bytes() for path in (there, *there.rglob("*")) if path.is_file()}
    for act in (
        folder.restart,
        lambda: folder.add("set", "greedy", PROBLEMS, [scored("set/1")], IDENTITY),
        lambda: folder.kept("set", "greedy", PROBLEMS, {**IDENTITY, "grader": 2}, lambda problems, attempts: []),
        folder.results,
        lambda: folder.write_results({"format": 1, "new": True}, {}),
    ):
        with contextlib.suppress(DataError, ConfigError):
            act()
    assert {path: path.read_bytes() for path in (there, *there.rglob("*")) if path.is_file()} == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        EvaluationFolder(tmp_path / "file")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    folder.add("set", "greedy", PROBLEMS, [scored("set/0")], IDENTITY)
    (path,) = tmp_path.rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"00000.parquet cannot be read"):
        folder.kept("set", "greedy", PROBLEMS, IDENTITY)


def test_results_are_read_back(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    assert folder.results() is None
    folder.write_results({"format": 1, "model": "数"}, {"results.md": "| a |\n"})
    assert folder.results() == {"format": 1, "model": "数"}
    assert (tmp_path / "results.md").read_text() == "| a |\n"
    folder.write_results({"format": 2}, {})
    with pytest.raises(DataError, match="not of format 1"):
        folder.results()
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(DataError, match="is not valid JSON"):
        folder.results()
