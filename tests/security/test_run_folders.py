"""A run folder of a stranger is read, checked and written to: nothing in it is run, nothing outside is touched."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gruppo import BEMACallback
from gruppo.errors import CheckpointError, DataError, RunLockedError
from gruppo.runs import RolloutRow, Run, RunRecorder, checkpoints, links, prompt_id
from tests.helpers import prompts
from tests.runs.records import updated
from tests.security.strangers import WAYS, bare_pickle
from tests.trainer.runs import make

DEEP = 200_000
CONFIG = {"beta": 0.1}


def row(i: int) -> RolloutRow:
    return RolloutRow(
        update=0,
        split="train",
        row=i,
        group=0,
        prompt_id=prompt_id("p"),
        prompt="p",
        prompt_tokens=[5],
        completion="c",
        completion_tokens=[6, 1],
        stop="eos",
        truncated=False,
        rewards={"mine": 1.0},
        reward_kinds={"mine": "score"},
        reward=1.0,
        advantage=0.5,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The record of a small run."""
    recorder = RunRecorder(tmp_path / "run")
    recorder.begin(config=CONFIG, environment={"python": "3"})
    recorder.metrics(1, {"loss": 0.5})
    recorder.rollouts([row(0), row(1)])
    recorder.update(1, updated())
    recorder.sync()
    recorder.close()
    return tmp_path / "run"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def read_all(folder: Path) -> dict[str, Any]:
    """Everything that every reader here makes of a folder; what it refuses to read is the reason."""
    readers: dict[str, Callable[[], Any]] = {
        "run": lambda: Run(folder).info,
        "config": lambda: Run(folder).config,
        "environment": lambda: Run(folder).environment,
        "metrics": lambda: Run(folder).metrics(),
        "events": lambda: Run(folder).events(),
        "rollouts": lambda: Run(folder).rollouts().to_pylist(),
        "updates": lambda: Run(folder).update_logps().to_pylist(),
        "checkpoints": lambda: Run(folder).checkpoints,
        "newest": lambda: checkpoints.newest_good(folder),
    }
    found: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except DataError as refusal:
            found[name] = refusal
    return found


def only_table(folder: Path) -> Path:
    (path,) = (folder / "rollouts").glob("*.parquet")
    return path


def test_a_good_folder_is_read(folder: Path) -> None:
    found = read_all(folder)
    assert found["config"] == CONFIG
    assert [line["loss"] for line in found["metrics"]] == [0.5]
    assert [line["completion"] for line in found["rollouts"]] == ["c", "c"]
    assert not [value for value in found.values() if isinstance(value, DataError)]


# ---- texts


@pytest.mark.parametrize(
    "text",
    [
        'beta: !!python/object/apply:os.system ["touch {mark}"]',
        'beta: !!python/object/new:os.system ["touch {mark}"]',
        'beta: !!python/object/apply:subprocess.check_output [["touch", "{mark}"]]',
        "beta: !!python/name:os.system",
        "beta: !!python/module:os",
        "beta: !!python/tuple [1]",
    ],
)
def test_python_in_yaml_is_refused(text: str, folder: Path, mark: Path) -> None:
    (folder / "config.yaml").write_text(text.replace("{mark}", str(mark)))
    assert isinstance(read_all(folder)["config"], DataError)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["run.json", "environment.json", "config.yaml"])
@pytest.mark.parametrize("content", [b"[" * DEEP, b'{"a":' * DEEP, b"\x80\x04\xff", b"", b"7", b'"text"'])
def test_files_that_are_not_what_they_should_be_are_refused(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    key = {"run.json": "run", "environment.json": "environment", "config.yaml": "config"}[name]
    assert isinstance(read_all(folder)[key], DataError)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_lines_that_are_not_what_they_should_be_are_skipped(name: str, folder: Path) -> None:
    before = read_all(folder)[name.removesuffix(".jsonl")]
    with open(folder / name, "ab") as file:
        for line in (b"[" * DEEP, b'{"a":' * DEEP, b"\x80\x04\xff", b"[1]", b"NaN"):
            file.write(line + b"\n")
    assert read_all(folder)[name.removesuffix(".jsonl")] == before


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "environment.json", "metrics.jsonl", "events.jsonl"])
def test_a_pickle_under_our_names_is_not_run(name: str, folder: Path, mark: Path) -> None:
    bare_pickle(folder / name, mark)
    read_all(folder)
    assert not mark.exists()


# ---- tables


def test_a_type_that_is_a_pickle_is_not_run(folder: Path, mark: Path) -> None:
    """Arrow once unpickled such types by itself."""
    path = only_table(folder)
    bare_pickle(folder / "pickle", mark)
    table = pq.read_table(path)
    extension = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": (folder / "pickle").read_bytes(),
    }
    fields = [field.with_metadata(extension) for field in table.schema]
    schema = pa.schema(fields, {**(table.schema.metadata or {}), b"pandas": b"{nonsense"})
    pq.write_table(pa.Table.from_arrays(table.columns, schema=schema), path)
    read_all(folder)
    assert not mark.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_pickle_that_is_called_a_table_of_an_update_is_skipped(way: str, folder: Path, mark: Path) -> None:
    WAYS[way](folder / "updates" / "00000001-0000.parquet", mark)
    assert read_all(folder)["updates"] == []
    assert not mark.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_pickle_that_is_called_a_table_is_skipped(way: str, folder: Path, mark: Path) -> None:
    WAYS[way](only_table(folder), mark)
    assert read_all(folder)["rollouts"] == []
    assert not mark.exists()


# ---- links, pipes

SECRET = '{"format": 1, "run_id": "private", "loss": "private"}\n'


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "environment.json", "metrics.jsonl", "events.jsonl"])
def test_links_that_lead_out_are_not_followed(name: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text(SECRET)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "outside")
    assert "private" not in repr(read_all(folder))


def test_folders_that_lead_out_are_not_followed(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "rollouts", tmp_path / "rollouts")
    (folder / "rollouts").symlink_to(tmp_path / "rollouts")
    (tmp_path / "elsewhere").mkdir()
    (folder / "checkpoint-5").symlink_to(tmp_path / "elsewhere")
    found = read_all(folder)
    assert found["rollouts"] == []
    assert len(found["updates"]) == 2
    assert found["checkpoints"] == []


def test_a_table_that_leads_out_is_skipped(folder: Path, tmp_path: Path) -> None:
    path = only_table(folder)
    shutil.move(path, tmp_path / "table")
    path.symlink_to(tmp_path / "table")
    assert read_all(folder)["rollouts"] == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.jsonl"])
def test_a_pipe_is_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    key = name.partition(".")[0]
    assert isinstance(read_all(folder)[key], DataError)


# ---- tools that write


def position_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint made at the end of the record says about it."""
    size = (folder / "metrics.jsonl").stat().st_size
    return {"run_id": Run(folder).info["run_id"], "metrics_bytes": size, "rollouts": 1, "rollout_files": 1}


def test_a_resumed_record_runs_nothing_in_its_settings(folder: Path, mark: Path) -> None:
    position = position_of(folder)
    (folder / "config.yaml").write_text(f'beta: !!python/object/apply:os.system ["touch {mark}"]')
    recorder = RunRecorder(folder)
    recorder.resume(config=CONFIG, environment={}, position=position)
    recorder.close()
    assert not mark.exists()
    assert Run(folder).config == CONFIG


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_resumed_record_is_not_written_through_links(name: str, folder: Path, tmp_path: Path) -> None:
    position = position_of(folder)
    (tmp_path / "outside").write_text(SECRET)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="is a link"):
        RunRecorder(folder).resume(config=CONFIG, environment={}, position=position)
    assert (tmp_path / "outside").read_text() == SECRET


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_are_examined_without_running_them(way: str, folder: Path, mark: Path) -> None:
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 3}')
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin", "training_args.bin"):
        WAYS[way](checkpoint / name, mark)
    checkpoints.problems(checkpoint)
    read_all(folder)
    assert not mark.exists()


def test_what_a_run_records_holds_no_token(tmp_path: Path) -> None:
    """The settings of a run go through `without_secrets` before they are written."""
    make(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, hub_token="my-hub-token").train()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "training_args.bin"]
    assert {tmp_path / "config.yaml", tmp_path / "checkpoint-1" / "manifest.json"} <= set(written)
    assert [path for path in written if b"my-hub-token" in path.read_bytes()] == []


# ---- all that a run writes


def whole_run(folder: Path, resume: bool = False) -> None:
    """A run that writes everything it can write into its folder."""
    trainer = make(
        folder,
        callbacks=[BEMACallback(update_freq=1)],
        eval_dataset=prompts(4),
        eval_strategy="steps",
        eval_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        max_steps=3 if resume else 2,
        resume_allow_changes=["max_steps"],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    trainer._this_update.batches = [{"ids": torch.ones(1)}]
    trainer._keep_broken_update(float("nan"))
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"loss": 0.5})
    trainer.create_model_card()


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def changed_by(run: Path, name: str, outside: Path, resume: bool) -> bool:
    """Let the run go on in a folder where a link took the place of `name`; whether what it leads to was changed."""
    outside.mkdir()
    there = outside / "there"
    if (run / name).exists():
        shutil.move(run / name, there)
    elif name.startswith("."):
        shutil.copytree(run / "checkpoint-2", there)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(there)
    before = content(outside)
    with contextlib.suppress(DataError, CheckpointError, RunLockedError):
        whole_run(run, resume)
    return content(outside) != before


@pytest.fixture(scope="module")
def all_written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    whole_run(folder)
    whole_run(folder)  # so that there are things of an earlier run
    return folder


def test_the_folders_that_a_run_writes_into_are_known(all_written: Path) -> None:
    folders = {path.name for path in all_written.iterdir() if path.is_dir()}
    assert {name for name in folders if not name.startswith("checkpoint-")} == set(links.FOLDERS)


LEFT = (
    ".saving-checkpoint-3",
    ".deleting-checkpoint-2",
    ".saving-checkpoint-2",
    "lock",
    "checkpoint-3",
    "checkpoint-1",
)
LATER = ("completions/completions_00003.parquet", "eval_results.json", "all_results.json.tmp", "run.json.tmp")


@pytest.mark.medium
@pytest.mark.parametrize("resume", [False, True])
def test_nothing_is_written_through_a_link(all_written: Path, tmp_path: Path, resume: bool) -> None:
    names = [str(path.relative_to(all_written)) for path in sorted(all_written.rglob("*"))]
    earlier = [name for name in names if name.startswith("earlier/")]
    names = [name for name in names if name not in earlier[3:]]
    assert len(names) > 50
    changed = []
    for number, name in enumerate([*names, *LEFT, *LATER]):
        run = tmp_path / f"{number}"
        shutil.copytree(all_written, run)
        if changed_by(run, name, tmp_path / f"{number}-outside", resume):
            changed.append(name)
        shutil.rmtree(run)
    assert changed == []


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    whole_run(tmp_path / "run")
    assert (tmp_path / "scratch" / "checkpoint-2" / "manifest.json").exists()
    whole_run(tmp_path / "run", resume=True)
    assert (tmp_path / "scratch" / "checkpoint-3" / "manifest.json").exists()


def test_links_that_stay_inside_and_folders_that_no_run_writes_into_are_no_reason(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "run" / "notes").write_text("mine")
    (tmp_path / "run" / "data").symlink_to(tmp_path / "data")
    (tmp_path / "run" / "latest").symlink_to("notes")
    make(tmp_path / "run", max_steps=1).train()


def test_a_linked_checkpoint_is_not_resumed_from_by_itself(
    all_written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless it is named: then the user chose it."""
    run = tmp_path / "run"
    shutil.copytree(all_written, run)
    shutil.move(run / "checkpoint-2", tmp_path / "theirs")
    (run / "checkpoint-2").symlink_to(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="is a link"):
        make(run, max_steps=3).train(resume_from_checkpoint=True)
    assert checkpoints.rotate(run, 1) == []
    assert checkpoints.newest_good(run).path is None
    settings = dict(max_steps=3, resume_allow_changes=["*"], callbacks=[BEMACallback(update_freq=1)])
    make(run, **settings).train(resume_from_checkpoint=str(run / "checkpoint-2"))
