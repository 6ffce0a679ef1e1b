"""Stop strings: text that ends a completion, searched for on the host because only the tokenizer knows the text."""

from collections.abc import Sequence
from typing import Any

from gruppo.errors import ConfigError


class StopStrings:
    """Follows completions token by token and reports where one of the strings is complete."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]):
        if tokenizer is None:
            raise ConfigError(f"stop_strings={list(strings)!r} need a tokenizer; give one to the engine.")
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        # A token may be a single byte of a character; the extra tokens allow for some that decode to no text.
        self.window = max(len(string.encode()) for string in self.strings) + 16
        self._ids: dict[int, list[int]] = {}

    def feed(self, completion: int, tokens: Sequence[int]) -> int | None:
        """The length at which a stop string ends the completion, its last token included; or None."""
        ids = self._ids.setdefault(completion, [])
        for token in tokens:
            ids.append(token)
            text = self.tokenizer.decode(ids[-self.window :], skip_special_tokens=False)
            if any(string in text for string in self.strings):
                return len(ids)
        return None
