"""What the page is told: every number it shows, against a folder whose numbers are known."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import ConfigError, DataError
from gruppo.runs import RunRecorder
from gruppo.runs.lock import Owner, RunLock
from gruppo.view.evaluations import Evaluation, compare_two
from gruppo.view.export import report_data
from gruppo.view.folders import find_folders, short_names
from gruppo.view.groups import FILTERS
from gruppo.view.queries import Desk, Question
from tests.view import runs
from tests.view.evaluations import make_evaluation


def ask(desk: Desk, question: str, **values: Any) -> Any:
    listed = {
        name: [str(v) for v in value] if isinstance(value, list) else [str(value)] for name, value in values.items()
    }
    answer = desk.answer(question, Question(listed))
    return json.loads(json.dumps(answer, allow_nan=False))  # as it arrives


def keys(answer: Any) -> list[tuple[int, int, int]]:
    return [(group["update"], group["round"], group["group"]) for group in answer["groups"]]


# ---- folders


def test_folders_are_found_by_what_is_in_them(run_folder: Path, evaluations: Path, tmp_path: Path) -> None:
    found = find_folders([run_folder.parent, evaluations / "before", run_folder])
    assert (found.runs, found.evaluations) == ([run_folder], [evaluations / "before"])
    with pytest.raises(DataError, match=r"firts is not a folder. Did you mean .*first\?"):
        find_folders([run_folder.parent / "firts"])
    with pytest.raises(DataError, match=r"neither a run \(run.json\) nor an evaluation"):
        find_folders([tmp_path])


def test_names_are_as_long_as_they_must_be() -> None:
    assert short_names([Path("/a/x/run"), Path("/a/y/run"), Path("/b/demo")]) == ["x/run", "y/run", "demo"]
    assert short_names([Path("/a/run")]) == ["run"]


# ---- the run


def test_the_overview(desk: Desk) -> None:
    run = ask(desk, "overview")["runs"][0]
    assert run["name"] == "first"
    assert run["splits"] == {"train": [0, 1, 2, 3], "eval": [4]}
    assert run["rewards"] == ["right", "short"]
    assert run["metrics"] == ["reward", "loss", "eval_reward"]
    assert run["state"]["status"] == "finished"
    assert run["state"]["completions"] == 3 * 4 * 4 + 4 + len(runs.HOSTILE)
    assert ask(desk, "settings")["num_generations"] == "4"


def test_curves_have_a_gap_where_a_value_was_not_finite(desk: Desk) -> None:
    (loss,) = ask(desk, "curves", name=["loss"])
    assert loss["updates"] == [1, 2, 3, 4]
    assert loss["values"] == [0.0, -0.125, None, -0.375]
    assert ask(desk, "curves", name=["reward", "nothing"])[0]["values"] == [0.0, 0.25, 0.5, 0.75]


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "run")
    recorder.begin(config={}, environment={})
    recorder.metrics(1, {"reward": 0.5})
    recorder.rollouts(runs.rows_of(0))
    desk = runs.desk(tmp_path / "run")
    before = ask(desk, "state")["runs"][0]
    assert (before["update"], before["completions"]) == (1, 12)
    assert ask(desk, "state")["runs"][0] == before, "nothing has come"
    recorder.metrics(2, {"reward": 0.75})
    recorder.rollouts(runs.rows_of(1))
    after = ask(desk, "state")["runs"][0]
    assert after["metrics"] > before["metrics"]
    assert after["rollouts"] > before["rollouts"]
    assert (after["update"], after["completions"]) == (2, 24)
    assert ask(desk, "curves", name=["reward"])[0]["values"] == [0.5, 0.75]


def test_a_run_goes_on_as_long_as_its_process(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.begin(config={}, environment={})
    recorder.metrics(1, {"reward": 0.5})
    desk = runs.desk(tmp_path)

    def status() -> str:
        return str(ask(desk, "state")["runs"][0]["status"])

    assert status() == "not finished", "nobody holds the lock"
    with RunLock(tmp_path):
        before = (tmp_path / "lock").read_bytes()
        assert status() == "running"
        assert report_data(desk)["overview"]["runs"][0]["state"]["status"] == "not finished", "when it will be read"
        assert (tmp_path / "lock").read_bytes() == before
    gone = dataclasses.asdict(Owner.here()) | {"pid_started": 1}
    (tmp_path / "lock").write_text(json.dumps(gone))
    assert status() == "not finished", "it was killed"
    (tmp_path / "lock").write_text(json.dumps(gone | {"host": "elsewhere"}))
    assert status() == "running", "it cannot be seen, but has just written"
    for name in ("metrics.jsonl", "events.jsonl"):
        os.utime(tmp_path / name, (1e9, 1e9))
    assert status() == "no news"
    for nonsense in (b"\xff\xfe", b"", b"[" * 9000):
        (tmp_path / "lock").write_bytes(nonsense)
        assert status() in ("no news", "not finished")
    recorder.event("finished", update=1)
    assert status() == "finished"


def test_what_is_new_in_a_folder_is_found(
    run_folder: Path, evaluations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run_folder, tmp_path / "b" / "run")
    desk = runs.desk(tmp_path)
    state = ask(desk, "state")
    shutil.copytree(run_folder, tmp_path / "a" / "run")
    shutil.copytree(evaluations / "before", tmp_path / "before")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("[")
    assert ask(desk, "state") == state, "not looked for all the time"
    overview = ask(desk, "overview")
    assert [run["name"] for run in overview["runs"]] == ["b/run", "a/run"], "the number of a run stays"
    assert [each["name"] for each in overview["evaluations"]] == ["before"]
    assert ask(desk, "groups", run=1)["total"] > 0
    before = ask(desk, "state")
    os.utime(tmp_path / "before" / "results.json", (1e9, 1e9))
    assert ask(desk, "state")["results"] != before["results"], "results that are written anew"
    monkeypatch.setattr("gruppo.view.queries.SEARCH_EVERY", 0)
    shutil.copytree(run_folder, tmp_path / "c")
    assert len(ask(desk, "state")["runs"]) == 3
    shutil.rmtree(tmp_path)
    assert len(ask(desk, "overview")["runs"]) == 3, "a folder that is gone does not break the page"


def test_what_a_resumed_run_cut_is_forgotten(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.begin(config={}, environment={})
    recorder.metrics(1, {"reward": 0.1})
    recorder.rollouts(runs.rows_of(0))
    position = recorder.sync()
    recorder.metrics(2, {"reward": 0.9})
    recorder.rollouts(runs.rows_of(1))
    recorder.close()
    desk = runs.desk(tmp_path)
    assert ask(desk, "curves", name=["reward"])[0]["values"] == [0.1, 0.9]
    resumed = RunRecorder(tmp_path)
    resumed.resume(config={}, environment={}, position=position)
    for update in (2, 3):
        resumed.metrics(update, {"reward": 0.25 * update})
    resumed.rollouts(runs.rows_of(3))
    assert ask(desk, "state")["runs"][0]["completions"] == 24
    assert ask(desk, "curves", name=["reward"])[0]["values"] == [0.1, 0.5, 0.75]
    assert {group["update"] for group in ask(desk, "groups")["groups"]} == {0, 3}


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.begin(config={}, environment={})
    recorder.rollouts(runs.rows_of(0))
    recorder.close()
    (tmp_path / "rollouts" / "00000001-0000.parquet").write_bytes(b"PAR1 is all there is")
    os.symlink("/etc/passwd", tmp_path / "rollouts" / "00000002-0000.parquet")
    desk = runs.desk(tmp_path)
    assert ask(desk, "state")["runs"][0]["completions"] == 12
    assert sum("is left out" in message for message in caplog.messages) == 2, "once for each"


def test_lines_of_a_stranger_do_not_break_an_answer(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"update": 9, "kind": "train", "loss": 1' + "0" * 400 + ', "reward": NaN, "odd": [1], "x": "1"}\n')
        file.write('{"update": "x", "loss": 1}\n[1]\n{"update": 10, "kind": [], "nonfinite": 3, "reward": 1e999}\n')
    with open(tmp_path / "run" / "events.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": ["started"], "value": Infinity}\n{"event": {}, "time": 1e999}\n')
        file.write('{"event": ' + "[" * 700 + "]" * 700 + "}\n")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "results.json").write_text("[NaN")
    desk = runs.desk(tmp_path)
    overview = ask(desk, "overview")
    assert overview["runs"][0]["state"]["status"] == "finished"
    assert [curve["values"][-1] for curve in ask(desk, "curves", name=["loss", "reward"])] == [None, None]
    assert "is not valid JSON" in overview["evaluations"][0]["problem"]


# ---- groups


def test_groups_in_the_order_that_is_asked_for(desk: Desk) -> None:
    train = dict(split="train")
    spread = ask(desk, "groups", **train, order="spread", descending=1)
    assert spread["total"] == 13
    assert keys(spread)[0] == (2, 0, 2), "two of four are right: the largest spread"
    assert spread["groups"][0]["spread"] == 0.5
    assert spread["groups"][-1]["spread"] is None, "no rewards, no spread: last"
    assert spread["groups"][-1]["replaced"]
    lowest = ask(desk, "groups", **train, order="accuracy", descending=0)
    assert [g["accuracy"] for g in lowest["groups"]] == sorted(g["accuracy"] for g in lowest["groups"])
    longest = ask(desk, "groups", **train, order="length", descending=1)["groups"]
    assert longest[0]["length"] >= longest[-1]["length"]
    one = ask(desk, "groups", **train, update=3, order="reward", descending=1)
    assert [(g["group"], g["reward"], g["accuracy"]) for g in one["groups"]] == [(0, 1, 1), (2, 0.75, 0.75), (1, 0, 0)]
    second_page = ask(desk, "groups", **train, first=10, count=10)
    assert (second_page["total"], len(second_page["groups"])) == (13, 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("truncated", {(1, 0, 0)}),
        ("tool_failures", {(1, 0, 1)}),
        ("reward_failures", {(1, 0, 1)}),
        ("replaced", {(2, 0, 1)}),
        ("disagreement", {(1, 0, 2)}),
    ],
)
def test_filters(desk: Desk, name: str, expected: set[tuple[int, int, int]]) -> None:
    assert set(keys(ask(desk, "groups", split="train", filter=[name]))) == expected


def test_groups_without_spread(desk: Desk) -> None:
    found = set(keys(ask(desk, "groups", split="train", filter=["zero_spread"])))
    assert found == {(u, 0, 0) for u in range(4)} | {(0, 0, 1), (1, 0, 1), (2, 1, 1), (3, 0, 1), (0, 0, 2)}
    both = ask(desk, "groups", split="train", filter=["zero_spread", "truncated"])
    assert keys(both) == [(1, 0, 0)], "all filters must hold"
    assert set(ask(desk, "overview")["filters"]) == set(FILTERS)


def test_search_finds_texts_in_whatever_case(desk: Desk) -> None:
    found = ask(desk, "groups", split="train", search="THE ANSWER IS 6.")
    assert {(g["update"], g["hits"]) for g in found["groups"]} == {(3, 1)}
    assert ask(desk, "groups", search="question 2: how")["total"] == 4, "prompts are searched too"
    assert keys(ask(desk, "groups", search="'error': 'b is missing'")) == [(1, 0, 1)], "messages too"
    assert ask(desk, "groups", search="(.*)")["total"] == 0, "it is text, no expression"


def test_what_counts_as_right_can_be_chosen(desk: Desk) -> None:
    asked = dict(split="train", update=3, filter=[])
    by_sum = {g["group"]: g["accuracy"] for g in ask(desk, "groups", **asked)["groups"]}
    by_short = ask(desk, "groups", **asked, pass_reward="short", pass_at="0.85")["groups"]
    assert by_sum == {0: 1, 1: 0, 2: 0.75}
    assert {g["accuracy"] for g in by_short} == {0.5}
    with pytest.raises(DataError, match=r"There is no reward 'nice'\. There are"):
        ask(desk, "groups", pass_reward="nice")


def test_one_group(desk: Desk) -> None:
    group = ask(desk, "group", generation=1, group=1)
    assert group["prompt"]["parts"][0]["text"] == "Question 1: how many?"
    assert [each["row"] for each in group["completions"]] == [4, 5, 6, 7]
    tool, failed = group["completions"][1], group["completions"][2]
    assert [(part["role"], part["failed"]) for part in tool["content"]["parts"]] == [
        *(("assistant", False), ("tool", True), ("assistant", False)),
    ]
    assert '"add"' in tool["content"]["parts"][0]["text"]
    assert tool["turns"] == 2
    assert failed["rewards"] == {"right": None, "short": 1.0}
    assert failed["kinds"] == {"right": "timeout"}
    assert failed["passes"] is False
    again = ask(desk, "group", generation=2, round=1, group=1)
    assert (again["replaced"], len(again["completions"])) == (False, 4)


def test_long_texts_come_when_they_are_asked_for(desk: Desk) -> None:
    group = ask(desk, "group", generation=4, group=0)
    huge = group["completions"][1]["content"]
    assert (huge["cut"], huge["characters"], len(huge["parts"][0]["text"])) == (True, len(runs.HUGE_LINE), 20_000)
    assert ask(desk, "text", generation=4, row=1)["parts"][0]["text"] == runs.HUGE_LINE


# ---- prompts


def test_prompts_over_training(desk: Desk) -> None:
    hardest = ask(desk, "prompts", split="train")
    assert [each["prompt"] for each in hardest["prompts"]] == [f"Question {i}: how many?" for i in (1, 2, 0)]
    assert (hardest["solved"], hardest["never"]) == (1, 1)
    assert ask(desk, "prompts", split="train", order="solved")["prompts"][0]["prompt"] == "Question 0: how many?"
    improved = ask(desk, "prompts", split="train", order="improved")["prompts"][0]
    assert (improved["prompt"], improved["first"], improved["last"]) == ("Question 2: how many?", 0.0, 0.75)
    assert ask(desk, "prompts", search="question 2")["total"] == 1


def test_the_history_of_one_prompt(desk: Desk) -> None:
    asked = ask(desk, "prompts", split="train", order="improved")["prompts"][0]["prompt_id"]
    history = ask(desk, "prompt", prompt_id=asked)["history"]
    assert [(each["update"], each["accuracy"]) for each in history] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]


# ---- evaluations


def test_two_checkpoints_on_the_same_problems(desk: Desk) -> None:
    overview = ask(desk, "overview")["evaluations"]
    assert [each["name"] for each in overview] == ["after", "before"]
    assert overview[0]["benchmarks"]["demo"]["greedy"]["accuracy"] == 10 / 12
    found = ask(desk, "compare", first=1, second=0, benchmark="demo")
    assert found["accuracies"] == [2 / 12, 10 / 12]
    assert found["mcnemar"] == {"only_first": 0, "only_second": 8, "p_value": pytest.approx(2 / 256)}
    assert found["significant"] is True
    assert "before: 16.7%. after: 83.3%. Both on 12 problems." in found["said"]
    assert found["asked"] == []
    assert [r["problem"] for r in found["rates"] if r["first"] != r["second"]] == [f"demo/{i}" for i in range(2, 10)]
    problem = ask(desk, "problem", evaluation=0, benchmark="demo", problem="demo/3")
    assert problem["question"].startswith("What is 3 + 1?")
    assert [(each["correct"], each["answer"], each["gold"]) for each in problem["attempts"]] == [(True, "4", "4")]


def test_other_problems_under_the_same_ids_are_not_compared(tmp_path: Path) -> None:
    sides = [Evaluation(make_evaluation(tmp_path / name, 3, asked), name) for name, asked in (("a", "1"), ("b", "2"))]
    with pytest.raises(ConfigError, match=r"12 of 12 problems with the same id differ\. The first is demo/0"):
        compare_two(*sides, "demo", "greedy")


def test_an_evaluation_with_a_link_that_leads_out_is_refused(evaluations: Path, tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    os.symlink(evaluations / "before" / "completions" / "demo", tmp_path / "completions" / "demo")
    with pytest.raises(DataError, match="leads out of"):
        runs.desk(tmp_path)


# ---- questions that make no sense


@pytest.mark.parametrize(
    ("question", "values", "said"),
    [
        ("grops", {}, "There is no question 'grops'. Did you mean 'groups'"),
        ("zzz", {}, "There is no question 'zzz'. There are overview, state, curves,"),
        ("groups", {"run": 7}, "There is no run 7; there are 1"),
        ("groups", {"update": "x"}, "update='x' is not a whole number"),
        ("groups", {"count": 0}, "count 1 to 500"),
        ("groups", {"count": 10_000}, "count 1 to 500"),
        ("groups", {"order": "luck"}, "cannot be sorted by 'luck'"),
        ("groups", {"filter": ["nice"]}, "There is no filter 'nice'"),
        ("groups", {"pass_at": "nan"}, "pass_at=nan is not finite"),
        ("group", {"generation": 1}, "The question lacks 'group'"),
        ("group", {"generation": 99, "group": 0}, "no group 0 in generation 99"),
        ("tokens", {"generation": 0, "row": 99}, "no row 99"),
        ("tokens", {"generation": 0, "row": 0, "first": 999}, "has no tokens from 999 on"),
        ("prompt", {"prompt_id": "nobody"}, "no prompt 'nobody'"),
        ("compare", {"first": 0, "second": 9}, "no evaluation 9"),
        ("compare", {"first": 0, "second": 1, "benchmark": "x"}, "no attempts of x"),
        ("problem", {"evaluation": 0, "benchmark": "demo", "problem": "?"}, "no attempts at '?'"),
    ],
)
def test_nonsense_is_answered_with_a_reason(desk: Desk, question: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as raised:
        ask(desk, question, **values)
    assert said in str(raised.value)
