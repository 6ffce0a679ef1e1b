import pytest

from gruppo.data.chat import (
    apply_chat_template,
    is_conversational,
    is_conversational_from_value,
    maybe_apply_chat_template,
    prepare_multimodal_messages,
)
from gruppo.errors import DataError
from tests.helpers import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "yo"}
BAD = {"role": "assistant", "content": "no"}
TOOL = {"role": "tool", "content": "6"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"prompt": [USER]}, True),
        ({"messages": [USER]}, True),
        ({"chosen": [USER, GOOD]}, True),
        ({"completion": [GOOD]}, True),
        ({"prompt": [{"role": "user"}]}, True),
        ({"prompt": "hi"}, False),
        ({"prompt": []}, False),
        ({"prompt": None}, False),
        ({"prompt": ["hi"]}, False),
        ({"prompt": [{"content": "hi"}]}, False),
        ({"prompt": "hi", "completion": [GOOD]}, False),  # the prompt decides
        ({"conversations": [USER]}, False),
        ({}, False),
    ],
)
def test_is_conversational(example, expected):
    assert is_conversational(example) is expected


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"conversations": [{"from": "user", "value": "hi"}]}, True),
        ({"conversations": [USER]}, False),
        ({"conversations": []}, False),
        ({"conversations": "hi"}, False),
        ({"messages": [{"from": "user", "value": "hi"}]}, False),
    ],
)
def test_is_conversational_from_value(example, expected):
    assert is_conversational_from_value(example) is expected


@pytest.mark.parametrize(
    ("example", "rendered"),
    [
        ({"prompt": [USER]}, {"prompt": "<user>hi<eos><assistant>"}),
        ({"prompt": [USER, GOOD]}, {"prompt": "<user>hi<eos><assistant>yo"}),
        ({"prompt": [USER, GOOD, TOOL]}, {"prompt": "<user>hi<eos><assistant>yo<eos><tool>6<eos><assistant>"}),
        ({"prompt": [USER], "completion": [GOOD]}, {"prompt": "<user>hi<eos><assistant>", "completion": "yo<eos>"}),
        (
            {"prompt": [USER], "completion": [GOOD], "label": False, "answer": 1},
            {"prompt": "<user>hi<eos><assistant>", "completion": "yo<eos>", "label": False},
        ),
        (
            {"prompt": [USER, GOOD], "completion": [BAD]},
            {"prompt": "<user>hi<eos><assistant>yo", "completion": "<eos><assistant>no<eos>"},
        ),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
            {"prompt": "<user>hi<eos><assistant>", "chosen": "yo<eos>", "rejected": "no<eos>"},
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
            {"chosen": "<user>hi<eos><assistant>yo<eos>", "rejected": "<user>hi<eos><assistant>no<eos>"},
        ),
        ({"messages": [USER, GOOD], "answer": 1}, {"text": "<user>hi<eos><assistant>yo<eos>"}),
    ],
)
def test_apply_chat_template(example, rendered):
    before = repr(example)
    assert apply_chat_template(example, tiny_tokenizer()) == rendered
    assert maybe_apply_chat_template(example, tiny_tokenizer()) == rendered
    assert repr(example) == before


def test_text_rows_are_left_alone():
    example = {"prompt": "hi", "answer": 1}
    assert maybe_apply_chat_template(example, tiny_tokenizer()) is example


def test_options_and_tools_reach_the_template():
    tokenizer = tiny_tokenizer(chat_template="{{ mood }}|{{ tools | length if tools else 'none' }}")
    prompt = {"prompt": [USER]}
    assert apply_chat_template(prompt, tokenizer, mood="calm") == {"prompt": "calm|none"}
    assert apply_chat_template(prompt, tokenizer, [{"type": "function"}], mood="calm") == {"prompt": "calm|1"}
    # What a row says about itself wins.
    row = {**prompt, "chat_template_kwargs": {"mood": "wild"}}
    assert apply_chat_template(row, tokenizer, mood="calm") == {"prompt": "wild|none"}
    assert apply_chat_template({**prompt, "chat_template_kwargs": None}, tokenizer) == {"prompt": "|none"}


def test_prompt_loses_an_opening_that_the_answer_does_not_have():
    opens = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    rendered = apply_chat_template({"prompt": [USER], "completion": [GOOD]}, tiny_tokenizer(chat_template=opens))
    assert rendered == {"prompt": "<user>hi<assistant>", "completion": "yo"}


def test_template_that_ends_every_text_with_eos():
    ends = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% else %}<eos>{% endif %}"
    )
    rendered = apply_chat_template({"prompt": [USER], "completion": [GOOD]}, tiny_tokenizer(chat_template=ends))
    assert rendered == {"prompt": "<user>hi|<assistant>", "completion": "yo|<eos>"}


def test_template_that_rewrites_the_prompt_is_refused():
    rewrites = (
        "{% for m in messages %}{% if loop.last %}<last>{% endif %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(DataError, match="renders the prompt differently"):
        apply_chat_template({"prompt": [USER], "completion": [GOOD]}, tiny_tokenizer(chat_template=rewrites))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"prompt": [SYSTEM]}, "role 'system'"),
        ({"prompt": []}, "role None"),
        ({"answer": 1}, r"columns \[\]"),
        ({"prompt": [USER], "messages": [USER]}, r"\['messages', 'prompt'\]"),
        ({"prompt": [USER], "chosen": [GOOD]}, r"\['chosen', 'prompt'\]"),
    ],
)
def test_rows_that_cannot_be_rendered(example, message):
    with pytest.raises(DataError, match=message):
        apply_chat_template(example, tiny_tokenizer())


def test_old_keyword_warns():
    with pytest.warns(FutureWarning, match="processing_class"):
        rendered = apply_chat_template({"prompt": [USER]}, tokenizer=tiny_tokenizer())
    assert rendered == {"prompt": "<user>hi<eos><assistant>"}
    with pytest.raises(TypeError, match="processing_class"):
        apply_chat_template({"prompt": [USER]})


def text(value):
    return {"type": "text", "text": value}


def image(value):
    return {"type": "image", "image": value}


@pytest.mark.parametrize(
    ("messages", "images", "expected"),
    [
        ([USER, GOOD], ["A"], [[image("A"), text("hi")], [text("yo")]]),
        ([USER], ["A", "B"], [[image("A"), image("B"), text("hi")]]),
        ([USER], None, [[text("hi")]]),
        ([USER], [], [[text("hi")]]),
        ([SYSTEM, USER, GOOD, USER], ["A"], [[text("s")], [image("A"), text("hi")], [text("yo")], [text("hi")]]),
        ([{"role": "user", "content": [text("x"), {"type": "image"}]}], ["A"], [[text("x"), image("A")]]),
        (
            [{"role": "user", "content": [image("P"), text("x"), {"type": "image"}]}],
            ["A"],
            [[image("P"), text("x"), image("A")]],
        ),
        ([USER, {"role": "user", "content": [{"type": "image"}]}], ["A"], [[text("hi")], [image("A")]]),
        # An Arrow table fills absent keys with None.
        ([{"role": "user", "content": [{"type": "image", "image": None}]}], ["A"], [[image("A")]]),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [1]}], ["A"], [[image("A"), text("hi")], None]),
    ],
)
def test_prepare_multimodal_messages(messages, images, expected):
    before = repr(messages)
    prepared = prepare_multimodal_messages(messages, images)
    assert [message["content"] for message in prepared] == expected
    assert [message["role"] for message in prepared] == [message["role"] for message in messages]
    assert repr(messages) == before


def test_assistant_message_without_content_stays_without():
    prepared = prepare_multimodal_messages([USER, {"role": "assistant", "tool_calls": [1]}])
    assert prepared[1] == {"role": "assistant", "tool_calls": [1]}


@pytest.mark.parametrize(
    ("messages", "images", "message"),
    [
        ([{"role": "user", "content": [{"type": "image"}]}], ["A", "B"], "2 images for 1"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "0 images for 1"),
        ([{"role": "user", "content": [text("x")]}], ["A"], "1 images for 0"),
        ([SYSTEM], ["A"], "1 images for 0"),
        ([{"role": "robot", "content": "x"}], None, "role 'robot'"),
    ],
)
def test_messages_that_do_not_fit_the_images(messages, images, message):
    with pytest.raises(DataError, match=message):
        prepare_multimodal_messages(messages, images)
