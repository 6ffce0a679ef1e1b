"""Settings without their secrets, for files that others will read."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["HIDDEN", "without_secrets"]

HIDDEN = "<hidden>"

# Secret by name, whatever the value: hub_token, OPENAI_API_KEY, x-api-key, clientSecret.
SECRET_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secrets?|passw(or)?d|passphrase|pwd|credentials?|authorization|auth"
    r"|bearer|cookies?|token|(access|api|auth|hub|refresh|session)_tokens)(_value)?$|(^|_)secret_"
)
# Tokens of a vocabulary, not of an account: eos_token, image_token.
PLAIN_TOKEN = re.compile(
    r"(^|_)(additional|audio|bos|bot|boundary|cls|end|eos|extra|image|mask|pad|sep|special|start|stop|think|tool|unk"
    r"|video|vision)_token$"
)
# Secret by value, anywhere in a text: only this part is hidden.
SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|sk-(?=[\w-]*\d)[\w-]{16,}"  # OpenAI, Anthropic and others with the same format
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|xox[abeoprs]-[\w-]{10,}"  # Amazon, Google, Slack
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"  # a JSON web token
    r"|(?<=[Bb]earer )[\w.~+/=-]{8,}"
    r"|(?<=://)[^/\s@]+(?=@)"  # credentials in a URL
)


def without_secrets(settings: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy in which values that are secrets by name or by format are hidden, at any nesting depth.

    Only common names and formats are recognised; a secret in a field `note` that looks like a word is not hidden.

    Example:
        without_secrets({"beta": 0.1, "hub_token": "abc", "headers": {"Authorization": "Bearer abc"}})
        == {"beta": 0.1, "hub_token": "<hidden>", "headers": {"Authorization": "<hidden>"}}
    """
    return {name: HIDDEN if _is_secret(name, value) else _cleaned(value) for name, value in settings.items()}


def _is_secret(name: Any, value: Any) -> bool:
    if value is None or isinstance(value, bool) or value in ("", [], {}, ()):
        return False  # token=True is not a secret: it says where to find the token
    return isinstance(name, str) and _sounds_secret(name)


def _sounds_secret(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    return SECRET_NAME.search(words) is not None and PLAIN_TOKEN.search(words) is None


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return SECRET_VALUE.sub(HIDDEN, value)
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list):
        return _cleaned_items(value)
    return tuple(_cleaned_items(value)) if isinstance(value, tuple) else value


def _cleaned_items(items: Sequence[Any]) -> list[Any]:
    """The items of a list; if it is a command line, the value after `--hub_token` is hidden too."""
    cleaned: list[Any] = []
    flag = ""
    for item in items:
        name, equals, _ = item.partition("=") if isinstance(item, str) and item.startswith("--") else ("", "", "")
        if flag and not name:
            cleaned.append(HIDDEN)
        elif equals and _sounds_secret(name):
            cleaned.append(f"{name}={HIDDEN}")
        else:
            cleaned.append(_cleaned(item))
        flag = name if name and not equals and _sounds_secret(name) else ""
    return cleaned
