"""Find prompts that leave no room for a completion before a run begins.

Tokenising a large dataset takes ten times as long as reading it. A text has no more tokens than bytes, and a sample
shows how much a chat template adds, so only prompts with enough bytes to exceed the context are tokenised. Prompts
that this misses (because a tokenizer expands some characters, for example) are found when they are used.
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
SPECIAL_TOKENS = 16  # more than any tokenizer adds to a text
AT_ONCE = 256  # prompts that are read or tokenised together


def check_every_prompt(dataset: Any, encoder: PromptEncoder, limit: int = MOST_READ) -> None:
    """Raise for prompts that are empty, of the wrong form or too long, naming their rows.

    Reading takes time too, so only the first `limit` rows are checked; later ones are checked when they are used.

    Example, of a model whose context has 128 tokens:
        check_every_prompt(Dataset.from_list([{"prompt": "a"}, {"prompt": "b" * 500}]), encoder)
        -> DataError: Row 1: A prompt has 500 tokens, which leaves no room …
    """
    sizes, messages = array("q"), array("q")  # bytes and number of messages per prompt
    blank = []  # rows whose prompts may have no tokens
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
    """The prompts in order, read in batches, which takes a tenth of the time of reading row by row."""
    if dataset.format["type"] is not None:  # a custom format may treat a batch differently from single rows
        yield from dataset["prompt"]
        return
    for rows in dataset.select_columns("prompt").iter(AT_ONCE):
        yield from rows["prompt"]


def _encode(dataset: Any, places: Sequence[int], encoder: PromptEncoder) -> None:
    """Raise if any of these rows cannot be encoded, naming them."""
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
        named = f" Other invalid rows: {', '.join(map(str, others[:MOST_NAMED]))}" if others else ""
        named += " and more" if len(others) > MOST_NAMED else ""
        raise DataError(f"Row {first}: {wrong[first]}{named}{'.' if named else ''}")


def _problem(rows: Sequence[Mapping[str, Any]], encoder: PromptEncoder) -> DataError | None:
    try:
        encoder(rows)
    except DataError as error:
        return error
    return None


def _bytes_of_template(rows: Sequence[Mapping[str, Any]], encoder: PromptEncoder) -> int:
    """The most bytes that the chat template adds to one of these conversations."""
    chats = [row for row in rows if not isinstance(row["prompt"], str)]
    if not chats:
        return 0
    texts = encoder.rendered(chats)
    return max(0, *(_bytes(text) - _bytes(row["prompt"]) for row, text in zip(chats, texts, strict=True)))


def _bytes(value: Any) -> int:
    """Number of bytes of all texts in a prompt."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0 if value is None else len(str(value))
