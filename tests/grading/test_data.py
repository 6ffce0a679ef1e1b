"""Every gold answer of the benchmark sets grades itself as right in every form, and other numbers as wrong."""

import gzip
import json
from pathlib import Path

import pytest

from gruppo.grading import LADDERS, Rule, Rung, extract_gold, grade, parse_number

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"the benchmark sets are not at {DATA}")

SETS = [
    ("gsm8k", "gsm8k/test.jsonl", 1319),
    ("gsm8k", "gsm8k/train.jsonl.gz", 7473),
    ("mgsm_zh", "mgsm_zh/test.jsonl", 250),
    ("cmath", "cmath/test.jsonl", 1098),
    ("cmath", "cmath/validation.jsonl", 600),
]

# form, rule, the language whose sentences it needs
FORMS = [
    ("so 3 and 5 make \\boxed{{{}}}.", Rule.BOX, "en"),
    ("$\\boxed{{\\text{{{}}}}}$", Rule.BOX, "en"),
    ("3 + 5 = 8\n#### {}", Rule.HASHES, "en"),
    ("With 3 and 5, the answer is {}.", Rule.SENTENCE, "en"),
    ("3和5，所以答案是：{}。", Rule.SENTENCE, "zh"),
    ("答：一共有{}个。", Rule.SENTENCE, "zh"),
    ("3 and 5 make {}", Rule.LAST_NUMBER, "en"),
]


def answers(file):
    raw = (DATA / file).read_bytes()
    text = (gzip.decompress(raw) if file.endswith(".gz") else raw).decode("utf-8")
    return [json.loads(line)["answer"] for line in text.split("\n") if line]


def distinct(file):
    """Each answer once: the form matters here, not the question."""
    return list(dict.fromkeys(answers(file)))


@pytest.mark.parametrize(("ladder", "file", "rows"), SETS, ids=[row[1] for row in SETS])
def test_every_gold_is_usable(ladder, file, rows):
    golds = answers(file)
    assert len(golds) == rows
    assert [gold for gold in golds if extract_gold(gold, LADDERS[ladder]) is None] == []


@pytest.mark.parametrize(("ladder", "file", "rows"), SETS, ids=[row[1] for row in SETS])
def test_every_gold_is_right_in_every_form(ladder, file, rows):
    wrong = []
    for form, rule, language in FORMS:
        if language not in LADDERS[ladder].languages:
            continue
        for gold in distinct(file):
            result = grade(form.format(gold), gold, ladder)
            if not result.correct or result.rule is not rule:
                wrong.append((form, gold, result))
    assert wrong == []


@pytest.mark.parametrize(("ladder", "file", "rows"), SETS, ids=[row[1] for row in SETS])
def test_other_numbers_are_wrong(ladder, file, rows):
    right = []
    for gold in distinct(file):
        number = parse_number(gold)
        for other in (number.value + 1, number.value - 1, -number.value - 1, number.value * 10 + 7, number.value + 99):
            result = grade(f"\\boxed{{{other}}}", gold, ladder)
            if result.correct or result.rung is not Rung.NUMBER:
                right.append((gold, other, result))
    assert right == []


def test_thousands_and_units_of_real_golds():
    for gold in distinct("gsm8k/test.jsonl"):
        for written in (f"{int(gold):,}", f"\\${gold}", f"{gold}.00", f"{gold} \\text{{ dollars}}"):
            assert grade(f"\\boxed{{{written}}}", gold, "gsm8k").correct, written
    for gold in distinct("mgsm_zh/test.jsonl"):
        for written in (f"{gold}元", f"{gold}\\text{{个}}", f"{gold} 美元"):
            assert grade(f"\\boxed{{{written}}}", gold, "mgsm_zh").correct, written
