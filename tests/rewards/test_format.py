import pytest

import gruppo.rewards
from gruppo.rewards import think_format_reward
from gruppo.rewards.format import completion_text

TEXTS = [
    ("<think>a</think>", 1.0),
    ("<think>a</think>b", 1.0),
    ("<think>\n\n</think>\nb", 1.0),
    ("<think></think></think>", 1.0),
    (" <think>a</think>", 0.0),
    ("a<think>b</think>", 0.0),
    ("<think>a<think>b</think>", 0.0),
    ("<think>a</think><think>", 0.0),
    ("<think>a", 0.0),
    ("</think><think>", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("text", "reward"), TEXTS)
def test_think_format(text, reward):
    assert think_format_reward([[{"role": "assistant", "content": text}]], prompts=["p"]) == [reward]
    assert think_format_reward([text, text]) == [reward, reward]


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "first"}, {"role": "tool", "content": "second"}], "first"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([{"role": "assistant"}], ""),
        ([], ""),
        ([{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "seen"}]}], "seen"),
    ],
)
def test_completion_text(completion, text):
    assert completion_text(completion) == text


def test_exports_are_lazy_and_complete():
    assert set(gruppo.rewards.__all__) <= set(dir(gruppo.rewards))
    for name in gruppo.rewards.__all__:
        assert callable(getattr(gruppo.rewards, name))
    with pytest.raises(AttributeError, match="no_such_reward"):
        gruppo.rewards.no_such_reward  # noqa: B018
