"""One completion, token by token: its text, and the values by which tokens are coloured.

The texts are decoded with the tokenizer.json in the run folder, through the `tokenizers` library: the file is data,
and nothing in it is executed.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gruppo.errors import DataError
from gruppo.runs import Run
from gruppo.runs.follow import read_text

__all__ = ["COLOURINGS", "load_decoder", "pieces", "token_view", "update_logps"]

logger = logging.getLogger(__name__)

Decoder = Callable[[Sequence[int]], str]

COLOURINGS = {
    "logp": "log-probability of the token when it was sampled",
    "entropy": "entropy of the distribution that it was sampled from, in nats",
    "ratio": "its probability in the update, divided by that when it was sampled",
    "contribution": "advantage × ratio: what the token adds to the objective before clipping and averaging",
}
FILES = ("tokenizer/tokenizer.json", "tokenizer.json")
LATER_UPDATES = 16  # updates searched for a completion: it is trained on soon after it was sampled
LONGEST_CHARACTER = 16  # maximum number of tokens that may form one character together
UNFINISHED = "\ufffd"


def load_decoder(run: Run) -> Decoder | None:
    """A function that decodes token ids, or None if the folder has no readable tokenizer."""
    from tokenizers import Tokenizer

    for name in (*FILES, *(f"{path.name}/tokenizer.json" for path in run.checkpoints)):
        try:
            text = read_text(run, name)
            tokenizer = None if text is None else Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises plain Exception for any problem with a file
            logger.warning("%s cannot be used: %s", run.folder / name, error)
            continue
        if tokenizer is not None:
            return lambda ids, own=tokenizer: own.decode(list(ids), skip_special_tokens=False)  # type: ignore[misc]
    return None


def pieces(decode: Decoder, ids: Sequence[int]) -> list[str]:
    """The text that each token adds. If several tokens form one character, the last of them gets it.

    Each token is decoded together with preceding tokens, because its text may depend on them.
    """
    texts: list[str] = []
    before, done = 0, 0  # decoding starts at token `before`; the text of tokens up to `done` is already assigned
    for end in range(1, len(ids) + 1):
        known, now = decode(ids[before:done]), decode(ids[before:end])
        whole = len(now) > len(known) and not now.endswith(UNFINISHED)
        if whole or end - done >= LONGEST_CHARACTER:
            texts.append(now[len(known) :])
            before, done = done, end
        else:
            texts.append("")
    if done < len(ids):  # the completion ends within a character
        texts[-1] = decode(ids[before:])[len(decode(ids[before:done])) :]
    return texts


def update_logps(run: Run, update: int, generation: int, row: int) -> tuple[int, list[float | None]] | None:
    """The last update that trained on a completion, and the log-probs that it computed; None if none were recorded."""
    read = getattr(run, "update_logps", None)
    if read is None:
        return None
    found = None
    for later in range(update, update + LATER_UPDATES + 1):
        for line in read(updates=[later]).to_pylist():
            if (line["generation"], line["row"]) == (generation, row) and line["logps"] is not None:
                found = later, [None if value is None or math.isnan(value) else value for value in line["logps"]]
    return found


def token_view(run: Run, decode: Decoder | None, row: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
    """Tokens `first` to `first + count` of a row, with the values of each; None where a value is not known.

    Example of the result, abridged:
        {"texts": ["4", "</s>"], "model": [1, 1], "logp": [-0.1, -0.02], "why": {"ratio": "The run recorded no …"}}
    """
    ids = row["completion_tokens"]
    if not 0 <= first <= len(ids) or count < 1:
        raise DataError(f"A completion of {len(ids)} tokens has no tokens from {first} on.")
    learned = None if row["replaced"] else update_logps(run, row["update"], row["generation"], row["row"])
    ratios = _ratios(row["logps"], learned)
    written = row["model_mask"] or [1] * len(ids)
    values = {
        "logp": _known(row["logps"], written),
        "entropy": _known(row["entropies"], written),
        "ratio": _known(ratios, written),
        "contribution": _known(_contributions(row, ratios), written),
    }
    part = slice(first, first + count)
    return {
        "total": len(ids),
        "first": first,
        "ids": ids[part],
        "texts": (None if decode is None else pieces(decode, ids)[part]),
        "model": [int(bool(mark)) for mark in written[part]],
        **{
            name: None if value is None else [_short(number) for number in value[part]]
            for name, value in values.items()
        },
        "update": None if learned is None else learned[0],
        "why": {name: _why(name) for name, value in values.items() if value is None},
        "means": COLOURINGS,
    }


def _known(values: Sequence[float | None] | None, written: Sequence[int]) -> list[float | None] | None:
    """The values of the tokens that the model wrote; None if no value is known."""
    if values is None or len(values) != len(written):
        return None
    kept = [v if own and v is not None and math.isfinite(v) else None for v, own in zip(values, written, strict=True)]
    return kept if any(value is not None for value in kept) else None


def _ratios(
    before: Sequence[float | None] | None, learned: tuple[int, list[float | None]] | None
) -> list[float | None] | None:
    if before is None or learned is None or len(before) != len(learned[1]):
        return None
    pairs = zip(learned[1], before, strict=True)
    return [None if new is None or old is None or math.isnan(old) else _exp(new - old) for new, old in pairs]


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _contributions(row: Mapping[str, Any], ratios: Sequence[float | None] | None) -> list[float | None] | None:
    """Advantage × ratio of each token; an unknown ratio counts as 1."""
    length = len(row["completion_tokens"])
    if row["advantages"] is None and row["advantage"] is None:
        return None
    advantages = row["advantages"] or [row["advantage"]] * length
    known = [None] * length if ratios is None else ratios
    return [a * (1.0 if ratio is None else ratio) for a, ratio in zip(advantages, known, strict=False)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _why(name: str) -> str:
    """The reason why a colouring is not available."""
    return {
        "logp": "The run recorded no log-probabilities of this completion.",
        "entropy": "The run recorded no entropies of this completion.",
        "ratio": "The run recorded no log-probabilities of an update that learned from this completion.",
        "contribution": "This completion has no advantage: nothing was learned from it.",
    }[name]
