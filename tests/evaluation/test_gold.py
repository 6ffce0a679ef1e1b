"""Gold answers are right in their own places and wrong in others', and a report says where that fails."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.errors import ConfigError
from gruppo.evaluation.gold import GoldFailure, check_gold
from gruppo.evaluation.grading import Graders
from gruppo.evaluation.types import Benchmark, Problem
from gruppo.grading import LADDERS, Rung, parse_number

try:
    import math_verify
except ImportError:
    math_verify = None

needs_math = pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")

DATA = Path(__file__).parents[3] / "shared" / "data"

SETS = [
    ("gsm8k", "gsm8k/test.jsonl", 1319),
    ("mgsm_zh", "mgsm_zh/test.jsonl", 250),
    ("cmath", "cmath/test.jsonl", 1098),
    ("cmath", "cmath/validation.jsonl", 600),
]


def benchmark(name="gsm8k", **changes):
    return Benchmark(name, name, f"{name}.jsonl", replace(LADDERS[name], **changes))


def rows(*answers, mode="last"):
    return [
        Problem(f"p{n}", "?", (answer,) if isinstance(answer, str) else answer, mode)
        for n, answer in enumerate(answers)
    ]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the benchmark sets are not at {DATA}")
@pytest.mark.parametrize(("name", "file", "count"), SETS, ids=[row[1] for row in SETS])
def test_the_golds_of_the_real_sets(name, file, count):
    read = [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").split("\n") if line]
    problems = [Problem(row["id"], row["question"], (row["answer"],)) for row in read]
    report = check_gold(benchmark(name), problems, paper=math_verify is not None)
    assert report.describe() == (
        f"{name}: {count} of {count} gold answers accepted, {count} of {count} answers of other problems rejected."
    )
    assert report.ok


def test_a_missing_package_is_told_before_anything_is_graded(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    for name, paper in [("math", False), ("gsm8k", True)]:
        with pytest.raises(ConfigError, match=r"pip install .math-verify"):
            check_gold(benchmark(name), [], paper=paper)
    assert check_gold(benchmark("gsm8k"), []).ok


MIXED = ["18", "1,250", "40%", "0.4", "40", "2/6", "1/3", "0.5", "7", "7", "7.0", "-3", "12.5"]


def test_golds_of_all_kinds():
    report = check_gold(benchmark("cmath"), rows(*MIXED))
    assert (report.ok, report.accepted, report.shuffled, report.rejected_shuffled) == (True, 13, 13, 13)


@given(st.lists(st.sampled_from(MIXED), min_size=1, max_size=15), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_a_problem_never_gets_its_own_value(answers, seed):
    report = check_gold(benchmark("cmath"), rows(*answers), seed)
    assert report.failures == ()
    # Where no value fills half of the places, everyone can get another's; 40 % has several readings.
    values = [parse_number(answer).value for answer in answers]
    if not {"40%", "0.4", "40"} & set(answers) and max(map(values.count, values)) <= len(values) / 2:
        assert report.shuffled == len(answers)


def test_another_seed_is_another_shuffle():
    # Three answers within the reach of a ladder that is far too tolerant: who meets whom depends on the seed.
    loose = benchmark(tolerance=0.9)
    problems = rows("1", "1.5", "20", "30", "40.2", "41")
    found = {tuple(failure.graded for failure in check_gold(loose, problems, seed).failures) for seed in range(10)}
    assert len(found) > 1
    assert check_gold(loose, problems, 3) == check_gold(loose, problems, 3)


def test_a_ladder_that_is_too_tolerant_is_found_out():
    report = check_gold(benchmark(tolerance=0.9), rows("1", "1.5"))
    assert not report.ok
    assert (report.accepted, report.shuffled, report.rejected_shuffled) == (2, 2, 0)
    assert report.failures[0] == GoldFailure("p0", "other accepted", "1", "\\boxed{1.5}", Rung.NUMBER)
    assert report.describe() == (
        "gsm8k: 2 of 2 gold answers accepted, 0 of 2 answers of other problems rejected.\n"
        "  p0: other accepted (number): gold '1', graded '\\\\boxed{1.5}'\n"
        "  p1: other accepted (number): gold '1.5', graded '\\\\boxed{1}'"
    )


def test_golds_that_cannot_be_graded_are_named():
    report = check_gold(benchmark(), rows("18", "who knows"))
    assert (report.ok, report.problems, report.accepted) == (False, 2, 1)
    assert report.failures == (GoldFailure("p1", "gold rejected", "who knows", "\\boxed{who knows}", Rung.NO_GOLD),)


def test_a_ladder_without_units_rejects_golds_with_units():
    assert check_gold(benchmark(), rows("18 eggs", "3")).ok
    assert [failure.problem for failure in check_gold(benchmark(units=False), rows("18 eggs", "3")).failures] == ["p0"]


def test_long_reports_are_cut():
    text = check_gold(benchmark(), rows(*["unknown"] * 14)).describe()
    assert text.count("gold rejected") == 10
    assert text.endswith("… and 4 more")


@pytest.mark.parametrize("answers", [[], ["7"], ["7", "7.0", "7"], ["40%", "0.4"], ["0.3333", "1/3"]])
def test_where_there_is_no_other_answer(answers):
    report = check_gold(benchmark(), rows(*answers))
    assert (report.ok, report.accepted, report.shuffled) == (True, len(answers), 0)
    assert ("no other problem with a different answer" in report.describe()) is bool(answers)


@needs_math
@pytest.mark.parametrize("mode", ["all", "any"])
def test_problems_with_several_answers(mode):
    problems = [*rows(("2", "5"), ("x+1", "y"), mode=mode), Problem("q", "?", ("(1,2)",))]
    report = check_gold(benchmark("math"), problems, paper=True)
    assert report.describe() == "math: 3 of 3 gold answers accepted, 3 of 3 answers of other problems rejected."


@needs_math
@pytest.mark.medium
def test_formulas_in_workers():
    problems = rows(r"\frac{\sqrt{3}}{2}", "x^2+1", "(1,2)", r"\text{even}", "[2,5)", "30^\\circ", "30", "3:5")
    with Graders(processes=2) as graders:
        report = check_gold(benchmark("math"), problems, workers=graders)
    assert report.ok, report.describe()
    assert (report.accepted, report.rejected_shuffled) == (8, 8)


@needs_math
def test_the_papers_rules_may_reject_a_gold_that_ours_accept():
    problems = rows(r"\left\{x\right.", "3")  # an escaped brace without its like: that code never sees the box close
    assert check_gold(benchmark("math"), problems).ok
    report = check_gold(benchmark("math"), problems, paper=True)
    assert [(failure.problem, failure.kind) for failure in report.failures] == [
        ("p0", "gold rejected by the paper's rules")
    ]
    assert report.accepted == 2
