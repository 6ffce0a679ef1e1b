"""The tables of what updates computed: their columns, and that they share the fate of the rest of the record."""

import errno
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gruppo.errors import DataError
from gruppo.runs import Run, RunRecorder
from gruppo.runs.updates import COLUMNS, FURTHER, to_table
from tests.runs.records import CONFIG, FullDisk, files, row, updated


def begun(folder: Path, **kwargs: int) -> RunRecorder:
    recorder = RunRecorder(folder, **kwargs)
    recorder.begin(config=CONFIG, environment={})
    return recorder


def test_columns() -> None:
    table = to_table(updated(), 7, 3)
    assert table.column_names == list(COLUMNS), "what there is nothing to say about is left out"
    assert table.to_pylist()[0] | {"logps": None} == {
        "update": 7,
        "process": 3,
        "generation": 0,
        "row": 1,
        "micro_batch": 0,
        "logps": None,
        "old": "own",
        "loss": 0.25,
        "update_rows": 2,
        "update_tokens": 4,
        "update_micro_batches": 1,
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
    }
    assert table["logps"].to_pylist() == [[-0.5, -0.25], None]


def test_further_columns_are_nulls_where_a_table_has_none(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    recorder.update(1, updated())
    further = {"ref_logps": [np.array([-1.0, -2.0], np.float32), None], "kl_penalty": [0.5, 0.25]}
    recorder.update(2, updated(further=further, facts={**updated().facts, "loss": math.nan, "epsilon_high": math.inf}))
    table = Run(tmp_path).update_logps()
    assert table.column_names == [*COLUMNS, *FURTHER]
    assert table["ref_logps"].to_pylist() == [None, None, [-1.0, -2.0], None]
    assert table["kl_penalty"].to_pylist() == [None, None, 0.5, 0.25]
    assert table["old_logps"].null_count == 4
    assert table["epsilon_high"].to_pylist()[2:] == [math.inf] * 2
    assert Run(tmp_path).updates == [1, 2]
    assert Run(tmp_path).update_logps(["update", "row"], updates=[2]).to_pylist() == [
        {"update": 2, "row": 1},
        {"update": 2, "row": 0},
    ]
    with pytest.raises(DataError, match="logprobs"):
        Run(tmp_path).update_logps(["logprobs"])


def test_without_updates(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    recorder.update(1, None)  # a subclass has made its own tensors
    assert not (tmp_path / "updates").exists()
    assert recorder.position()["updates"] == 2
    assert Run(tmp_path).updates == []
    assert Run(tmp_path).update_logps().num_rows == 0


@pytest.mark.parametrize("kept", [{"rollouts": False}, {"keeps": False}])
def test_only_with_rollouts(tmp_path: Path, kept: dict[str, bool]) -> None:
    begun(tmp_path, **kept).update(1, updated())
    assert not (tmp_path / "updates").exists()


def test_resuming_cuts_what_came_after(tmp_path: Path) -> None:
    straight, killed = begun(tmp_path / "straight"), begun(tmp_path / "killed")
    for number in range(1, 6):
        straight.update(number, updated())
    for number in range(1, 4):
        killed.update(number, updated())
        if number == 2:
            position = json.loads(json.dumps(killed.sync()))
    (tmp_path / "killed" / "updates" / "00000002-0000.parquet.tmp").write_bytes(b"PAR1")
    killed.close()
    resumed = RunRecorder(tmp_path / "killed")
    resumed.resume(config=CONFIG, environment={}, position=position)
    assert Run(tmp_path / "killed").events()[-1]["update_files_cut"] == 1
    assert list(files(tmp_path / "killed" / "updates")) == ["00000001-0000.parquet", "00000002-0000.parquet"]
    assert resumed.position()["updates"] == 3
    for number in range(3, 6):
        resumed.update(number, updated())
    assert files(tmp_path / "killed" / "updates") == files(tmp_path / "straight" / "updates")


def test_going_back_keeps_what_is_cut(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    recorder.update(1, updated())
    position = recorder.sync()
    recorder.update(2, updated())
    recorder.close()
    resumed = RunRecorder(tmp_path)
    resumed.resume(config=CONFIG, environment={}, position=position, branch=True)
    assert Run(tmp_path).updates == [1]
    assert list(files(tmp_path / "earlier" / "0001" / "updates")) == ["00000002-0000.parquet"]


def test_a_position_of_before_updates_were_recorded(tmp_path: Path) -> None:
    """All there are came after it."""
    recorder = begun(tmp_path)
    position = {name: value for name, value in recorder.sync().items() if name != "updates"}
    recorder.update(4, updated())
    recorder.close()
    RunRecorder(tmp_path).resume(config=CONFIG, environment={}, position=position)
    assert Run(tmp_path).updates == []


def test_each_process_cuts_its_own(tmp_path: Path) -> None:
    ranks = [RunRecorder(tmp_path, rank=rank, world=2) for rank in range(2)]
    run_id = ranks[0].begin(config=CONFIG, environment={})
    ranks[1].join(run_id)
    for recorder in ranks:
        recorder.update(1, updated())
    position = ranks[0].sync()
    for recorder in ranks:
        recorder.update(2, updated())
    assert sorted(files(tmp_path / "updates")) == [f"0000000{n}-000{r}.parquet" for n in (1, 2) for r in (0, 1)]
    one = RunRecorder(tmp_path, rank=1, world=2)
    one.resume(config=CONFIG, environment={}, position=position)
    one.join(run_id)
    assert sorted(files(tmp_path / "updates"))[-1] == "00000002-0000.parquet"
    assert one.position()["updates"] == 2
    assert Run(tmp_path).update_logps(["process"])["process"].to_pylist() == [0, 0, 1, 1, 0, 0]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = begun(tmp_path)
    disk = FullDisk(monkeypatch, 0, errno.ENOSPC)
    recorder.update(1, updated())
    recorder.update(2, updated())
    assert Run(tmp_path).updates == []
    disk.room = 1 << 20
    recorder.rollouts([row()])
    assert Run(tmp_path).updates == [1, 2]
    assert Run(tmp_path).events()[-1]["updates_dropped"] == 0


def test_a_new_run_puts_them_aside(tmp_path: Path) -> None:
    begun(tmp_path).update(1, updated())
    begun(tmp_path)
    assert Run(tmp_path).updates == []
    assert list(files(tmp_path / "earlier" / "0001" / "updates")) == ["00000001-0000.parquet"]


def test_tables_of_another_kind_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = begun(tmp_path)
    recorder.update(1, updated())
    table = to_table(updated(), 2, 0)
    without = pa.table({"update": [2]}).replace_schema_metadata(table.schema.metadata)
    pq.write_table(without, tmp_path / "updates" / "00000002-0000.parquet")
    assert Run(tmp_path).update_logps()["update"].to_pylist() == [1, 1]
    assert "not a table of updates" in caplog.text
    newer = table.replace_schema_metadata({b"gruppo.updates": b"2"})
    pq.write_table(newer, tmp_path / "updates" / "00000003-0000.parquet")
    with pytest.raises(DataError, match="Use a newer version"):
        Run(tmp_path).update_logps()
