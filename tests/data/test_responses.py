"""Token ids to what a reward function reads."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gruppo.data.responses import decode, has_response_parser, parse_response, without_end
from gruppo.data.templates import add_response_schema
from gruppo.types import Prompt
from tests.data.imitations import QWEN2_5, byte_tokenizer
from tests.helpers import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer that decodes in its own way."""

    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs).upper()


@pytest.mark.parametrize("cleans_up", [False, True])
@pytest.mark.parametrize("kind", ["word-level", "byte-pair", "own"])
def test_texts_are_those_of_batch_decode(kind: str, cleans_up: bool) -> None:
    """Also where transformers takes out spaces, and where a tokenizer has a decode of its own."""
    tokenizer = tiny_tokenizer(clean_up_tokenization_spaces=cleans_up)
    rows = [ids("what , is this ?<eos>"), ids("it 's."), []]
    if kind == "own":
        tokenizer = Shouting(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    if kind == "byte-pair":
        backend = Tokenizer(models.BPE(TOKENIZER.get_vocab(), [], unk_token="<unk>"))
        backend.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=cleans_up
        )
    expected = tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert "?<" not in expected[0]
    assert (kind == "own") == expected[0].startswith("WHAT")
    assert decode(tokenizer, [Prompt(row={}, text="q", ids=[1])] * 3, rows) == expected


class Parser:
    """A tokenizer whose `parse_response` gives back (or raises) what it is told, and keeps what it was asked."""

    response_template = "some"
    eos_token = "<eos>"

    def __init__(self, result):
        self.result = result
        self.asked = []

    def parse_response(self, response, **kwargs):
        self.asked.append((list(response), kwargs))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def decode(self, token_ids, **kwargs):
        return TOKENIZER.decode(token_ids, **kwargs)

    def batch_decode(self, rows, **kwargs):
        return TOKENIZER.batch_decode(rows, **kwargs)


PLAIN = Prompt(row={}, text="q", ids=[9])
CHAT = Prompt(row={}, text=[{"role": "user", "content": "q"}], ids=[2, 9, 1, 3])


def test_text_for_strings_and_a_message_for_conversations():
    outputs = decode(TOKENIZER, [PLAIN, CHAT], [ids("ab<eos>"), ids("cd<eos>")])
    assert outputs == ["ab", [{"role": "assistant", "content": "cd"}]]


def test_an_empty_completion_is_empty_text():
    assert decode(TOKENIZER, [PLAIN, CHAT], [[], []]) == ["", [{"role": "assistant", "content": ""}]]


def test_only_conversations_are_parsed_and_with_their_prompt_as_prefix():
    parser = Parser({"role": "assistant", "content": "parsed"})
    outputs = decode(parser, [PLAIN, CHAT], [ids("ab"), ids("cd")])
    assert outputs == ["ab", [{"role": "assistant", "content": "parsed"}]]
    assert parser.asked == [(ids("cd"), {"prefix": [2, 9, 1, 3], "tools": None})]


def test_a_tokenizer_without_a_response_template_does_not_parse():
    legacy = tiny_tokenizer()
    legacy.response_schema = {"type": "object"}  # a form that transformers no longer reads
    assert not has_response_parser(legacy)
    assert decode(legacy, [CHAT], [ids("cd")]) == [[{"role": "assistant", "content": "cd"}]]
    assert has_response_parser(Parser(None))


@pytest.mark.parametrize(
    "result",
    [
        ValueError("no match"),
        TypeError("bad"),
        None,
        {},
    ],
    ids=repr,
)
def test_what_does_not_parse_is_kept_as_text(result):
    assert parse_response(Parser(result), ids("ab<eos>")) == {"role": "assistant", "content": "ab"}


def test_other_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        parse_response(Parser(ZeroDivisionError()), ids("ab"))


@pytest.mark.parametrize(
    ("content", "cleaned"),
    [("ab<eos>", "ab"), ("ab<eos><eos>", "ab<eos>"), ("ab", "ab"), ("", ""), (None, ""), (["a"], "['a']")],
)
def test_content_is_a_string_without_its_end_token(content, cleaned):
    assert parse_response(Parser({"content": content}), ids("x")) == {"role": "assistant", "content": cleaned}


def test_missing_content_becomes_empty_and_other_fields_are_kept():
    message = parse_response(Parser({"reasoning_content": "hm"}), ids("x"))
    assert message == {"role": "assistant", "reasoning_content": "hm", "content": ""}


@pytest.mark.parametrize(
    ("call", "completed"),
    [
        ({"function": {"name": "f"}}, {}),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, {"a": 1}),
        ({"function": {"name": "f", "arguments": '{"a": {"b": "}"}}'}}, {"a": {"b": "}"}}),
        ({"name": "f"}, {}),
        ({"type": "function", "name": "f", "arguments": None}, {}),
    ],
)
def test_tool_calls_have_a_type_a_name_and_arguments(call, completed):
    message = parse_response(Parser({"content": "x", "tool_calls": [call]}), ids("x"))
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": completed}}]


def test_a_list_of_calls_is_several_calls():
    entry = {"type": "function", "function": [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]}
    message = parse_response(Parser({"tool_calls": [entry]}), ids("x"))
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "g", "arguments": {}},
    ]


@pytest.mark.parametrize(
    ("call", "name", "error"),
    [
        ({"function": {"name": None}}, "", "no name"),
        ({"type": "function"}, "", "no name"),
        ("f", "", "must be an object"),
        ({"function": "f"}, "", "must be an object"),
        ({"function": []}, "", "must be an object"),
        ({"function": [[{"name": "f"}]]}, "", "must be an object"),
        ({"function": {"name": "f", "arguments": [1]}}, "f", "arguments of 'f'"),
        ({"function": {"name": "f", "arguments": "{1"}}, "f", "arguments of 'f'"),
    ],
    ids=repr,
)
def test_a_malformed_call_says_what_is_wrong_and_the_others_stay(call, name, error):
    good = {"type": "function", "function": {"name": "g", "arguments": {}}}
    message = parse_response(Parser({"content": "x", "tool_calls": [good, call]}), ids("x"))
    assert message["content"] == "x"
    first, second = message["tool_calls"]
    assert first == good
    assert second["function"] == {"name": name, "arguments": {}}
    assert error in second["error"]
    assert second["text"]


def test_a_real_response_template():
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = {
        "start_anchor": "<assistant>",
        "fields": {"reasoning_content": {"open": "[", "close": "]"}, "content": {"close": "<eos>"}},
    }
    (thought,), (plain,), (empty,) = decode(tokenizer, [CHAT] * 3, [ids("[hm]ab<eos>"), ids("ab"), []])
    assert thought == {"role": "assistant", "reasoning_content": "hm", "content": "ab"}
    assert plain == {"role": "assistant", "content": "ab"}
    assert empty == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("arguments", ["arguments", "parameters"])
def test_arguments_have_two_usual_names(arguments: str) -> None:
    tokenizer = add_response_schema(byte_tokenizer(QWEN2_5))
    text = f'<tool_call>\n{{"name": "add", "{arguments}": {{"a": 1}}}}\n</tool_call><|im_end|>'
    message = parse_response(tokenizer, tokenizer(text)["input_ids"])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def test_the_end_is_taken_off() -> None:
    assert without_end([5, 1], [1, 2]) == [5]
    assert without_end([5, 1, 3], [1, 2]) == [5, 1, 3]
    assert without_end([], [1]) == []
