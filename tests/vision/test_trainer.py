"""Both trainers on prompts with images: gradients, what rewards and files get, evaluation, replacement, refusals."""

import logging
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoProcessor

from gruppo import GRPOTrainer
from gruppo.data.collate import trim
from gruppo.data.images import image_digest
from gruppo.errors import ConfigError, DataError, RolloutError
from gruppo.rollout.select import reject_blind_backends
from gruppo.runs import Run
from gruppo.types import TrainBatch
from tests.helpers import sharp
from tests.trainer.test_completions import FakeTracker
from tests.vision.families import FAMILIES
from tests.vision.runs import make, row, rows, variety

NAMES = list(FAMILIES)
MIXED = (1, 2, 0, 1)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_gradient_of_a_batch_is_that_of_its_rows(tmp_path: Path, name: str, kind: str) -> None:
    model, processor = FAMILIES[name].make()
    trainer = make(tmp_path, name, kind, model=sharp(model, 4.0), processor=processor, beta=0.1, num_iterations=2)
    some = [each for each in trainer.train_dataset for _ in range(2)]
    inputs = trainer._generate_and_score_completions(some)
    assert len(inputs["vision"]) == 8
    inputs["advantages"] = torch.randn(8, generator=torch.Generator().manual_seed(0))
    size = trainer.update_size([TrainBatch.from_dict(inputs)])
    model = trainer.model.train()
    trainer.compute_loss(model, inputs, num_items_in_batch=size).backward()
    together = gradients(model)
    for i in range(8):
        one = trim(TrainBatch.from_dict(inputs).rows(slice(i, i + 1)).to_dict())
        trainer.compute_loss(model, one, num_items_in_batch=size).backward()
    alone = gradients(model)
    largest = max(gradient.abs().max().item() for gradient in together.values())
    assert largest > 1e-4
    assert alone.keys() == together.keys()
    for key, gradient in together.items():
        torch.testing.assert_close(alone[key], gradient, rtol=1e-4, atol=1e-6 * largest, msg=key)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rows_with_one_two_and_no_images_are_trained_on(tmp_path: Path, name: str, kind: str) -> None:
    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]  # no group without spread

    trainer = make(tmp_path, name, kind, rewards=reward, beta=0.1, learning_rate=1e-2, shuffle_dataset=False)
    before = {key: weight.clone() for key, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = {key for key, weight in trainer.model.named_parameters() if not torch.equal(weight, before[key])}
    assert any("visual" in key or "vision" in key for key in moved)
    logs = [log for log in trainer.state.log_history if "kl" in log]
    assert len(logs) == 2
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6), "the reference sees the same images"
    assert logs[1]["kl"] != 0
    assert logs[0]["num_tokens"] > 60, "those of images among them"


# ---- who samples, and how rows are run


def test_the_fast_ways_are_left_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make(tmp_path, rollout_backend="auto", packed_update=True)
    said = " ".join(caplog.messages)
    assert "The built-in engine cannot sample here: prompts of Qwen2VLForConditionalGeneration may have images" in said
    assert "Rows are padded" in said
    assert "prompts of Qwen2VLForConditionalGeneration may have images, which packed rows do not support" in said
    assert "suppress_tokens" not in said, "that is set by us"
    assert trainer.backend.name == "transformers"
    assert trainer.packed is None
    assert trainer.backend.config.suppress_tokens == [6, 7] == sorted(trainer.prompt_encoder.placeholders)
    assert trainer.accelerator.ddp_handler.find_unused_parameters is True


def test_a_suppressed_token_of_the_users_is_kept_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make(tmp_path, generation_kwargs={"suppress_tokens": [50]})
    assert trainer.backend.config.suppress_tokens == [6, 7, 50]
    assert "suppress_tokens=[6, 7, 50]: this changes what is sampled" in " ".join(caplog.messages)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_backend": "builtin"}, "rollout_backend='builtin' cannot sample here: prompts of Qwen2VLForCond"),
        ({"use_transformers_continuous_batching": True, "rollout_backend": "auto"}, "use_transformers_continuous_b"),
        ({"packed_update": True, "max_tokens_per_micro_batch": 64}, "max_tokens_per_micro_batch=64 needs packed rows"),
    ],
)
def test_what_cannot_see_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **settings)


@pytest.mark.parametrize("asked", [{"use_vllm": True}, {"rollout_backend": "vllm"}])
def test_vllm_is_not_given_images(tmp_path: Path, asked: dict[str, Any]) -> None:
    args = make(tmp_path).args
    for name, value in asked.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError, match=r"vllm.* cannot be used with a processor, whose prompts may have images"):
        reject_blind_backends(args)


def test_a_tokenizer_cannot_see(tmp_path: Path) -> None:
    model, processor = FAMILIES["qwen2_vl"].make()
    with pytest.raises(DataError, match=r"images \(column `images`\), but a tokenizer reads text only"):
        make(tmp_path, model=model, processor=processor.tokenizer)


def test_another_processing_class_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="PreTrainedTokenizerBase or a ProcessorMixin"):
        make(tmp_path, processor=object())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": "plain"}, "images and the plain prompt 'plain'"),
        ({"image": "x.png"}, "both columns"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}] * 3}]}, "1 images for 3"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_rows_are_found_at_construction(
    tmp_path: Path, changed: dict[str, Any], message: str, streamed: bool
) -> None:
    dataset = Dataset.from_list([row(i, 1) | changed for i in range(4)])
    with pytest.raises(DataError, match=message):
        make(tmp_path, dataset=dataset.to_iterable_dataset() if streamed else dataset)


# ---- what rewards and files get


def test_rewards_get_images_and_the_prompts_with_them(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], images: list[Any], label: list[str], **kw: Any) -> Any:
        seen.append((prompts, images, label))
        prompts[0][0]["content"].clear()  # its own copy
        return [float(len(completion[0]["content"])) for completion in completions]

    dataset = Dataset.from_list([row(i, 1 + i % 2, label=f"l{i}") for i in range(4)])
    trainer = make(tmp_path, rewards=reward, dataset=dataset, shuffle_dataset=False, max_steps=1)
    trainer.train()
    ((prompts, images, labels),) = seen
    assert labels == ["l0", "l0", "l1", "l1"]
    assert [len(each) for each in images] == [1, 1, 2, 2]
    assert isinstance(images[0][0], Image.Image)
    content = prompts[2][0]["content"]
    assert [part["type"] for part in content] == ["image", "image", "text"]
    assert content[1]["image"] is images[2][1] or image_digest(content[1]["image"]) == image_digest(images[2][1])
    assert prompts[1][0]["content"], "a reward changes its own copy only"


def test_files_have_digests_of_images(tmp_path: Path) -> None:
    trainer = make(tmp_path, log_completions=True, num_completions_to_print=1, record="all", shuffle_dataset=False)
    trainer.train()
    digest = image_digest(rows()[0]["images"][0])
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert digest in str(table["prompt"][0])
    assert "PIL" not in str(table["prompt"])
    assert "image" not in table
    recorded = Run(tmp_path).rollouts()
    stored = recorded.to_pydict() if hasattr(recorded, "to_pydict") else {"prompt": [r["prompt"] for r in recorded]}
    assert digest in stored["prompt"][0]
    assert "PIL" not in str(stored["prompt"])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("unique", [True, False])
def test_trackers_are_shown_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kept: bool, unique: bool
) -> None:
    tracker = FakeTracker()
    tracker.Image = lambda image: ("shown", image.size)
    monkeypatch.setitem(sys.modules, name, tracker)
    settings = {"log_completions": True, "num_completions_to_print": 0, "log_multimodal": kept}
    trainer = make(tmp_path, max_steps=1, shuffle_dataset=False, log_unique_prompts=unique, **settings)
    trainer.args.report_to = [name]
    trainer.train()
    (frame,) = tracker.tables()
    assert ("image" in frame) == kept
    assert frame["prompt"].iloc[0] == "USER\n[IMAGE]what"
    if kept:
        one, two = ("shown", (16, 16)), [("shown", (24, 16)), ("shown", (16, 24))]
        assert list(frame["image"]) == ([one, two] if unique else [one, one, two, two])


def test_text_alone_has_no_column_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    trainer = make(tmp_path, dataset=Dataset.from_list(rows((0, 0))), max_steps=1, log_completions=True)
    trainer.args.report_to = ["wandb"]
    trainer.train()
    (frame,) = tracker.tables()
    assert "image" not in frame


# ---- evaluation, replacement, adapters, checkpointing


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_evaluation_sees_images(tmp_path: Path, kind: str) -> None:
    evaluation = Dataset.from_list(rows((2, 1)))
    trainer = make(tmp_path, kind=kind, arguments={"eval_dataset": evaluation}, per_device_eval_batch_size=2, beta=0.1)
    found = trainer.evaluate()
    assert found["eval_completions/mean_length"] > 0
    assert found["eval_loss"] == pytest.approx(0, abs=1e-5)


def test_groups_without_spread_are_replaced_with_their_images(tmp_path: Path) -> None:
    seen: list[int] = []

    def reward(completions: list[Any], images: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(map(len, images))
        return [float(i % 2) if len(images[i]) == 2 else 1.0 for i in range(len(completions))]

    dataset = Dataset.from_list(rows((1, 2, 1, 2, 2, 1)))
    settings = {"dynamic_sampling": True, "max_resample_rounds": 2, "shuffle_dataset": False, "max_steps": 1}
    trainer = make(tmp_path, dataset=dataset, rewards=reward, **settings)
    batches: list[Any] = []
    collect = trainer.collect
    trainer.collect = lambda given: batches.append(collect(given)) or batches[-1]
    trainer.train()
    assert seen == [1, 1, 2, 2, 1, 1, 2, 2]
    images = [len(vision.pixels["image_grid_thw"]) for vision in batches[0].vision]
    assert images == [2, 2, 2, 2]
    for vision, mask in zip(batches[0].vision, batches[0].prompt_mask, strict=True):
        assert len(vision.types["mm_token_type_ids"]) == mask.sum()


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, {"num_iterations": 2}, {"pad_to_multiple_of": 8}]
)
def test_other_ways_to_update(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = make(tmp_path, **settings)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_an_adapter_is_trained_with_images(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = make(tmp_path, arguments={"peft_config": lora}, beta=0.1, learning_rate=1e-2)
    before = {key: weight.clone() for key, weight in trainer.model.named_parameters() if weight.requires_grad}
    trainer.train()
    moved = [
        key for key, weight in trainer.model.named_parameters() if key in before and not weight.equal(before[key])
    ]
    assert moved


def test_bfloat16_weights_are_given_pixels_of_their_kind(tmp_path: Path) -> None:
    model, processor = FAMILIES["llava_next"].make()
    trainer = make(tmp_path, "llava_next", model=model.bfloat16(), processor=processor, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_the_processor_is_saved_and_found_again(tmp_path: Path) -> None:
    trainer = make(tmp_path, "llava_next", save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    assert (folder / "processor_config.json").exists()
    assert type(AutoProcessor.from_pretrained(folder)).__name__ == "LlavaNextProcessor"
    again = GRPOTrainer(str(folder), variety, args=trainer.args, train_dataset=trainer.train_dataset)
    assert type(again.processing_class).__name__ == "LlavaNextProcessor"
    assert again.prompt_encoder.takes_images


# ---- hooks and rollout functions


class Scripted(GRPOTrainer):
    """Asks for completions through its own hooks."""

    passes_fields = True

    def _generate_single_turn(self, ids: Any, images: Any = None, multimodal_fields: Any = None, **kw: Any) -> Any:
        seen = [len(vision.pixels.get("image_grid_thw", ())) for vision in multimodal_fields["vision"]]
        assert [len(each) for each in images] == seen
        return super()._generate_single_turn(ids, images, multimodal_fields if self.passes_fields else None, **kw)


class LosesFields(Scripted):
    passes_fields = False


class OwnLoss(GRPOTrainer):
    """Scores by itself, as scripts for TRL do."""

    names: tuple[str, ...] = ("vision",)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        given = {name: inputs.get(name) for name in self.names}
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width, **given)
        return -(logps * inputs["completion_mask"] * inputs["advantages"][:, None]).sum()


class TheirLoss(OwnLoss):
    names = ("pixel_values", "image_grid_thw")


def test_a_hook_may_sample(tmp_path: Path) -> None:
    trainer = make(tmp_path, trainer=Scripted)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    with pytest.raises(RolloutError, match=r"LosesFields\._generate_single_turn requests .* does not pass"):
        make(tmp_path / "other", trainer=LosesFields).train()


def test_a_hook_may_compute_the_loss(tmp_path: Path) -> None:
    trainer = make(tmp_path, trainer=OwnLoss)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    with pytest.raises(ConfigError, match=r"TheirLoss scores rows with images.*vision=inputs\['vision'\]"):
        make(tmp_path / "other", trainer=TheirLoss).train()


@pytest.mark.parametrize("right", [True, False])
def test_a_rollout_function_is_given_images(tmp_path: Path, right: bool) -> None:
    _, processor = FAMILIES["qwen2_vl"].make()
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [processor.apply_chat_template([prompt], **how)["input_ids"][0] for prompt in prompts]
        return {
            "prompt_ids": [list(each)[0 if right else 1 :] for each in ids],
            "completion_ids": [[40 + i, 50, 1] for i in range(len(prompts))],
            "logprobs": None,
        }

    def reward(completion_ids: list[Any], **kwargs: Any) -> list[float]:
        return [float(ids[0] % 2) for ids in completion_ids]

    trainer = make(tmp_path, processor=processor, rewards=reward, arguments={"rollout_func": rollout})
    if right:
        trainer.train()
        assert trainer.state.log_history[0]["grad_norm"] > 0
    else:
        with pytest.raises(RolloutError, match="prompt_ids that differ from those of the processor"):
            trainer.train()
