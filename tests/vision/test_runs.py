"""Runs with images that are resumed, that use tools, and that two processes share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.rollout.base import RolloutBackend
from gruppo.trainer.resume.state import pack_queue, unpack_queue
from gruppo.types import Completion, SampleRequest, StopReason, Vision
from tests.processes import run_together
from tests.trainer.scripted import relative_difference
from tests.vision import two_processes
from tests.vision.families import FAMILIES
from tests.vision.runs import make, weights

# ---- resuming


@pytest.mark.parametrize(("name", "kind"), [("qwen2_vl", "grpo"), ("qwen2_vl", "rloo"), ("gemma3", "grpo")])
def test_a_resumed_run_is_the_straight_one(tmp_path: Path, name: str, kind: str) -> None:
    """From inside a generation, whose rows wait with their images."""
    settings = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 5,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
    }
    sampled: list[int] = []
    straight = make(tmp_path / "a", name, kind, **settings)
    straight.train()
    make(tmp_path / "b", name, kind, **settings).train()
    resumed = make(tmp_path / "b", name, kind, **settings)
    collect = resumed.collect
    resumed.collect = lambda given: sampled.append(resumed.state.global_step) or collect(given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert sampled == [4], "the rows of the first generation are trained on as they are"
    expected = weights(straight)
    assert all(torch.equal(weight, expected[key]) for key, weight in weights(resumed).items())


def test_a_queue_keeps_each_image_once() -> None:
    one = Vision({"pixel_values": torch.rand(2, 3)}, {"token_type_ids": torch.tensor([0, 1])})
    blind = Vision({}, {})
    first = {"completion_ids": torch.ones(3, 1), "vision": [one, None, one]}
    second = {"completion_ids": torch.ones(2, 1), "vision": [blind, one]}
    state = pack_queue([first, second, first])
    assert state is not None
    assert len([key for key in state.tensors if key.endswith("pixel_values")]) == 1
    back = list(unpack_queue(state, torch.device("cpu")))
    assert back[0] is back[2]
    assert [vision is None for vision in back[0]["vision"]] == [False, True, False]
    assert back[0]["vision"][0] is back[0]["vision"][2] is back[1]["vision"][1]
    assert torch.equal(back[0]["vision"][0].pixels["pixel_values"], one.pixels["pixel_values"])
    assert back[0]["vision"][0].types["token_type_ids"].tolist() == [0, 1]
    assert not back[1]["vision"][0].pixels
    assert pack_queue([{"something": "else"}]) is None


# ---- tools


def look(what: str) -> Any:
    """Look at something.

    Args:
        what: at what
    """
    if what == "picture":
        return [{"type": "image", "image": None}]
    return f"a {what} <|image_pad|>"


def call(what: str) -> str:
    return f'<tool_call>{{"name": "look", "arguments": {{"what": "{what}"}}}}</tool_call><eos>'


class Script(RolloutBackend):
    """The first completion of a group calls a tool that answers with text, the second one that has an image."""

    name = "script"

    def __init__(self, config: Any, tokenizer: Any):
        self.config, self.tokenizer = config, tokenizer
        self.asked: list[list[SampleRequest]] = []

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self.asked.append(list(requests))
        texts = []
        for request in requests:
            for i in range(request.count):
                first = call("picture" if (request.first_sample + i) % 2 else "cat")
                texts.append("seen<eos>" if request.turn else first)
        return [Completion(self.tokenizer(text)["input_ids"], StopReason.EOS) for text in texts]


def seen_by(model: Any) -> list[dict[str, Any]]:
    """What the model is given from now on."""
    given: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    return given


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "idefics3"])
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_tool_answers_after_an_image(tmp_path: Path, name: str, kind: str) -> None:
    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float("cat" in str(completion)) for completion in completions]

    settings = {"max_completion_length": 400, "max_steps": 1, "shuffle_dataset": False}
    model, processor = FAMILIES[name].make()
    model.config.get_text_config().max_position_embeddings = 2048
    trainer = make(
        tmp_path, name, kind, model=model, processor=processor, rewards=reward, arguments={"tools": [look]}, **settings
    )
    trainer.backend = Script(trainer.backend.config, processor.tokenizer)
    given = seen_by(trainer.model)
    trainer.train()
    first, second = trainer.backend.asked
    assert [request.count for request in first] == [2, 2]
    assert [request.vision for request in second] == [first[0].vision] * 2 + [first[1].vision] * 2
    assert "[look]" in processor.tokenizer.decode(first[0].prompt_ids)
    images = sum(token in trainer.prompt_encoder.placeholders for token in first[0].prompt_ids)
    for request in second:
        prompt = first[0] if request.vision is first[0].vision else first[1]
        assert list(request.prompt_ids)[: len(prompt.prompt_ids)] == list(prompt.prompt_ids)
        after = list(request.prompt_ids)[len(prompt.prompt_ids) :]
        assert not trainer.prompt_encoder.placeholders & set(after), "what a tool says is no image"
    assert images > 0
    answers = [processor.tokenizer.decode(request.prompt_ids) for request in second]
    if name == "qwen2_vl":
        assert "a cat < |image_pad|>" in answers[0]
    assert "Content of type 'image' cannot be shown" in answers[1]
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0.5
    assert trainer.state.log_history[0]["grad_norm"] > 0
    update = given[-1]
    assert len(update["input_ids"]) == 4
    tokens = torch.isin(update["input_ids"], torch.tensor(sorted(trainer.prompt_encoder.placeholders)))
    if (types := FAMILIES[name].types) is not None:
        assert torch.equal(update[types] == 1, tokens), "and nothing after the prompts"
    assert "pixel_values" in update


# ---- two processes


@pytest.mark.medium
def test_two_processes_make_the_updates_of_one(tmp_path: Path) -> None:
    run_together(2, "tests.vision.two_processes", tmp_path)
    for name, settings in two_processes.CASES.items():
        first, second = (torch.load(tmp_path / f"{name}{rank}.pt") for rank in (0, 1))
        alone = two_processes.update(tmp_path / "alone", name, 1)
        assert all(torch.equal(first[key], second[key]) for key in first), name
        moved = {key for key in first if first[key].any()}
        assert any("visual" in key for key in moved) == (settings["images"] is not None), name
        assert moved == {key for key in alone if alone[key].any()}, name
        assert relative_difference({key: alone[key] for key in moved}, first) < 1e-10, name
