import pickle
from dataclasses import replace

import pytest

from gruppo.errors import ConfigError, RewardError
from gruppo.grading import LADDERS
from gruppo.rewards import get_math_answer_reward, math_answer_reward

try:
    import math_verify
except ImportError:
    math_verify = None

needs_math = pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")

# completion, gold, reward, gold_parsed, answer_parsed, graded_by
ANSWERS = [
    (r"so \boxed{42}", "42", 1.0, "42", "42", "string"),
    (r"so \boxed{41}", "42", 0.0, "42", "41", "number"),
    ("The answer is 42.0000001.", "42", 1.0, "42", "42.0000001", "number"),
    ("#### 42", "40 + 2 = 42\n#### 42", 1.0, "42", "42", "string"),
    ("答案是42元。", "#### 42", 1.0, "42", "42元", "string"),
    (r"\boxed{42} or \boxed{41}", "42", 0.0, "42", "41", "number"),
    ("no idea", "42", 0.0, "42", "[none]", "no_answer"),
    (r"\boxed{42}", "", None, "[unparseable]", "[skipped]", "no_gold"),
    (r"\boxed{42}", None, None, "[unparseable]", "[skipped]", "no_gold"),
    (r"\boxed{9^{9^{9^9}}}", "42", 0.0, "42", "9^{9^{9^9}}", "refused"),
    ("{" * 100_000, "42", 0.0, "42", "[none]", "no_answer"),
    (r"\boxed{42}", 42, 1.0, "42", "42", "string"),
]


def test_table_and_logs():
    columns, metrics = {}, {}
    rewards = math_answer_reward(
        completions=[row[0] for row in ANSWERS],
        answer=[row[1] for row in ANSWERS],
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
        prompts=["p"] * len(ANSWERS),
    )
    assert rewards == [row[2] for row in ANSWERS]
    assert columns == {
        "gold_parsed": [row[3] for row in ANSWERS],
        "answer_parsed": [row[4] for row in ANSWERS],
        "graded_by": [row[5] for row in ANSWERS],
    }
    assert metrics == {"math_answer/boxed": pytest.approx(5 / 10), "math_answer/undecided": pytest.approx(1 / 10)}


@needs_math
def test_formulas():
    assert math_answer_reward(
        [r"\boxed{\sqrt{12}}", r"\boxed{x}"], solution=[r"\boxed{2\sqrt{3}}", r"$2\sqrt{3}$"]
    ) == [
        1.0,
        0.0,
    ]


def test_the_answer_comes_before_the_solution_row_by_row():
    golds = dict(answer=["1", None], solution=["2", r"so \boxed{3}"])
    assert math_answer_reward([r"\boxed{1}", r"\boxed{3}"], **golds) == [1.0, 1.0]


def test_conversations_are_judged_by_the_last_thing_the_assistant_says():
    said = [
        {"role": "assistant", "content": r"\boxed{1}", "tool_calls": []},
        {"role": "tool", "content": r"\boxed{2}"},
        {"role": "assistant", "content": r"\boxed{3}"},
    ]
    assert math_answer_reward([said, said, said, []], answer=["1", "2", "3", "3"]) == [0.0, 0.0, 1.0, 0.0]


@needs_math
def test_the_ladder_of_a_set():
    work = [r"\boxed{9 \cdot 2}"]
    assert get_math_answer_reward()(work, answer=["18"]) == [1.0]
    assert get_math_answer_reward("math")(work, answer=["18"]) == [1.0]
    assert get_math_answer_reward("gsm8k")(work, answer=["18"]) == [0.0]
    loose = replace(LADDERS["gsm8k"], tolerance=0.5)
    assert get_math_answer_reward(loose)([r"\boxed{18.4}"], answer=["18"]) == [1.0]


@needs_math
@pytest.mark.parametrize("reward", [math_answer_reward, get_math_answer_reward()])
@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        (r"(16-3-4)\cdot 2", "9 * 2 = 18\n#### 18", 0.0),
        (r"\sqrt{324}", "#### 18", 0.0),
        (r"18\text{ dollars}", "#### 18", 1.0),
        ("18元", "#### 18", 1.0),
        (r"\sqrt{324}", "18", 1.0),  # no grade-school answer, for all one knows
        (r"\sqrt{324}", "#### 3 Sum\nso \\boxed{18}", 1.0),
        ("x+x", "#### $2x$", 1.0),
    ],
)
def test_a_number_after_hashes_wants_a_literal_one(reward, answer, gold, score):
    assert reward([rf"\boxed{{{answer}}}"], answer=[gold]) == [score]


@needs_math
def test_several_golds():
    texts = [r"\boxed{5}, \boxed{2}", r"\boxed{5}", r"\boxed{4}"]
    golds = [["2", "5"]] * 3
    assert get_math_answer_reward("math", answers_mode="all")(texts, answer=golds) == [1.0, 0.0, 0.0]
    assert get_math_answer_reward("math", answers_mode="any")(texts, answer=golds) == [1.0, 1.0, 0.0]
    assert get_math_answer_reward("math", answers_mode="all")(texts[:1], answer=["2, 5"]) == [1.0]
    modes = ["all", "any", None]
    golds = [["2", "5"], ["2", "5"], "4"]
    assert get_math_answer_reward("math")(texts, answer=golds, answers_mode=modes) == [1.0, 1.0, 1.0]
    assert math_answer_reward(texts, answer=golds, answers_mode=modes) == [1.0, 1.0, 1.0]
    with pytest.raises(RewardError, match="'some' in `answers_mode`"):
        math_answer_reward(texts, answer=golds, answers_mode=["some"] * 3)
    with pytest.raises(RewardError, match="3 completions but 1 as `answers_mode`"):
        math_answer_reward(texts, answer=golds, answers_mode=["all"])


def test_the_column():
    reward = get_math_answer_reward("gsm8k", column="final")
    assert reward([r"\boxed{5}"], final=["5"], answer=["6"]) == [1.0]
    with pytest.raises(RewardError, match="no column final"):
        reward([r"\boxed{5}"], answer=["5"])


def test_it_can_be_sent_to_a_process():
    reward = get_math_answer_reward("cmath", column="gold")
    copy = pickle.loads(pickle.dumps(reward))
    assert copy == reward
    assert copy.__name__ == "math_answer_reward"
    assert copy([r"\boxed{5个}"], gold=["5"]) == [1.0]
    assert reward.gruppo_worker is math_answer_reward.gruppo_worker is True


@pytest.mark.parametrize(
    ("golds", "message"),
    [
        ({}, "no column answer or solution"),
        ({"answer": ["1"]}, "2 completions but 1"),
        ({"answer": "12"}, "one string"),
    ],
)
def test_golds_that_cannot_be_used(golds, message):
    with pytest.raises(RewardError, match=message):
        math_answer_reward(["a", "b"], **golds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"answers_mode": "some"}, "answers_mode='some'"),
        ({"ladder": "gsm"}, "use one of gsm8k"),
        ({"column": ""}, "column=''"),
        ({"column": 3}, "column=3"),
    ],
)
def test_impossible_settings(arguments, message):
    with pytest.raises(ConfigError, match=message):
        get_math_answer_reward(**arguments)
