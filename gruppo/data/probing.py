"""Find out what a chat template supports by rendering small conversations with it.

Nothing here compares a template's source with a stored text: a template is recognised by what it renders, so an edited
copy of a known template works like the original.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gruppo.data.chat import Message, ProcessingClass, prepare_multimodal_messages

# Plain words that no template escapes, trims or translates.
TOOL, ARGUMENT, VALUE, RESULT = "probetool", "probeargument", "probevalue", "proberesult"
QUESTION, ANSWER = "probequestion", "probeanswer"

ASKED: list[Message] = [{"role": "user", "content": QUESTION}]
ANSWERED: list[Message] = [*ASKED, {"role": "assistant", "content": ANSWER}]
RETURNED: Message = {"role": "tool", "name": TOOL, "content": RESULT}


def inner_tokenizer(processing_class: ProcessingClass) -> Any:
    """The tokenizer of a processor; a tokenizer itself (some have an unrelated `tokenizer` attribute)."""
    from transformers import PreTrainedTokenizerBase

    return processing_class if isinstance(processing_class, PreTrainedTokenizerBase) else processing_class.tokenizer


def tokenizer_json(processing_class: ProcessingClass) -> str | None:
    """The content of tokenizer.json; None for a tokenizer without a fast backend."""
    backend = getattr(inner_tokenizer(processing_class), "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())


def render(processing_class: ProcessingClass, messages: list[Message], **options: Any) -> str:
    """The conversation as text."""
    if inner_tokenizer(processing_class) is not processing_class:  # a processor: its templates expect blocks
        messages = prepare_multimodal_messages(messages)
    template = options.get("chat_template") or getattr(processing_class, "chat_template", None)
    if isinstance(template, str) and _IS_NONE.search(template):
        options["chat_template"] = without_none(template)
    return str(processing_class.apply_chat_template(messages, **{**options, "tokenize": False}))


# A variable with attributes and subscripts, tested for None.
_IS_NONE = re.compile(r"([\w.]+(?:\[[^\[\]]+\])*) is (not )?none\b")


def without_none(template: str) -> str:
    """The template, changed to treat missing values as None: transformers 5.23 drops values that are None.

    Example:
        without_none("{% if m.content is none %}") == "{% if (m.content | default(none)) is none %}"
    """
    return _IS_NONE.sub(lambda found: f"({found[1]} | default(none)) is {found[2] or ''}none", template)


def options_of(chat_template: str | None) -> dict[str, Any]:
    """Options for `render` to use a template other than the tokenizer's own."""
    return {} if chat_template is None else {"chat_template": chat_template}


def rendering_errors() -> tuple[type[Exception], ...]:
    """Exceptions that a template may raise for an unknown role or field, from Jinja or from Python."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


class CallForm(NamedTuple):
    """The form in which a template expects a message with tool calls.

    Most expect empty content and the arguments as a dict. DeepSeek's expect no content (None) and the arguments as
    JSON text.
    """

    content: str | None
    arguments_as_text: bool

    def message(self, names: Sequence[str] = (TOOL,)) -> Message:
        """An assistant message with one call per name, each with the argument `probeargument`."""
        arguments: Any = {ARGUMENT: VALUE}
        if self.arguments_as_text:
            arguments = json.dumps(arguments)
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in names]
        return {"role": "assistant", "content": self.content, "tool_calls": calls}


_CALL_FORMS = (CallForm("", False), CallForm(None, False), CallForm(None, True), CallForm("", True))


def call_form(processing_class: ProcessingClass, **options: Any) -> CallForm | None:
    """The first form in which the template renders a whole tool exchange, or None.

    A whole exchange shows the call's name, argument and value, and the result.
    """
    for form in _CALL_FORMS:
        try:
            text = render(processing_class, [*ASKED, form.message(), RETURNED], add_generation_prompt=True, **options)
        except rendering_errors():
            continue
        if all(word in text for word in (TOOL, ARGUMENT, VALUE, RESULT)):
            return form
    return None
