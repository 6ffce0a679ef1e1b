"""What the recorder writes: a fresh run, going on after a checkpoint, several ranks."""

import itertools
import json
import math
import os
from pathlib import Path

import pytest
import yaml

from gruppo.errors import DataError
from gruppo.runs import Run, RunRecorder
from tests.runs.records import CONFIG, files, row, stop_the_clock, train


def begun(folder: Path, **options: int | bool) -> RunRecorder:
    recorder = RunRecorder(folder, **options)  # type: ignore[arg-type]
    recorder.begin(config=CONFIG, environment={"python": "3.12"})
    return recorder


def kinds(folder: Path) -> list[str]:
    return [event["event"] for event in Run(folder).events()]


def test_nothing_is_touched_before_the_beginning(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RuntimeError, match="begin"):
        recorder.metrics(1, {"loss": 1.0})
    with pytest.raises(RuntimeError, match="begin"):
        recorder.rollouts([row()])
    recorder.close()
    assert not (tmp_path / "run").exists()


def test_a_fresh_run(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "deep" / "run")
    run_id = recorder.begin(config={**CONFIG, "out": Path("x"), "betas": (0.9, math.inf)}, environment={"gpus": 0})
    info = json.loads((recorder.folder / "run.json").read_text())
    assert (info["format"], info["run_id"]) == (1, run_id)
    assert recorder.run_id == run_id
    config = yaml.safe_load((recorder.folder / "config.yaml").read_text())
    assert config == {**CONFIG, "out": "x", "betas": [0.9, math.inf]}
    (start,) = json.loads((recorder.folder / "environment.json").read_text())["starts"]
    assert start["gpus"] == 0
    assert kinds(recorder.folder) == ["started"]
    assert not (recorder.folder / "rollouts").exists(), "no completion yet"


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    recorder.metrics(3, {"loss": math.nan, "reward": 0.5, "none": None, "kl": -math.inf, "time": 7.0, "nonfinite": 2})
    recorder.metrics(3, {"eval_reward": 1}, kind="eval")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    first, second = (
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert first.pop("time") > "2026"
    values = {"loss": None, "reward": 0.5, "none": None, "kl": None, "value/time": 7.0, "value/nonfinite": 2}
    assert first == {"update": 3, "kind": "train", "nonfinite": ["loss", "kl"], **values}
    assert (second["kind"], second["eval_reward"]) == ("eval", 1)


def test_metrics_of_other_types(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    recorder = begun(tmp_path)
    recorder.metrics(1, {"tensor": torch.tensor(0.5), "text": "odd", "flag": True})  # type: ignore[dict-item]
    (line,) = Run(tmp_path).metrics()
    assert (line["tensor"], line["text"], line["flag"]) == (0.5, "odd", True)


def test_events_take_anything(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    recorder.event("odd", update=4, path=Path("a/b"), thing=object(), bad="\udc80ä", many={3, 1}, nan=math.nan, time=1)
    event = Run(tmp_path).events()[-1]
    del event["time"]
    fields = {"path": "a/b", "thing": "<object object>", "bad": "?ä", "many": [1, 3], "nan": "nan", "value/time": 1}
    assert event == {"event": "odd", "update": 4, **fields}


def test_one_file_per_call_and_the_number_goes_on(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    recorder.rollouts([row(0)])
    recorder.rollouts([])
    recorder.rollouts([row(1), row(2)])
    assert sorted(files(tmp_path / "rollouts")) == ["00000000-0000.parquet", "00000002-0000.parquet"]
    assert Run(tmp_path).rollouts()["generation"].to_pylist() == [0, 2, 2]


def test_rollouts_can_be_left_out(tmp_path: Path) -> None:
    recorder = begun(tmp_path, rollouts=False)
    train(recorder, 1, 2)
    assert not (tmp_path / "rollouts").exists()
    assert recorder.sync()["rollouts"] == 2


def test_an_earlier_record_is_kept(tmp_path: Path) -> None:
    ids = []
    for _ in range(3):
        recorder = begun(tmp_path)
        ids.append(recorder.run_id)
        train(recorder, 1, 2)
        recorder.close()
        (tmp_path / "checkpoint-2").mkdir(exist_ok=True)
    assert [Run(folder).info["run_id"] for folder in sorted((tmp_path / "earlier").iterdir())] == ids[:2]
    assert sorted(path.name for path in (tmp_path / "earlier").iterdir()) == ["0001", "0002"]
    earlier = Run(tmp_path / "earlier" / "0001")
    assert (len(earlier.metrics()), earlier.rollouts().num_rows) == (2, 4)
    assert Run(tmp_path).events()[0]["earlier_record"] == "earlier/0002"
    assert Run(tmp_path).checkpoints == [tmp_path / "checkpoint-2"], "checkpoints stay"


def test_a_recorder_can_begin_again(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    train(recorder, 1, 2)
    recorder.begin(config=CONFIG, environment={})
    train(recorder, 1, 1)
    assert list(files(tmp_path / "rollouts")) == ["00000000-0000.parquet"]
    assert len(Run(tmp_path).metrics()) == 1
    assert len(Run(tmp_path / "earlier" / "0001").metrics()) == 2


def test_resumed_equals_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after update 5, resumed from the checkpoint of update 3: not a byte differs."""
    stop_the_clock(monkeypatch)
    straight = begun(tmp_path / "straight")
    train(straight, 1, 6)
    killed = begun(tmp_path / "killed")
    train(killed, 1, 3)
    position = json.loads(json.dumps(killed.sync()))
    train(killed, 4, 5)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"update": 6, "ki')
    for number in (1, 5):
        (tmp_path / "killed" / "rollouts" / f"0000000{number}-0000.parquet.tmp").write_bytes(b"PAR1")

    resumed = RunRecorder(tmp_path / "killed")
    resumed.resume(config=CONFIG, environment={"python": "3.12"}, position=position)
    assert resumed.run_id == position["run_id"]
    train(resumed, 4, 6)
    for recorder in (straight, resumed):
        recorder.close()
    for name in ("metrics.jsonl", "config.yaml"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    assert files(tmp_path / "killed" / "rollouts") == files(tmp_path / "straight" / "rollouts")
    assert len(files(tmp_path / "killed" / "rollouts")) == 6
    event = Run(tmp_path / "killed").events()[-1]
    assert (event["event"], event["metrics_lines_cut"], event["rollout_files_cut"]) == ("resumed", 2, 2)
    assert event["metrics_bytes_cut"] > 150
    assert len(Run(tmp_path / "killed").environment["starts"]) == 2


def test_an_abandoned_update_leaves_nothing(tmp_path: Path) -> None:
    """A position can be taken before an update and used when it is given up half-way."""
    recorder = begun(tmp_path)
    train(recorder, 1, 2)
    before = recorder.position()
    recorder.rollouts([row(3)])
    recorder.sync()
    recorder.close()
    resumed = RunRecorder(tmp_path)
    resumed.resume(config=CONFIG, environment={}, position=before)
    assert resumed.position() == before
    train(resumed, 3, 3)
    assert Run(tmp_path).rollouts()["generation"].to_pylist() == [0, 0, 1, 1, 2, 2]


def test_a_half_line_of_events_is_cut_before_more_follow(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    position = recorder.sync()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": "20')
    RunRecorder(tmp_path).resume(config=CONFIG, environment={}, position=position)
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        json.loads(line)
    assert kinds(tmp_path) == ["started", "resumed"]


def test_changed_settings_are_named(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    position = recorder.sync()
    RunRecorder(tmp_path).resume(config={**CONFIG}, environment={}, position=position)
    assert "config_changed" not in kinds(tmp_path)
    new = {"learning_rate": 2e-6, "num_generations": 2, "beta": math.nan}
    for _ in range(2):
        RunRecorder(tmp_path).resume(config=new, environment={}, position=position)
    (event,) = [event for event in Run(tmp_path).events() if event["event"] == "config_changed"]
    assert event["settings"] == ["beta", "learning_rate"]
    assert Run(tmp_path).config["learning_rate"] == 2e-6


def bomb(first: str, rest: str) -> str:
    """Ten lines of YAML, each nine times as large as the one before."""
    pairs = itertools.pairwise("abcdefghij")
    return f"a: &a {first}\n" + "".join(f"{n}: &{n} {rest % ', '.join(['*' + p] * 9)}\n" for p, n in pairs)


STRANGE = {
    "cut off": "a: " + "[" * 50_000,
    "deep": "a: " + "[" * 500 + "]" * 500,
    "lists": bomb("[x, x]", "[%s]"),
    "merges": bomb("{x: 1, y: 2}", "{<<: [%s]}"),
    "numbers for names": "1: 2",
    "a list": "- 1",
    "a number that is too long": "a: 0x" + "f" * 9000,
    "no text": "\xff",
    "empty": "",
}


@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE.keys())
def test_settings_that_a_stranger_wrote_have_changed(tmp_path: Path, text: str) -> None:
    recorder = begun(tmp_path)
    position = recorder.sync()
    recorder.close()
    (tmp_path / "config.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"config\.yaml"):
        Run(tmp_path).config  # noqa: B018
    RunRecorder(tmp_path).resume(config=CONFIG, environment={}, position=position)
    (event,) = [event for event in Run(tmp_path).events() if event["event"] == "config_changed"]
    assert event["settings"] == sorted(CONFIG)
    assert Run(tmp_path).config == CONFIG


@pytest.mark.parametrize("depth", [600, 1200])  # too much for Python 3.11 and 3.12: to convert, and to read or convert
def test_an_environment_that_cannot_be_written_again_is_replaced(tmp_path: Path, depth: int) -> None:
    recorder = begun(tmp_path)
    position = recorder.sync()
    recorder.close()
    (tmp_path / "environment.json").write_text('{"starts": ' + "[" * depth + "]" * depth + "}")
    RunRecorder(tmp_path).resume(config=CONFIG, environment={"python": "3.12"}, position=position)
    starts = Run(tmp_path).environment["starts"]
    assert [start["python"] for start in starts if isinstance(start, dict)] == ["3.12"]


def test_the_plan_belongs_to_the_last_start(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    with pytest.raises(RuntimeError, match="begin"):
        recorder.plan({})
    recorder.begin(config=CONFIG, environment={"python": "3.12"})
    recorder.plan({"rows": 4})
    resumed = RunRecorder(tmp_path)
    resumed.resume(config=CONFIG, environment={}, position=recorder.sync())
    for rows in (7, 8):
        resumed.plan({"rows": rows})
    RunRecorder(tmp_path, rank=1, world=2).plan({"rows": 99})
    starts = Run(tmp_path).environment["starts"]
    assert [start["plan"] for start in starts] == [{"rows": 4}, {"rows": 8}]
    assert starts[0]["python"] == "3.12"


def test_a_position_of_another_run_begins_anew(tmp_path: Path) -> None:
    other = begun(tmp_path / "other")
    train(other, 1, 2)
    position = other.sync()
    here = begun(tmp_path / "here")
    train(here, 1, 3)
    here.close()
    for folder in ("here", "empty"):
        recorder = RunRecorder(tmp_path / folder)
        recorder.resume(config=CONFIG, environment={}, position=position)
        assert kinds(tmp_path / folder) == ["started", "resumed"]
        assert recorder.run_id == Run(tmp_path / folder).info["run_id"] != position["run_id"]
        assert recorder.sync()["rollouts"] == 0
    event = Run(tmp_path / "here").events()[-1]
    assert (event["record"], event["checkpoint_run"]) == ("new", position["run_id"])
    assert "another run" in event["reason"]
    assert "no record" in Run(tmp_path / "empty").events()[-1]["reason"]
    assert len(Run(tmp_path / "here" / "earlier" / "0001").metrics()) == 3


def test_a_plain_checkpoint_begins_anew(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.close()
    RunRecorder(tmp_path).resume(config=CONFIG, environment={}, position=None)
    assert "does not mention a record" in Run(tmp_path).events()[-1]["reason"]
    assert (tmp_path / "earlier" / "0001" / "run.json").exists()


def test_what_is_missing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = begun(tmp_path)
    train(recorder, 1, 3)
    position = recorder.sync()
    recorder.close()
    (tmp_path / "rollouts" / "00000001-0000.parquet").unlink()
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-5])
    resumed = RunRecorder(tmp_path)
    resumed.resume(config=CONFIG, environment={}, position=position)
    event = Run(tmp_path).events()[-1]
    assert event["event"] == "record_incomplete"
    metrics, rollouts = event["missing"]
    assert f"{len(whole):,} bytes" in metrics
    assert "3 files of rollouts, 2 are left" in rollouts
    assert "incomplete" in caplog.text
    train(resumed, 4, 4)
    assert [line["update"] for line in Run(tmp_path).metrics()] == [1, 2, 4], "the half line is gone"
    again = RunRecorder(tmp_path)
    again.resume(config=CONFIG, environment={}, position=resumed.sync())
    assert Run(tmp_path).events()[-1]["event"] == "resumed", "told once"


def test_several_ranks(tmp_path: Path) -> None:
    ranks = [RunRecorder(tmp_path, rank=rank, world=3) for rank in range(3)]
    names = [recorder.begin(config=CONFIG, environment={}) for recorder in ranks]
    assert names[1:] == ["", ""]
    for recorder in ranks[1:]:
        recorder.join(names[0])
    for generation in range(4):
        for rank, recorder in enumerate(ranks):
            recorder.rollouts([row(rank)] if generation != rank else [])
            recorder.metrics(generation, {"rank": rank})
            recorder.event("rank", rank=rank)
    positions = [recorder.sync() for recorder in ranks]
    assert [position["rollouts"] for position in positions] == [4, 4, 4]
    assert {line["rank"] for line in Run(tmp_path).metrics()} == {0}
    assert kinds(tmp_path) == ["started", *["rank"] * 4]
    table = Run(tmp_path).rollouts()
    assert list(zip(table["generation"].to_pylist(), table["row"].to_pylist(), strict=True)) == [
        (generation, rank) for generation in range(4) for rank in range(3) if generation != rank
    ]


@pytest.mark.parametrize("join_first", [False, True])
def test_fewer_ranks_go_on(tmp_path: Path, join_first: bool) -> None:
    """Three ranks become two: each removes its own, rank 0 those of the one that is gone."""
    ranks = [RunRecorder(tmp_path, rank=rank, world=3) for rank in range(3)]
    run_id = ranks[0].begin(config=CONFIG, environment={})
    for recorder in ranks[1:]:
        recorder.join(run_id)
    for generation in range(4):
        for recorder in ranks:
            recorder.rollouts([row(generation)])
        if generation == 1:
            position = ranks[0].sync()
    zero, one = (RunRecorder(tmp_path, rank=rank, world=2) for rank in range(2))
    zero.resume(config=CONFIG, environment={}, position=position)
    left = {name.split(".")[0] for name in files(tmp_path / "rollouts")}
    assert left == {f"0000000{n}-000{r}" for n in (0, 1) for r in range(3)} | {"00000002-0001", "00000003-0001"}
    assert Run(tmp_path).events()[-1]["rollout_files_cut"] == 6
    if join_first:
        one.join(run_id)
    one.resume(config=CONFIG, environment={}, position=position)
    one.join(run_id)
    assert len(files(tmp_path / "rollouts")) == 6
    one.rollouts([row(2)])
    assert "00000002-0001.parquet" in files(tmp_path / "rollouts")


def test_ranks_begin_anew_with_rank_0(tmp_path: Path) -> None:
    """The record of the checkpoint is not here: all start from number 0."""
    zero, one = (RunRecorder(tmp_path, rank=rank, world=2) for rank in range(2))
    position = {"run_id": "elsewhere", "metrics_bytes": 10, "rollouts": 7}
    for recorder in (zero, one):
        recorder.resume(config=CONFIG, environment={}, position=position)
    assert zero.run_id is not None
    one.join(zero.run_id)
    for recorder in (zero, one):
        recorder.rollouts([row()])
    assert sorted(files(tmp_path / "rollouts")) == ["00000000-0000.parquet", "00000000-0001.parquet"]


def test_sync_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = begun(tmp_path / "run")
    train(recorder, 1, 2)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink().name))
    recorder.sync()
    tables = ["00000000-0000.parquet", "00000001-0000.parquet"]
    assert sorted(synced) == sorted(["metrics.jsonl", "events.jsonl", *tables, "rollouts", "run"])
    assert synced.index("rollouts") > synced.index(tables[1]), "a name last"
    synced.clear()
    recorder.sync()
    assert synced == []
    recorder.metrics(3, {"loss": 1.0})
    recorder.sync()
    assert synced == ["metrics.jsonl"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    recorder = begun(tmp_path / "run")
    position = recorder.sync()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(DataError, match="is a link"):
        RunRecorder(tmp_path / "run").resume(config=CONFIG, environment={}, position=position)
    (tmp_path / "run" / "config.yaml.tmp").symlink_to(victim)
    RunRecorder(tmp_path / "run").begin(config=CONFIG, environment={})
    assert victim.read_text() == "precious"


def test_the_tokenizer_goes_with_the_rollouts(tmp_path: Path) -> None:
    kept, left_out, other = (tmp_path / name for name in ("kept", "left_out", "other"))
    for folder, rollouts in ((kept, True), (left_out, False)):
        recorder = RunRecorder(folder, rollouts=rollouts)
        recorder.begin(config=CONFIG, environment={})
        recorder.tokenizer('{"model": "é"}')
        recorder.tokenizer(None)  # a tokenizer without such a form
    assert (kept / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8") == '{"model": "é"}'
    assert not (left_out / "tokenizer").exists()
    RunRecorder(other, rank=1, world=2).tokenizer("{}")
    assert not other.exists(), "one process writes it"
    other.mkdir()
    (left_out / "tokenizer").symlink_to(other)
    with pytest.raises(DataError, match="tokenizer is a link"):
        RunRecorder(left_out).tokenizer("{}")
    assert list(other.iterdir()) == []
