"""With its own settings, a record gives again what the run had: advantages, loss, and what was logged with it."""

from pathlib import Path
from typing import Any

import pytest

from gruppo import GRPOTrainer
from gruppo.errors import DataError
from gruppo.replay import Replay, replay
from gruppo.runs import Run
from tests.helpers import length_reward
from tests.processes import run_together
from tests.replay.conftest import Recorded
from tests.replay.worlds import OFF_POLICY, RUNS
from tests.tools.scripted import call, make, turns_in
from tests.trainer.runs import RecordedGRPO, SaveAt, run
from tests.trainer.runs import make as make_run
from tests.trainer.test_tools import add

TOLERANCE = 1e-6  # of losses of about 1: float32 is added up in another order


def check(folder: Path) -> Replay:
    """Replay all of a run and compare it with its record."""
    found = replay(folder)
    logged = {line["update"]: line for line in Run(folder).metrics("train")}
    assert [update["update"] for update in found.updates] == list(logged), "every update is there"
    for update in found.updates:
        line = logged[update["update"]]
        assert update["loss"] == pytest.approx(line["loss"], abs=TOLERANCE)
        assert update["recorded_loss"] == pytest.approx(line["loss"], abs=TOLERANCE)
        assert update["advantage_difference"] <= 1e-6
        for name, value in update["metrics"].items():
            assert value == pytest.approx(line[name], abs=TOLERANCE), name
    assert found.notes == []
    return found


@pytest.mark.sampled(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, recorded: Recorded) -> None:
    found = check(recorded(name))
    assert any(abs(update["loss"]) > 1e-3 for update in found.updates) or name == "rloo on policy"
    assert all(update["gradient_norm"] > 0 for update in found.updates)


@pytest.mark.medium
def test_the_runs_are_what_they_are_meant_to_be(recorded: Recorded) -> None:
    """Rows that were dropped, groups that were replaced, ratios of every kind."""

    def column(name: str, of: str) -> list[Any]:
        return Run(recorded(name)).update_logps([of])[of].to_pylist()

    assert None in column("bnpo in parts", "logps"), "rows that could not matter were not run"
    assert None in column("gspo, truncated masked", "logps")
    assert True in Run(recorded("dapo")).rollouts(["replaced"])["replaced"].to_pylist()
    assert set(column("dapo", "old")) == {"own"}
    assert set(column("cispo", "old")) == {"rollout"}
    assert set(column("two rewards", "old")) == {"row"}
    assert set(column("rloo", "old")) == {"sum"}
    assert None not in column("rloo on policy", "kl_penalty")
    assert None not in column("entropy", "entropies")
    assert None not in column("grpo with a reference", "ref_logps")
    clipped = [
        update["metrics"]["clip_ratio/region_mean"] for update in replay(recorded("gspo, truncated masked")).updates
    ]
    assert max(clipped) > 0.1


def test_tokens_of_tools_have_no_gradient(tmp_path: Path) -> None:
    def script(prompt: str, sample: int) -> str:
        return f"done{sample}<eos>" if turns_in(prompt) else call("add", a=sample, b=2) + "<eos>"

    make(tmp_path, script, arguments={"tools": [add]}, max_steps=2, num_iterations=2, learning_rate=1e-2).train()
    found = check(tmp_path)
    masks = Run(tmp_path).rollouts(["model_mask"])["model_mask"].to_pylist()
    for line in found.rows.table().select(["row", "gradient"]).to_pylist():
        still = [g == 0 for g, written in zip(line["gradient"], masks[line["row"]], strict=True) if not written]
        assert all(still)
        assert len(still) > 10
    assert found.updates[1]["gradient_norm"] > 0


@pytest.mark.medium
def test_two_processes(tmp_path: Path) -> None:
    """The loss of a micro-batch is that of one process; both write their own rows."""
    run_together(2, "tests.replay.worlds", tmp_path)
    check(tmp_path / "run")
    table = Run(tmp_path / "run").update_logps(updates=[1])
    assert set(table["process"].to_pylist()) == {0, 1}
    (tmp_path / "run" / "updates" / "00000002-0001.parquet").unlink()
    found = replay(tmp_path / "run")
    assert [update["update"] for update in found.updates] == [1]
    assert "8 of its 16 rows are recorded" in found.notes[0]


class OwnLoss(RecordedGRPO):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        logits = model(input_ids=inputs["completion_ids"]).logits
        return logits.float().square().mean()


class OwnAdvantages(OwnLoss):
    def estimate_advantages(self, *args: Any, **kwargs: Any) -> Any:
        found = super().estimate_advantages(*args, **kwargs)
        return found._replace(advantages_B=2 * found.advantages_B)


class OtherAdvantages(RecordedGRPO):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        tensors = super()._generate_and_score_completions(inputs)
        return tensors | {"advantages": 3 * tensors["advantages"]}


def test_a_subclass_with_a_loss_of_its_own(tmp_path: Path) -> None:
    """Its log-probs are not known, and that is what the record says."""
    run(tmp_path, OwnLoss)
    table = Run(tmp_path).update_logps()
    assert len(table) == 8
    assert table["logps"].null_count == table["loss"].null_count == 8
    found = replay(tmp_path)
    assert found.updates[0]["recorded_loss"] is None
    assert found.to_dict()["updates"][0]["loss_difference"] is None
    assert found.updates[0]["rows_assumed"] == 4


def test_a_subclass_with_everything_of_its_own(tmp_path: Path) -> None:
    run(tmp_path, OwnAdvantages, max_steps=1)
    assert "and it was not recorded; advantages differ by up to" in replay(tmp_path).notes[0]


def test_a_subclass_that_changes_advantages(tmp_path: Path) -> None:
    """A replay does not pretend to know why the loss was another."""
    run(tmp_path, OtherAdvantages, num_iterations=2, learning_rate=1e-2)
    found = replay(tmp_path)
    assert len(found.notes) == 1
    assert "The run is not reproduced in update 1" in found.notes[0]


def test_a_generation_of_another_record(tmp_path: Path) -> None:
    """A run that goes on in another folder, inside a generation: that record does not have these rows."""
    settings = OFF_POLICY | {"max_steps": 4}
    run(tmp_path / "one", GRPOTrainer, callbacks=[SaveAt(1)], **settings)
    assert check(tmp_path / "one").updates[-1]["update"] == 4
    other = make_run(tmp_path / "other", GRPOTrainer, **settings)
    other.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-1"))
    assert Run(tmp_path / "other").updates == [3, 4], "the second update is on the rest of the generation"
    assert [update["loss_difference"] for update in replay(tmp_path / "other").updates] == pytest.approx(
        [0, 0], abs=1e-6
    )


def test_nothing_to_replay(tmp_path: Path) -> None:
    run(tmp_path / "metrics", GRPOTrainer, record="metrics", rewards=length_reward)
    with pytest.raises(DataError, match="trained with record='metrics'"):
        replay(tmp_path / "metrics")
    run(tmp_path / "all", GRPOTrainer, max_steps=1)
    with pytest.raises(DataError, match="it has 1 to 1"):
        replay(tmp_path / "all", updates=[7])
