"""What is shown of the completions: console, parquet files, trackers, the hub; and the timings beside them."""

import io
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from huggingface_hub import CommitScheduler
from rich.console import Console

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.trainer.display.completions import CompletionLog, print_prompt_completions_sample, write_parquet
from tests.helpers import chats, length_reward, prompts
from tests.hub import Hub
from tests.trainer.runs import RecordedGRPO, RecordedRLOO, make, run, stored

SHOW = {"log_completions": True, "num_completions_to_print": 0}


def shown(*args: Any, width: int = 200, **kwargs: Any) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    print_prompt_completions_sample(*args, **kwargs, console=console)
    return console.export_text()


def read(path: Path) -> dict[str, list[Any]]:
    return pq.read_table(path).to_pydict()


# ---- console


def test_a_locale_that_lacks_characters_of_a_completion_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", output)
    print_prompt_completions_sample(["2 × 2?"], ["答案是 4"], {"right": [1.0]}, [0.5], 3)
    output.flush()
    assert "2 × 2?".encode("latin-1") in output.buffer.getvalue()
    assert rb"\u7b54\u6848" in output.buffer.getvalue()


def test_the_table_shows_every_column(tmp_path: Path) -> None:
    text = shown(["2+2="], ["4"], {"exact": [1.0]}, [0.70711], 12, extra={"parsed": ["four"]})
    header = next(line for line in text.splitlines() if "Prompt" in line)
    assert [word for word in header.split() if word.isalpha()] == [
        "Prompt",
        "Completion",
        "exact",
        "Advantage",
        "parsed",
    ]
    assert "Step 12" in text
    row = next(line for line in text.splitlines() if "2+2=" in line)
    assert all(cell in row for cell in ("4", "1.00", "0.71", "four"))


@pytest.mark.parametrize("text", ["[bold]loud[/bold]", "[/INST] answer", "[red]", "\\boxed{[1, 2]}", "a]b[c"])
def test_brackets_are_text_and_not_markup(text: str) -> None:
    assert text in shown([f"prompt {text}"], [text], {"reward": [0.0]}, [0.0], 1, extra={text: [text]})


def test_messages_are_shown_as_a_person_reads_them() -> None:
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what is it?"}]},
    ]
    call = {"type": "function", "function": {"name": "look", "arguments": {"zoom": 2}}}
    completion = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "a [cat]"}]
    text = shown([prompt], [completion], {"reward": [0.0]}, [0.0], 1)
    for part in ("SYSTEM", "Be brief.", "USER", "[IMAGE] what is it?", "ASSISTANT", "look(zoom=2)", "TOOL", "a [cat]"):
        assert part in text


@pytest.mark.parametrize(("samples", "rows"), [(None, 6), (4, 4), (9, 6), (0, 0), (-1, 0)])
def test_a_sample_of_the_completions_is_printed(samples: int | None, rows: int) -> None:
    texts = [f"completion-{i}" for i in range(6)]
    state = random.getstate()
    text = shown(["p"] * 6, texts, {"reward": [0.0] * 6}, [0.0] * 6, 3, samples)
    assert sum(completion in text for completion in texts) == rows
    assert random.getstate() == state, "looking at a run does not change it"


def test_another_step_shows_another_sample() -> None:
    texts = [f"completion-{i:02d}" for i in range(40)]
    samples = [shown(["p"] * 40, texts, {}, [0.0] * 40, step, 3) for step in range(4)]
    assert len({tuple(t for t in texts if t in text) for text in samples}) > 1


def test_a_run_prints_its_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"p0:": ["one<eos>", "[two]"], "p1:": ["three<eos>", "four"]}
    settings = {"dataset": prompts(2), "rollout_func": stored(texts), "max_steps": 1}
    run(tmp_path, **settings)
    assert "three" not in capsys.readouterr().out
    run(tmp_path, **settings, log_completions=True)
    output = capsys.readouterr().out
    assert all(word in output for word in ("Step 1", "one", "[two]", "three", "four", "Advantage"))
    run(tmp_path, **settings, log_completions=True, num_completions_to_print=1)
    output = capsys.readouterr().out
    assert sum(word in output for word in ("one", "[two]", "three", "four")) == 1
    run(tmp_path, **settings, **SHOW)
    assert "Advantage" not in capsys.readouterr().out


# ---- parquet


@pytest.mark.parametrize("trainer_class", [RecordedGRPO, RecordedRLOO])
def test_files_hold_the_completions_of_their_step(trainer_class: Any, tmp_path: Path) -> None:
    trainer = run(tmp_path, trainer_class, max_steps=3, **SHOW)
    files = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert files == [f"completions_0000{i}.parquet" for i in (1, 2, 3)], "the summary at the end adds none"
    for step in (1, 2, 3):
        table = read(tmp_path / "completions" / f"completions_0000{step}.parquet")
        assert list(table) == ["step", "prompt", "completion", "length_reward", "advantage"]
        assert table["step"] == [step] * 4
        assert table["prompt"] == [row["prompt"] for row in trainer.rows[step - 1]]
        assert table["length_reward"] == pytest.approx(length_reward(table["completion"]))


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1)
    assert not (tmp_path / "completions").exists()


def test_a_file_holds_the_newest_generation(tmp_path: Path) -> None:
    trainer = run(tmp_path, max_steps=4, logging_steps=2, **SHOW)
    assert sorted(p.name for p in (tmp_path / "completions").iterdir()) == [
        "completions_00002.parquet",
        "completions_00004.parquet",
    ]
    table = read(tmp_path / "completions" / "completions_00002.parquet")
    assert table["prompt"] == [row["prompt"] for row in trainer.rows[1]]


def test_evaluation_has_files_of_its_own(tmp_path: Path) -> None:
    trainer = run(
        tmp_path,
        max_steps=2,
        eval_dataset=prompts(1),
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=2,
        **SHOW,
    )
    folder = tmp_path / "completions"
    assert sorted(path.name for path in folder.iterdir()) == [
        "completions_00001.parquet",
        "completions_00002.parquet",
        "completions_eval_00002.parquet",
    ]
    assert read(folder / "completions_00002.parquet")["prompt"] == [row["prompt"] for row in trainer.rows[1]]
    assert read(folder / "completions_eval_00002.parquet")["prompt"] == ["p0:"] * 2


def test_each_of_several_eval_sets_keeps_its_completions(tmp_path: Path) -> None:
    halves = {"low": prompts(4).select([0, 1]), "high": prompts(4).select([2, 3])}
    trainer = make(tmp_path, eval_dataset=halves, per_device_eval_batch_size=4, **SHOW)
    trainer.evaluate()
    found = {path.name: sorted(set(read(path)["prompt"])) for path in (tmp_path / "completions").iterdir()}
    assert found == {
        "completions_eval_low_00000.parquet": ["p0:", "p1:"],
        "completions_eval_high_00000.parquet": ["p2:", "p3:"],
    }


def test_extra_columns(tmp_path: Path) -> None:
    def with_columns(completions: Sequence[str], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("upper", [text.upper() for text in completions])
        log_extra("size", [len(text) for text in completions])
        return [0.0, 1.0] * (len(completions) // 2)

    run(tmp_path, rewards=with_columns, max_steps=1, **SHOW)
    table = read(tmp_path / "completions" / "completions_00001.parquet")
    assert list(table) == ["step", "prompt", "completion", "with_columns", "size", "upper", "advantage"]
    assert table["size"] == [len(text) for text in table["completion"]]
    assert table["upper"] == [text.upper() for text in table["completion"]]
    assert table["advantage"] == pytest.approx([-0.7070, 0.7070] * 2, abs=1e-3)


def test_a_column_that_comes_and_goes_is_filled_with_none() -> None:
    log = CompletionLog(capacity=4)
    log.extend(["a"], ["1"], {"r": [0.0]}, [0.0], {})
    log.extend(["b"], ["2"], {"r": [1.0]}, [0.0], {"note": ["here"]})
    log.extend(["c"], ["3"], {"r": [2.0]}, [0.0], {})
    table = log.table(step=5)
    assert table["note"] == [None, "here", None]
    assert table["r"] == [0.0, 1.0, 2.0]
    log.extend(["d", "e"], ["4", "5"], {"r": [3.0, 4.0]}, [0.0, 0.0], {"note": ["x", "y"]})
    assert log.table(step=6)["prompt"] == ["b", "c", "d", "e"]
    assert log.table(step=6)["note"] == ["here", None, "x", "y"]


def test_an_extra_column_of_the_wrong_length_is_named(tmp_path: Path) -> None:
    def careless(completions: Sequence[str], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("note", ["only one"])
        return length_reward(list(completions))

    with pytest.raises(ValueError, match=r"note.*1.*4"):
        run(tmp_path, rewards=careless, max_steps=1, **SHOW)


def test_conversations_keep_their_messages(tmp_path: Path) -> None:
    run(tmp_path, dataset=chats(4), max_steps=1, shuffle_dataset=False, **SHOW)
    table = read(tmp_path / "completions" / "completions_00001.parquet")
    assert table["prompt"][0] == [{"role": "user", "content": "p0"}]
    assert table["completion"][0][0]["role"] == "assistant"


class Odd:
    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("values", "stored_as"),
    [
        ([1, 2], [1, 2]),
        ([None, "a"], [None, "a"]),
        ([["a"], "b"], ['["a"]', "b"]),  # messages beside plain text
        ([{"a": 1}, {"b": "x"}], [{"a": 1, "b": None}, {"a": None, "b": "x"}]),
        ([{"a": 1}, {"a": "x"}, None], ['{"a": 1}', '{"a": "x"}', None]),
        ([{}, {}], ["{}", "{}"]),
        ([[{"arguments": {}}], []], ['[{"arguments": {}}]', "[]"]),
        ([2**70, 1], [str(2**70), "1"]),
        (["é", "\ud800"], ["é", "\\ud800"]),
        ([Odd(), 1], ['"odd"', "1"]),
    ],
)
def test_anything_can_be_written(values: list[Any], stored_as: list[Any], tmp_path: Path) -> None:
    write_parquet({"x": values}, tmp_path / "sub" / "t.parquet")
    assert read(tmp_path / "sub" / "t.parquet")["x"] == stored_as


# ---- trackers


class FakeTracker(SimpleNamespace):
    """wandb or trackio, as far as they are used."""

    def __init__(self, active: bool = True):
        super().__init__(run=object() if active else None, logged=[], Table=lambda dataframe: dataframe)

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def tables(self) -> list[Any]:
        return [values["completions"] for values in self.logged if "completions" in values]

    def times(self) -> dict[str, float]:
        return {key: value for values in self.logged for key, value in values.items() if key.startswith("profiling/")}


def tracked(folder: Path, tracker: str, trainer_class: Any = RecordedGRPO, **settings: Any) -> Any:
    """A run that reports to a tracker, without the Trainer's own integration of it."""
    trainer = make(folder, trainer_class, **({"max_steps": 1} | settings))
    trainer.args.report_to = [tracker]
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_the_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, name, tracker)
    tracked(tmp_path, name, **SHOW)
    (frame,) = tracker.tables()
    table = read(tmp_path / "completions" / "completions_00001.parquet")
    assert {column: list(values) for column, values in frame.items()} == table


def test_trackers_get_messages_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    tracked(tmp_path, "wandb", dataset=chats(4), shuffle_dataset=False, **SHOW)
    (frame,) = tracker.tables()
    assert frame["prompt"][0] == "USER\np0"
    assert frame["completion"][0].startswith("ASSISTANT\n")


def test_one_row_per_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    tracked(tmp_path, "wandb", log_unique_prompts=True, **SHOW)
    (frame,) = tracker.tables()
    assert len(frame) == frame["prompt"].nunique() == 2
    assert len(read(tmp_path / "completions" / "completions_00001.parquet")["prompt"]) == 4


def test_wandb_without_a_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker(active=False)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    tracked(tmp_path, "wandb", **SHOW)
    assert tracker.logged == []


def test_completions_go_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    trainer = run(tmp_path, max_steps=1, log_completions_hub_repo="me/completions", hub_private_repo=True, **SHOW)
    uploads = trainer._hub_uploads
    assert (uploads.repo_id, uploads.repo_type, uploads.every) == ("me/completions", "dataset", 2)
    uploads.push_to_hub()
    assert hub.private == {"me/completions": True}
    assert hub.files["me/completions/README.md"].startswith(b"---\n")
    written = {f"me/completions/{file.name}" for file in (tmp_path / "completions").iterdir()}
    assert written == hub.files.keys() - {"me/completions/README.md"}
    assert written, "the folder that is uploaded is the one written to"
    assert not hasattr(run(tmp_path / "without", max_steps=1, **SHOW), "_hub_uploads")


def test_tables_of_an_earlier_run_are_moved_and_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    monkeypatch.setattr(CommitScheduler, "_run_scheduler", CommitScheduler.push_to_hub)  # at once
    run(tmp_path, max_steps=2, **SHOW)
    again = run(tmp_path, max_steps=1, log_completions_hub_repo="me/completions", **SHOW)
    again._hub_uploads._scheduler_thread.join()
    again._hub_uploads.push_to_hub()
    first = "completions_00001.parquet"
    assert [path.name for path in (tmp_path / "completions").iterdir()] == [first]
    earlier = tmp_path / "earlier" / "0001" / "completions"
    assert sorted(path.name for path in earlier.iterdir()) == [first, "completions_00002.parquet"]
    assert hub.files.keys() - {"me/completions/README.md"} == {f"me/completions/{first}"}


def test_a_table_of_an_evaluation_before_the_run_stays(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=1, eval_dataset=prompts(4), **SHOW)
    trainer.evaluate()
    trainer.train()
    assert (tmp_path / "completions" / "completions_eval_00000.parquet").exists()


# ---- timings


def test_timings_are_summed_and_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    trainer = tracked(tmp_path, "wandb", GRPOTrainer, beta=0.1, max_steps=2, gradient_accumulation_steps=2)
    blocks = {
        "_prepare_inputs": 2,
        "builtin.generate": 2,
        "_calculate_rewards": 2,
        "length_reward": 2,
        "compute_loss": 2,
        "_get_per_token_logps_and_entropies": 2,  # of the reference
    }
    assert dict(trainer.timings.calls) == blocks
    assert all(seconds > 0 for seconds in trainer.timings.seconds.values())
    assert trainer.timings.seconds["_prepare_inputs"] > trainer.timings.seconds["builtin.generate"]
    assert set(tracker.times()) == {f"profiling/Time taken: GRPOTrainer.{block}" for block in blocks}


def test_timings_bear_the_name_of_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class MyTrainer(RLOOTrainer):
        pass

    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    tracked(tmp_path, "trackio", MyTrainer, max_completion_length=2)
    assert "profiling/Time taken: MyTrainer.compute_loss" in tracker.times()


def test_nothing_is_sent_without_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    trainer = run(tmp_path, max_steps=1, **SHOW)
    assert trainer.timings.calls["compute_loss"] == 1
    assert tracker.logged == []
