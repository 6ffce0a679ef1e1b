"""The tokens between one turn of the model and the next: the tools' answers, as the chat template renders them.

    prompt  model …<|im_end|>  \\n<|im_start|>user\\n<tool_response>…<|im_end|>\\n<|im_start|>assistant\\n  model …
                               └───────────────────────── suffix ────────────────────────────────┘

A dummy conversation is rendered with and without the tools' messages, and the difference is tokenised. This does not
need the model's output, which is therefore never re-tokenised.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gruppo.data.chat import ProcessingClass
from gruppo.data.probing import ASKED, RETURNED, TOOL, VALUE, call_form, inner_tokenizer, render, rendering_errors
from gruppo.errors import ConfigError
from gruppo.types import Message


class SuffixTokens:
    """Makes the suffix of a round of tool calls.

    Example:
        tokens = SuffixTokens(tokenizer)
        tokens.suffix(["add"], [{"role": "tool", "name": "add", "content": "3"}])  # the tokens of
        # "\\n<|im_start|>user\\n<tool_response>\\n3\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n"

    `chat_template` and `chat_template_kwargs` are those used to render the prompts. A template that cannot render
    calls and results, or renders them differently from round to round, raises here and not in the middle of a run.
    """

    def __init__(
        self,
        tokenizer: ProcessingClass,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._renderer = tokenizer
        self._tokenizer = inner_tokenizer(tokenizer)
        self._options: dict[str, Any] = dict(chat_template_kwargs or {})
        if chat_template is not None:
            self._options["chat_template"] = chat_template
        form = call_form(tokenizer, **self._options)
        if form is None:
            raise ConfigError(
                "The chat template does not show tool calls and their results, so a model cannot be trained with "
                "tools. Set `tokenizer.chat_template` to a template that does; for models with ChatML turns "
                "(<|im_start|>), such as SmolLM2, `gruppo.data.templates.HERMES_TEMPLATE` is one."
            )
        self._form = form
        self.longest_token = max(map(len, self._tokenizer.get_vocab()))  # in characters
        self._takes_many = self._can_render([form.message([TOOL, TOOL])])
        # Bounded, since names come from the model and may be anything; those of real tools recur.
        self._turn = lru_cache(maxsize=1024)(self._find_turn)
        self._probe()

    def suffix(self, call_names: Sequence[str], messages: Sequence[Message], ended: bool = True) -> list[int]:
        """The tokens from the end of the model's turn to the start of its next one.

        `call_names` are the tools that were called, `messages` their answers, in the same order. `ended` says whether
        the model closed its turn itself; if not (after a stop string, for example), the suffix begins with the token
        that closes it.
        """
        asked, called, head, end = self._turn(tuple(call_names) if self._takes_many else tuple(call_names[:1]))
        answers = list(messages) if self._tokenizer is not self._renderer else [_in_text(m) for m in messages]
        after = self._render([*ASKED, called, *answers], add_generation_prompt=True)
        tail = after.split(VALUE, asked)[-1]
        if not tail.startswith(head + end):
            raise ConfigError(
                "The chat template renders the end of the assistant's turn differently when a tool's message follows: "
                f"{head + end!r} becomes {tail[: len(head + end)]!r}. Use the template that "
                "`get_training_chat_template` returns, or edit yours: a message must not change those before it."
            )
        kept = head + end if ended else head
        return self._tokens_after(kept, tail[len(kept) :])

    def _render(self, messages: list[Message], **how: Any) -> str:
        return render(self._renderer, messages, **{**self._options, "add_generation_prompt": False, **how})

    def _can_render(self, messages: list[Message]) -> bool:
        try:
            self._render([*ASKED, *messages])
        except rendering_errors():
            return False
        return True

    def _find_turn(self, names: tuple[str, ...]) -> tuple[int, Message, str, str]:
        """For a dummy call of these tools: how often its value is rendered, the message, the text between the last
        value and the token that ends the turn, and that token."""
        called = self._form.message(names or (TOOL,))
        before = self._render([*ASKED, called])
        tail = before.split(VALUE)[-1]
        end = self._end_of_turn(tail)
        head = tail.rpartition(end)[0] if end else tail
        return before.count(VALUE), called, head, end

    def _end_of_turn(self, tail: str) -> str:
        """The last token of the model's turn, as text: its end-of-sequence token, or else the last special token."""
        eos = self._tokenizer.eos_token
        if eos and eos in tail:
            return str(eos)
        known = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        shown = [token for token in known if token and token in tail]
        return max(shown, key=lambda token: (tail.rindex(token), len(token)), default="")

    def _tokens_after(self, kept: str, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate in a tool's output cannot be tokenised
        # Tokenised together, since some tokenizers put a space before the first word of a text.
        before = self._tokenizer(kept, add_special_tokens=False)["input_ids"]
        both = self._tokenizer(kept + text, add_special_tokens=False)["input_ids"]
        if both[: len(before)] != before:
            raise ConfigError(
                f"The tokenizer joins the end of the assistant's turn, {kept[-20:]!r}, with what follows it, "
                f"{text[:20]!r}, so the tokens the model wrote would change. The chat template must end a turn "
                "with a special token."
            )
        return list(both[len(before) :])

    def _probe(self) -> None:
        """Check that one result and two results each appear in the suffix."""
        for count in (1, 2):
            try:
                ids = self.suffix([TOOL] * count, [RETURNED] * count)
            except rendering_errors() as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"The chat template cannot render {count} tool messages in a row: {error}"
                ) from error
            if self._tokenizer.decode(ids).count(RETURNED["content"]) != count:
                raise ConfigError(f"The chat template does not show {count} tool messages in a row.")


def _in_text(message: Message) -> Message:
    """Join content blocks into one string, which templates of text models expect."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [block.get("text") if isinstance(block, dict) else block for block in content]
    text = "\n".join(str(block) if part is None else str(part) for block, part in zip(content, parts, strict=True))
    return {**message, "content": text}
