"""From dataset rows to token ids: reading, checking, rendering, truncating."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from gruppo.errors import ConfigError, DataError
from gruppo.types import Message, Prompt

# Token ids, images and `{"vision": …}` of prompts; without a processor, images are None and the dict is empty.
Encoded = tuple[list[list[int]], list[list[Any]] | None, dict[str, Any]]
Tokenize = Callable[..., Encoded]  # takes prompts, and `tools` if these differ from row to row
Schemas = Sequence[Mapping[str, Any]]  # of tools, in the format of chat templates

# Arguments of apply_chat_template that users cannot set, and why.
RENDERING = {
    "conversation": "it is the prompt",
    "add_generation_prompt": "the model's turn always follows the prompt",
    "continue_final_message": "the model's turn always follows the prompt",
    "tokenize": "token ids are needed",
    "return_dict": "token ids are needed",
    "return_tensors": "prompts are padded later",
    "padding": "prompts are padded later",
    "truncation": "prompts are cut by max_prompt_length",
    "max_length": "prompts are cut by max_prompt_length",
}

IMAGE_COLUMNS = ("image", "images")


def require_prompt(row: Mapping[str, Any]) -> None:
    """Raise for a row without the required column, `prompt`."""
    if "prompt" not in row:
        raise DataError(
            f"The dataset has no `prompt` column; its columns are {sorted(row)}. Rename the one that holds the "
            "prompts to `prompt`."
        )


def read_prompt(row: Mapping[str, Any]) -> str | list[Message]:
    """The `prompt` of a row: a non-empty string, or a non-empty list of messages.

    Every row is checked, so that a dataset may mix plain prompts and conversations.
    """
    require_prompt(row)
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise DataError("A row has an empty `prompt`. Remove it, or give the model something to continue.")
        return prompt
    if not isinstance(prompt, list | tuple) or not prompt:
        raise DataError(
            f"`prompt` must be a non-empty string or a non-empty list of messages, but a row has {prompt!r}."
        )
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message:
            raise DataError(
                f"Each message of a conversational `prompt` must be a dict with `role` and `content`, not {message!r}."
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"A message of a conversational `prompt` has neither content nor tool calls: {message!r}.")
    return list(prompt)


def reject_images(row: Mapping[str, Any]) -> None:
    """Raise for rows with images, which rollouts with a tokenizer would silently ignore."""
    for column in IMAGE_COLUMNS:
        if row.get(column) is not None:
            raise DataError(
                f"The dataset has images (column `{column}`), but a tokenizer reads text only. Pass the processor of "
                "a vision-language model as processing_class, or remove the column."
            )


def require_conversation(row: Mapping[str, Any]) -> None:
    """Raise for a plain prompt, which has no place for tools or an environment's observations."""
    if isinstance(row.get("prompt"), str):
        raise DataError(
            "Tools and environments need prompts that are conversations, because the chat template adds them there, "
            f"but a row has the plain text {row['prompt'][:80]!r}. Write it as "
            '[{"role": "user", "content": …}].'
        )


class PromptEncoder:
    """Turns prompts into token ids with the policy's tokenizer.

    `tools` are shown in every conversation; a mapping selects them by the name in the row's `environment` column.
    """

    takes_images = False
    sample_size = 256  # rows of a dataset that are encoded as a check before a run
    placeholders: frozenset[int] = frozenset()  # tokens that stand for images

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int | None = None,
        context_length: int | None = None,
        room: int = 1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Schemas | Mapping[str, Schemas] | None = None,
    ):
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.context_length = context_length
        self.room = room  # tokens that must fit after a prompt
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.chat_template = chat_template  # None is the tokenizer's own
        self.tools = tools
        self._reject_own_arguments()

    def _reject_own_arguments(self) -> None:
        """Raise for chat_template_kwargs that are arguments set by this class, not by the user."""
        given = {"tools": self.tools, "chat_template": self.chat_template}
        ours = RENDERING | {name: "the trainer sets it" for name, value in given.items() if value}
        for name, reason in ours.items():
            if name in self.chat_template_kwargs:
                raise ConfigError(
                    f"chat_template_kwargs[{name!r}]={self.chat_template_kwargs[name]!r} cannot be set: {reason}. "
                    "Remove it."
                )

    def __call__(self, rows: Sequence[Mapping[str, Any]], tokenize: Tokenize | None = None) -> list[Prompt]:
        """Encode rows in order; a row object that occurs several times (one per completion) is encoded once."""
        rows = list(rows)  # keeps the objects alive, so that their ids stay unique
        distinct = {id(row): row for row in rows}
        encoded: dict[int, Prompt] = {}
        for tools, part in self._by_tools(list(distinct.values())):
            texts = [self.read(row) for row in part]
            ids, _, fields = (tokenize or self.encode)(texts, **tools)
            visions = fields.get("vision") or [None] * len(part)
            for row, text, row_ids, vision in zip(part, texts, ids, visions, strict=True):
                encoded[id(row)] = self._fit(row, text, row_ids, vision)
        return [encoded[id(row)] for row in rows]

    def read(self, row: Mapping[str, Any]) -> str | list[Message]:
        """The prompt of a row as it is rendered."""
        return read_prompt(row)

    def encode(self, prompts: Sequence[str | list[Message]], tools: Schemas | None = None) -> Encoded:
        """Token ids of prompts, no images (None) and no further fields."""
        return self.token_ids(prompts, **({} if tools is None else {"tools": tools})), None, {}

    def _by_tools(self, rows: list[Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
        """Groups of rows that are rendered together, each with its `tools` argument."""
        if not isinstance(self.tools, Mapping):
            return [({}, rows)]
        parts: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            parts.setdefault(row["environment"], []).append(row)
        return [({"tools": self.tools[name]}, part) for name, part in parts.items()]

    def token_ids(self, prompts: Sequence[str | list[Message]], tools: Schemas | None = None) -> list[list[int]]:
        """Token ids of plain prompts and conversations, untruncated."""
        if tools is None and not isinstance(self.tools, Mapping):
            tools = self.tools
        ids: list[list[int]] = [[] for _ in prompts]
        plain = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
        chats = [i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)]
        if plain:
            for i, row_ids in zip(plain, self.tokenizer([prompts[i] for i in plain])["input_ids"], strict=True):
                ids[i] = list(row_ids)
        if chats:
            rendered = self._render([prompts[i] for i in chats], tools, tokenize=True, return_dict=True)
            for i, row_ids in zip(chats, rendered["input_ids"], strict=True):
                ids[i] = list(row_ids)
        return ids

    def rendered(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """The texts of conversations, as they are tokenised."""
        texts: dict[int, str] = {}
        for named, part in self._by_tools(list(rows)):
            tools = named.get("tools", None if isinstance(self.tools, Mapping) else self.tools)
            shown = self._render([read_prompt(row) for row in part], tools, tokenize=False)
            texts |= {id(row): text for row, text in zip(part, shown, strict=True)}
        return [texts[id(row)] for row in rows]

    def _render(self, chats: Sequence[Any], tools: Schemas | None, **how: Any) -> Any:
        self._require_chat_template()
        return self.tokenizer.apply_chat_template(
            list(chats),
            add_generation_prompt=True,
            **how,
            **({"tools": list(tools)} if tools else {}),
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
            **self.chat_template_kwargs,
        )

    @property
    def most_tokens(self) -> int | None:
        """Most tokens that a prompt may have to fit into the context; None if every prompt fits."""
        if self.context_length is None:
            return None
        most = self.context_length - self.room
        cut = self.max_prompt_length is not None and self.max_prompt_length <= most
        return None if cut else most

    def _require_chat_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise DataError(
                "The prompts are conversations but the tokenizer has no chat template. Set "
                "`tokenizer.chat_template`, or use plain strings as prompts."
            )

    def _fit(self, row: Mapping[str, Any], text: str | list[Message], ids: list[int], vision: Any = None) -> Prompt:
        if not ids:
            raise DataError(f"The prompt {text!r} has no tokens; there is nothing to continue.")
        length = len(ids)
        ids = ids[-(self.max_prompt_length or length) :]
        if self.context_length is not None and len(ids) + self.room > self.context_length:
            raise DataError(
                f"A prompt has {len(ids)} tokens, which leaves no room for a completion of {self.room} in the model's "
                f"context of {self.context_length}. Shorten or filter it, set max_prompt_length, or lower "
                f"max_completion_length. It begins with {str(text)[:80]!r}."
            )
        return Prompt(row=row, text=text, ids=ids, truncated=len(ids) < length)


def sample_rows(dataset: Any, size: int = 256) -> list[Mapping[str, Any]]:
    """An evenly spaced sample of a dataset: about `size` rows, or all of them if there are fewer."""
    return [dataset[i] for i in range(0, len(dataset), max(1, len(dataset) // size))]


# Names of arguments that every reward function receives; a column with such a name could not be passed to it.
REWARD_ARGUMENTS = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


def reject_reserved_columns(row: Mapping[str, Any]) -> None:
    """Raise for columns that collide with an argument of every reward function."""
    for column in REWARD_ARGUMENTS:
        if column in row:
            raise DataError(
                f"The dataset has a column `{column}`, but reward functions get another argument of that name. "
                "Rename the column."
            )


def check_prompts(
    rows: Sequence[Mapping[str, Any]], encoder: PromptEncoder | None, *, takes_images: bool = False
) -> None:
    """Read and encode some rows of a dataset, so that bad ones are found before the run starts.

    Without an encoder (a custom rollout function reads the prompts) the prompts only have to exist.
    """
    for row in rows:
        require_prompt(row)
        if not takes_images:
            reject_images(row)
        reject_reserved_columns(row)
    if encoder is not None:
        encoder(rows)
