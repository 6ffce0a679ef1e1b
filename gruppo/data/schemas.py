"""Find out by rendering how a chat template writes tool calls, and build the response template that parses them."""

import re
from typing import Any, NamedTuple, TypeVar

from gruppo.data.probing import (
    ANSWER,
    ANSWERED,
    ARGUMENT,
    ASKED,
    RESULT,
    RETURNED,
    TOOL,
    VALUE,
    call_form,
    inner_tokenizer,
    options_of,
    render,
    rendering_errors,
)
from gruppo.errors import ConfigError

T = TypeVar("T")


def add_response_schema(processing_class: T, chat_template: str | None = None) -> T:
    """Set `response_template` on the tokenizer, so that `parse_response` finds the tool calls in a completion.

    Supports tool calls written as JSON in `<tool_call>` (Hermes, Qwen2.5, Qwen3), as `<function=…>` tags in
    `<tool_call>` (Qwen3-Coder, Qwen3.5, Nemotron 3), as JSON with `parameters` (Llama 3.1 and later), and after
    `<｜tool▁call▁begin｜>` (DeepSeek-V3, R1 and the distilled models). An existing `response_template` is kept. If
    given, `chat_template` is examined instead of the tokenizer's own. Returns its first argument.
    """
    tokenizer: Any = inner_tokenizer(processing_class)
    if getattr(tokenizer, "response_template", None) is not None:
        return processing_class
    options = options_of(chat_template)
    turn = _assistant_turn(processing_class, options)
    for recognise, build in _TOOL_STYLES:
        if turn is not None and recognise.search(turn.call):
            schema = _schema(turn, build(turn))
            if _parses_back(tokenizer, turn, schema):
                tokenizer.response_template = schema
                return processing_class
    if call_form(processing_class, **options) is None:
        raise ConfigError(
            "The chat template does not show tool calls and their results, so the model cannot be trained with tools. "
            "Set `tokenizer.chat_template` to a template that does; for models with ChatML turns (<|im_start|>), such "
            "as SmolLM2, `gruppo.data.templates.HERMES_TEMPLATE` is one. If the tokenizer is to read calls that the "
            "template does not show, set `tokenizer.response_template` yourself."
        )
    raise ConfigError(
        "The chat template writes tool calls in a way that is not recognised. Set `tokenizer.response_template` "
        "yourself; the transformers documentation on response parsing describes its fields."
    )


class _Turn(NamedTuple):
    """How a template frames the assistant's turn, and what a call looks like in it.

    Example, ChatML:
        starts ["<|im_start|>assistant\\n"], end "<|im_end|>", call "<tool_call>…</tool_call><|im_end|>\\n"
    """

    starts: list[str]  # after a question, and after a tool's result where that differs
    end: str  # a regex: the turn's end, and anything else that may end the model's text
    call: str


def _assistant_turn(processing_class: Any, options: dict[str, Any]) -> _Turn | None:
    """Find the frame of the assistant's turn by rendering; None if the template shows no tool call or no frame."""
    form = call_form(processing_class, **options)
    if form is None:
        return None
    try:
        asked = render(processing_class, ASKED, **options)
        prompted = render(processing_class, ASKED, add_generation_prompt=True, **options)
        answered = render(processing_class, ANSWERED, **options)
        called = render(processing_class, [*ASKED, form.message()], **options)
        returned = render(processing_class, [*ASKED, form.message(), RETURNED], add_generation_prompt=True, **options)
    except rendering_errors():
        return None
    if not prompted.startswith(asked) or not called.startswith(asked):
        return None
    # A generation prompt may open the reasoning; that part belongs to the message, not to the frame.
    start = prompted[len(asked) :].partition("<think>")[0]
    eos = inner_tokenizer(processing_class).eos_token
    ends = [end for end in (answered.rpartition(ANSWER)[2].strip(), eos, "<|eom_id|>") if end]
    if not start or not ends or not called[len(asked) :].startswith(start):
        return None
    after_result = returned.rpartition(RESULT)[2].partition("<think>")[0]
    starts = [start] if not after_result or after_result.endswith(start) else [start, after_result]
    return _Turn(starts, "|".join(map(re.escape, dict.fromkeys(ends))), called[len(asked) + len(start) :])


def _tagged_json(turn: _Turn) -> dict[str, Any]:
    return {
        "open": "<tool_call>",
        "close_pattern": rf"</tool_call>\s*|(?={turn.end})",
        "content": "json",
        # The whole object is kept, so that a missing "arguments" is not a parsing error but left to `uniform_calls`.
        "transform": {"type": "function", "function": "{content}"},
    }


def _tagged_parameters(turn: _Turn) -> dict[str, Any]:
    return {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        "close_pattern": rf"</function>\s*</tool_call>\s*|(?={turn.end})",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }


def _json_parameters(turn: _Turn) -> dict[str, Any]:
    arguments = {"name": "{content.name}", "arguments": "{content.parameters}"}
    call = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:'
    return {
        # Calls need no opening or closing tag: an object that begins like a call is one, up to the next or the end.
        "open_pattern": rf"<\|python_tag\|>\s*|(?={call})",
        "close_pattern": rf"(?:{turn.end})\s*|(?<=\}})[\s;]*(?={call})",
        "content": "json",
        "transform": {"type": "function", "function": arguments},
    }


def _deepseek(turn: _Turn) -> dict[str, Any]:
    return {
        "open_pattern": (
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<type>\w*)<｜tool▁sep｜>(?P<name>[^\n<]*)\n?(?:```json)?"
        ),
        "close_pattern": rf"(?:```\s*)?<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?|(?={turn.end})",
        "content": "json",
        "transform": {"type": "{type}", "function": {"name": "{name}", "arguments": "{content}"}},
    }


_TOOL_STYLES = (
    (re.compile(rf'<tool_call>\s*\{{\s*"name"\s*:\s*"{TOOL}"\s*,\s*"arguments"\s*:'), _tagged_json),
    (re.compile(rf"<tool_call>\s*<function={TOOL}>\s*<parameter={ARGUMENT}>"), _tagged_parameters),
    (re.compile(rf'\A\s*\{{\s*"name"\s*:\s*"{TOOL}"\s*,\s*"parameters"\s*:'), _json_parameters),
    (re.compile(rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{TOOL}\n```json\n"), _deepseek),
)


def _schema(turn: _Turn, tool_calls: dict[str, Any]) -> dict[str, Any]:
    """A response template, in the format of transformers 5.13 and later."""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": turn.starts,
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": rf"</think>\s*|(?={turn.end})"},
            "tool_calls": {"repeats": True, **tool_calls},
            # Text before, between and after tool calls forms one content; text after the end of the turn is dropped.
            "content": {"close_pattern": rf"(?:{turn.end}).*", "repeats": True, "join": "\n"},
        },
    }


def _parses_back(tokenizer: Any, turn: _Turn, schema: dict[str, Any]) -> bool:
    try:
        message = tokenizer.parse_response(turn.call, schema, prefix="")
    except ValueError:
        return False
    expected = [{"type": "function", "function": {"name": TOOL, "arguments": {ARGUMENT: VALUE}}}]
    return bool(message.get("tool_calls") == expected and not message.get("content"))
