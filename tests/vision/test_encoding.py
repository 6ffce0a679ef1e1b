"""What processors make of prompts, one at a time, and what it becomes for many rows."""

from typing import Any

import pytest
import torch

from gruppo.data.collate import collate, join, shuffle_sequence_dict, split_tensor_dict, trim
from gruppo.data.images import conversation, images_in
from gruppo.data.vision import model_inputs, read_vision
from gruppo.errors import ConfigError, DataError
from gruppo.policy.loading import placeholder_ids
from gruppo.policy.unwrap import forward_arguments
from gruppo.types import Completion, Prompt, Rollout, StopReason, TrainBatch, Vision
from tests.vision.families import FAMILIES, VOCABULARY
from tests.vision.runs import encoder_of, row, rows

NAMES = list(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_joined_are_what_the_processor_makes_of_them_together(name: str) -> None:
    family = FAMILIES[name]
    model, processor = family.make()
    some = rows((1, 2, 1))
    prompts = encoder_of(model, processor)(some)
    chats = [conversation(each) for each in some]
    texts = processor.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    processor.tokenizer.padding_side = "left"
    images = [images_in(chat) for chat in chats]
    together = processor(text=texts, images=images, padding=True, return_tensors="pt")
    width = together["input_ids"].shape[1]
    lengths = [len(prompt.ids) for prompt in prompts]
    assert len(set(lengths)) > 1, "else nothing is padded"
    padded = [[0] * (width - len(prompt.ids)) + list(prompt.ids) for prompt in prompts]
    assert padded == together["input_ids"].tolist()
    joined = model_inputs([prompt.vision for prompt in prompts], [width - n for n in lengths], width)
    assert set(joined) == {*family.tensors, *([family.types] if family.types else [])}
    for key, value in joined.items():
        assert torch.equal(value, together[key]), key
        assert value.dtype == together[key].dtype


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_without_images_has_none(name: str) -> None:
    model, processor = FAMILIES[name].make()
    encoder = encoder_of(model, processor)
    plain, chat = encoder([{"prompt": "hello"}, row(0, 0)])
    assert plain.text == "hello"
    assert processor.tokenizer.decode(chat.ids) == "<user>what<eos><assistant>"
    for prompt in (plain, chat):
        assert prompt.vision is not None
        assert not prompt.vision.pixels
        assert prompt.images == []
        assert not any(types.any() for types in prompt.vision.types.values())


def test_a_row_of_a_group_is_processed_once() -> None:
    model, processor = FAMILIES["qwen2_vl"].make()
    first, second = rows((1, 1))
    prompts = encoder_of(model, processor)([first, first, second])
    assert prompts[0] is prompts[1]
    assert prompts[0].vision is prompts[1].vision is not prompts[2].vision


def test_the_columns_of_types_begin_where_the_ids_do() -> None:
    sight = Vision({}, {"token_type_ids": torch.tensor([0, 1, 1])})
    inputs = model_inputs([sight, None, sight], [2, 0, 0], 6)
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 0], [0] * 6, [0, 1, 1, 0, 0, 0]]
    assert model_inputs([sight], [0], 2)["token_type_ids"].tolist() == [[0, 1]], "a prompt but its last token"


def test_images_of_other_sizes_are_padded_as_their_model_expects() -> None:
    small = Vision({"pixel_values": torch.ones(1, 2, 3), "pixel_position_ids": torch.zeros(1, 2, 2)}, {})
    large = Vision({"pixel_values": torch.ones(2, 4, 3), "pixel_position_ids": torch.zeros(2, 4, 2)}, {})
    inputs = model_inputs([small, large], [0, 0], 1, dtype=torch.float64)
    assert inputs["pixel_values"].shape == (3, 4, 3)
    assert inputs["pixel_values"].dtype is torch.float64
    assert inputs["pixel_values"][0, 2:].sum() == 0
    assert (inputs["pixel_position_ids"][0, 2:] == -1).all(), "0 would be a place in the image"
    assert (inputs["pixel_position_ids"][1:] == 0).all()


def test_a_processor_that_makes_something_unknown_is_refused() -> None:
    output = {"input_ids": torch.ones(1, 2), "pixel_values": torch.ones(1, 2), "depth_values": torch.ones(1, 2)}
    assert set(read_vision(output, {"pixel_values"}).pixels) == {"pixel_values"}, "the model does not take the other"
    with pytest.raises(
        ConfigError, match=r"makes depth_values for this model.*supported are pixel_values, image_grid"
    ):
        read_vision(output, {"pixel_values", "depth_values"})
    with pytest.raises(ConfigError, match="makes pixel_values for this model"):
        read_vision({"pixel_values": [torch.ones(1), torch.ones(2)]}, {"pixel_values"})


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_that_stand_for_images_are_known(name: str) -> None:
    model, processor = FAMILIES[name].make()
    tokens = set(placeholder_ids(model))
    assert tokens
    assert tokens < set(range(VOCABULARY))
    one, none = encoder_of(model, processor)([row(1, 1), row(1, 0)])
    assert tokens & set(one.ids)
    assert not tokens & set(none.ids)


# ---- lengths


def test_a_prompt_may_be_cut_before_its_images_only() -> None:
    model, processor = FAMILIES["qwen2_vl"].make()
    text = {"type": "text", "text": "before"}
    content = [text, {"type": "image"}, {"type": "text", "text": "after"}]
    asked = {"prompt": [{"role": "user", "content": content}], "images": row(0, 1)["images"]}
    (whole,) = encoder_of(model, processor)([asked])
    (cut,) = encoder_of(model, processor, max_prompt_length=len(whole.ids) - 4)([asked])
    assert list(cut.ids) == list(whole.ids)[4:]
    assert cut.truncated
    assert torch.equal(cut.vision.types["mm_token_type_ids"], whole.vision.types["mm_token_type_ids"][4:])
    with pytest.raises(DataError, match="max_prompt_length=9 would cut into the images of a prompt of"):
        encoder_of(model, processor, max_prompt_length=9)([asked])


def test_images_count_towards_the_context() -> None:
    model, processor = FAMILIES["qwen2_vl"].make()
    (prompt,) = encoder_of(model, processor)([row(0, 2)])
    with pytest.raises(DataError, match=f"A prompt has {len(prompt.ids)} tokens"):
        encoder_of(model, processor, context_length=len(prompt.ids))([row(0, 2)])


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        # From transformers 5.23 on the processor says so itself.
        ("look <|image_pad|>", 0, "(for an image, but no image|no images were passed).*'look <"),
        ([{"role": "user", "content": "look <|image_pad|>"}], 0, "(for an image, but no image|no images were passed)"),
        ([{"role": "user", "content": "look <|image_pad|>"}], 1, "Qwen2VLProcessor cannot read a prompt"),
    ],
)
def test_a_text_may_not_contain_the_tokens_of_images(prompt: Any, images: int, message: str) -> None:
    model, processor = FAMILIES["qwen2_vl"].make()
    with pytest.raises(DataError, match=message):
        encoder_of(model, processor)([{"prompt": prompt, "images": row(0, images)["images"]}])


def test_a_processor_without_a_template_says_so() -> None:
    model, processor = FAMILIES["qwen2_vl"].make()
    processor.chat_template = None
    with pytest.raises(DataError, match="the processor has no chat template"):
        encoder_of(model, processor)([row(0, 1)])


def test_a_hook_that_changes_tokens_is_refused() -> None:
    model, processor = FAMILIES["qwen2_vl"].make()
    encoder = encoder_of(model, processor)

    def tokenize(prompts: Any) -> Any:
        ids, images, fields = encoder.encode(prompts)
        return [[5, *each] for each in ids], images, fields

    with pytest.raises(DataError, match="a hook that changes the tokens of prompts cannot be used with images"):
        encoder([row(0, 1)], tokenize=tokenize)


# ---- batches


def batch_of(counts: tuple[int, ...], length: int) -> tuple[TrainBatch, list[Any]]:
    model, processor = FAMILIES["qwen2_vl"].make()
    prompts = encoder_of(model, processor)(rows(counts))
    stop = StopReason.EOS
    rollouts = [Rollout(prompt, Completion([7] * (length - i % 2), stop), "") for i, prompt in enumerate(prompts)]
    return collate(rollouts, 0, torch.device("cpu")), [prompt.vision for prompt in prompts]


def test_rows_keep_their_images_wherever_they_go() -> None:
    batch, visions = batch_of((1, 0, 2, 1), 3)
    assert batch.vision == visions
    assert batch.rows(torch.tensor([True, False, False, True])).vision == [visions[0], visions[3]]
    assert batch.rows(torch.tensor([2, 0])).vision == [visions[2], visions[0]]
    assert batch.rows(slice(1, 3)).vision == visions[1:3]
    shuffled = shuffle_sequence_dict(batch.to_dict())
    for part in split_tensor_dict(shuffled, 2):
        cut = TrainBatch.from_dict(trim(part))
        for ids, mask, vision in zip(cut.prompt_ids, cut.prompt_mask, cut.vision, strict=True):
            assert len(vision.types["mm_token_type_ids"]) == mask.sum()
            image_tokens = (ids == FAMILIES["qwen2_vl"].make()[0].config.image_token_id).sum()
            assert vision.types["mm_token_type_ids"].sum() == image_tokens


def test_generations_with_and_without_images_are_joined() -> None:
    (first, seen), (second, _) = batch_of((1, 2), 3), batch_of((0, 0), 5)
    second.vision = None
    joined = join([first, second])
    assert joined.vision == [*seen, None, None]
    assert joined.completion_ids.shape[1] == 5
    assert join([second, second]).vision is None


def test_text_has_no_vision() -> None:
    rollout = Rollout(Prompt({}, "a", [5]), Completion([7], StopReason.EOS), "")
    batch = collate([rollout], 0, torch.device("cpu"))
    assert batch.vision is None
    assert "vision" not in batch.to_dict()


def test_model_arguments_are_those_of_the_class() -> None:
    model, _ = FAMILIES["gemma3"].make()
    assert {"pixel_values", "token_type_ids"} <= forward_arguments(model)
