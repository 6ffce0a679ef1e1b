"""What a chat template can do, found out by rendering it, and what must be changed for training.

Nothing here compares a template with a stored text: a template is recognised by what it renders, so an edited copy of
a known template is as good as the original.
"""

import re
from typing import TYPE_CHECKING, Any, TypeVar

from gruppo.data.chat import Message, ProcessingClass, prepare_multimodal_messages
from gruppo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "add_response_schema",
    "clone_chat_template",
    "get_training_chat_template",
    "is_chat_template_prefix_preserving",
    "supports_tool_calling",
]

T = TypeVar("T")

# Plain words, so that no template escapes, trims or translates them.
TOOL, ARGUMENT, VALUE, RESULT = "probetool", "probeargument", "probevalue", "proberesult"
QUESTION, ANSWER = "probequestion", "probeanswer"

ASK: list[Message] = [{"role": "user", "content": QUESTION}]
CALL: list[Message] = [
    *ASK,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": TOOL, "arguments": {ARGUMENT: VALUE}}}],
    },
]
CALL_AND_RESULT: list[Message] = [*CALL, {"role": "tool", "name": TOOL, "content": RESULT}]


def inner_tokenizer(processing_class: ProcessingClass) -> Any:
    """The tokenizer of a processor; a tokenizer is its own (some have an attribute `tokenizer` of another kind)."""
    from transformers import PreTrainedTokenizerBase

    return processing_class if isinstance(processing_class, PreTrainedTokenizerBase) else processing_class.tokenizer


def _render(processing_class: ProcessingClass, messages: list[Message], **options: Any) -> Any:
    if inner_tokenizer(processing_class) is not processing_class:  # a processor: its templates expect blocks
        messages = prepare_multimodal_messages(messages)
    return processing_class.apply_chat_template(messages, **{"tokenize": False, **options})


def _rendering_errors() -> tuple[type[Exception], ...]:
    """What a template that does not know a role or a field may raise, in Jinja or in the Python it runs on."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


def supports_tool_calling(processing_class: ProcessingClass) -> bool:
    """Whether the chat template shows a whole tool exchange: the call's name, argument and value, and the result."""
    try:
        text = _render(processing_class, CALL_AND_RESULT, add_generation_prompt=True)
    except _rendering_errors():
        return False
    return all(word in text for word in (TOOL, ARGUMENT, VALUE, RESULT))


def is_chat_template_prefix_preserving(processing_class: ProcessingClass, chat_template: str | None = None) -> bool:
    """Whether a conversation keeps its tokens when a tool message is added to it.

    Only then do the tokens the model wrote and those of the longer conversation agree. A template that cannot render
    tool calls is tried with a second question instead.
    """
    answered: Message = {"role": "assistant", "content": ANSWER}
    if supports_tool_calling(processing_class):
        short, long = CALL, CALL_AND_RESULT
    else:
        short, long = [*ASK, answered], [*ASK, answered, *ASK]
    options: dict[str, Any] = {} if chat_template is None else {"chat_template": chat_template}
    before = _render(processing_class, short, **options)
    after = _render(processing_class, long, add_generation_prompt=True, **options)
    if not after.startswith(before):
        return False
    tokenizer = inner_tokenizer(processing_class)
    before_ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    after_ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    return bool(after_ids[: len(before_ids)] == before_ids)


# Known reasons for a template not to preserve its prefix, and their repair: (what to find, what to put there).
_REPAIRS = (
    # Qwen3 writes an empty think block into the last assistant message only, and takes it out once a message follows.
    (
        re.compile(r"\bif\s+loop\.last\s+or\s+\(?\s*(?:not\s+loop\.last\s+and\s+)?reasoning_content\s*\)?\s*(?=-?%})"),
        "if true ",
    ),
    # Phi-3 ends every text that is not a prompt with the end-of-text token, even in the middle of a conversation.
    (re.compile(r"{%-?\s*else\s*-?%}\s*{{-?\s*eos_token\s*-?}}\s*(?={%-?\s*endif\s*-?%}\s*\Z)"), ""),
)


def get_training_chat_template(processing_class: ProcessingClass) -> str | None:
    """A version of the chat template that keeps a conversation's tokens when messages are added, or None.

    None means that the template does so already. A template whose fault is not known raises: change it by hand.
    """
    if is_chat_template_prefix_preserving(processing_class):
        return None
    template = processing_class.get_chat_template()
    for fault, repair in _REPAIRS:
        patched = fault.sub(repair, template)
        if patched != template and is_chat_template_prefix_preserving(processing_class, patched):
            return patched
    raise ConfigError(
        "The chat template renders earlier messages differently once a message is added, so that the tokens the model "
        "wrote would not be the tokens it is trained on, and no repair is known for this template. Edit it so that "
        "rendering [user, assistant] is a prefix of rendering [user, assistant, tool], and set it as "
        "`tokenizer.chat_template`."
    )


def add_response_schema(processing_class: T) -> T:
    """Set `response_template` on the tokenizer, so that `parse_response` finds the tool calls in a completion.

    Recognised are tool calls written as JSON in `<tool_call>` (Hermes, Qwen2.5, Qwen3), as `<function=…>` tags in
    `<tool_call>` (Qwen3-Coder, Qwen3.5, Nemotron 3), and as JSON with `parameters` (Llama 3.1 and later). A template
    that is set already is kept. Returns its argument.
    """
    tokenizer: Any = inner_tokenizer(processing_class)
    if getattr(tokenizer, "response_template", None) is not None:
        return processing_class
    turn = _assistant_turn(processing_class)
    for recognise, build in _TOOL_STYLES:
        if turn is not None and recognise.search(turn.call):
            schema = _schema(turn, build(turn))
            if _parses_back(tokenizer, turn, schema):
                tokenizer.response_template = schema
                return processing_class
    raise ConfigError(
        "The chat template writes tool calls in a way that is not recognised. Set `tokenizer.response_template` "
        "yourself; the transformers documentation on response parsing describes its fields."
    )


class _Turn:
    """How a template frames the assistant's turn.

    Example, ChatML: start "<|im_start|>assistant\\n", end "<|im_end|>", call '<tool_call>…</tool_call><|im_end|>\\n'
    """

    def __init__(self, start: str, end: str, call: str) -> None:
        self.start, self.end, self.call = start, end, call


def _assistant_turn(processing_class: Any) -> _Turn | None:
    """Find the frame of the assistant's turn by rendering; None if the template shows no tool call or no frame."""
    try:
        asked = _render(processing_class, ASK)
        prompted = _render(processing_class, ASK, add_generation_prompt=True)
        answered = _render(processing_class, [*ASK, {"role": "assistant", "content": ANSWER}])
        called = _render(processing_class, CALL)
    except _rendering_errors():
        return None
    if not prompted.startswith(asked) or not called.startswith(asked):
        return None
    # A prompt may open the reasoning; that belongs to the message, not to the frame.
    start = prompted[len(asked) :].partition("<think>")[0]
    end = answered.rpartition(ANSWER)[2].strip() or inner_tokenizer(processing_class).eos_token
    if not start or not end or not called[len(asked) :].startswith(start):
        return None
    return _Turn(start, end, called[len(asked) + len(start) :])


def _tagged_json(turn: _Turn) -> dict[str, Any]:
    # The whole object is kept: a missing "arguments" is then for the reader to judge, not a parsing error.
    transform = {"type": "function", "function": "{content}"}
    return {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "content": "json", "transform": transform}


def _tagged_parameters(turn: _Turn) -> dict[str, Any]:
    return {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        "close_pattern": r"</function>\s*</tool_call>\s*",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }


def _json_parameters(turn: _Turn) -> dict[str, Any]:
    arguments = {"name": "{content.name}", "arguments": "{content.parameters}"}
    return {
        "open_pattern": r'(?:<\|python_tag\|>)?(?=\{\s*"name"\s*:\s*"[^"]+"\s*,\s*"parameters"\s*:)',
        "close_pattern": rf"(?:{re.escape(turn.end)}|<\|eom_id\|>)\s*",
        "content": "json",
        "transform": {"type": "function", "function": arguments},
    }


_TOOL_STYLES = (
    (re.compile(rf'<tool_call>\s*\{{\s*"name"\s*:\s*"{TOOL}"\s*,\s*"arguments"\s*:'), _tagged_json),
    (re.compile(rf"<tool_call>\s*<function={TOOL}>\s*<parameter={ARGUMENT}>"), _tagged_parameters),
    (re.compile(rf'\A\s*\{{\s*"name"\s*:\s*"{TOOL}"\s*,\s*"parameters"\s*:'), _json_parameters),
)


def _schema(turn: _Turn, tool_calls: dict[str, Any]) -> dict[str, Any]:
    """A response template, in the form that transformers 5.13 and later read."""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": turn.start,
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
            "tool_calls": {"repeats": True, **tool_calls},
            # Text before, between and after tool calls is one content; what follows the end of the turn is none.
            "content": {"close_pattern": rf"{re.escape(turn.end)}.*", "repeats": True, "join": "\n"},
        },
    }


def _parses_back(tokenizer: Any, turn: _Turn, schema: dict[str, Any]) -> bool:
    try:
        message = tokenizer.parse_response(turn.call, schema, prefix="")
    except ValueError:
        return False
    return bool(message.get("tool_calls") == CALL[-1]["tool_calls"] and not message.get("content"))


def clone_chat_template(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase", list[int]]:
    """Give a model the chat template, added tokens and end-of-sequence token of another tokenizer.

    The embeddings are resized to the new vocabulary, rounded up to a multiple of `resize_to_multiple_of`; the
    tokenizer is filled up with `<extra_id_…>` tokens to the same size. Returns the model and the tokenizer, both
    changed in place, and the ids of all tokens that were added.
    """
    from transformers import AutoTokenizer

    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    known = len(tokenizer)
    tokenizer.chat_template = source.get_chat_template()
    tokenizer.add_tokens(list(source.added_tokens_decoder.values()))
    tokenizer.eos_token = source.eos_token
    model.config.eos_token_id = tokenizer.eos_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id

    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    embeddings: Any = model.get_input_embeddings()
    _fill_vocabulary(tokenizer, embeddings.weight.shape[0])
    return model, tokenizer, list(range(known, len(tokenizer)))


def _fill_vocabulary(tokenizer: "PreTrainedTokenizerBase", size: int) -> None:
    """Add `<extra_id_…>` tokens until the tokenizer has `size` tokens, so that no sampled id is unknown to it."""
    number = 0
    vocabulary = tokenizer.get_vocab()
    while len(tokenizer) < size:
        name = f"<extra_id_{number}>"
        number += 1
        if name not in vocabulary:
            tokenizer.add_tokens(name)
