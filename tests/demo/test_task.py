"""The word-problem task: seeded, right, split without overlap, scored by exact match."""

import itertools
import operator
import re

import pytest

from gruppo.demo.task import LARGEST, SMALLEST, exact_match, extract_answer, generate, load_task, problems

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def test_the_same_seed_gives_the_same_problems():
    assert problems("train", 50, seed=3) == problems("train", 50, seed=3)
    assert problems("train", 50, seed=3) != problems("train", 50, seed=4)


def test_the_first_problems_never_change():
    # The shipped weights were made from this stream: a change of the generator means new weights.
    first = next(generate("train", 0))
    assert (
        first.prompt
        == "Q: Tom starts with 15 buttons. Tom sells 7. Then Tom loses 5 buttons. How many buttons does Tom have?\n"
    )
    assert first.worked == "15-7=8, 8-5=3. A: 3"


def test_splits_share_neither_question_nor_calculation():
    train, held_out = problems("train", 5000), problems("held_out", 500)
    assert not {p.question for p in train} & {p.question for p in held_out}
    assert not {p.steps for p in train} & {p.steps for p in held_out}
    assert len({p.question for p in train}) == 5000


def test_no_seed_leaks_a_held_out_problem_into_train():
    held_out = {p.steps for p in problems("held_out", 500)}
    for seed in range(5):
        assert not held_out & {p.steps for p in itertools.islice(generate("train", seed), 2000)}


def parse(step):
    """ "7+5=12" → (7, "+", 5, 12)."""
    a, sign, b, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", step).groups()
    return int(a), sign, int(b), int(result)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_right(split):
    for problem in problems(split, 500):
        steps = [parse(step) for step in problem.steps]
        assert all(OPERATIONS[sign](a, b) == result for a, sign, b, result in steps)
        assert all(SMALLEST <= result <= LARGEST for *_, result in steps)
        assert [a for a, *_ in steps[1:]] == [result for *_, result in steps[:-1]]
        assert steps[-1][-1] == problem.answer


def test_the_story_tells_the_calculation():
    for problem in problems("train", 500):
        steps = [parse(step) for step in problem.steps]
        assert [int(number) for number in re.findall(r"\d+", problem.question)] == [
            steps[0][0],
            *(s[2] for s in steps),
        ]


def test_both_forms_of_a_demonstration_earn_the_reward():
    for problem in problems("held_out", 100):
        assert exact_match([problem.direct, problem.worked], [str(problem.answer)] * 2) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("A: 42", "42"),
        ("A: -3", "-3"),
        ("7+5=12, 12*3=36. A: 36", "36"),
        ("A: 1. A: 2", "2"),
        ("A: 42\n", "42"),
        ("A: 042", "042"),
        ("A: 42 pears", None),
        ("A: ", None),
        ("42", None),
        ("", None),
        ("A: 4 2", None),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


def test_reward_takes_trls_call():
    scores = exact_match(
        prompts=["p", "p"],
        completions=["A: 4", "A: 5"],
        completion_ids=[[1], [2]],
        answer=["5", "5"],
        trainer_state=None,
    )
    assert scores == [0.0, 1.0]


def test_reward_refuses_columns_of_different_length():
    with pytest.raises(ValueError, match="shorter"):
        exact_match(["A: 4", "A: 5"], ["4"])


def test_datasets_have_the_two_columns():
    train, held_out = load_task(train_size=20, held_out_size=10)
    assert train.column_names == held_out.column_names == ["prompt", "answer"]
    assert (len(train), len(held_out)) == (20, 10)
    assert train[0]["prompt"].startswith("Q: ")
    assert train[0]["answer"].isdigit()
