"""What a chat template supports, and what must be changed in it for training.

Templates are judged by what they render (see `probing.py`), never by their source.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gruppo.data.chat import Message, ProcessingClass
from gruppo.data.own_templates import HERMES_TEMPLATE, deepseek_template
from gruppo.data.probing import (
    ANSWERED,
    ASKED,
    RETURNED,
    CallForm,
    call_form,
    inner_tokenizer,
    options_of,
    render,
    rendering_errors,
)
from gruppo.data.schemas import add_response_schema
from gruppo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "HERMES_TEMPLATE",
    "add_response_schema",
    "chosen_template",
    "clone_chat_template",
    "get_training_chat_template",
    "is_chat_template_prefix_preserving",
    "shows_tools",
    "supports_tool_calling",
]


def chosen_template(processing_class: ProcessingClass) -> str | None:
    """The template for conversations with tools if the tokenizer has several named ones; None if there is only one.

    All rendering then uses this template. transformers would choose one depending on whether a conversation has tools,
    so that the prompt and what follows it could come from different templates.
    """
    if not isinstance(processing_class.chat_template, dict):
        return None
    named: dict[str, str] = processing_class.chat_template
    template = named.get("tool_use") or named.get("default")
    if template is None:
        raise ConfigError(
            f"The tokenizer has the chat templates {', '.join(named)}, but neither `tool_use` nor `default`. Set "
            "`tokenizer.chat_template` to the one to train with."
        )
    return template


def supports_tool_calling(processing_class: ProcessingClass, chat_template: str | None = None) -> bool:
    """Whether the chat template shows a whole tool exchange: the call's name, argument and value, and the result."""
    return call_form(processing_class, **options_of(chat_template)) is not None


def shows_tools(processing_class: ProcessingClass, chat_template: str | None = None) -> bool:
    """Whether the template describes the available tools to the model; if not, the prompts must do so."""
    words = ("probetool", "probedescription")
    function = {"name": words[0], "description": words[1], "parameters": {"type": "object", "properties": {}}}
    options = options_of(chat_template)
    try:
        text = render(processing_class, ASKED, tools=[{"type": "function", "function": function}], **options)
        return any(word in text for word in words)
    except rendering_errors():
        return False


def is_chat_template_prefix_preserving(processing_class: ProcessingClass, chat_template: str | None = None) -> bool:
    """Whether a conversation keeps its tokens when a tool message is added to it, in the second round as in the first.

    Only then do the tokens that the model wrote agree with those of the longer conversation. A template that cannot
    render tool calls is tested with a second question instead.
    """
    options = options_of(chat_template)
    form = call_form(processing_class, **options)
    if form is None:
        return _added(processing_class, ANSWERED, ASKED, **options) is not None
    try:
        first = _added(processing_class, [*ASKED, form.message()], [RETURNED], **options)
        again = _added(processing_class, [*ASKED, form.message(), RETURNED, form.message()], [RETURNED], **options)
        return first is not None and first == again and _goes_on(processing_class, form, **options)
    except rendering_errors():  # some templates refuse a second round
        return False


def _added(
    processing_class: ProcessingClass, messages: list[Message], more: list[Message], **options: Any
) -> list[int] | None:
    """The tokens that `more` and the generation prompt add to a conversation; None if they change earlier tokens."""
    tokenizer = inner_tokenizer(processing_class)
    before = render(processing_class, messages, **options)
    after = render(processing_class, [*messages, *more], **{**options, "add_generation_prompt": True})
    if not after.startswith(before):
        return None
    before_ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    after_ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    return list(after_ids[len(before_ids) :]) if after_ids[: len(before_ids)] == before_ids else None


def _goes_on(processing_class: ProcessingClass, form: CallForm, **options: Any) -> bool:
    """Whether a tool result is rendered unchanged once the model has answered it."""
    exchange = [*ASKED, form.message(), RETURNED]
    longer = render(processing_class, [*exchange, form.message()], **options)
    return longer.startswith(render(processing_class, exchange, **options))


# Known reasons why a template does not preserve its prefix, and their repair: (pattern, replacement).
_REPAIRS = (
    # Qwen3 writes an empty think block into the last assistant message only, and removes it once a message follows.
    (
        re.compile(r"\bif\s+loop\.last\s+or\s+\(?\s*(?:not\s+loop\.last\s+and\s+)?reasoning_content\s*\)?\s*(?=-?%})"),
        "if true ",
    ),
    # Phi-3 ends every text that is not a prompt with the end-of-text token, even in the middle of a conversation.
    (re.compile(r"{%-?\s*else\s*-?%}\s*{{-?\s*eos_token\s*-?}}\s*(?={%-?\s*endif\s*-?%}\s*\Z)"), ""),
)


def get_training_chat_template(processing_class: ProcessingClass, chat_template: str | None = None) -> str | None:
    """A version of the chat template that keeps a conversation's tokens when messages are added, or None.

    None means that the template already does so. If no repair is known, an error asks to edit the template by hand. If
    given, `chat_template` is examined instead of the tokenizer's own.
    """
    if is_chat_template_prefix_preserving(processing_class, chat_template):
        return None
    for candidate in _candidates(processing_class, chat_template):
        if is_chat_template_prefix_preserving(processing_class, candidate):
            return candidate
    raise ConfigError(
        "The chat template renders earlier messages differently once a message is added, so that the tokens the model "
        "wrote would not be the tokens it is trained on, and no repair is known for this template. Edit it so that "
        "rendering [user, assistant] is a prefix of rendering [user, assistant, tool], and set it as "
        "`tokenizer.chat_template`."
    )


def _candidates(processing_class: ProcessingClass, chat_template: str | None) -> Iterator[str]:
    template, options = chat_template or processing_class.get_chat_template(), options_of(chat_template)
    for fault, repair in _REPAIRS:
        patched = fault.sub(repair, template)
        if patched != template:
            yield patched
    form = call_form(processing_class, **options)
    if form is not None and "<｜tool▁call▁begin｜>" in render(processing_class, [*ASKED, form.message()], **options):
        yield from _deepseek(processing_class, options)


def _deepseek(processing_class: ProcessingClass, options: dict[str, Any]) -> Iterator[str]:
    """DeepSeek's template has too many faults to patch; it is replaced if prompts are rendered as before."""
    asked = render(processing_class, ASKED, **options)
    prompted = render(processing_class, ASKED, add_generation_prompt=True, **options)
    template = deepseek_template(prompted.removeprefix(asked))
    system: Message = {"role": "system", "content": "probesystem"}
    for messages in (ASKED, [system, *ASKED], [system, *ANSWERED, *ASKED]):
        theirs = render(processing_class, messages, add_generation_prompt=True, **options)
        if render(processing_class, messages, add_generation_prompt=True, chat_template=template) != theirs:
            return
    yield template


def clone_chat_template(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    source_tokenizer_path: str,
    resize_to_multiple_of: int | None = 64,
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase", list[int]]:
    """Give a model the chat template, added tokens and end-of-sequence token of another tokenizer.

    The embeddings are resized to the new vocabulary, rounded up to a multiple of `resize_to_multiple_of`; the
    tokenizer is filled up with `<extra_id_…>` tokens to the same size. Returns the model and the tokenizer, both
    modified in place, and the ids of all added tokens.
    """
    from transformers import AutoTokenizer

    source = AutoTokenizer.from_pretrained(source_tokenizer_path, trust_remote_code=False)
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
