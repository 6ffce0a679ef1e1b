"""Which run a folder is of: without a record too, and after going on from what others left."""

import json
from pathlib import Path

import pytest

from gruppo.runs import Run, RunRecorder
from gruppo.runs.checkpoints import newest_good, run_of
from gruppo.runs.record import recorded_run
from tests.runs.records import CONFIG, files, row, train
from tests.runs.saving import names, save

ABOUT: dict[str, dict[str, object]] = {"config": CONFIG, "environment": {}}


def plain_checkpoint(run: Path, step: int) -> Path:
    """As transformers writes it, without a manifest."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    return folder


def chosen(run: Path) -> str | None:
    path = newest_good(run, run_id=recorded_run(run)).path
    return None if path is None else path.name


def continues(run: Path) -> object:
    return json.loads((run / "run.json").read_text())["continues"]


# ---- without a record


def test_a_run_without_a_record_has_a_name_and_nothing_else(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, keeps=False)
    recorder.begin(**ABOUT)
    train(recorder, 1, 2)
    recorder.event("odd")
    recorder.plan({"rows": 4})
    position = recorder.sync()
    recorder.close()
    assert names(tmp_path) == ["run.json"]
    counts = {"metrics_bytes": 0, "rollouts": 2, "rollout_files": 0, "updates": 1}
    assert position == {"run_id": recorded_run(tmp_path), **counts}


def test_no_record_of_another_run_stays_beside_it(tmp_path: Path) -> None:
    recorded = RunRecorder(tmp_path)
    first = recorded.begin(**ABOUT)
    train(recorded, 1, 2)
    recorded.close()
    second = RunRecorder(tmp_path, keeps=False).begin(**ABOUT)
    assert names(tmp_path) == ["earlier", "run.json"]
    assert Run(tmp_path / "earlier" / "0001").info["run_id"] == first != second == recorded_run(tmp_path)
    assert len(Run(tmp_path / "earlier" / "0001").metrics()) == 2


def test_a_recorded_run_goes_on_without_a_record_and_with_one_again(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    run_id = recorder.begin(**ABOUT)
    train(recorder, 1, 2)
    position = recorder.sync()
    train(recorder, 3, 4)
    recorder.close()
    events = (tmp_path / "events.jsonl").read_bytes()

    silent = RunRecorder(tmp_path, keeps=False)
    silent.resume(position=position, **ABOUT)
    train(silent, 3, 5)
    later = silent.sync()
    silent.close()
    assert later["run_id"] == recorded_run(tmp_path) == run_id
    assert [line["update"] for line in Run(tmp_path).metrics()] == [1, 2], "what was undone is not told"
    assert (tmp_path / "events.jsonl").read_bytes() == events
    assert not (tmp_path / "earlier").exists()

    again = RunRecorder(tmp_path)
    again.resume(position=later, **ABOUT)
    train(again, 6, 6)
    assert [line["update"] for line in Run(tmp_path).metrics()] == [1, 2, 6]
    assert Run(tmp_path).rollouts()["generation"].to_pylist() == [0, 0, 1, 1, 5, 5]
    assert [event["event"] for event in Run(tmp_path).events()] == ["started", "resumed"]


def test_a_run_that_began_without_a_record_gets_one(tmp_path: Path) -> None:
    silent = RunRecorder(tmp_path, keeps=False)
    run_id = silent.begin(**ABOUT)
    train(silent, 1, 2)
    position = silent.sync()
    recorder = RunRecorder(tmp_path)
    recorder.resume(position=position, **ABOUT)
    train(recorder, 3, 3)
    run = Run(tmp_path)
    assert (run.info["run_id"], run.config, len(run.environment["starts"])) == (run_id, CONFIG, 1)
    assert [event["event"] for event in run.events()] == ["resumed"], "no setting has changed"
    assert run.rollouts()["generation"].to_pylist() == [2, 2]


def test_other_ranks_without_a_record(tmp_path: Path) -> None:
    zero, one = (RunRecorder(tmp_path, rank=rank, world=2, keeps=False) for rank in range(2))
    one.join(zero.begin(**ABOUT))
    for recorder in (zero, one):
        recorder.rollouts([row()])
        assert recorder.sync()["rollouts"] == 1
    assert files(tmp_path).keys() == {"run.json"}


# ---- going on from what is not its own


@pytest.mark.parametrize("keeps", [True, False])
def test_killed_before_its_own_first_checkpoint_a_run_finds_the_plain_one_again(tmp_path: Path, keeps: bool) -> None:
    plain = plain_checkpoint(tmp_path, 2)
    for _ in range(3):
        assert chosen(tmp_path) == "checkpoint-2"
        RunRecorder(tmp_path, keeps=keeps).resume(position=None, checkpoint=plain, **ABOUT)
        assert continues(tmp_path) == [{"run_id": None, "checkpoint": "checkpoint-2"}]
    plain_checkpoint(tmp_path, 9)
    assert chosen(tmp_path) == "checkpoint-2", "the run knows nothing of the other"
    save(tmp_path, 4, run_id=recorded_run(tmp_path))
    assert chosen(tmp_path) == "checkpoint-4"


@pytest.mark.parametrize("owner", ["", None, 7])
def test_a_manifest_that_names_no_run_is_like_none(tmp_path: Path, owner: object) -> None:
    checkpoint = save(tmp_path, 2, run_id=owner)
    assert run_of(checkpoint) is None
    RunRecorder(tmp_path).begin(**ABOUT)
    (rejected,) = newest_good(tmp_path, run_id=recorded_run(tmp_path)).rejected
    assert "no manifest that names its run" in rejected[1][0]
    position = {"run_id": "", "metrics_bytes": 0, "rollouts": 0}
    RunRecorder(tmp_path).resume(position=position, checkpoint=checkpoint, **ABOUT)
    assert chosen(tmp_path) == "checkpoint-2"


def test_a_checkpoint_of_another_run_in_the_same_folder(tmp_path: Path) -> None:
    position = {"run_id": "other", "metrics_bytes": 0, "rollouts": 0}
    for step in (2, 6):
        save(tmp_path, step, run_id="other", position=position)
    RunRecorder(tmp_path).resume(position=position, checkpoint=tmp_path / "checkpoint-2", **ABOUT)
    assert continues(tmp_path) == [{"run_id": "other", "checkpoint": "checkpoint-2"}]
    assert chosen(tmp_path) == "checkpoint-2", "not where the other run went from there"
    assert Run(tmp_path).events()[-1]["checkpoint"] == "checkpoint-2"


def test_a_checkpoint_elsewhere_does_not_make_its_namesake_here_good(tmp_path: Path, monkeypatch) -> None:
    plain_checkpoint(tmp_path / "here", 2)
    there = plain_checkpoint(tmp_path / "there", 2)
    RunRecorder(tmp_path / "here").resume(position=None, checkpoint=there, **ABOUT)
    assert continues(tmp_path / "here") == [{"run_id": None, "checkpoint": "there/checkpoint-2"}]
    assert chosen(tmp_path / "here") is None
    monkeypatch.chdir(tmp_path / "here")
    RunRecorder(Path(".")).resume(position=None, checkpoint=Path("checkpoint-2"), **ABOUT)
    assert chosen(tmp_path / "here") == "checkpoint-2"


@pytest.mark.parametrize("listed", [None, 7, {}, [7, None, {}, {"checkpoint": []}, {"run_id": [], "checkpoint": "x"}]])
def test_a_list_that_a_stranger_wrote(tmp_path: Path, listed: object) -> None:
    plain_checkpoint(tmp_path, 2)
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "run_id": "abc", "continues": listed}))
    assert chosen(tmp_path) is None


def test_a_run_of_its_own_continues_nothing(tmp_path: Path) -> None:
    RunRecorder(tmp_path).begin(**ABOUT)
    assert continues(tmp_path) == []
