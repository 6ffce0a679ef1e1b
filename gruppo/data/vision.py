"""Prompts with images: from a processor's output to the tensors of one prompt, and from these to a batch.

    row ─► conversation with images ─► processor, one prompt at a time ─► Vision ─► model_inputs of many rows

The processor is called for each prompt separately, so its output never has to be split by prompt: how many rows of
`pixel_values` belong to a prompt depends on the model. The joined tensors equal the processor's output for all prompts
together.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gruppo.data.images import conversation, images_in, without_images
from gruppo.data.prompts import Encoded, PromptEncoder, Schemas
from gruppo.errors import ConfigError, DataError
from gruppo.types import Message, Prompt, Vision

# Tensors of images, and their padding value, used if other prompts have larger or more images.
PIXELS = {
    "pixel_values": 0,
    "image_grid_thw": 0,
    "pixel_attention_mask": 0,
    "image_sizes": 0,
    "spatial_shapes": 0,
    "image_position_ids": -1,
    "pixel_position_ids": -1,
}
TYPES = ("token_type_ids", "mm_token_type_ids")  # one number per token; 0 is text


def read_vision(output: Mapping[str, Any], accepts: Collection[str]) -> Vision:
    """The part of a processor's output for one prompt that the model's forward accepts."""
    given = {name: value for name, value in output.items() if name in accepts}
    unknown = given.keys() - {*PIXELS, *TYPES, "input_ids", "attention_mask"}
    if unknown or not all(isinstance(value, Tensor) for value in given.values()):
        names = sorted(unknown) or [name for name, value in given.items() if not isinstance(value, Tensor)]
        raise ConfigError(
            f"The processor makes {', '.join(names)} for this model, which cannot be joined for several prompts; "
            f"supported are {', '.join([*PIXELS, *TYPES])}."
        )
    return Vision(
        pixels={name: given[name] for name in PIXELS if name in given},
        types={name: given[name][0] for name in TYPES if name in given},
    )


def model_inputs(
    visions: Sequence[Vision | None],
    starts: Sequence[int],
    width: int,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The model inputs of several rows besides their ids, which are `width` wide and begin at the columns `starts`.

    Everything after a prompt (completions, tool results) counts as text. Floating-point tensors are cast to `dtype`.

    Example, of two rows, the first of which is padded with two tokens and has no image:
        model_inputs([Vision({}, {"token_type_ids": [0, 0]}), Vision({"pixel_values": …}, {"token_type_ids": [1, 1]})],
                     [2, 0], 5)
        -> {"pixel_values": …, "token_type_ids": [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]]}
    """
    known = [vision for vision in visions if vision is not None]
    inputs = {}
    for name, filler in PIXELS.items():
        if parts := [vision.pixels[name] for vision in known if name in vision.pixels]:
            inputs[name] = _stacked(parts, filler)
    for name in TYPES:
        if any(name in vision.types for vision in known):
            inputs[name] = torch.stack([_row(v, name, s, width) for v, s in zip(visions, starts, strict=True)])
    return {
        name: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _stacked(parts: Sequence[Tensor], filler: int) -> Tensor:
    """Concatenate along the first dimension; pad the others to the largest size."""
    sizes = [max(each) for each in zip(*(part.shape[1:] for part in parts), strict=True)]

    def padded(part: Tensor) -> Tensor:
        missing = [(0, size - own) for size, own in zip(sizes, part.shape[1:], strict=True)]
        sides = [number for pair in reversed(missing) for number in pair]
        return functional.pad(part, sides, value=filler) if any(sides) else part

    return torch.cat([padded(part) for part in parts])


def _row(vision: Vision | None, name: str, start: int, width: int) -> Tensor:
    row = torch.zeros(width, dtype=torch.long)
    if vision is not None and name in vision.types:
        types = vision.types[name][: width - start]
        row[start : start + len(types)] = types
    return row


class VisionEncoder(PromptEncoder):
    """Turns prompts with and without images into token ids and `Vision`, with the policy's processor.

    `accepts` are the arguments of the model's forward, and `placeholders` the ids of tokens that stand for images.
    """

    takes_images = True
    sample_size = 16

    def __init__(self, processor: Any, *, accepts: Collection[str], placeholders: Collection[int], **settings: Any):
        super().__init__(processor, **settings)
        self.accepts = accepts
        self.placeholders = frozenset(placeholders)

    def read(self, row: Mapping[str, Any]) -> str | list[Message]:
        """The prompt, including its images."""
        return conversation(row)

    def encode(self, prompts: Sequence[str | list[Message]], tools: Schemas | None = None) -> Encoded:
        """Token ids, images and `{"vision": [Vision, …]}`, one entry each per prompt."""
        if tools is None and not isinstance(self.tools, Mapping):
            tools = self.tools
        outputs = [self._process(prompt, tools) for prompt in prompts]
        visions = [read_vision(output, self.accepts) for output in outputs]
        ids = [output["input_ids"][0].tolist() for output in outputs]
        return ids, [images_in(prompt) for prompt in prompts], {"vision": visions}

    def _process(self, prompt: str | list[Message], tools: Schemas | None) -> Any:
        try:
            if isinstance(prompt, str):
                return self.tokenizer(text=[prompt], return_tensors="pt")
            # Copy the messages, since a processor may modify them.
            messages = [dict(message) for message in prompt]
            return self._render([messages], tools, tokenize=True, return_dict=True, return_tensors="pt")
        except DataError:
            raise
        except (ValueError, StopIteration) as error:  # StopIteration: more image tokens than images
            said = str(error) or "its text and its images do not match"
            raise DataError(
                f"{type(self.tokenizer).__name__} cannot read a prompt: {said}. It begins with "
                f"{str(without_images(prompt))[:80]!r}."
            ) from error

    def _fit(self, row: Mapping[str, Any], text: str | list[Message], ids: list[int], vision: Any = None) -> Prompt:
        prompt = super()._fit(row, text, ids, vision)
        assert vision is not None
        if any(len(types) != len(ids) for types in vision.types.values()):
            raise DataError(
                f"A prompt has {len(ids)} tokens, but its processor made a different number: a hook that "
                "changes the tokens of prompts cannot be used with images."
            )
        if not vision.pixels and self.placeholders & set(ids):
            raise DataError(
                "A prompt has a token that stands for an image, but no image. It begins with "
                f"{str(without_images(text))[:80]!r}. Remove the token from the text, or add the image."
            )
        cut = len(ids) - len(prompt.ids)
        if vision.pixels and self.placeholders & set(ids[:cut]):
            raise DataError(
                f"max_prompt_length={self.max_prompt_length} would cut into the images of a prompt of {len(ids)} "
                "tokens. Raise it, use smaller images, or filter such prompts."
            )
        types = {name: value[cut:] for name, value in vision.types.items()}
        return Prompt(
            row=row,
            text=text,
            ids=prompt.ids,
            truncated=prompt.truncated,
            vision=Vision(vision.pixels, types) if cut else vision,
            images=images_in(text),
            stored=without_images(text),
        )

    def _require_chat_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise DataError(
                "The prompts are conversations but the processor has no chat template. Set "
                "`processor.chat_template`, or use plain strings as prompts."
            )
