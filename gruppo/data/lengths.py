"""Prompts that leave no room for a completion, found before a run begins.

Tokenising a large dataset takes ten times as long as reading it. A text has no more tokens than bytes, and what a chat
template adds is seen in a sample: only prompts whose bytes could be too many for the context are tokenised. What slips
through (a tokenizer that writes some characters out, say) is found when its turn comes.
"""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from gruppo.data.prompts import PromptEncoder, read_prompt, sample_rows
from gruppo.errors import DataError

MOST_READ = 1_000_000  # prompts; a few seconds
MOST_NAMED = 5  # rows in an error message
SPECIAL_TOKENS = 16  # more than any tokenizer puts around a text
AT_ONCE = 256  # prompts that are read or tokenised together


def check_every_prompt(dataset: Any, encoder: PromptEncoder, limit: int = MOST_READ) -> None:
    """Raise for prompts that are empty, of the wrong form or too long, and say in which rows they are.

    Reading is cheap, but not free: of a larger dataset the rest is read when its turn comes.

    Example, of a model whose context has 128 tokens:
        check_every_prompt(Dataset.from_list([{"prompt": "a"}, {"prompt": "b" * 500}]), encoder)
        -> DataError: Row 1: A prompt has 500 tokens, which leaves no room …
    """
    sizes, messages = array("q"), array("q")  # of each prompt, in bytes, and how many
    blank = []  # they may have no tokens
    for i, prompt in enumerate(islice(_prompts(dataset), limit)):
        try:
            read_prompt({"prompt": prompt})
        except DataError as error:
            raise DataError(f"Row {i}: {error}") from None
        plain = isinstance(prompt, str)
        sizes.append(_bytes(prompt))
        messages.append(0 if plain else len(prompt))
        if plain and not prompt.strip():
            blank.append(i)
    most = math.inf if encoder.most_tokens is None else encoder.most_tokens - SPECIAL_TOKENS
    around = _bytes_of_template(sample_rows(dataset), encoder) if any(messages) else 0
    large = np.flatnonzero(np.asarray(sizes) + np.asarray(messages) * around > most)
    _encode(dataset, sorted({*large.tolist(), *blank}), encoder)


def _prompts(dataset: Any) -> Iterator[Any]:
    """The prompts in order. Many rows together take a tenth of the time that they take one by one."""
    if dataset.format["type"] is not None:  # what it makes of many rows is not always many times what it makes of one
        yield from dataset["prompt"]
        return
    for rows in dataset.select_columns("prompt").iter(AT_ONCE):
        yield from rows["prompt"]


def _encode(dataset: Any, places: Sequence[int], encoder: PromptEncoder) -> None:
    """Raise for those of these rows that cannot be encoded."""
    wrong: dict[int, DataError] = {}
    for start in range(0, len(places), AT_ONCE):
        part = places[start : start + AT_ONCE]
        rows = [dataset[i] for i in part]
        if _problem(rows, encoder) is None:
            continue
        found = {i: _problem([row], encoder) for i, row in zip(part, rows, strict=True)}
        wrong |= {i: error for i, error in found.items() if error is not None}
        if len(wrong) > MOST_NAMED:
            break
    if wrong:
        first, *others = wrong
        named = f" So are rows {', '.join(map(str, others[:MOST_NAMED]))}" if others else ""
        named += " and more" if len(others) > MOST_NAMED else ""
        raise DataError(f"Row {first}: {wrong[first]}{named}{'.' if named else ''}")


def _problem(rows: Sequence[Mapping[str, Any]], encoder: PromptEncoder) -> DataError | None:
    try:
        encoder(rows)
    except DataError as error:
        return error
    return None


def _bytes_of_template(rows: Sequence[Mapping[str, Any]], encoder: PromptEncoder) -> int:
    """The most that the chat template adds to one of these conversations, in bytes."""
    chats = [row for row in rows if not isinstance(row["prompt"], str)]
    if not chats:
        return 0
    texts = encoder.rendered(chats)
    return max(0, *(_bytes(text) - _bytes(row["prompt"]) for row, text in zip(chats, texts, strict=True)))


def _bytes(value: Any) -> int:
    """Of all texts in a prompt."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0 if value is None else len(str(value))
