"""Dataset rows to token ids."""

from itertools import pairwise

import pytest
from datasets import Dataset

from gruppo.data.prompts import PromptEncoder, check_prompts, read_prompt, sample_rows
from gruppo.errors import ConfigError, DataError
from tests.helpers import prompts, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
USER = {"role": "user", "content": "ab"}


def row(prompt, **columns):
    return {"prompt": prompt, **columns}


def text(ids) -> str:
    return TOKENIZER.decode(ids)


# ---- reading


def test_reads_strings_and_conversations():
    assert read_prompt(row("a")) == "a"
    assert read_prompt(row([USER])) == [USER]
    assert read_prompt(row((USER, {"role": "assistant", "content": ""}))) == [
        USER,
        {"role": "assistant", "content": ""},
    ]


def test_a_turn_of_tool_calls_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert read_prompt(row([USER, call])) == [USER, call]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"question": "a"}, r"no `prompt` column; its columns are \['question'\]"),
        (row(""), "empty `prompt`"),
        (row(None), "a row has None"),
        (row(3), "a row has 3"),
        (row([]), r"a row has \[\]"),
        (row(["hi"]), "not 'hi'"),
        (row([{"content": "hi"}]), "not {'content': 'hi'}"),
        (row([{"role": "user"}]), "neither content nor tool calls"),
        (row([USER, {"role": "user", "content": None, "tool_calls": []}]), "neither content nor tool calls"),
    ],
)
def test_bad_rows_are_refused(wrong, message):
    with pytest.raises(DataError, match=message):
        read_prompt(wrong)


# ---- encoding


def test_plain_prompts_are_tokenized_as_they_are():
    (prompt,) = PromptEncoder(TOKENIZER)([row("ab", answer="1")])
    assert text(prompt.ids) == "ab"
    assert (prompt.text, prompt.row["answer"], prompt.truncated, prompt.is_conversation) == ("ab", "1", False, False)


def test_conversations_are_rendered_with_a_generation_prompt_even_after_an_assistant_turn():
    turns = [USER, {"role": "assistant", "content": "c"}]
    one, two = PromptEncoder(TOKENIZER)([row([USER]), row(turns)])
    assert text(one.ids) == "<user>ab<eos><assistant>"
    assert text(two.ids) == "<user>ab<eos><assistant>c<eos><assistant>"
    assert (two.text, two.is_conversation) == (turns, True)


def test_plain_prompts_and_conversations_may_be_mixed_in_any_order():
    rows = [row([USER]), row("xy"), row([USER | {"content": "c"}]), row("z")]
    assert [text(p.ids) for p in PromptEncoder(TOKENIZER)(rows)] == [
        "<user>ab<eos><assistant>",
        "xy",
        "<user>c<eos><assistant>",
        "z",
    ]


def test_chat_template_kwargs_reach_the_template():
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0]['content'] }}{% if loud %}!{% endif %}")
    for loud, expected in ((True, "ab!"), (False, "ab")):
        encoder = PromptEncoder(tokenizer, chat_template_kwargs={"loud": loud})
        assert text(encoder([row([USER])])[0].ids) == expected


def test_a_conversation_without_a_template_is_an_error_but_strings_are_not():
    encoder = PromptEncoder(tiny_tokenizer(chat_template=None))
    assert len(encoder([row("ab")])) == 1
    with pytest.raises(DataError, match="no chat template"):
        encoder([row("ab"), row([USER])])


def test_a_row_that_occurs_once_per_completion_is_encoded_once():
    asked = []

    def tokenize(texts):
        asked.append(list(texts))
        return [[ord(t)] for t in texts], None, {}

    a, b = row("a"), row("b")
    encoded = PromptEncoder(TOKENIZER)([a, a, b, a, dict(b)], tokenize=tokenize)
    assert asked == [["a", "b", "b"]]  # an equal row that is another object is another row
    assert [list(p.ids) for p in encoded] == [[97], [97], [98], [97], [98]]
    assert encoded[0] is encoded[1] is encoded[3]


def test_rows_may_come_from_anything_that_makes_them_as_it_goes():
    dataset = prompts(40)
    assert [text(p.ids) for p in PromptEncoder(TOKENIZER)(dataset)] == dataset["prompt"][:]


def test_a_tokenize_that_loses_a_prompt_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        PromptEncoder(TOKENIZER)([row("a"), row("b")], tokenize=lambda texts: ([[1]], None, {}))


def test_a_prompt_without_tokens_is_an_error():
    with pytest.raises(DataError, match="The prompt 'a' has no tokens"):
        PromptEncoder(TOKENIZER)([row("a")], tokenize=lambda texts: ([[]], None, {}))


# ---- lengths


@pytest.mark.parametrize(("limit", "kept", "cut"), [(3, "cde", True), (5, "abcde", False), (9, "abcde", False)])
def test_max_prompt_length_keeps_the_end(limit, kept, cut):
    (prompt,) = PromptEncoder(TOKENIZER, max_prompt_length=limit)([row("abcde")])
    assert (text(prompt.ids), prompt.truncated) == (kept, cut)
    assert prompt.text == "abcde"  # rewards still see all of it


def test_max_prompt_length_cuts_conversations_too():
    (prompt,) = PromptEncoder(TOKENIZER, max_prompt_length=3)([row([USER])])
    assert (text(prompt.ids), prompt.truncated) == ("b<eos><assistant>", True)


@pytest.mark.parametrize(("length", "fits"), [(7, True), (8, False), (9, False)])
def test_a_prompt_must_leave_room_in_the_context(length, fits):
    encoder = PromptEncoder(TOKENIZER, context_length=8)
    if fits:
        assert len(encoder([row("a" * length)])[0].ids) == length
        return
    with pytest.raises(
        DataError, match=rf"{length} tokens.*context of 8.*max_prompt_length.*begins with 'a{{{length}}}'"
    ):
        encoder([row("a" * length)])


def test_a_truncated_prompt_fits_the_context():
    encoder = PromptEncoder(TOKENIZER, context_length=8, max_prompt_length=4)
    assert len(encoder([row("a" * 20)])[0].ids) == 4


# ---- checks before a run


@pytest.mark.parametrize("count", [1, 255, 256, 512, 1000])
def test_the_sample_is_evenly_spaced_and_bounded(count):
    answers = [int(r["answer"]) for r in sample_rows(prompts(count))]
    steps = {b - a for a, b in pairwise(answers)}
    assert answers[0] == 0
    assert len(steps) <= 1
    assert min(count, 256) <= len(answers) < 512
    assert count - answers[-1] <= max(steps, default=1)  # it reaches to the end


def test_check_prompts_encodes_what_it_is_given():
    check_prompts([row("a"), row([USER])], PromptEncoder(TOKENIZER))
    with pytest.raises(DataError, match="9 tokens"):
        check_prompts([row("a"), row("b" * 9)], PromptEncoder(TOKENIZER, context_length=8))


def test_without_an_encoder_only_the_column_is_needed():
    check_prompts([row({"anything": 1})], None)
    with pytest.raises(DataError, match="no `prompt` column"):
        check_prompts([{"question": "a"}], None)
    with pytest.raises(DataError, match=r"column `image`.*a tokenizer reads text only"):
        check_prompts([row("a", image="x.png")], None)


def test_rows_of_a_text_dataset_may_have_an_image_column_of_nones():
    rows = Dataset.from_list([row("a", image=None), row("b", image=None)])
    check_prompts(sample_rows(rows), PromptEncoder(TOKENIZER))
    with pytest.raises(DataError, match="column `images`"):
        check_prompts([row("a", images=["x.png"])], PromptEncoder(TOKENIZER))


@pytest.mark.parametrize(
    ("ours", "given", "message"),
    [
        ({}, {"tokenize": False}, r"chat_template_kwargs\['tokenize'\]=False cannot be set: token ids"),
        ({"tools": [{"name": "f"}]}, {"tools": []}, r"\['tools'\]=\[\] cannot be set: the trainer sets it"),
        ({"chat_template": "x"}, {"chat_template": "y"}, r"\['chat_template'\]='y' cannot be set"),
    ],
)
def test_template_arguments_that_collide_are_named(ours, given, message):
    with pytest.raises(ConfigError, match=message):
        PromptEncoder(TOKENIZER, chat_template_kwargs=given, **ours)
    PromptEncoder(TOKENIZER, chat_template_kwargs={"tools": [], "chat_template": "y", "enable_thinking": False})
