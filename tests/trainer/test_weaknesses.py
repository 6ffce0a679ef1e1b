"""Known weaknesses of trainers of this kind.

Most are mended, and a test shows it. Six are kept on purpose, so that numbers stay comparable; a test says so.
"""

import copy
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
    TrainerCallback,
)

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.errors import ConfigError, DataError
from gruppo.rewards import models as reward_models
from gruppo.rewards import runner as reward_runner
from tests.helpers import base_args, length_reward, prompts, timeless, tiny_model, tiny_tokenizer
from tests.trainer.failures import spread_out
from tests.trainer.runs import RecordedGRPO, RecordedRLOO, logs, make, run, slow_scores, stored, token_ids
from tests.trainer.scripted import make_trainer, update_of

# ---- compute and memory


def test_a_micro_batch_is_no_wider_than_its_rows(tmp_path: Path) -> None:
    widths: list[tuple[int, int]] = []

    class Watching(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            for kind in ("prompt", "completion"):
                lengths = inputs[f"{kind}_mask"].sum(1)
                widths.append((inputs[f"{kind}_ids"].shape[1], int(lengths.max())))
                assert inputs[f"{kind}_ids"].shape == inputs[f"{kind}_mask"].shape
            assert inputs["old_per_token_logps"].shape == inputs["completion_ids"].shape
            return super()._compute_loss(model, inputs)

    dataset = Dataset.from_dict({"prompt": ["a", "a long prompt of many tokens"]})
    texts = {"a": ["b<eos>"], "a long prompt of many tokens": ["c<eos>", "a long completion<eos>"]}
    run(
        tmp_path,
        Watching,
        dataset=dataset,
        rollout_func=stored(texts),
        per_device_train_batch_size=1,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=4,
    )
    assert all(width == longest for width, longest in widths)
    assert {longest for _, longest in widths} >= {1, 2, 28, 18}


def test_trimming_keeps_tokens_behind_a_hole_in_the_mask(tmp_path: Path) -> None:
    """A subclass may take single tokens out of the loss."""
    seen: list[Tensor] = []

    class FirstTokenMasked(RecordedGRPO):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            tensors = super()._generate_and_score_completions(inputs)
            tensors["completion_mask"][:, 0] = 0
            return tensors

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            seen.append(inputs["completion_mask"])
            return super()._compute_loss(model, inputs)

    run(tmp_path, FirstTokenMasked, dataset=prompts(2), rollout_func=stored({"p0:": ["abcd"], "p1:": ["abcd"]}))
    assert seen[0].tolist() == [[0, 1, 1, 1]] * 4


@pytest.mark.parametrize(
    ("trainer_class", "loss"), [(RecordedGRPO, "dapo"), (RecordedGRPO, "grpo"), (RecordedRLOO, "")]
)
def test_rows_that_cannot_move_the_update_have_no_backward_pass(trainer_class: Any, loss: str, tmp_path: Path) -> None:
    graded: list[int] = []

    class Watching(trainer_class):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                graded.append(len(input_ids))
            return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)

    def one_group_decides(completions: Sequence[str], **kwargs: Any) -> list[float]:
        return [1.0, 0.0, *[0.5] * (len(completions) - 2)]

    settings = {"rewards": one_group_decides, "beta": 0.0, "max_steps": 1, "optim": "sgd", "learning_rate": 1.0}
    settings |= {"loss_type": loss} if loss else {}
    fast = run(tmp_path, Watching, **settings)
    assert graded == [2]

    slow = run(tmp_path, Watching, skip_zero_advantage=False, **settings)
    assert graded == [2, 4]
    for a, b in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)
    assert timeless(logs(fast)[0]) == pytest.approx(timeless(logs(slow)[0]), rel=1e-5, abs=1e-7)


def test_on_policy_rloo_runs_no_pass_for_old_log_probs(tmp_path: Path) -> None:
    assert run(tmp_path, RecordedRLOO, beta=0.0, max_steps=2).frozen_passes == 0
    assert run(tmp_path, RecordedRLOO, beta=0.0, max_steps=2, num_iterations=2).frozen_passes == 1


def tiny_reward_model() -> LlamaForSequenceClassification:
    config = copy.deepcopy(tiny_model().config)
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def test_a_reward_model_scores_a_batch_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    judge = tiny_reward_model()
    judge.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr(reward_runner, "token_budget", lambda device: 48)
    run(tmp_path, rewards=judge, reward_processing_classes=tiny_tokenizer(), steps_per_generation=4, max_steps=1)
    assert sum(sizes) == 16
    assert len(sizes) >= 3, "a text has at most 3 + 8 tokens"
    assert max(sizes) < 16


def test_each_row_is_read_once_per_generation(tmp_path: Path) -> None:
    reads: list[str] = []

    def watched(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        reads.extend(batch["prompt"])
        return batch

    dataset = prompts(8).with_transform(watched)
    trainer = make(tmp_path, dataset=dataset, steps_per_generation=2, num_iterations=3, max_steps=6)
    reads.clear()
    trainer.train()
    assert len(trainer.slices) == 6
    assert reads == list(trainer.generations[0].prompts)


class NoLoading:
    """Fails the test if anything is loaded from a name or folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("something was loaded")

        monkeypatch.setattr(type(tiny_model()), "from_pretrained", refuse)
        monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)


def test_the_reference_is_a_copy_of_the_policy_as_it_was_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NoLoading(monkeypatch)
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)  # modified in memory: no checkpoint has these weights
    before = copy.deepcopy(model.state_dict())
    trainer = make(tmp_path, model=model, beta=0.1, max_steps=2)
    trainer.train()
    reference = trainer.ref_model.state_dict()
    assert all(torch.equal(reference[name], weight) for name, weight in before.items())
    assert not torch.equal(trainer.model.lm_head.weight, before["lm_head.weight"]), "the policy moved away from it"
    assert not any(weight.requires_grad for weight in trainer.ref_model.parameters())


# ---- numbers


def dropping_model() -> GPT2LMHeadModel:
    vocabulary = tiny_model().config.vocab_size
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def test_dropout_is_off_while_sampling_and_scoring(tmp_path: Path) -> None:
    modes: dict[str, set[bool]] = {"generate": set(), "score": set(), "loss": set()}
    old: list[tuple[Tensor, ...]] = []

    class Watching(GRPOTrainer):
        phase = "loss"

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            self.phase = "generate"
            output = super()._generate_single_turn(*args, **kwargs)
            self.phase = "score"
            return output

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            tensors = super()._generate_and_score_completions(inputs)
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
            old.append((*(tensors[name] for name in names), tensors["old_per_token_logps"]))
            self.phase = "loss"
            return tensors

    model = dropping_model()
    initial = copy.deepcopy(model).eval()
    trainer = make(tmp_path, Watching, model=model, num_iterations=2, max_steps=2)
    model.transformer.drop.register_forward_hook(
        lambda module, args, output: modes[trainer.phase].add(module.training)
    )
    trainer.train()
    assert modes == {"generate": {False}, "score": {False}, "loss": {True}}
    prompt_ids, prompt_mask, completion_ids, completion_mask, logps = old[0]
    for i in range(len(prompt_ids)):
        ids = completion_ids[i][completion_mask[i].bool()].tolist()
        expected, _ = slow_scores(initial, prompt_ids[i][prompt_mask[i].bool()].tolist(), ids)
        assert logps[i][: len(ids)].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("steps", "accumulation", "updates"), [(4, 2, 2), (2, 3, 1), (3, 2, 2)])
def test_the_normaliser_is_the_number_of_tokens_in_the_update(
    steps: int, accumulation: int, updates: int, tmp_path: Path
) -> None:
    """Every loss of dapo times the tokens of its update is the plain sum over tokens, whatever the generation held."""
    sizes: list[list[int]] = []
    losses: list[float] = []
    sums: list[float] = []

    class Watching(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            loss = super()._compute_loss(model, inputs)
            mask = inputs["completion_mask"]
            sizes.append([int(mask.sum()), int(inputs["num_items_in_batch"])])
            losses.append(loss.item())
            # On-policy every ratio is 1; off it, it is nearly so with this learning rate.
            sums.append(-(inputs["advantages"].unsqueeze(1) * mask).sum().item())
            return loss

    run(
        tmp_path,
        Watching,
        dataset=prompts(24),
        rollout_func=varied_lengths,
        per_device_train_batch_size=2,
        steps_per_generation=steps,
        gradient_accumulation_steps=accumulation,
        max_steps=updates,
        learning_rate=1e-9,
        loss_type="dapo",
    )
    assert len(losses) == updates * accumulation
    told_apart = False
    for i in range(updates):
        window = slice(i * accumulation, (i + 1) * accumulation)
        tokens = sum(size for size, _ in sizes[window])
        told_apart |= tokens != sizes[window][0][1] * accumulation / steps  # an average share of the generation
        assert losses[window] == pytest.approx([total / tokens for total in sums[window]], abs=1e-5)
    assert told_apart


def test_the_gradient_is_divided_by_the_number_of_tokens_in_the_update(tmp_path: Path) -> None:
    """The first update of a generation with three slices takes two of them."""
    batches: list[dict[str, Tensor]] = []

    class Watching(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            batches.append(inputs)
            return super()._compute_loss(model, inputs)

    model = tiny_model()
    twin = copy.deepcopy(model)
    trainer = make(
        tmp_path,
        Watching,
        model=model,
        dataset=prompts(24),
        rollout_func=varied_lengths,
        per_device_train_batch_size=2,
        steps_per_generation=3,
        gradient_accumulation_steps=2,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    update = update_of(trainer)
    tokens = sum(int(batch["completion_mask"].sum()) for batch in batches)
    assert tokens != int(batches[0]["num_items_in_batch"]) * 2 / 3
    for batch in batches:
        for i, advantage in enumerate(batch["advantages"].tolist()):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
            completion = batch["completion_ids"][i][batch["completion_mask"][i].bool()]
            logits = twin(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            logps = logits.log_softmax(-1).gather(1, completion[:, None])
            (-advantage * logps.sum() / tokens).backward()
    for name, weight in twin.named_parameters():
        assert torch.allclose(update[name], weight.grad, atol=1e-6), name


def varied_lengths(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of 1 to 8 tokens."""
    ids = [token_ids("abcdefgh"[: 1 + i * i % 7]) for i in range(len(prompt_list))]
    return {"prompt_ids": trainer.processing_class(prompt_list)["input_ids"], "completion_ids": ids, "logprobs": None}


# ---- robustness (25, resuming, is in test_batching.py)


def test_a_dataset_too_small_for_one_generation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 prompts.*4 of one generation"):
        make(tmp_path, dataset=prompts(3), gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_type", "gpro"),
        ("scale_rewards", "groups"),
        ("importance_sampling_level", "tokens"),
        ("multi_objective_aggregation", "normalise"),
        ("vllm_importance_sampling_mode", "mask"),
    ],
)
def test_choices_are_checked_before_anything_is_loaded(field: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{field}='{value}'"):
        GRPOConfig(**base_args(tmp_path, **{field: value}))


@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_completion_is_data(masked: bool, tmp_path: Path) -> None:
    texts = {"p0:": ["", "abc<eos>"], "p1:": ["ab<eos>", ""]}
    trainer = run(
        tmp_path,
        dataset=prompts(2),
        rollout_func=stored(texts),
        mask_truncated_completions=masked,
        beta=0.1,
        max_steps=2,
    )
    log = logs(trainer)[0]
    assert log["completions/min_length"] == 0
    assert log["completions/clipped_ratio"] == 0.5
    assert math.isfinite(log["loss"])
    assert log["grad_norm"] > 0
    nothing = run(tmp_path, dataset=prompts(2), rollout_func=stored({"p0:": [""], "p1:": [""]}), max_steps=1)
    assert logs(nothing)[0]["completions/max_length"] == 0
    assert logs(nothing)[0]["loss"] == 0


def test_two_rewards_of_one_name_are_told_apart(tmp_path: Path) -> None:
    def make_reward(value: float) -> Any:
        def judge(completions: Sequence[str], **kwargs: Any) -> list[float]:
            return [value] * len(completions)

        return judge

    trainer = run(
        tmp_path,
        rewards=[make_reward(1.0), make_reward(2.0)],
        max_steps=1,
        log_completions=True,
        num_completions_to_print=0,
    )
    log = logs(trainer)[0]
    assert (log["rewards/judge/mean"], log["rewards/judge_2/mean"]) == (1.0, 2.0)
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert (table["judge"], table["judge_2"]) == ([1.0] * 4, [2.0] * 4)


def test_evaluation_leaves_the_completions_of_training_alone(tmp_path: Path) -> None:
    trainer = run(tmp_path, eval_dataset=prompts(1), per_device_eval_batch_size=2, max_steps=1)
    before = list(trainer._logs["prompt"])
    trainer.evaluate()
    assert list(trainer._logs["prompt"]) == before
    assert list(trainer.completion_logs["eval"].columns["prompt"]) == ["p0:"] * 2


def test_what_the_user_passed_is_not_changed(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "policy")
    judge_folder = tmp_path / "judge"
    tiny_reward_model().save_pretrained(judge_folder)
    tiny_tokenizer().save_pretrained(judge_folder)
    functions = [length_reward, str(judge_folder)]
    kwargs = {"dtype": "float32"}
    rows = [{"prompt": f"p{i}:", "tags": ["x"]} for i in range(4)]

    def with_extras(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
        prompt_list[0] = "changed"
        texts = {f"p{i}:": ["a<eos>", "b"] for i in range(4)}
        output = stored(texts)(["p0:", *prompt_list[1:]], trainer)
        return {**output, "turns": [1] * len(prompt_list)}

    seen: list[Any] = []

    class Watching(RecordedGRPO):
        def _calculate_rewards(self, inputs: Any, *args: Any) -> Tensor:
            seen.append([dict(row) for row in inputs])
            return super()._calculate_rewards(inputs, *args)

    dataset = IterableDataset.from_generator(lambda: iter(rows))
    trainer = make(
        tmp_path,
        Watching,
        model=str(tmp_path / "policy"),
        model_init_kwargs=kwargs,
        rewards=functions,
        dataset=dataset,
        rollout_func=with_extras,
        shuffle_dataset=False,
        max_steps=1,
    )
    trainer.train()
    assert functions == [length_reward, str(judge_folder)]
    assert kwargs == {"dtype": "float32"} == trainer.args.model_init_kwargs
    assert seen[0][0]["turns"] == 1
    assert all(row == rows[i // 2] for i, row in enumerate(trainer.rows[0]))


def test_reward_models_do_not_inherit_how_the_policy_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_folder = tmp_path / "judge"
    tiny_reward_model().save_pretrained(judge_folder)
    tiny_tokenizer().save_pretrained(judge_folder)
    tiny_model().save_pretrained(tmp_path / "policy")
    calls: list[dict[str, Any]] = []
    load = AutoModelForSequenceClassification.from_pretrained

    def spy(name: str, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return load(name, **kwargs)

    monkeypatch.setattr(reward_models.AutoModelForSequenceClassification, "from_pretrained", spy)
    trainer = make(
        tmp_path,
        model=str(tmp_path / "policy"),
        rewards=str(judge_folder),
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"},
    )
    assert trainer.model.dtype == torch.bfloat16
    assert set(calls[0]) == {"num_labels", "trust_remote_code"}
    assert trainer.reward_funcs[0].dtype == torch.float32


def test_plain_and_conversational_prompts_in_one_batch(tmp_path: Path) -> None:
    mixed = [{"prompt": "plain"}, {"prompt": [{"role": "user", "content": "chat"}]}]
    seen: list[tuple[Any, Any]] = []

    def spy(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return length_reward(completions)

    def rows() -> Iterator[dict[str, Any]]:
        yield from mixed

    lengths: list[int] = []

    class Watching(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            lengths.extend(map(len, prompt_ids))
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    run(
        tmp_path,
        Watching,
        rewards=spy,
        dataset=IterableDataset.from_generator(rows),
        shuffle_dataset=False,
        max_completion_length=3,
        max_steps=1,
    )
    assert [type(completion) for _, completion in seen] == [str, str, list, list]
    assert seen[2][1][0]["role"] == "assistant"
    assert lengths == [len("plain")] * 2 + [len(["<user>", *"chat", "<eos>", "<assistant>"])] * 2


def test_prompt_length_is_under_control(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"prompt": ["x" * 100, "y" * 200]})
    with pytest.raises(DataError, match="200 tokens"):
        make(tmp_path, dataset=dataset)
    lengths: list[int] = []

    class Watching(RecordedGRPO):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            lengths.extend(map(len, prompt_ids))
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    run(tmp_path, Watching, dataset=dataset, max_prompt_length=10, max_steps=1)
    assert lengths == [10] * 4


def test_a_config_can_be_copied(tmp_path: Path) -> None:
    config = GRPOConfig(**base_args(tmp_path, gradient_accumulation_steps=2))
    twin = dataclasses.replace(config, learning_rate=0.5)
    assert (twin.generation_batch_size, twin.steps_per_generation) == (8, 2)
    assert twin.learning_rate == 0.5
    assert make(tmp_path).args.steps_per_generation == 1


class Meddling(TrainerCallback):
    """Puts the model into evaluation mode whenever it can."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        model.eval()

    on_step_end = on_substep_end = on_epoch_begin = on_train_begin = on_log = on_step_begin


@pytest.mark.parametrize("trainer_class", [RecordedGRPO, RecordedRLOO])
def test_the_mode_of_the_model_decides_nothing(trainer_class: Any, tmp_path: Path) -> None:
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 3, "dataset": prompts(24)}
    calm = run(tmp_path, trainer_class, **settings)
    meddled = run(tmp_path, trainer_class, callbacks=[Meddling()], **settings)
    assert meddled.generations == calm.generations
    assert {g.mode for g in meddled.generations} == {"train"}
    assert [set(log) for log in logs(meddled)] == [set(log) for log in logs(calm)]
    assert [log["reward"] for log in logs(meddled, "reward")] == [log["reward"] for log in logs(calm, "reward")]
    assert not meddled._metrics["eval"]


# ---- kept, so that numbers stay those that users know


def test_cut_distributions_bias_the_ratios_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make(tmp_path, top_k=5)
    assert any("top_k" in record.message and "biased" in record.message for record in caplog.records)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make(tmp_path)
    assert not any("biased" in record.message for record in caplog.records)


MODELS_OWN: list[dict[str, Any]] = [
    {"min_p": 0.9},
    {"suppress_tokens": list(range(20, 60))},
    {"min_new_tokens": 3},
    {"no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("own", MODELS_OWN, ids=lambda own: next(iter(own)))
def test_what_the_model_itself_asks_for_is_seen_as_well(
    own: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The samplers take it over where the config says nothing; then it is no finding that it shows."""
    model = spread_out(100)
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    settings = {"dataset": prompts(32), "per_device_train_batch_size": 64, "max_steps": 3}
    trainer = make(tmp_path, GRPOTrainer, model=model, audit="error", **settings)
    ((name, value),) = own.items()
    assert f"{name}={value}: this changes what is sampled" in caplog.text
    trainer.train()


def test_what_no_sampler_reads_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.generation_config.min_p = 0.9
    make(tmp_path / "a", GRPOTrainer, model=model, min_p=0.0)
    make(tmp_path / "b", GRPOTrainer, model=model, use_transformers_continuous_batching=True)
    make(tmp_path / "c", GRPOTrainer, model=model, rollout_func=stored({}))
    assert "biased" not in caplog.text


def test_the_sampler_correction_is_a_product_over_tokens_by_default(tmp_path: Path) -> None:
    """It comes with the engines that report log-probs; its defaults are those that users know."""
    config = GRPOConfig(**base_args(tmp_path))
    assert config.vllm_importance_sampling_mode == "sequence_mask"
    assert (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max) == (None, 3.0)


def test_cispo_caps_at_epsilon_high_itself_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make(tmp_path, loss_type="cispo")
    assert any("cispo" in record.message and "0.2" in record.message for record in caplog.records)
    assert trainer.epsilon_high == 0.2
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make(tmp_path, loss_type="cispo", epsilon_high=5.0)
    assert not any("cispo" in record.message for record in caplog.records)


def test_the_entropy_threshold_is_that_of_the_micro_batch(tmp_path: Path) -> None:
    """So the update depends on how it is cut, which the other settings do not."""
    updates = [
        update_of(
            make_trainer(
                "grpo",
                tmp_path,
                top_entropy_quantile=0.3,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=16 // rows,
            )
        )
        for rows in (16, 2)
    ]
    name = "lm_head.weight"
    assert (updates[0][name] - updates[1][name]).norm() > 1e-3 * updates[0][name].norm()


def test_none_counts_as_zero_beside_a_sibling_that_has_the_reward(tmp_path: Path) -> None:
    def base(completions: Sequence[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    def bonus(completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        return [2.0, None] * (len(completions) // 2)

    advantages: list[float] = []

    class Watching(RecordedGRPO):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            tensors = super()._generate_and_score_completions(inputs)
            advantages.extend(tensors["advantages"].tolist())
            return tensors

    run(tmp_path, Watching, rewards=[base, bonus], scale_rewards="none", max_steps=1)
    assert advantages == pytest.approx([1.0, -1.0] * 2), "sums 3 and 1: the abstention is worth 0"


# 22, clip metrics on the capped ratio and the scale of policy_loss, is in test_metrics.py.
