"""Every metric, against a value worked out from the completions by other means."""

import asyncio
import math
import re
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from gruppo import GRPOTrainer
from gruppo.rollout.vllm import transfer
from gruppo.trainer.books import ledger
from gruppo.trainer.books.metrics import MetricStore, value_stat
from gruppo.trainer.update.drift import drift_of_update, drift_stats
from gruppo.types import TrainBatch
from tests.helpers import length_reward, prompts, tiny_model
from tests.policy.experts import experts
from tests.rollout.vllm_doubles import saved_model, serving, share_bytes
from tests.rollout.vllm_package import fake_vllm
from tests.tools.scripted import random_caller
from tests.trainer.runs import (
    RecordedGRPO,
    RecordedRLOO,
    Weights,
    logs,
    make,
    run,
    slow_scores,
    std,
    stored,
    token_ids,
    with_weights,
)

TEXTS = {"p0:": ["ab<eos>", "abcd"], "p1:": ["x<eos>", "xyz12"]}
ROWS = [(prompt, text) for prompt in TEXTS for text in TEXTS[prompt]]
LENGTHS = [3, 4, 2, 5]  # the second and the fourth did not end
FIRST = dict(zip(("ab", "abcd", "x", "xyz12"), (1.0, 0.0, 0.5, 0.5), strict=True))
SECOND = dict(zip(("ab", "abcd", "x", "xyz12"), (None, 2.0, 1.0, None), strict=True))


def first(completions: Sequence[str], **kwargs: Any) -> list[float]:
    return [FIRST[text] for text in completions]


def second(completions: Sequence[str], **kwargs: Any) -> list[float | None]:
    return [SECOND[text] for text in completions]


def spread(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Both groups have a winner and a loser."""
    return [float(text in ("ab", "xyz12")) for text in completions]


ADVANTAGE = {"ab<eos>": 1, "abcd": -1, "x<eos>": -1, "xyz12": 1}  # signs, under `spread`


class StoredRLOO(RecordedRLOO):
    """RLOO takes no rollout_func; its rollouts are stored one level below."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        texts = [self.processing_class.decode(ids) for ids in prompt_ids]
        return stored(TEXTS)(texts, self)["completion_ids"], None


def stored_run(folder: Path, trainer_class: Any = RecordedGRPO, **settings: Any) -> Any:
    """Two prompts with two stored completions each, one micro-batch per update, in order."""
    defaults = {"max_steps": 1, "rewards": spread, "shuffle_dataset": False, "learning_rate": 0.0}
    if trainer_class is not StoredRLOO:
        defaults["rollout_func"] = stored(TEXTS)
    return run(folder, trainer_class, dataset=prompts(2), **(defaults | settings))


def scores(state: dict[str, torch.Tensor] | None = None, seed: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    """Log-probs and entropies of each stored completion under a tiny model."""
    model = tiny_model(seed) if state is None else with_weights(state)
    return {text: slow_scores(model, token_ids(prompt), token_ids(text)) for prompt, text in ROWS}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- what is known when a generation is scored


def test_lengths(tmp_path: Path) -> None:
    log = logs(stored_run(tmp_path))[0]
    assert {key.removeprefix("completions/"): log[key] for key in log if key.startswith("completions/")} == {
        "mean_length": 3.5,
        "min_length": 2.0,
        "max_length": 5.0,
        "clipped_ratio": 0.5,
        "mean_terminated_length": 2.5,
        "min_terminated_length": 2.0,
        "max_terminated_length": 3.0,
    }


def test_terminated_lengths_are_zero_when_nothing_ended(tmp_path: Path) -> None:
    endless = stored({"p0:": ["abc"], "p1:": ["abcd"]})
    log = logs(run(tmp_path, dataset=prompts(2), rollout_func=endless, max_steps=1))[0]
    assert log["completions/clipped_ratio"] == 1.0
    assert [log[f"completions/{kind}_terminated_length"] for kind in ("mean", "min", "max")] == [0.0, 0.0, 0.0]


def test_lengths_count_the_tokens_of_the_model_only(tmp_path: Path) -> None:
    def with_environment(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
        output = stored(TEXTS)(prompt_list, trainer)
        return {**output, "env_mask": [[0, *[1] * (len(ids) - 1)] for ids in output["completion_ids"]]}

    log = logs(stored_run(tmp_path, rollout_func=with_environment, rewards=length_reward))[0]
    assert log["completions/mean_length"] == 2.5
    assert log["completions/max_terminated_length"] == 2.0
    assert log["num_tokens"] == 4 * 3 + 10


def test_rewards(tmp_path: Path) -> None:
    log = logs(stored_run(tmp_path, rewards=[first, second], reward_weights=[1.0, 0.5]))[0]
    weighted = [1.0, 0.0 + 0.5 * 2.0, 0.5 + 0.5 * 1.0, 0.5]
    assert log["rewards/first/mean"] == pytest.approx(0.5)
    assert log["rewards/first/std"] == pytest.approx(std([1.0, 0.0, 0.5, 0.5]))
    assert log["rewards/second/mean"] == pytest.approx(1.5)
    assert log["rewards/second/std"] == pytest.approx(std([2.0, 1.0]))
    assert log["reward"] == pytest.approx(mean(weighted))
    assert log["reward_std"] == pytest.approx(std(weighted))
    assert log["frac_reward_zero_std"] == 0.5, "the first group has twice the same sum"


def test_rloo_reports_the_raw_reward(tmp_path: Path) -> None:
    """Before the clip and the KL penalty, which the share of groups without spread is measured after."""
    raw = logs(stored_run(tmp_path, StoredRLOO, rewards=first, beta=0.0))[0]
    clipped = logs(stored_run(tmp_path, StoredRLOO, rewards=first, beta=0.0, reward_clip_range=[0.0, 0.0001]))[0]
    assert raw["reward"] == clipped["reward"] == pytest.approx(0.5)
    assert raw["reward_std"] == clipped["reward_std"] == pytest.approx(std([1.0, 0.0, 0.5, 0.5]))
    assert (raw["frac_reward_zero_std"], clipped["frac_reward_zero_std"]) == (0.5, 0.5)
    both = logs(stored_run(tmp_path, StoredRLOO, rewards=first, beta=0.0, reward_clip_range=[-1.0, 0.0]))[0]
    assert both["frac_reward_zero_std"] == 1.0


def test_unscorable_rows_are_left_out_of_the_reward(tmp_path: Path) -> None:
    log = logs(stored_run(tmp_path, rewards=second))[0]
    assert log["reward"] == pytest.approx(1.5)
    assert log["reward_std"] == pytest.approx(std([2.0, 1.0]))


def test_tokens_are_counted_over_the_whole_run(tmp_path: Path) -> None:
    trainer = stored_run(tmp_path, max_steps=3, logging_steps=2)
    per_generation = 4 * 3 + sum(LENGTHS)
    assert [log["num_tokens"] for log in logs(trainer, "num_tokens")] == [2 * per_generation, 3 * per_generation]
    assert trainer.state.num_input_tokens_seen == 3 * per_generation


def test_a_log_averages_what_came_since_the_last_one(tmp_path: Path) -> None:
    values = iter([1.0, 3.0, 7.0])

    def climbing(completions: Sequence[str], **kwargs: Any) -> list[float]:
        return [next(values)] * len(completions)

    trainer = stored_run(tmp_path, rewards=climbing, max_steps=3, logging_steps=2)
    assert [log["reward"] for log in logs(trainer, "reward")] == [2.0, 7.0]


def test_values_that_are_not_known_are_left_out_of_the_average(tmp_path: Path) -> None:
    """One score has no deviation; a key without any known value is logged as None."""
    rounds = iter([[2.0, None, None, None], [1.0, 3.0, None, None], [4.0, None, None, None]])

    def sparse(completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        return next(rounds)

    trainer = stored_run(tmp_path, rewards=sparse, max_steps=3, logging_steps=2)
    both, last = logs(trainer, "reward")
    assert both["reward_std"] == both["rewards/sparse/std"] == pytest.approx(std([1.0, 3.0]))
    assert both["reward"] == pytest.approx(mean([2.0, 2.0]))
    assert last["reward_std"] is None


def test_the_share_of_truncated_prompts(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"prompt": ["abc", "abcdef"]})
    log = logs(run(tmp_path, dataset=dataset, max_prompt_length=4, max_steps=1))[0]
    assert log["prompts/truncated_ratio"] == 0.5
    assert log["num_tokens"] == 2 * (3 + 4) + 4 * log["completions/mean_length"]
    assert "prompts/truncated_ratio" not in logs(run(tmp_path, dataset=dataset, max_steps=1))[0]


def test_step_time_is_the_time_of_an_update_with_its_rollouts(tmp_path: Path) -> None:
    def slow(completions: Sequence[str], **kwargs: Any) -> list[float]:
        time.sleep(0.1)
        return length_reward(list(completions))

    start = time.perf_counter()
    trainer = run(tmp_path, rewards=slow, max_steps=2, gradient_accumulation_steps=2, steps_per_generation=1)
    passed = time.perf_counter() - start
    times = [log["step_time"] for log in logs(trainer)]
    assert min(times) >= 0.2, "two generations in an update"
    assert sum(times) < passed


def test_metrics_of_the_users_own(tmp_path: Path) -> None:
    def reporting(completions: Sequence[str], log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("accuracy", 1.0)
        log_metric("accuracy", 0.5)
        log_metric("words", len(completions))
        return length_reward(list(completions))

    trainer = make(tmp_path, rewards=reporting, eval_dataset=prompts(2), per_device_eval_batch_size=4, max_steps=1)
    trainer.train()
    assert (logs(trainer)[0]["accuracy"], logs(trainer)[0]["words"]) == (0.75, 4.0)
    metrics = trainer.evaluate()
    assert (metrics["eval_accuracy"], metrics["eval_words"]) == (0.75, 4.0)


@pytest.mark.parametrize("passes", [1, 2], ids=["on-policy", "off-policy"])
def test_the_drift_of_the_sampler(passes: int, tmp_path: Path) -> None:
    """Log-probs of the sampler that are a little off, and unknown for one token."""
    truth = {text: logps for text, (logps, _) in scores().items()}

    def with_logps(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
        output = stored(TEXTS)(prompt_list, trainer)
        logps = [[value + 0.1 * (t + 1) for t, value in enumerate(truth[text])] for _, text in ROWS]
        logps[0][2] = None
        return {**output, "logprobs": logps}

    log = logs(stored_run(tmp_path, rollout_func=with_logps, num_iterations=passes))[0]
    differences = [0.1 * (t + 1) for i, n in enumerate(LENGTHS) for t in range(n) if (i, t) != (0, 2)]
    assert log["sampling/sampling_logp_difference/mean"] == pytest.approx(mean(differences), abs=1e-5)
    assert log["sampling/sampling_logp_difference/max"] == pytest.approx(0.5, abs=1e-5)


# ---- what is known when the loss is computed


def test_entropy(tmp_path: Path) -> None:
    log = logs(stored_run(tmp_path))[0]
    entropies = [value for _, values in scores().values() for value in values]
    assert log["entropy"] == pytest.approx(mean(entropies), rel=1e-5)


@pytest.mark.parametrize("trainer_class", [RecordedGRPO, StoredRLOO])
def test_entropy_is_of_the_tempered_distribution_and_of_loss_tokens(trainer_class: Any, tmp_path: Path) -> None:
    log = logs(stored_run(tmp_path, trainer_class, temperature=0.5, mask_truncated_completions=True, beta=0.0))[0]
    model = tiny_model()
    tempered = [slow_scores(model, token_ids(p), token_ids(t), 0.5)[1] for p, t in ROWS if t.endswith("<eos>")]
    assert log["entropy"] == pytest.approx(mean([value for values in tempered for value in values]), rel=1e-5)


def other_reference(trainer: Any) -> None:
    """A reference that is not the policy, lest every KL be 0."""
    trainer.ref_model.load_state_dict(tiny_model(seed=5).state_dict())


def differences() -> list[float]:
    """ℓ_ref − ℓ of every token."""
    policy, reference = scores(), scores(seed=5)
    return [r - p for text in policy for p, r in zip(policy[text][0], reference[text][0], strict=True)]


@pytest.mark.parametrize("corrected", [True, False])
def test_kl_of_grpo_is_the_mean_of_k3_over_tokens(corrected: bool, tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        dataset=prompts(2),
        rollout_func=stored(TEXTS),
        beta=0.1,
        use_bias_correction_kl=corrected,
        max_steps=1,
    )
    other_reference(trainer)
    trainer.train()
    expected = mean([math.exp(d) - d - 1 for d in differences()])  # the ratio is 1
    assert expected > 1e-3
    assert logs(trainer)[0]["kl"] == pytest.approx(expected, rel=1e-4)


def test_kl_of_rloo_is_the_mean_log_ratio_over_tokens(tmp_path: Path) -> None:
    trainer = make(tmp_path, StoredRLOO, dataset=prompts(2), rewards=spread, beta=0.1, max_steps=1)
    other_reference(trainer)
    trainer.train()
    expected = mean([-d for d in differences()])
    assert abs(expected) > 1e-3
    assert logs(trainer)[0]["kl"] == pytest.approx(expected, rel=1e-4)


def test_no_kl_without_beta(tmp_path: Path) -> None:
    assert "kl" not in logs(stored_run(tmp_path))[0]


# Two passes over one generation with a step large enough that the second is clipped.
OFF_POLICY = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 0.0}


def off_policy_run(folder: Path, trainer_class: Any = RecordedGRPO, **settings: Any) -> tuple[dict[str, Any], Any]:
    """The log of the second pass, and the ratio of every token in it by completion."""
    weights = Weights()
    trainer = stored_run(folder, trainer_class, callbacks=[weights], **(OFF_POLICY | settings))
    old, new = scores(), scores(weights.before[1])
    log_ratios = {t: [n - o for n, o in zip(new[t][0], old[t][0], strict=True)] for t in old}
    return logs(trainer)[1], log_ratios


def shares(hits: dict[str, list[bool]]) -> dict[str, float]:
    tokens = [hit for row in hits.values() for hit in row]
    rows = [mean(row) for row in hits.values()]
    return {"mean": mean(tokens), "min": min(rows), "max": max(rows)}


def clip_metrics(log: dict[str, Any]) -> dict[str, float]:
    return {key.removeprefix("clip_ratio/"): log[key] for key in log if key.startswith("clip_ratio/")}


def expected_clip(ratios: dict[str, list[float]], low: float, high: float) -> dict[str, float]:
    lows = {t: [r < 1 - low and ADVANTAGE[t] < 0 for r in row] for t, row in ratios.items()}
    highs = {t: [r > 1 + high and ADVANTAGE[t] > 0 for r in row] for t, row in ratios.items()}
    return {
        "low_mean": shares(lows)["mean"],
        "low_min": shares(lows)["min"],
        "high_mean": shares(highs)["mean"],
        "high_max": shares(highs)["max"],
        "region_mean": shares(lows)["mean"] + shares(highs)["mean"],
    }


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_clip_ratios_of_tokens(loss_type: str, tmp_path: Path) -> None:
    log, log_ratios = off_policy_run(tmp_path, loss_type=loss_type, epsilon=0.001, epsilon_high=0.002)
    expected = expected_clip({t: [math.exp(d) for d in row] for t, row in log_ratios.items()}, 0.001, 0.002)
    assert 0 < expected["region_mean"] < 1
    assert clip_metrics(log) == pytest.approx(expected, abs=1e-6)


def test_clip_ratios_are_measured_after_the_cap_of_delta(tmp_path: Path) -> None:
    log, log_ratios = off_policy_run(tmp_path, epsilon=0.001, epsilon_high=0.002, delta=1.001)
    capped = {t: [min(math.exp(d), 1.001) for d in row] for t, row in log_ratios.items()}
    assert clip_metrics(log) == pytest.approx(expected_clip(capped, 0.001, 0.002), abs=1e-6)
    assert log["clip_ratio/high_mean"] == 0


def test_clip_ratios_of_sequences(tmp_path: Path) -> None:
    log, log_ratios = off_policy_run(tmp_path, loss_type="grpo", importance_sampling_level="sequence", epsilon=0.001)
    ratios = {t: [math.exp(mean(row))] for t, row in log_ratios.items()}
    assert clip_metrics(log) == pytest.approx(expected_clip(ratios, 0.001, 0.001), abs=1e-6)
    assert log["clip_ratio/region_mean"] > 0


def test_clip_ratios_of_rloo(tmp_path: Path) -> None:
    log, log_ratios = off_policy_run(tmp_path, StoredRLOO, beta=0.0, epsilon=0.01)
    ratios = {t: [math.exp(sum(row))] for t, row in log_ratios.items()}
    assert clip_metrics(log) == pytest.approx(expected_clip(ratios, 0.01, 0.01), abs=1e-6)
    assert log["clip_ratio/region_mean"] > 0


def test_cispo_clip_ratio(tmp_path: Path) -> None:
    log, log_ratios = off_policy_run(tmp_path, loss_type="cispo", epsilon_high=1.002)
    capped = {t: [math.exp(d) > 1.002 and ADVANTAGE[t] > 0 for d in row] for t, row in log_ratios.items()}
    assert log["cispo_clip_ratio"] == pytest.approx(shares(capped)["mean"], abs=1e-6)
    assert 0 < log["cispo_clip_ratio"] < 1
    assert clip_metrics(log) == {}


def test_vespo_phi(tmp_path: Path) -> None:
    log, log_ratios = off_policy_run(tmp_path, loss_type="vespo")
    phis = []
    for text, row in log_ratios.items():
        k, decay = (2.0, 3.0) if ADVANTAGE[text] > 0 else (3.0, 2.0)
        phis.append(math.exp(decay + k * sum(row) - decay * math.exp(sum(row))))
    assert log["vespo/phi_seq_mean"] == pytest.approx(mean(phis), rel=1e-4)
    assert abs(log["vespo/phi_seq_mean"] - 1) > 1e-4
    assert clip_metrics(log) == {}


def test_vespo_phi_does_not_depend_on_which_rows_are_run(tmp_path: Path) -> None:
    def some_equal(prompts: list[str], **kwargs: Any) -> list[float]:
        return [float(i % 2 and int(prompt.strip("p:")) > 3) for i, prompt in enumerate(prompts)]

    def phis(name: str, **how: Any) -> list[float]:
        settings = {"loss_type": "vespo", "num_iterations": 2, "learning_rate": 5e-2, "max_steps": 8}
        rows = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
        trainer = make(tmp_path / name, rewards=some_equal, parity_check="off", **settings, **rows, **how)
        trainer.train()
        return [log["vespo/phi_seq_mean"] for log in logs(trainer)]

    skipped, all_run, padded = phis("a"), phis("b", skip_zero_advantage=False), phis("c", packed_update=False)
    assert skipped == pytest.approx(all_run, rel=1e-5)
    assert skipped == pytest.approx(padded, rel=1e-4)
    assert any(abs(phi - 1) > 1e-4 for phi in skipped)


def test_sapo_has_no_clip_ratio(tmp_path: Path) -> None:
    log, _ = off_policy_run(tmp_path, loss_type="sapo")
    assert clip_metrics(log) == {}


# ---- the entropy bonus


class Lifted(RecordedGRPO):
    """Advantages that do not cancel, so that the loss is not 0."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        tensors = super()._generate_and_score_completions(inputs)
        tensors["advantages"] = tensors["advantages"] + 1.0
        return tensors


@pytest.mark.parametrize(("loss_type", "parts"), [("dapo", 2), ("grpo", 1), ("bnpo", 1), ("luspo", 1)])
def test_policy_loss_is_the_loss_without_the_bonus(loss_type: str, parts: int, tmp_path: Path) -> None:
    """Of a micro-batch: dapo's are parts of the update's loss and add up to it, the others are averaged."""
    settings = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "loss_type": loss_type}
    log = logs(stored_run(tmp_path, Lifted, entropy_coef=0.1, **settings))[0]
    plain = logs(stored_run(tmp_path, Lifted, **settings))[0]
    assert abs(plain["loss"]) > 0.5
    assert "policy_loss" not in plain
    assert parts * log["policy_loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert log["loss"] == pytest.approx(parts * log["policy_loss"] - 0.1 * log["entropy"], rel=1e-4)
    assert log["entropy_coef"] == 0.1
    assert "entropy_coef" not in plain


def test_the_adaptive_coefficient(tmp_path: Path) -> None:
    """The entropy of a random model is about 4.6: far above the first target, far below the second."""
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.03, "max_steps": 5}
    down = logs(stored_run(tmp_path, entropy_target=0.2, entropy_coef_min=0.02, **settings))
    assert [log["entropy_coef"] for log in down] == pytest.approx([0.07, 0.04, 0.02, 0.02, 0.02])
    up = logs(stored_run(tmp_path, entropy_target=9.0, entropy_coef_max=0.2, **settings))
    assert [log["entropy_coef"] for log in up] == pytest.approx([0.13, 0.16, 0.19, 0.2, 0.2])
    bonus = [log["policy_loss"] - log["loss"] for log in up]
    assert bonus[0] == pytest.approx(0, abs=1e-6), "before the first update nothing is known of the entropy"
    assert bonus[1] == pytest.approx(0.13 * up[1]["entropy"], rel=1e-4)
    assert max(abs(log["policy_loss"] - log["loss"]) for log in down) < 1e-6


# ---- evaluation


def test_evaluation_returns_and_logs_the_same_metrics_with_a_prefix(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        dataset=prompts(2),
        eval_dataset=prompts(2),
        rollout_func=stored(TEXTS),
        rewards=[first, second],
        per_device_eval_batch_size=4,
        max_steps=1,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == pytest.approx(mean([1.0, 2.0, 1.5, 0.5]))
    assert metrics["eval_rewards/second/mean"] == pytest.approx(1.5)
    assert metrics["eval_completions/mean_length"] == 3.5
    assert metrics["eval_entropy"] == pytest.approx(mean([h for _, row in scores().values() for h in row]), rel=1e-5)
    assert "num_tokens" not in metrics
    assert metrics["eval_num_tokens"] == trainer.state.num_input_tokens_seen, "evaluation does not count"
    assert "eval_step_time" not in metrics
    logged = trainer.state.log_history[-1]
    assert {key: logged[key] for key in metrics} == metrics
    assert trainer.evaluate(metric_key_prefix="held")["held_reward"] == metrics["eval_reward"]


RAGGED = {  # five prompts in batches of two: the last has one of its own
    "p0:": ["a<eos>", "bb<eos>"],
    "p1:": ["ccc<eos>", "dddd<eos>"],
    "p2:": ["ee<eos>", "f<eos>"],
    "p3:": ["g<eos>", "hhh<eos>"],
    "p4:": ["kkkkkk", "lllllll<eos>"],
}


def test_batches_of_an_evaluation_count_by_their_rows(tmp_path: Path) -> None:
    def length(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def short(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float | None]:
        """Of a few completions, and one call of log_metric for each of them."""
        scores = [float(len(text)) if len(text) < 3 else None for text in completions]
        for score in scores:
            log_metric("called", 0.0 if score is None else 1.0)
        return scores

    lengths = [len(text.removesuffix("<eos>")) for texts in RAGGED.values() for text in texts]
    results = {}
    for batch in (4, 10, 2):
        trainer = make(
            tmp_path / str(batch),
            dataset=prompts(5),
            eval_dataset=prompts(5),
            rollout_func=stored(RAGGED),
            rewards=[length, short],
            reward_weights=[1.0, 0.0],
            beta=0.1,
            max_completion_length=8,
            per_device_eval_batch_size=batch,
            max_prompt_length=None,
        )
        with torch.no_grad():
            for weight in trainer.ref_model.parameters():
                weight.mul_(1.5)  # a KL to speak of
        results[batch] = trainer.evaluate()
        assert results[batch]["eval_reward"] == pytest.approx(mean(lengths))
        assert results[batch]["eval_rewards/short/mean"] == pytest.approx(mean([n for n in lengths if n < 3]))
        assert results[batch]["eval_called"] == pytest.approx(mean([n < 3 for n in lengths]))
        ends = [text.endswith("<eos>") for texts in RAGGED.values() for text in texts]
        tokens = [n + end for n, end in zip(lengths, ends, strict=True)]
        assert results[batch]["eval_completions/mean_length"] == pytest.approx(mean(tokens))
        ended = [n for n, end in zip(tokens, ends, strict=True) if end]
        assert results[batch]["eval_completions/mean_terminated_length"] == pytest.approx(mean(ended))
        assert results[batch]["eval_completions/clipped_ratio"] == pytest.approx(0.1)
    for key in ("eval_entropy", "eval_kl"):
        assert results[4][key] == pytest.approx(results[10][key], rel=1e-5) == pytest.approx(results[2][key], rel=1e-5)


def test_the_loss_of_an_evaluation_is_the_mean_over_its_rows(tmp_path: Path) -> None:
    class Watches(RecordedGRPO):
        seen: list[tuple[float, int]]

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.seen = [*getattr(self, "seen", []), (loss.item(), len(inputs["completion_ids"]))]
            return loss

    trainer = make(tmp_path, Watches, eval_dataset=prompts(5), beta=0.1, per_device_eval_batch_size=4)
    with torch.no_grad():
        for weight in trainer.ref_model.parameters():
            weight.mul_(1.5)
    loss = trainer.evaluate()["eval_loss"]
    assert [rows for _, rows in trainer.seen] == [4, 4, 2]
    assert loss == pytest.approx(sum(each * rows for each, rows in trainer.seen) / 10, rel=1e-6)
    assert abs(loss - mean([each for each, _ in trainer.seen])) > 1e-5, "the batches differ"


def test_the_values_of_an_evaluation_that_failed_are_forgotten(tmp_path: Path) -> None:
    trainer = make(tmp_path, eval_dataset=prompts(4), per_device_eval_batch_size=4)
    expected = trainer.evaluate()["eval_reward"]
    trainer.metrics.add("eval", {"reward": 1000.0, "left": 1.0}, of=4)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == expected
    assert "eval_left" not in metrics


def test_an_evaluation_between_two_logs_does_not_touch_the_training_metrics(tmp_path: Path) -> None:
    def by_mode(completions: Sequence[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        return [float(len(completions))] * len(completions)  # 4 rows in training, 2 in evaluation

    trainer = run(
        tmp_path,
        rewards=by_mode,
        eval_dataset=prompts(1),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        logging_steps=2,
        max_steps=4,
    )
    assert [log["reward"] for log in logs(trainer)] == [4.0, 4.0]
    assert [log["eval_reward"] for log in logs(trainer, "eval_reward")] == [2.0] * 4


def test_the_best_checkpoint_by_reward(tmp_path: Path) -> None:
    best = {1: 0.0, 2: 5.0, 3: 1.0}

    def staged(completions: Sequence[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        return [best.get(trainer_state.global_step, 0.0)] * len(completions)

    trainer = run(
        tmp_path,
        rewards=staged,
        eval_dataset=prompts(1),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        per_device_eval_batch_size=2,
        max_steps=3,
    )
    assert trainer.state.best_metric == 5.0
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")


# ---- the documentation

VARIED: dict[str, dict[str, Any]] = {
    "kl and bonus": {"beta": 0.1, "entropy_coef": 0.01},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "vespo": {"loss_type": "vespo"},
    "cut prompts": {"max_prompt_length": 2},
    "rloo": {"trainer_class": RecordedRLOO},
    "sampled by the built-in engine": {"trainer_class": GRPOTrainer},
    "groups are replaced": {"dynamic_sampling": True, "reward_weights": [0.0]},
}
KEYS_OF_TRAINER = {
    *("loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos", "train_loss", "train_runtime"),
    *("train_samples_per_second", "train_steps_per_second", "eval_loss", "eval_runtime", "eval_samples_per_second"),
    *("eval_steps_per_second", "eval_model_preparation_time"),
}


def documented_keys() -> list[str]:
    """The keys in the first column of the tables of docs/metrics.md."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [part for cell in cells for part in cell.split("`")[1::2]]


def matches(key: str, pattern: str) -> bool:
    """Whether a logged key is meant by a documented one, in which <…> stands for a name."""
    literal = [re.escape(part) for part in re.split(r"<[^>]+>", pattern)]
    return re.fullmatch("[^/]+".join(literal), key) is not None


def logged_keys(folder: Path) -> set[str]:
    def reporting(completions: Sequence[str], log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("my_metric", 1.0)
        return length_reward(list(completions))

    keys: set[str] = set()
    for settings in VARIED.values():
        trainer = run(
            folder,
            rewards=reporting,
            eval_dataset=prompts(1),
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=2,
            max_steps=1,
            **settings,
        )
        keys.update(*trainer.state.log_history)
    truth = scores()

    def with_logps(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
        return {**stored(TEXTS)(prompt_list, trainer), "logprobs": [truth[text][0] for _, text in ROWS]}

    trainer = stored_run(folder, GRPOTrainer, rollout_func=with_logps, num_iterations=2)
    keys.update(*trainer.state.log_history)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", fake_vllm()["vllm"])
        model = AutoModelForCausalLM.from_pretrained(saved_model(folder / "model"))
        keys.update(*run(folder, GRPOTrainer, model=model, use_vllm=True, max_steps=1).state.log_history)
        patch.setattr(transfer, "share", share_bytes)
        with serving(folder / "model") as server:
            ahead = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": server.port, "async_rollouts": 1}
            keys.update(*run(folder, GRPOTrainer, model=str(folder / "model"), **ahead).state.log_history)
    game = random_caller(
        folder, "move", {"to": "a"}, arguments={"environment_factory": Game}, max_tool_calling_iterations=1
    )
    game.train()
    keys.update(*game.state.log_history)
    keys.update(*run(folder, model=experts("mixtral"), max_steps=1).state.log_history)
    broken = make(folder, GRPOTrainer, max_steps=1)
    broken.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    broken.train()
    keys.update(*broken.state.log_history)
    bounds = {"reward_timeout": 2.0, "reward_sample_timeout": 0.2, "reward_retries": 0}
    return keys.union(*stored_run(folder, GRPOTrainer, rewards=troubled, **bounds).state.log_history)


class Game:
    """An environment with a tool."""

    def reset(self, **row: Any) -> None:
        pass

    def move(self, to: str) -> str:
        """Move.

        Args:
            to: where
        """
        return to


async def troubled(completions: Sequence[str], **kwargs: Any) -> list[float | None]:
    """A reward with every kind of trouble there is."""
    (text,) = completions
    if text == "abcd":
        raise ValueError(text)
    if text == "x":
        await asyncio.sleep(60)
    return [None if text == "ab" else 1.0]


def test_every_logged_key_is_documented_and_every_documented_key_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "peak_flops", lambda *args: 1e12)  # that of a CPU is not known
    documented = documented_keys()
    logged = {key.removeprefix("eval_") for key in logged_keys(tmp_path) - KEYS_OF_TRAINER}
    # The row for the user's own metrics would match anything.
    fixed = [pattern for pattern in documented if not pattern.startswith("<")]
    unknown = {key for key in logged - {"my_metric"} if not any(matches(key, pattern) for pattern in fixed)}
    assert not unknown, f"docs/metrics.md has no row for {sorted(unknown)}"
    assert set(documented) >= KEYS_OF_TRAINER
    ours = [
        p for p in documented if p not in KEYS_OF_TRAINER and not p.startswith(("profiling/", "eval_", "balance/"))
    ]
    missing = [pattern for pattern in ours if not any(matches(key, pattern) for key in logged)]
    assert not missing, f"documented, but no run logged {missing}"


def test_micro_batches_on_a_device_may_differ_in_what_they_know() -> None:
    """What one of them does not know is a number made up here, which has to be on the device of the others."""
    device = torch.device("meta")
    shapes = []

    def gather(local: torch.Tensor) -> torch.Tensor:
        shapes.append((local.device, tuple(local.shape)))
        return torch.ones(local.shape, dtype=local.dtype)

    store = MetricStore(types.SimpleNamespace(device=device, gather=gather))  # type: ignore[arg-type]
    store.defer({"entropy": value_stat(torch.zeros((), device=device))})
    store.defer({"aux_loss": value_stat(torch.zeros((), device=device))})
    assert store.flush("train") == {"entropy": [(1.0, 1.0)] * 2, "aux_loss": [(1.0, 1.0)] * 2}
    assert shapes == [(device, (1, 2, 2, 2))]


@pytest.mark.parametrize("others_know", [True, False])
def test_processes_may_differ_in_what_they_know_of_their_sampler(others_know: bool) -> None:
    """They gather as many numbers each; of what nobody knows nothing is logged."""
    batch = TrainBatch(*torch.ones(4, 2, 3, dtype=torch.long).unbind())
    known = TrainBatch(*torch.ones(4, 2, 3, dtype=torch.long).unbind(), engine_logps=torch.full((2, 3), -1.5))
    stats = [
        drift_stats(one, torch.full((2, 3), -1.0), None, None, 0) for one in (batch, known if others_know else batch)
    ]
    sent: list[torch.Tensor] = []

    def gather(local: torch.Tensor) -> torch.Tensor:
        sent.append(local)
        return torch.cat(sent)

    logged: list[dict[str, Any]] = []
    for stat in stats:
        store = MetricStore(types.SimpleNamespace(device=torch.device("cpu"), gather=gather))  # type: ignore[arg-type]
        store.defer(stat)
        sums = store.flush("train")
        logged.append(store.take("train") | {"judged": drift_of_update(sums, {})["drift_mean"]})
    assert logged[0] == {"judged": None}
    if others_know:
        drift = "sampling/sampling_logp_difference"
        assert logged[1] == pytest.approx({f"{drift}/mean": 0.5, f"{drift}/max": 0.5, "judged": 0.5})
    else:
        assert logged[1] == {"judged": None}
