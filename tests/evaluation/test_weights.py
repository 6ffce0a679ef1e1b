"""Which weights a run folder stands for."""

import os
import shutil
import time
from pathlib import Path

import pytest

from gruppo.errors import ConfigError
from gruppo.evaluation.models import load_subject
from gruppo.evaluation.weights import find_weights
from gruppo.runs import RunRecorder
from gruppo.runs.checkpoints import publish, stage
from tests.evaluation.demo import save_model

HOUR = 3600


def checkpoint(run: Path, name: str, run_id: str | None = None) -> Path:
    run.mkdir(exist_ok=True)
    staged = stage(run, name)
    save_model(staged)
    return publish(staged, {} if run_id is None else {"run_id": run_id})


def test_a_run_is_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    old, new = checkpoint(run, "checkpoint-2"), checkpoint(run, "checkpoint-10")
    assert find_weights(run) == str(new)
    (new / "model.safetensors").write_bytes(b"cut")
    assert find_weights(run) == str(old)
    assert load_subject(run).name == "run/checkpoint-2"
    (old / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"run has no intact checkpoint of its run: checkpoint-10: .*; checkpoint-2: "
    ):
        find_weights(run)


def test_the_final_model_of_a_run_comes_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint(run, "checkpoint-2")
    save_model(run)
    assert find_weights(run) == str(run)
    assert load_subject(run).name == "run"


def record(run: Path) -> str:
    """A run begins in the folder; its id."""
    recorder = RunRecorder(run)
    run_id = recorder.begin(config={}, environment={})
    recorder.close()
    return run_id


def finish(run: Path, hours_ago: float = 0.0) -> None:
    """A final model in the folder."""
    save_model(run)
    then = time.time() - hours_ago * HOUR
    for path in run.glob("model*"):
        os.utime(path, (then, then))


def test_the_final_model_of_an_earlier_run_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    run.mkdir()
    old = record(run)
    checkpoint(run, "checkpoint-9", old)
    finish(run, hours_ago=1)
    new = record(run)
    with pytest.raises(ConfigError, match=r"older than the run .* checkpoint-9: it belongs to another run .* copy it"):
        find_weights(run)
    mine = checkpoint(run, "checkpoint-3", new)
    assert find_weights(run) == str(mine), "nor the checkpoint with the highest number, which is of that run too"
    assert (
        "older than the run that is recorded there: it belongs to another run. checkpoint-3 is evaluated"
        in caplog.text
    )
    assert load_subject(run).name == "run/checkpoint-3"
    assert (run / "model.safetensors").exists()
    caplog.clear()
    finish(run)
    assert find_weights(run) == str(run)
    assert caplog.text == ""


def test_the_checkpoints_of_an_earlier_run_are_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    checkpoint(run, "checkpoint-9", record(run))
    new = record(run)
    with pytest.raises(ConfigError, match="checkpoint-9: it belongs to another run"):
        find_weights(run)
    assert find_weights(run / "checkpoint-9") == str(run / "checkpoint-9"), "by its name it can be had"
    mine = checkpoint(run, "checkpoint-3", new)
    assert find_weights(run) == str(mine)


def test_the_adapter_of_an_earlier_run_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    assert find_weights(tmp_path) == str(tmp_path)
    os.utime(tmp_path / "adapter_model.safetensors", (1, 1))
    mine = checkpoint(tmp_path, "checkpoint-3", record(tmp_path))
    assert find_weights(tmp_path) == str(mine)


def test_a_run_that_went_on_after_its_model_was_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    run.mkdir()
    recorder = RunRecorder(run)
    run_id = recorder.begin(config={}, environment={})
    position = recorder.sync()
    checkpoint(run, "checkpoint-2", run_id)
    finish(run)
    assert find_weights(run) == str(run)
    time.sleep(0.01)
    recorder.resume(config={}, environment={}, position=position)
    recorder.close()
    assert find_weights(run) == str(run), "nothing newer has been saved"
    time.sleep(0.01)
    newer = checkpoint(run, "checkpoint-4", run_id)
    assert find_weights(run) == str(newer)
    assert "was resumed after its model was saved, and has newer checkpoints. checkpoint-4 is evaluated" in caplog.text


def test_a_copy_in_which_a_checkpoint_came_last(tmp_path: Path) -> None:
    """The times of its files say nothing, and the model need not be the last checkpoint: it may be the best one."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    checkpoint(run, "checkpoint-2", record(run))
    finish(run)
    shutil.copytree(run, copy, copy_function=shutil.copyfile)
    late = time.time() + HOUR
    os.utime(copy / "checkpoint-2" / "manifest.json", (late, late))
    assert find_weights(copy) == str(copy)
