"""What models write is read back: calls of all styles, reasoning, words around them, and calls that are malformed."""

import pytest

from gruppo.data.responses import parse_response
from gruppo.data.templates import HERMES_TEMPLATE, add_response_schema
from gruppo.errors import ConfigError
from tests.data.imitations import (
    DEEPSEEK,
    HERMES,
    LLAMA,
    NO_TOOLS,
    PHI,
    QWEN3,
    USER_ONLY,
    XML,
    byte_tokenizer,
    deepseek_tokenizer,
)
from tests.helpers import tiny_tokenizer

ASKED = [{"role": "user", "content": "What?"}]


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": "x"}}\n</tool_call>'
XML_MULTIPLY = (
    "<tool_call>\n<function=multiply>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n"
    "</function>\n</tool_call>"
)
DEEPSEEK_CALL = (
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>multiply\n```json\n{"a": 2, "b": "x"}\n```<｜tool▁call▁end｜>'
)
LLAMA_MULTIPLY = '{"name": "multiply", "parameters": {"a": 2, "b": {"c": "}"}}}'


@pytest.mark.parametrize(
    ("template", "prefix", "response", "message"),
    [
        (HERMES, "", "Hello<|im_end|>", {"content": "Hello"}),
        (HERMES, "", "Hello", {"content": "Hello"}),
        (HERMES, "", "Hello<|im_end|>\n<eos>junk", {"content": "Hello"}),
        (HERMES, "", MULTIPLY + "<|im_end|>", {"tool_calls": [call("multiply", a=2, b="x")]}),
        (
            HERMES,
            "",
            f"First.\n{MULTIPLY}\n{MULTIPLY}\nThen.<|im_end|>\n",
            {"content": "First.\nThen.", "tool_calls": [call("multiply", a=2, b="x")] * 2},
        ),
        (
            QWEN3,
            "",
            f"<think>\nHm.\n</think>\n\n{MULTIPLY}<|im_end|>",
            {"reasoning_content": "Hm.", "tool_calls": [call("multiply", a=2, b="x")]},
        ),
        (QWEN3, "", "<think>\nHm", {"reasoning_content": "Hm"}),
        (XML, "<think>\n", "Hm.\n</think>\n\nYes.<|im_end|>", {"reasoning_content": "Hm.", "content": "Yes."}),
        (XML, "<think>\n\n</think>\n\n", XML_MULTIPLY, {"tool_calls": [call("multiply", a="2", b="x\ny")]}),
        (LLAMA, "", "Hello {} there<|eot_id|>", {"content": "Hello {} there"}),
        (LLAMA, "", LLAMA_MULTIPLY + "<|eot_id|>", {"tool_calls": [call("multiply", a=2, b={"c": "}"})]}),
        (LLAMA, "", LLAMA_MULTIPLY, {"tool_calls": [call("multiply", a=2, b={"c": "}"})]}),
        (
            LLAMA,
            "",
            f"<|python_tag|>{LLAMA_MULTIPLY}<|eom_id|>",
            {"tool_calls": [call("multiply", a=2, b={"c": "}"})]},
        ),
        (
            LLAMA,
            "",
            f"Both: {LLAMA_MULTIPLY}; {LLAMA_MULTIPLY}\n{LLAMA_MULTIPLY}<|eot_id|>",
            {"content": "Both:", "tool_calls": [call("multiply", a=2, b={"c": "}"})] * 3},
        ),
        (
            DEEPSEEK,
            "<think>\n",
            f"Hm.\n</think>\n\nSo:<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}\n{DEEPSEEK_CALL}<｜tool▁calls▁end｜><eos>",
            {"reasoning_content": "Hm.", "content": "So:", "tool_calls": [call("multiply", a=2, b="x")] * 2},
        ),
        (QWEN3, "", "<think>\nHm<|im_end|>", {"reasoning_content": "Hm"}),
        (
            HERMES,
            "",
            MULTIPLY.removesuffix("</tool_call>") + "<|im_end|>",
            {"tool_calls": [call("multiply", a=2, b="x")]},
        ),
    ],
)
def test_responses_are_parsed(template, prefix, response, message):
    tokenizer = tiny_tokenizer(chat_template=template)
    assert add_response_schema(tokenizer) is tokenizer
    prompt = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    prompt = prompt.partition("<think>")[0] + prefix
    assert tokenizer.parse_response(response, prefix=prompt) == {"role": "assistant", **message}


def test_tags_are_cast_by_the_tool_schema():
    tokenizer = add_response_schema(tiny_tokenizer(chat_template=XML))
    tool = {"name": "multiply", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
    message = tokenizer.parse_response(XML_MULTIPLY, prefix="", tools=[{"type": "function", "function": tool}])
    assert message["tool_calls"] == [call("multiply", a=2, b="x\ny")]


@pytest.mark.parametrize("template", [HERMES, LLAMA])
def test_a_broken_call_is_a_value_error(template):
    tokenizer = add_response_schema(tiny_tokenizer(chat_template=template))
    broken = (MULTIPLY if template is HERMES else LLAMA_MULTIPLY)[:-20]
    with pytest.raises(ValueError, match="JSON"):
        tokenizer.parse_response(broken, prefix="")


def test_the_turn_after_a_result_begins_where_the_result_ends():
    tokenizer = add_response_schema(deepseek_tokenizer())
    prefix = (
        f"<｜User｜>What?<｜Assistant｜>No.<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>6<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )
    message = tokenizer.parse_response("Six.<｜end▁of▁sentence｜>", prefix=prefix)
    assert message == {"role": "assistant", "content": "Six."}


def parsed(tokenizer, response, tools=None):
    add_response_schema(tokenizer)
    prompt = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    prompt, response = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))
    return parse_response(tokenizer, response, prefix=prompt, tools=tools)


BROKEN = '{"name": "multiply", "arguments": {"a": 2, "b": "ü\\n}"}'  # the last brace is missing
LLAMA_BROKEN = LLAMA_MULTIPLY[:-1]


@pytest.mark.parametrize(
    ("template", "response", "content", "name", "text", "error"),
    [
        (HERMES, f"So\n<tool_call>\n{BROKEN}\n</tool_call>\nthen<|im_end|>", "So\nthen", "multiply", BROKEN, "JSON"),
        (HERMES, f"<tool_call>\n{BROKEN[:12]}<|im_end|>", "", "", BROKEN[:12], "JSON"),
        (HERMES, f"<tool_call>{BROKEN}}}}}</tool_call>", "", "multiply", BROKEN + "}}", "Extra data"),
        (HERMES, "<tool_call>\n</tool_call>", "", "", "", "JSON"),
        (HERMES, "<tool_call>\n[1]\n</tool_call>", "", "", "1", "must be an object"),
        (HERMES, '<tool_call>{"name": 3}</tool_call>', "", "", '{"name": 3}', "no name"),
        (HERMES, "<tool_call>" + "[" * 100_000, "", "", "[" * 100_000, "cannot be read"),
        (HERMES, "<tool_call>" + "9" * 5000, "", "", "9" * 5000, "cannot be read"),
        (LLAMA, f"{LLAMA_BROKEN}<|eot_id|>", "", "multiply", LLAMA_BROKEN, "JSON"),
        (LLAMA, "<|python_tag|>print(1)<|eom_id|>", "", "", "print(1)", "JSON"),
        (
            DEEPSEEK,
            f"</think><｜tool▁calls▁begin｜>{DEEPSEEK_CALL.replace('}', '')}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "",
            "multiply",
            '{"a": 2, "b": "x"',
            "JSON",
        ),
    ],
)
def test_a_malformed_call_is_a_call_with_an_error(template, response, content, name, text, error):
    message = parsed(byte_tokenizer(template, "<|endoftext|>", bos_token="<|begin_of_text|>"), response)
    (broken,) = message["tool_calls"]
    assert message["content"] == content
    assert broken["function"] == {"name": name, "arguments": {}}
    assert broken["text"] == text
    assert error in broken["error"]


def test_a_malformed_call_does_not_harm_the_others():
    tool = {"name": "multiply", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
    good = MULTIPLY.replace("2", '"2"')
    response = f"<think>\nHm.\n</think>\n\n{good}\n<tool_call>\n{BROKEN}\n</tool_call>\n{good}<|im_end|>"
    message = parsed(byte_tokenizer(QWEN3), response, tools=[{"type": "function", "function": tool}])
    assert message["reasoning_content"] == "Hm."
    first, broken, last = message["tool_calls"]
    assert first == last == call("multiply", a=2, b="x")  # and cast by the tool's schema
    assert "JSON" in broken["error"]


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (f"First {LLAMA_MULTIPLY}\nthat is all.<|eot_id|>", "First\nthat is all."),
        (LLAMA_MULTIPLY.replace("parameters", "arguments"), ""),
        ('{"type": "function", ' + LLAMA_MULTIPLY[1:], ""),
    ],
)
def test_llama_may_write_a_call_in_other_ways(response, content):
    message = parsed(byte_tokenizer(LLAMA, "<|eot_id|>", bos_token="<|begin_of_text|>"), response)
    assert message == {
        "role": "assistant",
        "content": content,
        "tool_calls": [call("multiply", a=2, b={"c": "}"})],
    }


def test_words_after_the_arguments_are_words():
    response = f"</think><｜tool▁calls▁begin｜>{DEEPSEEK_CALL.replace('}', '} I hope')}<｜tool▁calls▁end｜>"
    message = parsed(deepseek_tokenizer(), response)
    assert message == {"role": "assistant", "content": "I hope", "tool_calls": [call("multiply", a=2, b="x")]}


def test_smollm2_writes_its_calls_as_a_list():
    response = '<tool_call>[{"name": "multiply", "arguments": {"a": 2}}, {"name": "add"}]</tool_call><|im_end|>'
    message = parsed(byte_tokenizer(HERMES_TEMPLATE), response)
    assert message["tool_calls"] == [call("multiply", a=2), call("add")]


def test_a_response_template_of_the_tokenizers_own_may_have_the_name_in_the_opening():
    tokenizer = byte_tokenizer(HERMES)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"to=(?P<name>\w+) ",
                "close": ";",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<|im_end|>"},
        },
    }
    message = parsed(tokenizer, 'to=add {"a": 1};to=sub {"a": };<|im_end|>')
    good, broken = message["tool_calls"]
    assert good == call("add", a=1)
    assert broken["function"] == {"name": "sub", "arguments": {}}
    assert broken["text"] == '{"a": }'


@pytest.mark.parametrize("template", [NO_TOOLS, PHI, USER_ONLY, None])
def test_unknown_tool_style_is_an_error(template):
    tokenizer = tiny_tokenizer(chat_template=template)
    with pytest.raises(ConfigError, match=r"HERMES_TEMPLATE.*response_template"):
        add_response_schema(tokenizer)
    assert tokenizer.response_template is None


def test_a_style_of_its_own_is_another_error():
    tokenizer = tiny_tokenizer(chat_template=HERMES.replace("tool_call>", "call>"))
    with pytest.raises(ConfigError, match="not recognised"):
        add_response_schema(tokenizer)


def test_own_response_template_is_kept():
    tokenizer = tiny_tokenizer(chat_template=HERMES)
    tokenizer.response_template = {"mine": True}
    assert add_response_schema(tokenizer).response_template == {"mine": True}
