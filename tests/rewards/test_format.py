import pytest

import gruppo.rewards
from gruppo.rewards import think_format_reward
from gruppo.rewards.format import completion_text, final_text

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


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "first"}, {"role": "tool", "content": "second"}], "first"),
        ([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "last"}], "last"),
        ([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": None}], ""),
        ([{"role": "tool", "content": "second"}], ""),
        ([], ""),
    ],
)
def test_final_text(completion, text):
    assert final_text(completion) == text


SHIPPED = {
    "accuracy_reward": None,
    "reasoning_accuracy_reward": None,
    "think_format_reward": None,
    "math_answer_reward": None,
    "get_math_answer_reward": (),
    "get_cosine_scaled_reward": (10,),
    "get_repetition_penalty_reward": (),
    "get_soft_overlong_punishment": (10, 4),
    "get_tag_format_reward": (),
    "get_regex_reward": ("a",),
    "get_length_reward": ("linear",),
}


def test_every_shipped_reward_asks_for_a_worker():
    assert {"check_reward", *SHIPPED} == set(gruppo.rewards.__all__)
    for name, arguments in SHIPPED.items():
        reward = getattr(gruppo.rewards, name)
        if arguments is not None:
            reward = reward(*arguments, **({"maximum": 9} if name == "get_length_reward" else {}))
        assert reward.gruppo_worker is True, name


def test_exports_are_lazy_and_complete():
    assert set(gruppo.rewards.__all__) <= set(dir(gruppo.rewards))
    for name in gruppo.rewards.__all__:
        assert callable(getattr(gruppo.rewards, name))
    with pytest.raises(AttributeError, match="no_such_reward"):
        gruppo.rewards.no_such_reward  # noqa: B018
