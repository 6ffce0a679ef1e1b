"""From token ids to what a reward function reads: text, or assistant messages."""

from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, TokenizersBackend

from gruppo.data.calls import UNREADABLE, read_broken, uniform_calls
from gruppo.types import Message, Prompt


def decode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completion_ids: Sequence[Sequence[int]],
    ends: Collection[int] = (),
) -> list[str | list[Message]]:
    """Text for plain prompts, a list with one assistant message for conversations.

    `ends` are the tokens that may end a completion.
    """
    texts = _texts(tokenizer, [list(ids) for ids in completion_ids])
    parses = has_response_parser(tokenizer)
    outputs: list[str | list[Message]] = []
    for prompt, ids, text in zip(prompts, completion_ids, texts, strict=True):
        if not prompt.is_conversation:
            outputs.append(text)
        elif parses:
            outputs.append([parse_response(tokenizer, without_end(ids, ends), prefix=list(prompt.ids))])
        else:
            outputs.append([{"role": "assistant", "content": text}])
    return outputs


def _texts(tokenizer: PreTrainedTokenizerBase, ids: list[list[int]]) -> list[str]:
    """What `batch_decode` returns; decoded on all cores where it is only a loop over the backend."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    methods = ("batch_decode", "decode", "_decode")
    own = any(getattr(type(tokenizer), name) is not getattr(TokenizersBackend, name) for name in methods)
    if own or backend is None or _cleans_up(tokenizer, backend):
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    texts: list[str] = backend.decode_batch(ids, skip_special_tokens=True)
    return texts


def _cleans_up(tokenizer: Any, backend: Any) -> bool:
    """Whether decoding removes spaces before punctuation, which transformers does not do for byte-pair encodings."""
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return bool(tokenizer.clean_up_tokenization_spaces) and (forced or type(backend.model).__name__ != "BPE")


def without_end(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """Tokens without the final end token: a model may have several, and a parser may not know all of them."""
    return list(ids[:-1] if len(ids) and ids[-1] in ends else ids)


def has_response_parser(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer can split a response into its parts (reasoning, tool calls)."""
    return bool(getattr(tokenizer, "response_template", None))


def parse_response(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], prefix: list[int] | None = None, tools: list[Any] | None = None
) -> Message:
    """An assistant message from token ids; text that does not parse is kept as plain content.

    `content` is always a string without the end-of-sequence token, and every tool call has a name and arguments. A
    call that is recognised but malformed has the key `error`, which describes what is wrong.
    """
    try:
        parsed = tokenizer.parse_response(ids, prefix=prefix, tools=tools)
    except UNREADABLE:
        before = tokenizer.decode(prefix) if prefix else ""
        parsed = read_broken(tokenizer, _text(tokenizer.decode(ids)), _text(before), tools)
    if not parsed:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    message = {"role": "assistant", **parsed}
    content = message.get("content") or ""
    if isinstance(content, str):
        message["content"] = content.removesuffix(tokenizer.eos_token or "")
    else:
        message["content"] = str(content)
    if message.get("tool_calls"):
        message["tool_calls"] = [call for entry in message["tool_calls"] for call in uniform_calls(entry)]
    return message


def _text(decoded: str | list[str]) -> str:
    return decoded if isinstance(decoded, str) else "".join(decoded)
