"""Summaries of passes that are small enough to be counted by hand."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.statistics import mean_interval
from gruppo.evaluation.summary import problem_scores, summarise
from gruppo.evaluation.types import Attempt, Benchmark, Decoding, GradedAttempt, Problem, ToolUse
from gruppo.grading import LADDERS, Grade, Rule, Rung
from gruppo.types import StopReason

SET = Benchmark("toy", "Toy", "toy.jsonl", LADDERS["math"], rows=4, group_by=("level", "subject"), level_name="grade")
PROBLEMS = [
    Problem("p0", "?", ("1",), level="2", subject="algebra"),
    Problem("p1", "?", ("1",), level="10", subject="algebra"),
    Problem("p2", "?", ("1",), level="2", subject="number theory"),
    Problem("p3", "?", ("1",), level=None, subject="algebra"),
]
GREEDY = Decoding()
FOUR = Decoding(samples=4, temperature=0.7)


def scored(
    problem, correct, sample=0, *, vote=0, rung=Rung.NUMBER, rule=Rule.BOX, tokens=10, stop=StopReason.EOS, **other
):
    answer = None if rule is None else "1"
    tools = other.pop("tools", None)
    attempt = Attempt(problem, sample, "text", tokens, stop, tools)
    return GradedAttempt(
        attempt, Grade(correct, rung, "1", answer, rule), vote=None if rule is None else vote, **other
    )


def one_each(marks):
    """One greedy attempt at each problem: 1 is right, 0 wrong, a blank none."""
    return [scored(f"p{i}", mark == "1") for i, mark in enumerate(marks) if mark != " "]


def samples(*rows):
    """Sampled attempts, a text for each problem: letters are answers, capitals right ones, `-` no answer."""
    return [
        scored(f"p{i}", mark.isupper(), sample, vote=ord(mark.lower()), rule=None if mark == "-" else Rule.BOX)
        for i, row in enumerate(rows)
        for sample, mark in enumerate(row)
        if mark != " "
    ]


# ---- a greedy pass


def test_a_greedy_pass():
    summary = summarise(SET, PROBLEMS, one_each("1101"), GREEDY, "cot")
    assert summary["problems"] == summary["attempts"] == summary["attempted"] == summary["rows"] == 4
    assert summary["complete"] is True
    assert summary["whole_set"] is True
    assert (summary["correct"], summary["accuracy"]) == (3, 0.75)
    assert summary["interval"] == list(mean_interval([1, 1, 1, 0]))
    assert not {"avg", "pass", "maj", "paper", "program_accuracy", "tools"} & set(summary)


def test_groups_are_sorted_by_number_and_counted_on_their_own():
    by = summarise(SET, PROBLEMS, one_each("1101"), GREEDY, "cot")["by"]
    assert list(by) == ["grade", "subject"]
    assert list(by["grade"]) == ["2", "10", "unknown"]
    assert by["grade"]["2"] == {
        "problems": 2,
        "attempted": 2,
        "accuracy": 0.5,
        "interval": list(mean_interval([1, 0])),
        "correct": 1,
    }
    assert {name: group["correct"] for name, group in by["subject"].items()} == {"algebra": 3, "number theory": 0}


def test_levels_with_words_are_sorted_by_number_too():
    names = ["Level 10", "Level 2", "Level 1", "hard"]
    problems = [Problem(f"p{i}", "?", ("1",), level=name) for i, name in enumerate(names)]
    by = summarise(replace(SET, group_by=("level",)), problems, one_each("1111"), GREEDY, "cot")["by"]
    assert list(by["grade"]) == ["Level 1", "Level 2", "Level 10", "hard"]


def test_a_benchmark_without_groups():
    assert summarise(replace(SET, group_by=()), PROBLEMS, one_each("1101"), GREEDY, "cot")["by"] == {}


# ---- what is missing


def test_missing_attempts_are_absent_and_not_wrong():
    summary = summarise(SET, PROBLEMS, one_each("1 1 "), GREEDY, "cot")
    assert (summary["problems"], summary["attempted"], summary["attempts"]) == (4, 2, 2)
    assert summary["accuracy"] == 1.0
    assert summary["interval"] == list(mean_interval([1, 1]))
    assert summary["complete"] is False
    assert summary["whole_set"] is True
    assert summary["by"]["grade"]["10"] == {
        "problems": 1,
        "attempted": 0,
        "accuracy": None,
        "interval": None,
        "correct": 0,
    }


@pytest.mark.parametrize("decoding", [GREEDY, FOUR])
@pytest.mark.parametrize("mode", ["cot", "tir"])
def test_a_pass_that_has_not_begun(decoding, mode):
    summary = summarise(SET, PROBLEMS, [], decoding, mode)
    assert summary["accuracy"] is summary["interval"] is summary["boxed_rate"] is summary["mean_tokens"] is None
    assert summary["complete"] is False
    assert summary["total_tokens"] == 0
    assert json.loads(json.dumps(summary)) == summary


def test_a_part_of_a_set_says_so():
    assert summarise(SET, PROBLEMS[:3], one_each("111"), GREEDY, "cot")["whole_set"] is False
    unknown = summarise(replace(SET, rows=None), PROBLEMS, one_each("1111"), GREEDY, "cot")
    assert unknown["whole_set"] is unknown["rows"] is None


def test_a_problem_with_some_of_its_samples():
    summary = summarise(SET, PROBLEMS, samples("AAbb", "A   ", "bbbb"), FOUR, "cot")
    assert summary["complete"] is False
    assert (summary["attempted"], summary["attempts"]) == (3, 9)
    assert summary["accuracy"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert summary["avg"] == {"4": 0.25}, "of the problems that have all four"
    assert summary["pass"]["1"] == pytest.approx(0.5)
    assert summary["pass"]["4"] == pytest.approx(0.5)
    assert summary["maj"]["4"] == pytest.approx((0.5 + 0) / 2)


def test_a_k_that_no_problem_has_is_left_out():
    summary = summarise(SET, PROBLEMS, samples("A ", "bA"), FOUR, "cot")
    assert summary["avg"] == {}
    assert list(summary["pass"]) == ["1", "2"]
    assert summary["maj"] == {"2": 0.5}


# ---- a sampled pass


def test_a_sampled_pass():
    summary = summarise(SET, PROBLEMS, samples("AAbc", "bAbA", "AAAA", "bb-A"), FOUR, "cot")
    assert summary["accuracy"] == summary["avg"]["4"] == pytest.approx((2 + 2 + 4 + 1) / 16)
    assert summary["interval"] == list(mean_interval([0.5, 0.5, 1.0, 0.25]))
    assert "correct" not in summary
    assert "correct" not in summary["by"]["grade"]["2"]
    assert summary["pass"] == pytest.approx({"1": 9 / 16, "2": (5 / 6 + 5 / 6 + 1 + 1 / 2) / 4, "4": 1.0})
    assert summary["maj"]["4"] == pytest.approx((1 + 0.5 + 1 + 0) / 4)
    # the six pairs: AA 1, four with one A ½, the other 0; last problem: bb 0, two b- 0, two bA ½, -A 1
    pairs = [(1 + 4 * 0.5 + 0) / 6, (1 + 4 * 0.5 + 0) / 6, 1, (0 + 0 + 2 * 0.5 + 1) / 6]
    assert summary["maj"]["2"] == pytest.approx(sum(pairs) / 4)
    assert list(summary["maj"]) == ["2", "4"]
    assert summary["answer_rate"] == 15 / 16


@pytest.mark.parametrize(
    ("count", "ks", "keys"),
    [
        (1, (), ["1"]),
        (2, (), ["1", "2"]),
        (6, (), ["1", "2", "4", "6"]),
        (12, (3, 8), ["1", "2", "3", "4", "8", "12"]),
    ],
)
def test_which_k_there_are(count, ks, keys):
    summary = summarise(SET, PROBLEMS[:1], samples("Ab" * 6)[:count], Decoding(count, 0.5), "cot", ks)
    assert list(summary["pass"]) == keys
    assert list(summary["maj"]) == keys[1:]
    assert list(summary["avg"]) == [str(count)]


def test_the_order_of_attempts_does_not_matter():
    rows = samples("AAbc", "bAbA", "AAAA", "bb-A")
    assert summarise(SET, PROBLEMS, rows[::-1], FOUR, "cot") == summarise(SET, PROBLEMS, rows, FOUR, "cot")


def test_the_first_sample_speaks_for_its_group():
    unequal = [scored("p0", sample == 0, sample, vote=0) for sample in range(4)]
    assert summarise(SET, PROBLEMS[:1], unequal[::-1], FOUR, "cot")["maj"]["4"] == 1.0


def test_the_method_is_recorded():
    assert summarise(SET, PROBLEMS, one_each("1101"), GREEDY, "cot")["statistics"]["interval"] == "agresti-coull"
    method = summarise(SET, PROBLEMS, samples("AAbc"), FOUR, "cot")["statistics"]
    assert method == {"interval": "agresti-coull", "confidence": 0.95, "vote_subsets": 200, "seed": 0}


# ---- texts, the grader, the paper's grading, tools


def test_texts_and_the_grader():
    rows = [
        scored("p0", True, rule=Rule.BOX, tokens=10),
        scored("p1", False, rule=Rule.SENTENCE, tokens=20, rung=Rung.TIMEOUT, stop=StopReason.STOP_STRING),
        scored("p2", False, rule=Rule.BOX, tokens=30, rung=Rung.REFUSED, stop=StopReason.LENGTH),
        scored("p3", False, rule=None, tokens=40, rung=Rung.NO_ANSWER, stop=StopReason.NAN),
    ]
    summary = summarise(SET, PROBLEMS, rows, GREEDY, "cot")
    assert summary["boxed_rate"] == 0.5
    assert summary["answer_rate"] == 0.75
    assert summary["rules"] == {
        "box": 2, "minerva": 0, "hashes": 0, "sentence": 1, "output": 0, "last_number": 0
    }  # fmt: skip
    assert summary["truncation_rate"] == 0.5
    assert (summary["mean_tokens"], summary["total_tokens"]) == (25.0, 100)
    assert summary["grader"] == {"timeouts": 1, "refused": 1, "errors": 0, "no_gold": 0}


def test_what_the_grader_could_not_do_is_wrong():
    rows = [scored("p0", False, rung=Rung.ERROR), scored("p1", None, rung=Rung.NO_GOLD), *one_each("  11")]
    summary = summarise(SET, PROBLEMS, rows, GREEDY, "cot")
    assert summary["accuracy"] == 0.5
    assert summary["grader"] == {"timeouts": 0, "refused": 0, "errors": 1, "no_gold": 1}


def test_the_papers_grading():
    rows = [replace(row, paper=paper) for row, paper in zip(one_each("1100"), (True, True, True, False), strict=True)]
    summary = summarise(SET, PROBLEMS, rows, GREEDY, "cot")
    assert summary["accuracy"] == 0.5
    assert summary["paper"] == {"accuracy": 0.75, "interval": list(mean_interval([1, 1, 1, 0])), "correct": 3}


def test_the_papers_grading_of_samples():
    rows = [replace(row, paper=row.attempt.sample < 3) for row in samples("AAbc", "bbbb")]
    paper = summarise(SET, PROBLEMS[:2], rows, FOUR, "cot")["paper"]
    assert paper == {"accuracy": 0.75, "interval": list(mean_interval([0.75, 0.75]))}


def test_tools():
    uses = [
        ToolUse(rounds=2, executions=1, output="1"),
        ToolUse(rounds=3, executions=3, errors=2, timeouts=1),
        ToolUse(rounds=1),
        ToolUse(rounds=2, executions=1, output="7"),
    ]
    programs = [True, None, None, False]
    rows = [
        scored(f"p{i}", True, tools=use, program=program)
        for i, (use, program) in enumerate(zip(uses, programs, strict=True))
    ]
    summary = summarise(SET, PROBLEMS, rows, GREEDY, "tir")
    assert summary["program_accuracy"] == 0.25
    assert summary["tools"] == {"mean_rounds": 2.0, "executions": 5, "errors": 2, "timeouts": 1, "error_rate": 0.4}


def test_without_programs_none_failed():
    rows = [replace(row, attempt=replace(row.attempt, tools=ToolUse(rounds=1))) for row in one_each("1101")]
    summary = summarise(SET, PROBLEMS, rows, GREEDY, "tir")
    assert summary["tools"]["error_rate"] == 0.0
    assert summary["program_accuracy"] == 0.0


def test_a_summary_is_json():
    rows = [replace(row, paper=True, program=True) for row in samples("AAbc", "bAbA", "AAAA", "bb-A")]
    summary = summarise(SET, PROBLEMS, rows, FOUR, "tir", ks=[3])
    assert json.loads(json.dumps(summary)) == summary


# ---- mistakes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*one_each("1101"), scored("q", True)], "'q', which is not one of the 4 problems"),
        ([*one_each("1101"), scored("p1", True)], "'p1' has sample 0 twice"),
        ([*one_each("1101"), scored("p1", True, sample=1)], "'p1' has a sample 1; this pass has 1"),
        ([replace(row, paper=True if i else None) for i, row in enumerate(one_each("1101"))], "paper's rules"),
    ],
)
def test_attempts_that_do_not_fit(rows, message):
    with pytest.raises(DataError, match=message):
        summarise(SET, PROBLEMS, rows, GREEDY, "cot")


def test_problems_that_cannot_be_summarised():
    with pytest.raises(DataError, match="no problems"):
        summarise(SET, [], [], GREEDY, "cot")
    with pytest.raises(DataError, match="'p0' occurs more than once"):
        summarise(SET, [*PROBLEMS, PROBLEMS[0]], [], GREEDY, "cot")


@pytest.mark.parametrize(
    ("decoding", "ks", "message"), [(FOUR, (2, 8), r"ks=\[8\]"), (FOUR, (0,), r"ks=\[0\]"), (GREEDY, (1,), "greedy")]
)
def test_ks_that_cannot_be(decoding, ks, message):
    with pytest.raises(ConfigError, match=message):
        summarise(SET, PROBLEMS, [], decoding, "cot", ks)


# ---- problem by problem


def test_scores_of_problems():
    rows = samples("AAbc", "bAbA", "A   ")
    assert problem_scores(rows[::-1]) == {"p0": [1, 1, 0, 0], "p1": [0, 1, 0, 1], "p2": [1]}
    assert problem_scores(rows, "pass@2") == {"p0": [pytest.approx(5 / 6)], "p1": [pytest.approx(5 / 6)]}
    assert problem_scores(rows, "maj@4") == {"p0": [1.0], "p1": [0.5]}


def test_scores_of_problems_by_other_grades():
    rows = [replace(row, paper=not row.correct, program=None if row.correct else True) for row in samples("Ab", "bb")]
    assert problem_scores(rows, "paper") == problem_scores(rows, "program") == {"p0": [0, 1], "p1": [1, 1]}


def test_scores_of_problems_average_to_the_summary():
    rows = samples("AAbc", "bAbA", "AAAA", "bb-A")
    summary = summarise(SET, PROBLEMS, rows, FOUR, "cot")
    for name in ("pass", "maj"):
        scores = problem_scores(rows, f"{name}@2")
        assert np.mean([score[0] for score in scores.values()]) == pytest.approx(summary[name]["2"])


@pytest.mark.parametrize("metric", ["pass", "pass@", "pass@0", "maj@x", "acc", "avg@4", "paper@2"])
def test_metrics_that_do_not_exist(metric):
    with pytest.raises(ConfigError, match="must be accuracy, paper, program, pass@k or maj@k"):
        problem_scores(samples("AAbc"), metric)


def test_metrics_that_there_is_nothing_for():
    with pytest.raises(ConfigError, match="at least 8 attempts"):
        problem_scores(samples("AAbc"), "pass@8")
    with pytest.raises(ConfigError, match="not graded by the paper's rules"):
        problem_scores(samples("AAbc"), "paper")


# ---- size


def test_a_tenth_of_math_with_64_samples_takes_seconds():
    generator = np.random.default_rng(0)
    problems = [Problem(f"p{i}", "?", ("1",), level=str(i % 5), subject=str(i % 7)) for i in range(500)]
    rows = [
        scored(problem.id, bool(vote == 0), sample, vote=int(vote))
        for problem in problems
        for sample, vote in enumerate(generator.geometric(0.4, size=64) - 1)
    ]
    start = time.process_time()
    summary = summarise(SET, problems, rows, Decoding(64, 0.7), "cot")
    assert time.process_time() - start < 10  # one or two
    assert summary["maj"]["64"] > summary["maj"]["2"]
