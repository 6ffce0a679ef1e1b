"""Other rewards and other recipes on recorded rollouts: against definitions, and against runs that had them."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from rich.console import Console

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.algo.advantages import leave_one_out, sum_then_normalize
from gruppo.demo import exact_match, load_task
from gruppo.errors import ConfigError, DataError
from gruppo.replay import replay
from gruppo.replay.compute import advantages_of, compute
from gruppo.replay.record import Recording
from gruppo.replay.settings import Settings
from gruppo.replay.tables import tables
from gruppo.runs import Run
from tests.helpers import chats, length_reward, prompts, tiny_model
from tests.replay.conftest import Recorded
from tests.replay.worlds import OFF_POLICY
from tests.trainer.runs import SaveAt, make, run, with_weights


def letters(completions: list[str], **kwargs: Any) -> list[float]:
    """Takes the place of length_reward: the number of e, say."""
    return [float(sum(ch in "aeiou" for ch in text)) for text in completions]


# ---- recipes


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "bnpo", "mask_truncated_completions": True},
        {"loss_type": "vespo", "scale_rewards": "batch", "use_bias_correction_kl": False},
    ],
)
def test_what_is_replayed_is_what_a_run_with_it_computes(
    changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """In the first update all recipes have the same weights and rollouts."""
    run(tmp_path, GRPOTrainer, **OFF_POLICY | changes | {"beta": 0.1, "max_steps": 1})
    found = replay(folder, updates=[1], changes=changes)
    assert found.updates[0]["second_loss"] == pytest.approx(Run(tmp_path).metrics("train")[0]["loss"], abs=1e-6)
    there, here = (table.sort_by("row") for table in (replay(tmp_path).rows.table(), found.rows.table()))
    for own, replayed in zip(there.to_pylist(), here.to_pylist(), strict=True):
        assert replayed["second_gradient"] == pytest.approx(own["gradient"], abs=1e-7)
        assert replayed["second_advantage"] == pytest.approx(own["recorded_advantage"], abs=1e-6)


def test_advantages_of_another_recipe(folder: Path) -> None:
    rewards = torch.tensor(Run(folder).rollouts(["reward"])["reward"].to_pylist())[:, None]
    found = replay(folder, changes={"scale_rewards": "batch"}, against={"recipe": "rloo", "beta": 0})
    first = sum_then_normalize(rewards, torch.ones(1), 4, "batch").advantages_B
    second = leave_one_out(rewards, torch.ones(1), 4).advantages_B
    for line in found.rows.table().to_pylist():
        assert line["advantage"] == pytest.approx(first[line["row"]].item(), abs=1e-6)
        assert line["second_advantage"] == pytest.approx(second[line["row"]].item(), abs=1e-6)


def test_the_gradient_is_the_derivative_of_the_loss(folder: Path) -> None:
    """By finite differences, on the log-probs of the record."""
    settings = Settings.of(Run(folder).config, {"loss_type": "sapo"})
    recording = Recording(Run(folder), 4)
    update = recording.update(2)
    advantages = {0: advantages_of(recording.generation(0), settings).advantages_B}
    gradient = compute(update, settings, advantages).gradients[3][1].item()
    batch, size = update.micro_batches[0], 1e-2
    losses = []
    for step in (size, -2 * size):
        batch.logps_BT[3, 1] += step
        losses.append(compute(update, settings, advantages).loss)
    assert gradient == pytest.approx((losses[0] - losses[1]) / (2 * size), rel=2e-2)
    assert gradient != 0


def test_two_recipes_that_are_the_same(folder: Path) -> None:
    found = replay(folder, changes={"epsilon": 0.3}, against={"epsilon": 0.3, "epsilon_high": 0.3})
    assert [update["cosine"] for update in found.updates] == pytest.approx([1.0, 1.0])
    assert [update["norm_ratio"] for update in found.updates] == pytest.approx([1.0, 1.0])
    assert {(group["update"], group["group"]) for group in found.groups} == {(u, g) for u in (1, 2) for g in (0, 1)}
    assert all(sum(update["length_shares"]) == pytest.approx(1.0) for update in found.updates)


def test_a_scale_that_is_longer(folder: Path) -> None:
    """dr_grpo divides by the longest possible length, luspo's tokens are not divided at all."""
    found = replay(folder, changes={"loss_type": "dr_grpo", "beta": 0}, against={"loss_type": "luspo", "beta": 0})
    length = Run(folder).config["max_completion_length"]
    assert [update["norm_ratio"] for update in found.updates] == pytest.approx([length] * 2, rel=1e-4)
    assert [update["cosine"] for update in found.updates] == pytest.approx([1.0] * 2)
    assert found.first == "loss_type=dr_grpo, beta=0"


def test_cispo_has_the_gradient_of_a_clip_where_nothing_is_clipped(folder: Path) -> None:
    """Its cap is far away in a first update; with the run's width of 0.2 it would scale all of it by that."""
    found = replay(folder, updates=[1], changes={"recipe": "cispo"}, against={"loss_type": "dapo"})
    assert found.updates[0]["norm_ratio"] == pytest.approx(1.0, rel=1e-4)
    assert found.notes == []
    found = replay(
        folder, updates=[1], changes={"loss_type": "dapo", "beta": 0}, against={"loss_type": "cispo", "beta": 0}
    )
    assert found.updates[0]["norm_ratio"] == pytest.approx(0.2, rel=1e-4)
    assert "CISPO takes epsilon_high=0.2 as the cap" in found.notes[0]


def test_changes_that_change_nothing_are_said(folder: Path) -> None:
    found = replay(folder, changes={"epsilon": 0.2})
    assert found.second is None
    assert found.notes == ["The run was already trained with epsilon=0.2: this changes nothing."]
    assert replay(folder).notes == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beta": 0.1}, "has not recorded"),
        ({"recipe": "rloo", "beta": 0.1}, "this run had no reference"),
    ],
)
def test_what_the_record_does_not_have(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    run(tmp_path, GRPOTrainer, max_steps=1)
    with pytest.raises(ConfigError, match=said):
        replay(tmp_path, changes=changes)


def test_kl_in_the_reward_from_a_run_that_had_it_in_the_loss(folder: Path) -> None:
    """β Σ (ℓ_old − ℓ_ref) is known wherever the reference's log-probs are; before the first update it is 0."""
    found = replay(folder, changes={"recipe": "rloo"}, against={"recipe": "rloo", "beta": 0})
    assert [u["loss"] for u in found.updates] == pytest.approx([u["second_loss"] for u in found.updates], abs=1e-5)


@pytest.mark.medium
def test_kl_in_the_reward_costs_in_proportion(recorded: Recorded) -> None:
    own = Run(recorded("rloo on policy"))
    table = own.update_logps(["row", "kl_penalty"], updates=[2]).sort_by("row")
    rewards = own.rollouts(["reward", "row"], generations=[1]).sort_by("row")["reward"].to_pylist()
    half = torch.tensor(table["kl_penalty"].to_pylist()) / 2
    assert half.abs().max() > 1e-3
    expected = leave_one_out(torch.tensor(rewards)[:, None], torch.ones(1), 4, kl_penalty_B=half, normalize=True)
    found = replay(own, updates=[2], changes={"beta": 0.1}).rows.table().sort_by("row")
    assert found["second_advantage"].to_pylist() == pytest.approx(expected.advantages_B.tolist(), abs=1e-5)


def test_ratios_of_tokens_where_only_sums_are_known(tmp_path: Path) -> None:
    run(tmp_path, RLOOTrainer, beta=0.0, **OFF_POLICY)
    found = replay(tmp_path, changes={"recipe": "grpo"})
    assert found.updates[1]["rows_assumed"] == 8
    assert "log-probs of the sampler" in found.notes[0]
    assert replay(tmp_path, changes={"epsilon": 0.4}).notes == []


# ---- rewards


def test_the_same_reward_changes_nothing(folder: Path) -> None:
    found = replay(folder, rewards=length_reward)
    assert found.rescored is not None
    assert found.rescored["agreement"] == 1.0
    assert found.rescored["rank_correlation"] == pytest.approx(1.0)
    assert found.rescored["most_changed"] == []
    assert [update["cosine"] for update in found.updates] == pytest.approx([1.0, 1.0])
    assert found.second == "as recorded, other rewards"


def test_another_reward(folder: Path) -> None:
    found = replay(folder, rewards={"length_reward": letters})
    rollouts = Run(folder).rollouts().sort_by("row")
    before = torch.tensor(rollouts["reward"].to_pylist())
    after = torch.tensor(letters(rollouts["completion"].to_pylist()))
    said = found.rescored
    assert said is not None
    assert said["mean_after"] == pytest.approx(after.mean().item())
    assert said["agreement"] == pytest.approx((before == after).float().mean().item())
    assert said["most_changed"][0]["after"] == after[(after - before).abs().argmax()]
    assert len(said["most_changed"]) == min(10, int((before != after).sum()))
    expected = sum_then_normalize(after[:, None], torch.ones(1), 4, "group").advantages_B
    for line in found.rows.table().to_pylist():
        assert line["second_advantage"] == pytest.approx(expected[line["row"]].item(), abs=1e-5)
        assert line["advantage"] == pytest.approx(line["recorded_advantage"], abs=1e-6)


def test_rewards_take_the_place_of_one_of_several(tmp_path: Path) -> None:
    def none(completions: list[str], **kwargs: Any) -> list[None]:
        return [None] * len(completions)

    run(tmp_path, GRPOTrainer, rewards=[length_reward, none], max_steps=1, reward_weights=[1.0, 2.0])
    found = replay(tmp_path, rewards={"none": letters})
    totals = Run(tmp_path).rollouts().sort_by("row")
    expected = [
        reward + 2 * new
        for reward, new in zip(totals["reward"].to_pylist(), letters(totals["completion"].to_pylist()), strict=True)
    ]
    assert found.rescored is not None
    assert found.rescored["mean_after"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    with pytest.raises(ConfigError, match=r"no reward `letters`; it has length_reward, none.*length_reward=letters"):
        replay(tmp_path, rewards=letters)


def test_rewards_get_the_environment_that_they_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRUPPO_TEST_SCALE", "3")

    def scaled(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(os.environ["GRUPPO_TEST_SCALE"]) * len(text) for text in completions]

    run(tmp_path, GRPOTrainer, rewards=scaled, max_steps=1, reward_timeout=30.0, worker_env=["GRUPPO_TEST_SCALE"])
    found = replay(tmp_path, rewards=scaled)
    assert found.rescored is not None
    assert found.rescored["mean_after"] == pytest.approx(found.rescored["mean_before"])


def test_rows_that_had_been_left_out_count_with_another_reward(tmp_path: Path) -> None:
    """Their log-probs were not computed; those of the sampler stand in, and that is said."""

    def flat(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    def two(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    run(tmp_path, GRPOTrainer, rewards=flat, max_steps=1)
    assert Run(tmp_path).update_logps()["logps"].null_count == 3, "one row is run for the sake of the backward pass"
    found = replay(tmp_path, rewards=two)
    assert found.rescored is not None
    assert found.rescored["spread_appears"] == 2
    assert found.updates[0]["rows_assumed"] == 3
    assert "3 rows use log-probs of the sampler" in found.notes[0]
    table = found.rows.table()
    assert all(any(gradient) for gradient in table["second_gradient"].to_pylist())
    assert not any(any(gradient) for gradient in table["gradient"].to_pylist())


def wants_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def test_columns_of_the_dataset(folder: Path) -> None:
    seen: list[tuple[str, str]] = []

    def reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        seen.extend(zip(kwargs["prompts"], answer, strict=True))
        return [0.0] * len(answer)

    replay(folder, rewards=reward, dataset=prompts(8))
    assert seen
    assert all(prompt == f"p{answer}:" for prompt, answer in seen)
    turned = prompts(8).select(range(7, -1, -1))
    seen.clear()
    replay(folder, rewards=reward, dataset=turned)  # found by their prompts
    assert all(prompt == f"p{answer}:" for prompt, answer in seen)


def test_columns_that_are_missing(folder: Path) -> None:
    with pytest.raises(DataError, match="pass the dataset of the run as well"):
        replay(folder, rewards=wants_answer)

    def by_key(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(right) for right in kwargs["answer"]]

    with pytest.raises(DataError, match="pass the dataset of the run as well"):
        replay(folder, rewards=by_key)
    with pytest.raises(DataError, match="no row with the prompt 'p"):
        replay(folder, rewards=wants_answer, dataset=Dataset.from_dict({"prompt": ["x"], "answer": ["y"]}))


def test_a_reward_that_always_fails(folder: Path) -> None:
    """A line, without advice that would not help; the runner has shown the traceback."""

    def crashes(completions: list[str], **kwargs: Any) -> list[float]:
        raise RuntimeError("no such luck")

    with pytest.raises(DataError) as caught:
        replay(folder, rewards=crashes)
    assert str(caught.value) == (
        "No completion of generation 0 could be scored. The reward 'length_reward' failed: RuntimeError: no such luck."
    )


def test_a_dataset_without_prompts(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no column `prompt`.*it has prompts, answer\. Did you mean `prompts`"):
        replay(folder, rewards=wants_answer, dataset=Dataset.from_dict({"prompts": ["x"], "answer": ["y"]}))


def test_conversations(tmp_path: Path) -> None:
    run(tmp_path, GRPOTrainer, dataset=chats(8), max_steps=1)
    seen: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        assert kwargs["trainer_state"].global_step == 0
        return [float(len(ids)) for ids in completion_ids]

    replay(tmp_path, rewards=reward, dataset=chats(8))
    assert all(prompt[0]["role"] == "user" and completion[-1]["role"] == "assistant" for prompt, completion, _ in seen)


# ---- weights


def test_gradients_of_weights(tmp_path: Path) -> None:
    """At a checkpoint: two recipes that differ by a factor, and how far its log-probs are from the recorded ones."""
    settings = OFF_POLICY | {"loss_type": "dr_grpo", "max_steps": 2}
    trainer = run(tmp_path, GRPOTrainer, callbacks=[SaveAt(1)], **settings)
    found = replay(tmp_path, updates=[2], changes={"loss_type": "luspo"}, model=str(tmp_path / "checkpoint-1"))
    assert {(group["generation"], group["group"]) for group in found.weights} == {(0, 0), (0, 1)}
    assert all(group["logp_difference"] < 1e-5 for group in found.weights)
    assert [group["cosine"] for group in found.weights] == pytest.approx([1.0, 1.0], abs=1e-6)
    length = trainer.args.max_completion_length
    assert [group["norm_ratio"] for group in found.weights] == pytest.approx([length] * 2, rel=1e-4)
    (moved_on,) = replay(tmp_path, updates=[2], model=trainer.model, groups=1).weights
    assert moved_on["logp_difference"] > 1e-3


def test_the_whole_gradient(tmp_path: Path) -> None:
    """An update of one group: the norm is that of the update."""
    trainer = make(
        tmp_path, GRPOTrainer, max_steps=1, per_device_train_batch_size=4, num_generations=4, max_grad_norm=1e9
    )
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    (group,) = replay(tmp_path, model=with_weights(before)).weights
    assert group["gradient_norm"] == pytest.approx(Run(tmp_path).metrics("train")[0]["grad_norm"], rel=1e-4)
    assert math.isfinite(group["logp_difference"])


def test_gradients_of_an_adapter(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules="all-linear"))
    (group,) = replay(folder, updates=[1], changes={"epsilon": 0.3}, model=model, groups=1).weights
    assert group["gradient_norm"] > 0
    assert group["logp_difference"] < 1e-5, "an adapter that has not learned changes nothing"
    assert group["cosine"] == pytest.approx(1.0), "no ratio is clipped in a first update"


# ---- tables and records


def test_what_a_model_wrote_cannot_reach_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:

    found = replay(folder, rewards=letters)
    assert found.rescored is not None
    entry = {
        "generation": 0,
        "row": 0,
        "before": 0.0,
        "after": 1.0,
        "prompt": "[red]\x1b[2J",
        "completion": "a\u202eb" * 90,
    }
    found.rescored["most_changed"] = [entry]
    Console(width=80).print(tables(found))
    assert "…" not in capsys.readouterr().out.split("first: ")[1], "numbers are whole"
    Console(width=200).print(tables(found))
    printed = capsys.readouterr().out
    assert "[red]·[2J" in printed
    assert "\x1b[2J" not in printed
    assert "\u202e" not in printed


def test_records_of_before(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "updates")
    assert Run(tmp_path / "run").rollouts().num_rows == 8
    with pytest.raises(DataError, match="an older version wrote it"):
        replay(tmp_path / "run")


def test_a_generation_that_is_not_whole(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    (path,) = (tmp_path / "run" / "rollouts").glob("*.parquet")
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 7), path)
    with pytest.raises(DataError, match=r"Generation 0 .* is incomplete: it has 7 rows"):
        replay(tmp_path / "run")


@pytest.mark.medium
def test_the_demo_with_its_own_reward(recorded: Recorded) -> None:
    found = replay(recorded("dapo"), rewards=exact_match, dataset=load_task()[0])
    assert found.rescored is not None
    assert found.rescored["agreement"] == 1.0
