"""Images of dataset rows: finding them, placing them in a conversation, and what files store instead of them."""

import io
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gruppo.data.chat import prepare_multimodal_messages
from gruppo.data.prompts import read_prompt
from gruppo.errors import DataError
from gruppo.types import Message

TAKEN = ("text", "image")  # supported types of content blocks


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """The images in the columns of a row: `images`, a list, or `image`, a single image or None.

    Example:
        images_of({"prompt": […], "image": picture}) == [picture]
    """
    several, single = row.get("images"), row.get("image")
    if several is not None and single is not None:
        raise DataError("A row has images in both columns, `image` and `images`. Remove one of them.")
    if single is not None:
        if isinstance(single, list | tuple):
            raise DataError(
                f"`image` must be one image, but a row has a list of {len(single)}. Rename the column to `images`."
            )
        return [single]
    if several is None:
        return []
    if not isinstance(several, list | tuple):
        raise DataError(
            f"`images` must be a list, but a row has a {type(several).__name__}. Rename the column to `image`."
        )
    return list(several)


def conversation(row: Mapping[str, Any]) -> str | list[Message]:
    """The prompt of a row in block form, including its images; plain text stays as it is.

    Example:
        conversation({"prompt": [{"role": "user", "content": "What is this?"}], "image": picture})
        # [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": …}]}]
    """
    prompt, images = read_prompt(row), images_of(row)
    if isinstance(prompt, str):
        if images:
            raise DataError(
                f"A row has {len(images)} images and the plain prompt {prompt[:80]!r}, which has no place for "
                'them. Write it as [{"role": "user", "content": …}].'
            )
        return prompt
    messages = prepare_multimodal_messages([_without_gaps(message) for message in prompt], images)
    for block in blocks(messages):
        if block.get("type") not in TAKEN:
            raise DataError(
                f"A prompt has content of type {block.get('type')!r}; only {' and '.join(TAKEN)} are supported."
            )
        if block["type"] == "image":
            block["image"] = open_image(block["image"])
    return messages


def blocks(messages: list[Message]) -> list[dict[str, Any]]:
    """All content blocks of the messages that are in block form."""
    contents = [message.get("content") for message in messages]
    return [block for content in contents if isinstance(content, list) for block in content]


def images_in(messages: str | list[Message]) -> list[Any]:
    """The images of a conversation, in order."""
    if isinstance(messages, str):
        return []
    return [block["image"] for block in blocks(messages) if block.get("type") == "image"]


def _without_gaps(message: Message) -> Message:
    """Drop keys whose value is None: a dataset gives all blocks the same keys, and templates test for the key only."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    for block in content:
        if not isinstance(block, Mapping):
            raise DataError(f"The parts of a message's content must be dicts with a `type`; a prompt has {block!r}.")
    return {**message, "content": [{key: value for key, value in b.items() if value is not None} for b in content]}


def open_image(value: Any) -> Any:
    """A PIL image from an image, a file path, a file's bytes, or a dataset's dict for an image that is not decoded.

    Example:
        open_image("cat.png").size, open_image({"bytes": b"…", "path": None}).size
    """
    from PIL import Image

    if isinstance(value, Image.Image):
        return value
    if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, str) and "://" in value[:16]:
        raise DataError(f"The image {value[:80]!r} is a URL; images are not downloaded. Put the image in the dataset.")
    if not isinstance(value, str | bytes | Path):
        raise DataError(
            "An image must be a PIL image, a file path or the bytes of a file, but a row has a "
            f"{type(value).__name__}. `dataset.cast_column('image', datasets.Image())` decodes a column."
        )
    try:
        image = Image.open(io.BytesIO(value) if isinstance(value, bytes) else value)
        image.load()
    except (OSError, ValueError) as error:
        shown = f"{len(value)} bytes" if isinstance(value, bytes) else repr(str(value))
        raise DataError(f"The image {shown} cannot be read: {error}") from error
    return image


def image_digest(image: Any) -> str:
    """A name that depends on the pixels only, not on where the image comes from: a 64-bit hash."""
    head = f"{image.mode} {image.size[0]} {image.size[1]} ".encode()
    return blake2b(head + image.tobytes(), digest_size=8).hexdigest()


def without_images(messages: str | list[Message]) -> str | list[Message]:
    """The conversation as it is written to files, with a digest in place of each image.

    Example:
        without_images([{"role": "user", "content": [{"type": "image", "image": picture}]}])
        # [{"role": "user", "content": [{"type": "image", "digest": "0fc9d3…"}]}]
    """
    if isinstance(messages, str):
        return messages

    def stored(block: dict[str, Any]) -> dict[str, Any]:
        if block.get("type") != "image":
            return block
        rest = {key: value for key, value in block.items() if key != "image"}
        return {**rest, "digest": image_digest(block["image"])}

    return [
        {**message, "content": [stored(block) for block in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
