"""Rewards on the format of a completion."""

from collections.abc import Sequence
from typing import Any

from gruppo.rewards.marks import in_worker

__all__ = ["completion_text", "final_text", "think_format_reward"]

Completion = str | Sequence[dict[str, Any]]

OPEN, CLOSE = "<think>", "</think>"


def completion_text(completion: Completion) -> str:
    """The text a shipped reward judges: the string itself, or the content of the first message.

    Example:
        completion_text([{"role": "assistant", "content": "4"}, {"role": "tool", "content": "…"}]) == "4"
    """
    if isinstance(completion, str):
        return completion
    return _message_text(completion[0]) if completion else ""


def final_text(completion: Completion) -> str:
    """The string itself, or the last message of the assistant, which holds the answer after tool calls.

    Example:
        final_text([{"role": "assistant", "content": "6*7?"}, {"role": "tool", "content": "42"},
                    {"role": "assistant", "content": "It is 42."}]) == "It is 42."
    """
    if isinstance(completion, str):
        return completion
    texts = [_message_text(message) for message in completion if message.get("role", "assistant") == "assistant"]
    return texts[-1] if texts else ""


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        # Messages for a processor hold blocks; only the text ones can be judged.
        return "".join(block.get("text") or "" for block in content if block.get("type") == "text")
    return content or ""


@in_worker
def think_format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    """1.0 for a text that begins with `<think>`, has no second one, and closes it; else 0.0. One float per completion.

    Any text, or none, may follow `</think>`.
    """
    return [1.0 if _is_one_think_block(completion_text(completion)) else 0.0 for completion in completions]


def _is_one_think_block(text: str) -> bool:
    return text.startswith(OPEN) and text.count(OPEN) == 1 and CLOSE in text
