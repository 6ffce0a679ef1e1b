"""Subclasses and callbacks written for other trainers of this kind: the methods and names they rely on."""

import copy
import functools
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.config.base import own_fields
from gruppo.errors import ConfigError
from gruppo.trainer.hooks import PADDED_HOOKS
from gruppo.trainer.names import ONLY_HERE
from tests.helpers import length_reward, prompts, tiny_model, tiny_tokenizer
from tests.trainer.runs import RecordedGRPO, RecordedRLOO, SaveAt, logs, make, run, slow_scores, stored, token_ids
from tests.trainer.scripted import update_of

SGD = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}
BOTH = pytest.mark.parametrize("trainer_class", [RecordedGRPO, RecordedRLOO])


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


# ---- methods


def test_the_page_lists_the_hooks_with_their_arguments() -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|.*\| (?:packed|padded) \|$", page, re.MULTILINE))
    hooks = {
        name: list(inspect.signature(method).parameters)[1:]
        for name, method in inspect.getmembers(GRPOTrainer, inspect.isfunction)
        if (method.__doc__ or "").startswith("Hook:")
    }
    assert listed.keys() == hooks.keys()
    for name, arguments in listed.items():
        named = [argument for argument in arguments.split(", ") if argument != "…"]
        assert named == hooks[name][: len(named)]
    padded = re.findall(r"^\| `(\w+)\(.*?\)` \|.*\| padded \|$", page, re.MULTILINE)
    assert set(padded) == set(listed) & set(PADDED_HOOKS)


@BOTH
def test_calculate_rewards_may_be_replaced(trainer_class: Any, tmp_path: Path) -> None:
    class OwnRewards(trainer_class):  # type: ignore[misc]
        def _calculate_rewards(
            self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: Any
        ) -> Tensor:
            assert [row["answer"] for row in inputs] == [text.strip("p:") for text in prompts]
            assert all(len(t) <= len(ids) for t, ids in zip(completions, completion_ids_list, strict=True))
            return torch.tensor([[float(i)] for i in range(len(prompts))])

    trainer = run(tmp_path, OwnRewards, beta=0.0, max_steps=1, log_completions=True, num_completions_to_print=0)
    assert logs(trainer)[0]["reward"] == 1.5
    assert logs(trainer)[0]["rewards/length_reward/mean"] == 1.5


def test_calculate_rewards_may_be_extended(tmp_path: Path) -> None:
    class Doubled(RecordedGRPO):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
            return 2 * super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    plain, doubled = run(tmp_path, max_steps=1), run(tmp_path, Doubled, max_steps=1)
    assert logs(doubled)[0]["reward"] == pytest.approx(2 * logs(plain)[0]["reward"])


def test_the_dict_between_scoring_and_loss(tmp_path: Path) -> None:
    """Keys and shapes that a subclass may count on."""
    seen: dict[str, dict[str, Any]] = {}

    def watching(base: Any, name: str) -> Any:
        class Watching(base):  # type: ignore[misc]
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                seen[name] = super()._generate_and_score_completions(inputs)
                return seen[name]

        return Watching

    run(tmp_path, watching(RecordedGRPO, "grpo"), beta=0.1, num_iterations=2, steps_per_generation=2, max_steps=1)
    run(tmp_path, watching(RecordedGRPO, "bare"), max_steps=1)
    run(tmp_path, watching(RecordedRLOO, "rloo"), num_iterations=2, max_steps=1)
    ids = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "truncated", "sampled_at"}
    ids |= {"generation", "place"}
    assert set(seen["grpo"]) == ids | {"num_items_in_batch", "old_per_token_logps", "ref_per_token_logps"}
    assert set(seen["bare"]) == ids | {"num_items_in_batch"}
    assert ids | {"old_logps"} <= set(seen["rloo"])
    tensors = seen["grpo"]
    rows, width = tensors["completion_ids"].shape
    assert rows == 8
    assert tensors["advantages"].shape == (8,)
    assert tensors["advantages"].dtype == torch.float32
    assert tensors["old_per_token_logps"].shape == tensors["ref_per_token_logps"].shape == (8, width)
    assert tensors["prompt_mask"][:, -1].all(), "prompts are padded on the left"
    assert tensors["completion_mask"][:, 0].all(), "and completions on the right"
    assert tensors["num_items_in_batch"].shape == ()
    assert tensors["num_items_in_batch"] == tensors["completion_mask"].sum()
    assert seen["rloo"]["old_logps"].shape == (4,)


class Scaled(RecordedGRPO):
    """Advantages changed after scoring."""

    per_token = False

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        tensors = super()._generate_and_score_completions(inputs)
        tensors["advantages"] = 3 * tensors["advantages"]
        if self.per_token:
            tensors["advantages"] = tensors["advantages"][:, None] * tensors["completion_mask"]
        return tensors


class ScaledPerToken(Scaled):
    per_token = True


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "vespo", "cispo"])
def test_advantages_may_be_changed_and_given_per_token(loss_type: str, tmp_path: Path) -> None:
    settings = {**SGD, "loss_type": loss_type, "epsilon_high": 5.0, "steps_per_generation": 2, "dataset": prompts(8)}
    plain = update_of(make(tmp_path, **settings))
    scaled = update_of(make(tmp_path, Scaled, **settings))
    per_token = update_of(make(tmp_path, ScaledPerToken, **settings))
    assert difference({n: 3 * w for n, w in plain.items()}, scaled) < 1e-6
    assert difference(scaled, per_token) < 1e-6
    assert max(w.abs().max() for w in plain.values()) > 1e-4


def test_advantages_per_token_weigh_single_tokens(tmp_path: Path) -> None:
    """Only the last token of each completion counts: the gradient is that of its log-prob alone."""

    class LastToken(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            tensors = super()._generate_and_score_completions(inputs)
            mask = tensors["completion_mask"]
            last = mask.cumsum(1) == mask.sum(1, keepdim=True)
            tensors["advantages"] = (last * mask).float()
            return tensors

    texts = {"p0:": ["ab<eos>", "a"], "p1:": ["xyz", "x<eos>"]}
    trainer = make(tmp_path, LastToken, dataset=prompts(2), rollout_func=stored(texts), **SGD)
    update = update_of(trainer)
    twin = tiny_model()
    tokens = sum(len(token_ids(text)) for group in texts.values() for text in group)
    for prompt, group in texts.items():
        for text in group:
            ids = torch.tensor([[*token_ids(prompt), *token_ids(text)]])
            logps = twin(input_ids=ids).logits[0, -2].log_softmax(-1)
            (-logps[ids[0, -1]] / tokens).backward()
    assert max((update[n] - w.grad).abs().max().item() for n, w in twin.named_parameters()) < 1e-6


@BOTH
def test_compute_loss_may_be_extended(trainer_class: Any, tmp_path: Path) -> None:
    class Inner(trainer_class):  # type: ignore[misc]
        def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return 2 * super()._compute_loss(model, inputs)

    class Outer(trainer_class):  # type: ignore[misc]
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Tensor:
            return 2 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    settings = {**SGD, "beta": 0.0, "gradient_accumulation_steps": 2}
    plain = update_of(make(tmp_path, trainer_class, **settings))
    for subclass in (Inner, Outer):
        doubled = update_of(make(tmp_path, subclass, **settings))
        assert difference({n: 2 * w for n, w in plain.items()}, doubled) < 1e-6


@pytest.mark.parametrize("method", ["_compute_loss", "compute_loss"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(("trainer_class", "divided"), [(RecordedGRPO, False), (RecordedRLOO, True)])
def test_whether_a_loss_of_ones_own_is_divided_by_the_micro_batches(
    trainer_class: Any, divided: bool, accumulation: int, method: str, tmp_path: Path
) -> None:
    """As in TRL: GRPO's methods return a share of the update's loss, those of RLOO the loss of a micro-batch."""

    def loss(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([weight.sum() for weight in model.parameters()]).sum() / 64

    subclass = type("Own", (trainer_class,), {method: loss})
    step = update_of(make(tmp_path, subclass, **SGD, gradient_accumulation_steps=accumulation))
    wanted = 1 / 64 * (1 if divided else accumulation)
    assert max((change - wanted).abs().max().item() for change in step.values()) < 1e-6


@pytest.mark.parametrize("scaled", [False, True])
@BOTH
def test_a_subclass_may_say_whether_its_loss_is_divided(trainer_class: Any, scaled: bool, tmp_path: Path) -> None:
    class Same(trainer_class):  # type: ignore[misc]
        loss_is_scaled_for_ga = scaled

        def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return super()._compute_loss(model, inputs)

    settings = {**SGD, "beta": 0.0, "gradient_accumulation_steps": 4}
    plain = update_of(make(tmp_path, trainer_class, **settings))
    assert difference(plain, update_of(make(tmp_path, Same, **settings))) < 1e-6


@BOTH
def test_checkpointing_does_not_change_the_update(trainer_class: Any, tmp_path: Path) -> None:
    settings = {**SGD, "beta": 0.1, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}
    plain = update_of(make(tmp_path, trainer_class, **settings))
    saved = update_of(make(tmp_path, trainer_class, gradient_checkpointing=True, **settings))
    assert difference(plain, saved) < 1e-7


@BOTH
def test_mixed_precision_is_the_same_in_all_passes(trainer_class: Any, tmp_path: Path) -> None:
    """Sampling policy, reference and loss agree to the bit at the first update."""
    trainer = run(tmp_path, trainer_class, bf16=True, beta=0.1, num_iterations=2, max_steps=2)
    first = logs(trainer)[0]
    assert first["kl"] == 0.0
    assert first["clip_ratio/region_mean"] == 0.0
    assert first["grad_norm"] > 0
    assert trainer.model.dtype == torch.float32


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """Written from the dict of tensors and the scoring hook, as it has always been done."""

    class Reinforce(RecordedGRPO):
        def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
                model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True
            )
            assert entropies.shape == logps.shape
            assert aux_loss is None
            self._metrics["train"]["own/mean_logp"].append(logps.detach().mean().item())
            return -(logps * inputs["advantages"][:, None] * inputs["completion_mask"]).sum()

    trainer = run(tmp_path, Reinforce, max_steps=2)
    assert all(log["own/mean_logp"] < 0 for log in logs(trainer))
    assert all(log["grad_norm"] > 0 for log in logs(trainer))


def test_return_outputs_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(ValueError, match="return_outputs"):
        trainer.compute_loss(trainer.model, {}, return_outputs=True)


@BOTH
@pytest.mark.parametrize("values", [2, 3])
def test_log_probs_may_come_from_elsewhere(trainer_class: Any, values: int, tmp_path: Path) -> None:
    """Three values as of late; two, as earlier releases returned them."""

    class Other(trainer_class):  # type: ignore[misc]
        calls: list[tuple[int, ...]]

        def _get_per_token_logps_and_entropies(
            self,
            model: nn.Module,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            batch_size: int | None = None,
            compute_entropy: bool = False,
            **kwargs: Any,
        ) -> Any:
            self.__dict__.setdefault("calls", []).append(tuple(input_ids.shape))
            assert attention_mask.shape == input_ids.shape
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
            distribution = logits.log_softmax(-1)
            logps = distribution.gather(2, input_ids[:, -logits_to_keep:, None])[..., 0]
            entropies = -(distribution.exp() * distribution).sum(-1) if compute_entropy else None
            return (logps, entropies, None)[:values]

    settings = {**SGD, "beta": 0.1, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}
    plain, other = make(tmp_path, trainer_class, **settings), make(tmp_path, Other, **settings)
    assert difference(update_of(plain), update_of(other)) < 1e-5
    assert len(other.calls) >= 4, "old, reference, and the loss of two updates"


def test_generate_single_turn_may_be_replaced(tmp_path: Path) -> None:
    class Parrot(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            return [[*ids, 1] for ids in prompt_ids], None

    seen: list[tuple[str, str]] = []

    def spy(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [float(i) for i in range(len(prompts))]

    trainer = run(tmp_path, Parrot, rewards=spy, max_steps=1)
    assert all(prompt == completion for prompt, completion in seen)
    assert logs(trainer)[0]["completions/clipped_ratio"] == 0


@pytest.mark.parametrize("backend", ["builtin", "transformers"])
def test_stop_strings_of_the_model_count_under_a_hook_too(backend: str, tmp_path: Path) -> None:
    class Passing(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            return super()._generate_single_turn(*args, **kwargs)

    def clipped(trainer_class: Any, folder: Path) -> list[float]:
        model = tiny_model()
        model.generation_config.stop_strings = list("abcdefghijklmnopqrstuvwxyz")
        trainer = run(folder, trainer_class, model=model, rollout_backend=backend, max_steps=2)
        return [log["completions/clipped_ratio"] for log in logs(trainer)]

    found = clipped(GRPOTrainer, tmp_path / "plain")
    assert max(found) < 1.0
    assert clipped(Passing, tmp_path / "hook") == found


def test_log_probs_of_an_own_sampler_reach_the_loss(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Knowing(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            return [[10, 1], [10, 11, 1]] * (len(prompt_ids) // 2), [[-1.0, -2.0], [-1.0, None, -3.0]] * (
                len(prompt_ids) // 2
            )

        def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            seen.append(inputs["sampling_per_token_logps"])
            return super()._compute_loss(model, inputs)

    run(tmp_path, Knowing, max_steps=1)
    known = sorted(tuple(v for v in row if v == v) for row in seen[0].tolist())
    assert known == [(-1.0, -3.0), (-1.0, -3.0), (-1.0, -2.0), (-1.0, -2.0)]


def test_tokenize_prompts_may_be_extended(tmp_path: Path) -> None:
    class WithPreamble(RecordedGRPO):
        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            ids, images, fields = super()._tokenize_prompts(prompts)
            assert images is None
            return [[*token_ids("Q: "), *row] for row in ids], images, fields

        def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            texts = self.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
            assert all(text.startswith("Q: p") for text in texts)
            return super()._compute_loss(model, inputs)

    trainer = run(tmp_path, WithPreamble, max_steps=1)
    assert logs(trainer)[0]["num_tokens"] == 4 * (6 + logs(trainer)[0]["completions/mean_length"])


def test_prepare_inputs_may_be_extended(tmp_path: Path) -> None:
    class Counting(RecordedGRPO):
        prepared = 0

        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            inputs = super()._prepare_inputs(generation_batch)
            assert inputs["advantages"].shape == (4,)
            self.prepared += 1
            return inputs

    assert run(tmp_path, Counting, max_steps=2, gradient_accumulation_steps=2).prepared == 4


def test_training_and_prediction_step_may_be_extended(tmp_path: Path) -> None:
    class Counting(RecordedGRPO):
        steps = evaluated = 0

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            self.steps += 1
            return super().training_step(model, inputs, num_items_in_batch)

        def prediction_step(
            self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
        ) -> Any:
            self.evaluated += len(inputs)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    trainer = make(tmp_path, Counting, eval_dataset=prompts(3), per_device_eval_batch_size=4, max_steps=2)
    trainer.train()
    assert (trainer.steps, trainer._step) == (2, 2)
    assert trainer.evaluate()["eval_loss"] is not None
    assert trainer.evaluated == 6


def test_log_may_be_extended(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Logging(RecordedGRPO):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["mine"] = 42.0
            super().log(logs, start_time)
            seen.append(logs)

    trainer = run(tmp_path, Logging, max_steps=1)
    assert logs(trainer)[0]["mine"] == 42.0
    assert "reward" in seen[0], "the dict that was passed is the one that is filled"


@pytest.mark.parametrize("name", ["_generate", "_tool_call_loop"])
def test_overriding_what_is_never_called_is_refused(name: str, tmp_path: Path) -> None:
    subclass = type("Sub", (GRPOTrainer,), {name: lambda self, *args: None})
    with pytest.raises(NotImplementedError, match=name):
        make(tmp_path, subclass)


def counted(method: Any, calls: list[str]) -> Any:
    @functools.wraps(method)  # names the module of what it wraps
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(method.__name__)
        return method(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("patched", ["subclass", "our class", "parent of our class"])
def test_a_wrapper_of_a_hook_is_called(patched: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    wrapper = counted(GRPOTrainer._compute_loss, calls)
    trainer_class = GRPOTrainer
    if patched == "subclass":
        trainer_class = type("Sub", (GRPOTrainer,), {"_compute_loss": wrapper})
    else:
        where = GRPOTrainer if patched == "our class" else GRPOTrainer.__mro__[1]
        monkeypatch.setattr(where, "_compute_loss", wrapper, raising=False)
    trainer = run(tmp_path, trainer_class, max_steps=1)
    assert trainer.packed is None
    assert calls == ["_compute_loss"] * trainer.args.gradient_accumulation_steps


def test_a_wrapper_of_what_is_never_called_is_refused(tmp_path: Path) -> None:
    subclass = type("Sub", (GRPOTrainer,), {"get_high_entropy_mask": counted(GRPOTrainer.get_high_entropy_mask, [])})
    with pytest.raises(NotImplementedError, match="get_high_entropy_mask"):
        make(tmp_path, subclass)


def test_a_trainer_may_be_patched_after_it_was_made(tmp_path: Path) -> None:
    calls: list[str] = []
    trainer = make(tmp_path, max_steps=1)
    trainer._generate_single_turn = counted(trainer._generate_single_turn, calls)
    trainer.train()
    assert calls == ["_generate_single_turn"]


def test_formulas_by_their_known_names(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    entropies = torch.tensor([[1.0, 2.0, 0.5], [1.5, 0.2, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    chosen = trainer.get_high_entropy_mask(entropies, mask, 0.6)
    assert chosen.int().tolist() == [[0, 1, 0], [1, 0, 0]]
    keep = GRPOTrainer.get_off_policy_mask(
        advantages=torch.tensor([[1.0], [-1.0], [-1.0]]),
        per_token_logps=torch.tensor([[-3.0, -3.0]] * 3),
        sampling_per_token_logps=torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-2.9, -2.9]]),
        mask=torch.ones(3, 2),
        off_policy_threshold=0.5,
    )
    assert keep.tolist() == [[1.0], [0.0], [1.0]]
    phi = GRPOTrainer.get_gamma_weights(
        advantages=torch.tensor([[1.0], [-1.0]]), log_ratio_per_token=torch.zeros(2, 3), mask=torch.ones(2, 3)
    )
    assert phi.flatten().tolist() == pytest.approx([1.0, 1.0])


# ---- attributes


@BOTH
def test_attributes(trainer_class: Any, tmp_path: Path) -> None:
    def second(completions: Sequence[str], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    trainer = make(
        tmp_path,
        trainer_class,
        rewards=[length_reward, second],
        reward_weights=[1.0, 0.25],
        beta=0.3,
        epsilon=0.1,
        epsilon_high=0.4,
        temperature=0.7,
        num_iterations=2,
        num_generations_eval=4,
        steps_per_generation=2,
    )
    assert trainer.reward_funcs == [length_reward, second]
    assert trainer.reward_func_names == ["length_reward", "second"]
    assert trainer.reward_weights.tolist() == [1.0, 0.25]
    assert trainer.reward_processing_classes == [None, None]
    assert (trainer.num_generations, trainer.num_generations_eval, trainer.num_iterations) == (2, 4, 2)
    assert (trainer.beta, trainer.epsilon_low, trainer.epsilon_high, trainer.temperature) == (0.3, 0.1, 0.4, 0.7)
    assert isinstance(trainer.ref_model, nn.Module)
    assert isinstance(trainer.generation_config, GenerationConfig)
    assert trainer.generation_config.max_new_tokens == 6
    assert (trainer.max_completion_length, trainer.mask_truncated_completions, trainer.top_k) == (6, False, 0)
    assert trainer.pad_token_id == trainer.processing_class.pad_token_id
    with pytest.raises(AttributeError, match="no attribute 'max_completion_lenght'"):
        _ = trainer.max_completion_lenght
    assert not hasattr(trainer, "learning_rate"), "that is no setting that TRL's trainers copy"
    assert trainer._step == 0
    trainer.train()
    assert trainer._step == 2
    assert len(trainer._buffered_inputs) == 2, "two of four micro-batches are left"
    assert set(trainer._buffered_inputs[0]) >= {"completion_ids", "advantages"}
    assert list(trainer._logs["prompt"]) == [row["prompt"] for row in trainer.rows[-1]]
    assert list(trainer._logs["rewards"]) == ["length_reward", "second"]
    assert len(trainer._logs["advantages"]) == len(trainer._logs["completion"]) == 8


# What TRL's trainers keep a copy of, and another value than the config's default here.
COPIED = {
    "max_completion_length": 9,
    "num_generations": 4,
    "num_generations_eval": 6,
    "chat_template_kwargs": {"a": 1},
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "pad_to_multiple_of": 8,
    "use_vllm": True,
    "use_transformers_continuous_batching": True,
    "vllm_mode": "server",
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_tensor_parallel_size": 2,
    "use_liger_kernel": True,
    "mask_truncated_completions": True,
    "shuffle_dataset": False,
    "num_iterations": 3,
    "log_completions": True,
    "log_multimodal": False,
    "log_unique_prompts": True,
    "num_completions_to_print": 1,
    "max_prompt_length": 4,
    "aux_loss_enabled": True,
}
COPIED_IN_GRPO = {
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 9.0,
    "vllm_importance_sampling_clip_min": 0.1,
    "loss_type": "grpo",
    "multi_objective_aggregation": "normalize_then_sum",
    "scale_rewards": "none",
    "entropy_coef": 0.1,
    "importance_sampling_level": "sequence",
    "off_policy_mask_threshold": 0.1,
    "top_entropy_quantile": 0.5,
    "use_adaptive_entropy": True,
    "vllm_importance_sampling_cap": 5.0,
    "use_transformers_paged": True,
}
COPIED_IN_RLOO = {"normalize_advantages": True, "reward_clip_range": (0.0, 1.0)}


@BOTH
def test_a_copy_of_a_setting_that_nothing_reads_cannot_be_set(trainer_class: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path, trainer_class)
    own = COPIED_IN_RLOO if trainer.algorithm == "rloo" else COPIED_IN_GRPO
    for name, value in {**COPIED, **own}.items():
        kept = getattr(trainer, name, None)
        field = "router_aux_loss_coef" if name == "aux_loss_enabled" else name
        with pytest.raises(
            ConfigError, match=rf"trainer\.{name} = .* no effect.*{field}.*{type(trainer.args).__name__}"
        ):
            setattr(trainer, name, value)
        assert getattr(trainer, name, None) == kept
        if kept is not None:
            setattr(trainer, name, kept)  # the same value again
            assert name not in vars(trainer)
    trainer.epsilon_high, trainer.temperature, trainer.beta = 0.5, 0.9, 0.0
    assert (trainer.epsilon_high, trainer.temperature) == (0.5, 0.9)


def test_a_subclass_may_set_what_it_likes_otherwise(tmp_path: Path) -> None:
    class Mine(RecordedGRPO):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.loss_type = "sapo"  # TRL's constructor replaces it by the config's
            self.num_generations = 77
            self.weights_of_mine = [1.0]
            super().__init__(*args, **kwargs)
            self.loss_type, self.num_generations = self.args.loss_type, self.args.num_generations
            self.chat_template_kwargs = self.args.chat_template_kwargs or {}
            self.record, self.audit = [], "mine"  # TRL lacks these settings, so the names are the subclass's to use

    trainer = make(tmp_path, Mine)
    assert (trainer.loss_type, trainer.num_generations) == ("dapo", 2)
    assert (trainer.record, trainer.audit, trainer.weights_of_mine) == ([], "mine", [1.0])
    trainer.train()

    class Changed(RecordedGRPO):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scale_rewards = "none"

    with pytest.raises(ConfigError, match="scale_rewards"):
        make(tmp_path / "changed", Changed)


@BOTH
def test_every_copy_of_a_setting_takes_effect_or_cannot_be_set(trainer_class: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path, trainer_class, num_generations=2, beta=0.1)
    takes_effect = {"beta": 0.25, "temperature": 0.25, "epsilon_high": 0.25, "router_aux_loss_coef": 0.25}
    takes_effect["reward_weights"] = torch.tensor([0.25])
    seen = set()
    for name in set(own_fields(type(trainer.args))) - ONLY_HERE:
        if name in takes_effect:
            setattr(trainer, name, takes_effect[name])
            assert getattr(trainer, name) == takes_effect[name]
            seen.add(name)
            continue
        now = getattr(trainer, name)
        with pytest.raises(ConfigError, match=rf"trainer\.{name} = .* no effect"):
            setattr(trainer, name, "something else")
        assert getattr(trainer, name) == now
    assert seen == {name for name in takes_effect if hasattr(trainer.args, name)}
    assert trainer.loss_settings.epsilon_high == 0.25
    assert trainer.backend.config.temperature == 0.25
    assert trainer.rewards.weights.tolist() == [0.25]
    for name in ("tools", "environments"):
        setattr(trainer, name, getattr(trainer, name))
        with pytest.raises(ConfigError, match=rf"trainer\.{name} = .* no effect"):
            setattr(trainer, name, [length_reward])


def test_names_that_only_this_library_has_are_those_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fields.md").read_text(encoding="utf-8")
    new = set(re.findall(r"^\| `(\w+)` .*\| new[^|]*\|$", page, re.MULTILINE))
    assert new == ONLY_HERE | {"max_prompt_length"}, "TRL's trainers had this one for long"


def test_what_a_subclass_sets_first_is_there_until_the_constructor_replaces_it(tmp_path: Path) -> None:
    class Early(RecordedGRPO):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.num_generations, self.loss_type, self.temperature, self.tools = 77, "mine", 0.5, ["mine"]
            self.reward_funcs, self.pad_token_id, self.record = ["mine"], 99, ["mine"]
            self.read = (self.num_generations, self.loss_type, self.temperature, self.tools[0], self.reward_funcs[0])
            super().__init__(*args, **kwargs)

    trainer = make(tmp_path, Early)
    assert trainer.read == (77, "mine", 0.5, "mine", "mine")
    assert (trainer.num_generations, trainer.loss_type, trainer.temperature) == (2, "dapo", 1.0)
    assert (trainer.tools, trainer.reward_funcs, trainer.record) == ([], [length_reward], ["mine"])
    assert trainer.pad_token_id == trainer.processing_class.pad_token_id
    with pytest.raises(AttributeError):
        trainer.no_such_name  # noqa: B018
    trainer.train()


def test_names_that_a_subclass_defines_are_its_own(tmp_path: Path) -> None:
    class Mixin:
        scale_rewards = "mixed in"

    class Mine(Mixin, RecordedGRPO):
        top_k = 5

        @property
        def loss_type(self) -> str:
            return f"mine of {self.kept}"

        @loss_type.setter
        def loss_type(self, value: str) -> None:
            self.kept = value

        @property
        def num_generations(self) -> int:
            return int(self.args.num_generations)

    trainer = make(tmp_path, Mine)
    trainer.loss_type, trainer.top_k, trainer.scale_rewards = "this", 7, "changed"
    assert (trainer.loss_type, trainer.top_k, trainer.scale_rewards) == ("mine of this", 7, "changed")
    with pytest.raises(AttributeError, match="num_generations"):
        trainer.num_generations = 7
    with pytest.raises(ConfigError, match="no effect"):
        trainer.top_p = 0.5


def test_attributes_of_grpo_alone(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert trainer.tools == []
    assert trainer.environments is None
    assert trainer.ref_model is None


def test_metrics_of_a_subclass_are_logged_in_their_mode(tmp_path: Path) -> None:
    """Subclasses read the mode from the model, which comes from from_pretrained, or an evaluation, in eval mode."""

    class Measuring(RecordedGRPO):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["rows"].append(len(inputs))
            return super()._generate_and_score_completions(inputs)

    trainer = run(
        tmp_path,
        Measuring,
        model=tiny_model().eval(),
        eval_dataset=prompts(1),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        max_steps=2,
    )
    assert [log["rows"] for log in logs(trainer)] == [4, 4]
    assert [log["eval_rows"] for log in logs(trainer, "eval_rows")] == [2, 2]


# ---- callbacks


class Witness(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.evaluations.append(dict(metrics))


def test_callbacks_see_the_metrics(tmp_path: Path) -> None:
    witness = Witness()
    trainer = run(
        tmp_path,
        callbacks=[witness],
        eval_dataset=prompts(1),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        max_steps=1,
    )
    assert witness.logs[0]["reward"] == logs(trainer)[0]["reward"]
    assert witness.evaluations[0]["eval_reward"] == logs(trainer, "eval_reward")[0]["eval_reward"]


def test_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    class Enough(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            control.should_training_stop = "reward" in logs and state.global_step >= 2

    assert run(tmp_path, callbacks=[Enough()], max_steps=9).state.global_step == 2


class Reference(TrainerCallback):
    """The reference and the policy after every step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.policy: list[Tensor] = []
        self.reference: list[Tensor] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.note()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.note()

    def note(self) -> None:
        self.policy.append(self.trainer.model.lm_head.weight.detach().clone())
        self.reference.append(self.trainer.ref_model.lm_head.weight.detach().clone())


@BOTH
def test_the_reference_is_blended_at_the_right_steps(trainer_class: Any, tmp_path: Path) -> None:
    witness = Reference()
    trainer = make(
        tmp_path,
        trainer_class,
        callbacks=[witness],
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.25,
        learning_rate=0.1,
        max_steps=5,
    )
    witness.trainer = trainer
    trainer.train()
    policy, reference = witness.policy, witness.reference  # at step 0, 1, … 5
    for step in range(1, 6):
        if step % 2:
            assert torch.equal(reference[step], reference[step - 1])
        else:
            assert torch.allclose(reference[step], 0.75 * reference[step - 1] + 0.25 * policy[step], atol=1e-7)
            assert not torch.equal(reference[step], reference[step - 1])


def test_disable_dropout(tmp_path: Path) -> None:
    def with_dropout() -> Any:
        model = tiny_model()
        model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.5))
        return model

    for disabled, expected in ((False, 0.5), (True, 0.0)):
        trainer = make(tmp_path, model=with_dropout(), beta=0.1, disable_dropout=disabled)
        for model in (trainer.model, trainer.ref_model):
            assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [expected]


# ---- checkpoints and what a run leaves behind


def test_the_entropy_controller_survives_a_resume(tmp_path: Path) -> None:
    settings = {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_target": 9.0,
        "entropy_coef_delta": 0.01,
        "max_steps": 4,
    }
    straight = run(tmp_path, callbacks=[SaveAt(2)], **settings)
    state = json.loads((tmp_path / "checkpoint-2" / "entropy_ctrl_state.json").read_text())
    assert state["entropy_coef"] == pytest.approx(0.12)
    assert state["last_world_entropy"] == pytest.approx(logs(straight)[1]["entropy"])
    resumed = make(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [log["entropy_coef"] for log in logs(resumed)] == pytest.approx([0.11, 0.12, 0.13, 0.14])
    assert logs(resumed)[2]["loss"] == pytest.approx(logs(straight)[2]["loss"], abs=1e-5), "with the bonus at once"
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_no_state_file_without_a_controller(tmp_path: Path) -> None:
    run(tmp_path, callbacks=[SaveAt(1)], max_steps=1)
    assert not (tmp_path / "checkpoint-1" / "entropy_ctrl_state.json").exists()


@BOTH
def test_a_checkpoint_has_a_model_card(trainer_class: Any, tmp_path: Path) -> None:
    trainer = run(tmp_path, trainer_class, callbacks=[SaveAt(1)], max_steps=1)
    card = (tmp_path / "checkpoint-1" / "README.md").read_text(encoding="utf-8")
    header = card.split("---")[1]
    assert f"tags: [gruppo, {trainer.algorithm}]" in header
    assert "library_name: transformers" in header
    paper = {"grpo": "2402.03300", "rloo": "2402.14740"}[trainer.algorithm]
    assert f"arxiv.org/abs/{paper}" in card


def test_create_model_card(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    trainer.create_model_card(model_name="My policy", dataset_name="my/set", tags=["math", "tiny"])
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "# My policy" in card
    assert "`my/set`" in card
    assert "tags: [gruppo, grpo, math, tiny]" in card
    assert "loss type `dapo`" in card
    trainer.create_model_card(tags="single")
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "# run" in card
    assert "tags: [gruppo, grpo, single]" in card


def test_a_model_card_is_valid_and_names_the_base_model(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    model = tiny_model()
    model.config._name_or_path = "someone/tiny-llama"
    trainer = make(tmp_path, model=model)
    trainer.create_model_card()
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "someone/tiny-llama"
    assert card.data.tags == ["gruppo", "grpo"]


@BOTH
def test_plain_transformers_loads_a_saved_model(trainer_class: Any, tmp_path: Path) -> None:
    trainer = run(tmp_path / "run", trainer_class, max_steps=2, learning_rate=0.1)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    trained = trainer.model.state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.state_dict().items())
    assert not torch.equal(loaded.lm_head.weight, tiny_model().lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer("p0:")["input_ids"] == tiny_tokenizer()("p0:")["input_ids"]
    assert set(loaded.config.to_dict()) >= {"pad_token_id"}


def test_the_model_that_was_passed_is_the_one_that_is_trained(tmp_path: Path) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    trainer = run(tmp_path, model=model, max_steps=1)
    assert trainer.accelerator.unwrap_model(trainer.model) is model
    assert any(not torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert model.training


def test_the_trainers_are_trainers(tmp_path: Path) -> None:
    """Names that scripts use beyond train(): tags, algorithm, whether the loss is divided already."""
    for trainer_class, scaled in ((GRPOTrainer, True), (RLOOTrainer, False)):
        trainer = make(tmp_path, trainer_class)
        assert set(trainer.model.model_tags) == {"gruppo", trainer.algorithm}
        assert trainer.loss_is_scaled_for_ga is scaled


def test_scores_of_the_hook_are_those_of_the_model(tmp_path: Path) -> None:
    trainer = make(tmp_path, temperature=0.5)
    ids = torch.tensor([[0, *token_ids("p0:ab")], token_ids("p1:abc")])
    mask = (ids != 0).long()
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, 2, batch_size=1, compute_entropy=True
    )
    for i, (prompt, completion) in enumerate((("p0:", "ab"), ("p1:a", "bc"))):
        expected = slow_scores(trainer.model, token_ids(prompt), token_ids(completion), 0.5)
        assert logps[i].tolist() == pytest.approx(expected[0], abs=1e-5)
        assert entropies[i].tolist() == pytest.approx(expected[1], abs=1e-5)
