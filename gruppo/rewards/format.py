"""Rewards on the shape of a completion."""

from collections.abc import Sequence
from typing import Any

__all__ = ["completion_text", "think_format_reward"]

Completion = str | Sequence[dict[str, Any]]

OPEN, CLOSE = "<think>", "</think>"


def completion_text(completion: Completion) -> str:
    """The text a shipped reward judges: the string itself, or the content of the first message.

    Example:
        completion_text([{"role": "assistant", "content": "4"}, {"role": "tool", "content": "…"}]) == "4"
    """
    if isinstance(completion, str):
        return completion
    content = completion[0].get("content") if completion else None
    if isinstance(content, list):
        # Messages for a processor hold blocks; only the text ones can be judged.
        return "".join(block.get("text") or "" for block in content if block.get("type") == "text")
    return content or ""


def think_format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """1.0 for a text that begins with `<think>`, has no second one, and closes it; else 0.0. One float per completion.

    What follows `</think>` is free and may be empty.
    """
    return [1.0 if _is_one_think_block(completion_text(completion)) else 0.0 for completion in completions]


def _is_one_think_block(text: str) -> bool:
    return text.startswith(OPEN) and text.count(OPEN) == 1 and CLOSE in text
