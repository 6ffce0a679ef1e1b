"""Images of rows: where they are found, what they are made of, and what files say of them."""

import io
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from gruppo.data.copying import copy_of
from gruppo.data.images import conversation, image_digest, images_in, images_of, open_image, without_images
from gruppo.errors import DataError
from tests.vision.families import picture

A, B = picture(1), picture(2, (24, 16))
ASKED = {"role": "user", "content": "what?"}
TEXT = {"type": "text", "text": "what?"}


def shown(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"prompt": [ASKED], "image": A}, [[shown(A), TEXT]]),
        ({"prompt": [ASKED], "image": None}, [[TEXT]]),
        ({"prompt": [ASKED], "images": [A, B]}, [[shown(A), shown(B), TEXT]]),
        ({"prompt": [ASKED], "images": []}, [[TEXT]]),
        ({"prompt": [ASKED], "images": None, "image": B}, [[shown(B), TEXT]]),
        ({"prompt": [{"role": "user", "content": [TEXT, {"type": "image"}]}], "image": A}, [[TEXT, shown(A)]]),
        ({"prompt": [{"role": "user", "content": [shown(B), TEXT]}]}, [[shown(B), TEXT]]),
        # What Arrow makes of blocks of different kinds: every key in each of them.
        (
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "text": None},
                            {"type": "text", "text": "what?", "image": None},
                        ],
                    }
                ],
                "images": [A],
            },
            [[shown(A), TEXT]],
        ),
        (
            {"prompt": [{"role": "system", "content": "s"}, ASKED, ASKED], "image": A},
            [[{"type": "text", "text": "s"}], [shown(A), TEXT], [TEXT]],
        ),
    ],
)
def test_images_are_put_into_the_conversation(row: dict[str, Any], contents: Any) -> None:
    before = repr(row)
    assert [message["content"] for message in conversation(row)] == contents
    assert repr(row) == before, "the dataset's row is left alone"


def test_a_plain_prompt_stays_as_it_is() -> None:
    assert conversation({"prompt": "hello", "image": None}) == "hello"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hello", "image": A}, "1 images and the plain prompt 'hello'"),
        ({"prompt": [ASKED], "image": A, "images": [B]}, "both columns"),
        ({"prompt": [ASKED], "image": [A]}, "Rename the column to `images`"),
        ({"prompt": [ASKED], "images": A}, "Rename the column to `image`"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}, TEXT]}]}, "0 images for 1"),
        ({"prompt": [{"role": "user", "content": [TEXT]}], "image": A}, "1 images for 0"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]}, "content of type 'video'"),
        ({"prompt": [{"role": "user", "content": ["text"]}]}, "parts of a message's content must be dicts"),
        ({"prompt": [{"role": "painter", "content": "x"}], "image": A}, "the role 'painter'"),
        ({"prompt": [ASKED], "image": 7}, "a row has a int"),
        ({"prompt": [ASKED], "image": "https://example.org/cat.png"}, "is a URL; images are not downloaded"),
        ({"prompt": [ASKED], "image": "/nowhere/cat.png"}, "'/nowhere/cat.png' cannot be read"),
        ({"prompt": [ASKED], "image": b"no image"}, "8 bytes cannot be read"),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        conversation(row)


def test_images_come_as_files_and_bytes_too(tmp_path: Path) -> None:
    A.save(tmp_path / "a.png")
    stored = (tmp_path / "a.png").read_bytes()
    forms = [
        A,
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        stored,
        {"bytes": stored, "path": None},
        {"path": str(tmp_path / "a.png")},
    ]
    assert {image_digest(open_image(form)) for form in forms} == {image_digest(A)}


def test_a_dataset_gives_its_images(tmp_path: Path) -> None:
    B.save(buffer := io.BytesIO(), "PNG")
    features = Features({"images": List(ImageFeature()), "prompt": List({"role": Value("string")})})
    dataset = Dataset.from_list([{"images": [{"bytes": buffer.getvalue(), "path": None}], "prompt": []}], features)
    (image,) = images_of(dataset[0])
    assert isinstance(image, Image.Image)
    assert image_digest(image) == image_digest(B)


def test_a_digest_tells_images_apart() -> None:
    assert image_digest(A) == image_digest(picture(1)) != image_digest(B)
    flat, tall = Image.new("RGB", (4, 2)), Image.new("RGB", (2, 4))
    assert image_digest(flat) != image_digest(tall), "the same bytes in another shape"
    assert image_digest(flat) != image_digest(Image.new("L", (4, 6))), "in another mode"


def test_what_is_written_has_no_images_in_it() -> None:
    messages = conversation({"prompt": [ASKED], "images": [A, B]})
    stored = without_images(messages)
    assert images_in(messages) == [A, B]
    assert stored[0]["content"] == [
        {"type": "image", "digest": image_digest(A)},
        {"type": "image", "digest": image_digest(B)},
        TEXT,
    ]
    assert without_images("plain") == "plain"
    assert images_in("plain") == []
    called = [{"role": "assistant", "content": None, "tool_calls": [1]}]
    assert without_images(called) == called


def test_copies_of_rows_share_their_images() -> None:
    copied = copy_of({"images": [A], "other": [{1}]})
    assert copied["images"][0] is A
    assert copied == {"images": [A], "other": [{1}]}
