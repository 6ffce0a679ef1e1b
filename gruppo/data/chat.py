"""Conversations as text: recognise them, render them with the chat template, fill in images."""

from collections.abc import Callable, Sequence
from typing import Any

from gruppo.errors import DataError, warn_deprecated

__all__ = [
    "apply_chat_template",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "prepare_multimodal_messages",
]

ProcessingClass = Any  # a tokenizer or a processor: what renders the chat template
Message = dict[str, Any]
Tool = dict[str, Any] | Callable[..., Any]

# In this order, the first column that a row has decides whether the row is a conversation.
CONVERSATION_KEYS = ("prompt", "chosen", "rejected", "completion", "messages")

# The sets of conversation columns that can be rendered.
SHAPES = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
)

ROLES = ("system", "user", "assistant", "tool")


def _is_list_of_dicts_with(value: Any, *keys: str) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return isinstance(value[0], dict) and all(key in value[0] for key in keys)


def is_conversational(example: dict[str, Any]) -> bool:
    """Whether a row holds messages (`[{"role": …, "content": …}, …]`) rather than text.

    Example:
        is_conversational({"prompt": [{"role": "user", "content": "Hello"}]})  # True
        is_conversational({"prompt": "Hello"})  # False
    """
    key = next((key for key in CONVERSATION_KEYS if key in example), None)
    return key is not None and _is_list_of_dicts_with(example[key], "role")


def is_conversational_from_value(example: dict[str, Any]) -> bool:
    """Whether a row holds a conversation in the older form, `{"conversations": [{"from": …, "value": …}, …]}`."""
    return _is_list_of_dicts_with(example.get("conversations"), "from", "value")


def maybe_apply_chat_template(
    example: dict[str, Any],
    processing_class: ProcessingClass | None = None,
    tools: Sequence[Tool] | None = None,
    *,
    tokenizer: ProcessingClass | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """`apply_chat_template` for a conversational row; any other row is returned as it is."""
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, tokenizer=tokenizer, **template_kwargs)


def apply_chat_template(
    example: dict[str, Any],
    processing_class: ProcessingClass | None = None,
    tools: Sequence[Tool] | None = None,
    *,
    tokenizer: ProcessingClass | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Render the conversation columns of a row as text.

    A row holds `messages` (rendered as `text`), `prompt`, `prompt` and `completion`, `prompt`, `chosen` and
    `rejected`, or `chosen` and `rejected`. A prompt ends with the generation prompt, or, if its last message is the
    assistant's, with that message left open. The other columns become the text that the whole conversation adds to the
    prompt. Options in the row's `chat_template_kwargs` are passed to the template too and override `template_kwargs`.
    Of columns without conversations only `label` is kept.

    Example:
        apply_chat_template({"prompt": [{"role": "user", "content": "Hi"}]}, tokenizer)
        # {"prompt": "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"}
    """
    present = {key for key in CONVERSATION_KEYS if key in example}
    if present not in SHAPES:
        raise DataError(
            f"A row with the conversation columns {sorted(present)} cannot be rendered; it needs "
            f"{', or '.join(' and '.join(sorted(shape)) for shape in SHAPES)}."
        )
    renderer = _renderer(processing_class, tokenizer)
    options = {**template_kwargs, **(example.get("chat_template_kwargs") or {})}

    def render(messages: list[Message], **how: Any) -> str:
        text = renderer.apply_chat_template(
            messages, tools=list(tools) if tools else None, tokenize=False, **how, **options
        )
        return str(text)

    if "prompt" in present:
        rendered = _render_from_prompt(example, present - {"prompt"}, render)
    else:
        rendered = {("text" if key == "messages" else key): render(example[key]) for key in sorted(present)}
    if "label" in example:
        rendered["label"] = example["label"]
    return rendered


def _renderer(processing_class: ProcessingClass | None, tokenizer: ProcessingClass | None) -> Any:
    if tokenizer is not None:
        warn_deprecated("`tokenizer` is deprecated; use `processing_class` instead.")
    renderer = processing_class if processing_class is not None else tokenizer
    if renderer is None:
        raise TypeError(
            "apply_chat_template needs `processing_class`: the tokenizer or processor that has the template."
        )
    return renderer


def _render_from_prompt(example: dict[str, Any], others: set[str], render: Callable[..., str]) -> dict[str, Any]:
    messages = example["prompt"]
    role = messages[-1].get("role") if messages else None
    if role == "assistant":
        prompt = closed = render(messages, continue_final_message=True)
    elif role in ("user", "tool"):
        prompt = render(messages, add_generation_prompt=True)
        closed = render(messages) if others else prompt
    else:
        raise DataError(
            f"The last message of a prompt has the role {role!r}; it must be 'user' or 'tool' (to be answered) or "
            "'assistant' (to be continued)."
        )
    whole = {key: render(messages + example[key]) for key in sorted(others)}
    # Some templates open the answer with text that the finished conversation does not contain (an empty think block,
    # for example), so the prompt ends where the texts diverge. This may drop the opening from the prompt, but never
    # part of its messages.
    shared = _common_prefix([prompt, *whole.values()])
    if shared != prompt and len(shared) < len(_common_prefix([prompt, closed]).rstrip()):
        raise DataError(
            "The chat template renders the prompt differently once an answer follows, so the two cannot be "
            f"separated: the texts diverge after {shared[-40:]!r}, within the prompt's messages. Render the row "
            "yourself."
        )
    return {"prompt": shared, **{key: text[len(shared) :] for key, text in whole.items()}}


def _common_prefix(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    for i, char in enumerate(first):
        if i >= len(last) or last[i] != char:
            return first[:i]
    return first


def prepare_multimodal_messages(messages: list[Message], images: Sequence[Any] | None = None) -> list[Message]:
    """A copy of the messages in block form, with the images filled in.

    A string content becomes a text block. Images go, in order, into the `{"type": "image"}` blocks that have no
    image yet. Where no message had blocks, such blocks are first put before the text of the first user message.

    Example:
        prepare_multimodal_messages([{"role": "user", "content": "What is this?"}], [image])
        # [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]}]
    """
    remaining = list(images or [])
    result = [_in_blocks(message) for message in messages]
    if not any(isinstance(message.get("content"), list) for message in messages):
        first_user = next((m for m in result if m["role"] == "user"), None)
        if first_user is not None and isinstance(first_user.get("content"), list):
            first_user["content"][:0] = [{"type": "image"} for _ in remaining]
    slots = [
        block
        for message in result
        if isinstance(message.get("content"), list)
        for block in message["content"]
        if isinstance(block, dict) and block.get("type") == "image" and block.get("image") is None
    ]
    if len(slots) != len(remaining):
        raise DataError(
            f"{len(remaining)} images for {len(slots)} image placeholders; each image needs one "
            '`{"type": "image"}` block and each block one image.'
        )
    for slot, image in zip(slots, remaining, strict=True):
        slot["image"] = image
    return result


def _in_blocks(message: Message) -> Message:
    if message.get("role") not in ROLES:
        raise DataError(f"A message has the role {message.get('role')!r}; it must be one of {', '.join(ROLES)}.")
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    if isinstance(content, list):
        # The blocks are copied, the images in them are not.
        return {**message, "content": [dict(block) if isinstance(block, dict) else block for block in content]}
    return dict(message)
