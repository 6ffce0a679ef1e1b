import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.errors import ConfigError, RewardError
from gruppo.rewards import get_length_reward, get_regex_reward, get_tag_format_reward

# text, reward, with other text allowed
TAGS = [
    ("<think>a</think><answer>b</answer>", 1.0, 1.0),
    ("<think>a</think>\n <answer>b</answer>\n", 1.0, 1.0),
    ("<think></think><answer></answer>", 1.0, 1.0),
    ("So <think>a</think><answer>b</answer>", 0.0, 1.0),
    ("<think>a</think> so <answer>b</answer>", 0.0, 1.0),
    ("<think>a</think><answer>b</answer>.", 0.0, 1.0),
    ("<answer>b</answer><think>a</think>", 0.0, 0.0),
    ("<think>a<answer>b</answer></think>", 0.0, 0.0),
    ("<think>a</think><think>a</think><answer>b</answer>", 0.0, 0.0),
    ("<think>a</think><answer>b</answer></answer>", 0.0, 0.0),
    ("</think>a<think><answer>b</answer>", 0.0, 0.0),
    ("<think>a</think><answer>b", 0.0, 0.0),
    ("<Think>a</Think><answer>b</answer>", 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "strict", "loose"), TAGS)
def test_tags(text, strict, loose):
    chat = [{"role": "assistant", "content": text}]
    assert get_tag_format_reward()([text, chat], prompts=["p", "p"]) == [strict, strict]
    assert get_tag_format_reward(nothing_else=False)([text]) == [loose]


@given(st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", " "]), max_size=8))
def test_tags_agree_with_a_pattern(pieces):
    text = "".join(pieces)
    expected = re.fullmatch(r"\s*<a>[x ]*</a>\s*<b>[x ]*</b>\s*", text) is not None
    assert get_tag_format_reward(["a", "b"])([text]) == [float(expected)]


def test_patterns():
    assert get_regex_reward(r"\d+")(["42", "42 eggs", ""]) == [1.0, 0.0, 0.0]
    assert get_regex_reward(r"\d+", full=False)(["42", "42 eggs", ""]) == [1.0, 1.0, 0.0]
    assert get_regex_reward("a.b", flags=re.DOTALL | re.IGNORECASE)(["A\nB", "a-b"]) == [1.0, 1.0]
    assert get_regex_reward("a.b")(["A\nB", "a-b"]) == [0.0, 1.0]
    assert get_regex_reward("yes")([[{"role": "assistant", "content": "yes"}]]) == [1.0]


LENGTHS = [
    (dict(kind="linear", maximum=10), {0: 1.0, 5: 0.5, 10: 0.0, 99: 0.0}),
    (dict(kind="target", target=10, width=5), {0: 0.0, 5: 0.0, 8: 0.6, 10: 1.0, 12: 0.6, 15: 0.0, 99: 0.0}),
    (dict(kind="band", low=4, high=6), {0: 0.0, 3: 0.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 0.0}),
    (dict(kind="band", low=4, high=6, width=2), {2: 0.0, 3: 0.5, 4: 1.0, 6: 1.0, 7: 0.5, 8: 0.0}),
    (dict(kind="band", low=5, high=5), {4: 0.0, 5: 1.0, 6: 0.0}),
]


@pytest.mark.parametrize(("settings", "values"), LENGTHS)
def test_lengths(settings, values):
    texts, ids = ["x" * n for n in values], [[7] * n for n in values]
    expected = pytest.approx(list(values.values()))
    assert get_length_reward(**settings)(["ignored"] * len(ids), completion_ids=ids) == expected
    assert get_length_reward(**settings, unit="characters")(texts, completion_ids=[[1]] * len(ids)) == expected


def test_tokens_need_ids():
    with pytest.raises(RewardError, match="unit='characters'"):
        get_length_reward("linear", maximum=3)(["abc"])


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (get_tag_format_reward(["a"]), "tag_format_reward"),
        (get_regex_reward("a+", flags=re.IGNORECASE), "regex_reward"),
        (get_length_reward("linear", maximum=3), "length_reward"),
    ],
)
def test_they_have_names_and_can_be_sent_to_a_process(reward, name):
    copy = pickle.loads(pickle.dumps(reward))
    assert copy == reward
    assert copy.__name__ == reward.__name__ == name
    assert copy.gruppo_worker is True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_tag_format_reward([]), "at least one"),
        (lambda: get_tag_format_reward("think"), "must be a list"),
        (lambda: get_tag_format_reward(["<think>"]), "write 'think'"),
        (lambda: get_tag_format_reward(["a", "a"]), "contains a name twice"),
        (lambda: get_regex_reward("(a"), r"not a valid regular expression: missing \)"),
        (lambda: get_regex_reward("a", flags=re.ASCII | re.UNICODE), "not a valid regular expression"),
        (lambda: get_regex_reward(re.compile("a")), "must be a string, not Pattern"),
        (lambda: get_length_reward("square", maximum=3), "kind='square'"),
        (lambda: get_length_reward("linear", maximum=3, unit="words"), "unit='words'"),
        (lambda: get_length_reward("linear"), "needs maximum"),
        (lambda: get_length_reward("target", target=3), "needs width"),
        (lambda: get_length_reward("band", low=3), "needs high"),
        (lambda: get_length_reward("linear", maximum=3, low=1), "does not use low"),
        (lambda: get_length_reward("band", low=3, high=2), "low=3 must not be above high=2"),
        (lambda: get_length_reward("linear", maximum=0), "maximum=0 must be at least 1"),
        (lambda: get_length_reward("band", low=-1, high=2), "low=-1 must be at least 0"),
    ],
)
def test_impossible_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
