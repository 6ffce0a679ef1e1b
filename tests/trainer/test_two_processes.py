"""The worked example on two processes: who gets which rows, what they agree on, and what a resumed run sees.

They are started by torch's launcher, as those of a user are; other tests fork theirs, which is faster.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers

from tests.helpers import length_reward, prompts, timeless
from tests.trainer.runs import RecordedGRPO, SaveAt, logs, make

RANK = int(os.environ.get("RANK", "0"))


def reporting(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    """Process 1 says more than process 0."""
    log_extra("rank", [RANK] * len(completions))
    log_metric("said", 1.0)
    if RANK == 1:
        log_extra("only_one", ["x"] * len(completions))
        log_metric("said", 4.0)
        log_metric("said", 4.0)
    return length_reward(completions)


def example(folder: Path, **settings: Any) -> Any:
    """Ten prompts, groups of 4, 2 rows a process, 3 slices, 2 passes, 2 micro-batches an update."""
    return make(
        folder,
        RecordedGRPO,
        rewards=reporting,
        dataset=prompts(10),
        num_generations=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=3,
        num_iterations=2,
        max_steps=-1,
        num_train_epochs=1,
        shuffle_dataset=False,
        **settings,
    )


def main(folder: Path) -> None:
    straight = example(
        folder,
        callbacks=[SaveAt(4)],
        log_completions=True,
        num_completions_to_print=0,
        eval_dataset=prompts(3),
        eval_strategy="steps",
        eval_steps=9,
        per_device_eval_batch_size=4,
    )
    straight.train()
    resumed = example(folder / "resumed")
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    seen = {
        "steps": straight.state.global_step,
        "rows": [(g.step, g.mode, [row["prompt"] for row in rows]) for g, rows in zip_rows(straight)],
        "resumed": [(g.step, [row["prompt"] for row in rows]) for g, rows in zip_rows(resumed)],
        "cycle": straight.slices[:3] == straight.slices[3:6],
        "log": logs(straight)[0],
        "eval": logs(straight, "eval_reward")[0],
    }
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))


def zip_rows(trainer: Any) -> Any:
    return zip(trainer.generations, trainer.rows, strict=True)


def names(*numbers: int) -> list[str]:
    return [f"p{i}:" for i in numbers]


@pytest.mark.medium
@pytest.mark.skipif(
    transformers.__version__.startswith("5.17."), reason="transformers 5.17 cannot resume on several CPU processes"
)
def test_the_worked_example_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone"]
    subprocess.run(
        [*command, "-m", "tests.trainer.test_two_processes", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))

    assert zero["steps"] == one["steps"] == 9
    assert zero["cycle"]
    assert one["cycle"]
    assert zero["rows"][:3] == [
        [0, "train", names(0, 0, 0, 0, 1, 1)],
        [3, "train", names(3, 3, 3, 3, 4, 4)],
        [6, "train", names(6, 6, 6, 6, 7, 7)],
    ]
    assert one["rows"][:3] == [
        [0, "train", names(1, 1, 2, 2, 2, 2)],  # the group of p1 lies on both
        [3, "train", names(4, 4, 5, 5, 5, 5)],
        [6, "train", names(7, 7, 8, 8, 8, 8)],
    ]

    assert zero["resumed"] == [[6, names(6, 6, 6, 6, 7, 7)]], "the generation under way was saved"
    assert one["resumed"] == [[6, names(7, 7, 8, 8, 8, 8)]]

    evaluated = [[*a[2], *b[2]] for a, b in zip(zero["rows"][3:], one["rows"][3:], strict=True)]
    assert [len(batch) for batch in evaluated] == [8, 4], "the ragged last batch is split, not filled up"
    assert sorted(row for batch in evaluated for row in batch) == sorted(names(0, 1, 2) * 4)

    own = ("ledger/", "update/", "rollout/")  # what each process says of itself
    logs = [{k: v for k, v in timeless(seen["log"]).items() if not k.startswith(own)} for seen in (zero, one)]
    assert logs[0] == logs[1], "every process knows the same metrics"
    assert zero["log"]["said"] == (1 + 1 + 4 + 4) / 4, "the mean of all values, not of the processes' means"
    assert zero["eval"]["eval_reward"] == one["eval"]["eval_reward"]

    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert table["prompt"] == names(*[0] * 4, *[1] * 4, *[2] * 4)
    assert table["rank"] == [0] * 6 + [1] * 6
    assert table["only_one"] == [None] * 6 + ["x"] * 6


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.barrier()
    # Gloo's threads now and then abort an interpreter that ends in the ordinary way, after all is done.
    os._exit(0)
