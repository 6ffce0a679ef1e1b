import math
import pickle

import pytest

from gruppo.errors import ConfigError
from gruppo.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

try:
    import math_verify
except ImportError:
    math_verify = None


@pytest.mark.parametrize(
    ("length", "reward"), [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (11, -1.0), (99, -1.0)]
)
def test_soft_overlong_punishment(length, reward):
    punish = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    assert punish(completion_ids=[[7] * length], prompts=["p"]) == [reward]


def test_soft_overlong_punishment_without_a_slope():
    assert get_soft_overlong_punishment(3, 0)(completion_ids=[[1] * 3, [1] * 4]) == [0.0, -1.0]


@pytest.mark.parametrize(
    ("ids", "reward"),
    [
        ([], 0.0),
        ([1, 2], 0.0),
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4, 5], 0.0),
        ([1, 2, 3, 1, 2, 3], -0.25),  # 123 231 312 123: three of four are distinct
        ([1, 1, 1, 1, 1], -2 / 3),
    ],
)
def test_repetition_penalty(ids, reward):
    assert get_repetition_penalty_reward()(completion_ids=[ids]) == [pytest.approx(reward)]
    assert get_repetition_penalty_reward(max_penalty=-3.0)(completion_ids=[ids]) == [pytest.approx(3 * reward)]


def test_repetition_penalty_of_single_tokens():
    assert get_repetition_penalty_reward(ngram_size=1)(completion_ids=[[1, 1, 2, 2]]) == [-0.5]


@pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")
def test_cosine_scaled_reward():
    reward = get_cosine_scaled_reward(max_len=10)
    right, wrong = r"\boxed{1}", r"\boxed{2}"
    lengths = [0, 5, 10, 20, 0, 5, 10, 3]
    values = reward(
        completions=[right] * 4 + [wrong] * 3 + [right],
        solution=["1"] * 7 + ["no number"],
        completion_ids=[[0] * n for n in lengths],
        trainer_state=None,
    )
    assert values[:7] == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.75, -0.5])
    assert values[7] is None


@pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")
def test_cosine_scaled_reward_takes_its_bounds():
    reward = get_cosine_scaled_reward(4, -8.0, -4.0, 1.0, 3.0)
    got = reward(completions=[r"\boxed{1}", r"\boxed{2}"], solution=["1", "1"], completion_ids=[[0], [0]])
    cosine = (1 + math.cos(math.pi / 4)) / 2
    assert got == pytest.approx([1 + 2 * cosine, -4 - 4 * cosine])


@pytest.mark.parametrize(
    ("factory", "arguments", "name"),
    [
        (get_soft_overlong_punishment, (10, 4), "soft_overlong_punishment_reward"),
        (get_repetition_penalty_reward, (), "repetition_penalty_reward"),
        (get_cosine_scaled_reward, (10,), "cosine_scaled_reward"),
    ],
)
def test_rewards_have_names_and_can_be_sent_to_a_process(factory, arguments, name):
    reward = factory(*arguments)
    copy = pickle.loads(pickle.dumps(reward))
    assert reward.__name__ == copy.__name__ == name
    assert copy == reward


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_soft_overlong_punishment(4, 10), "soft_punish_cache=10"),
        (lambda: get_soft_overlong_punishment(4, -1), "soft_punish_cache=-1"),
        (lambda: get_repetition_penalty_reward(max_penalty=0.5), r"max_penalty=0\.5"),
        (lambda: get_repetition_penalty_reward(ngram_size=0), "ngram_size=0"),
        (lambda: get_cosine_scaled_reward(0), "max_len=0"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
