"""The ladder: compares an answer with the gold answer, rung by rung, and reports which rung decided.

1. the normalised texts are equal
2. both are literal numbers: equal, or closer than the tolerance
3. data sets that require a literal number stop here; they reject any other answer before rung 1
4. a gold with a colon (a time, a ratio), and numbers side by side without an operator, are compared as text only
5. math-verify compares the formulas
"""

import re
from collections.abc import Sequence
from typing import get_args

from gruppo.errors import ConfigError
from gruppo.grading.extract import boxes_of_the_last_line, extract, extract_gold
from gruppo.grading.numbers import SHORT_UNITS, parse_number, same_number
from gruppo.grading.symbolic import compare_formulas
from gruppo.grading.text import WRAPPER, plain_text, tidy
from gruppo.grading.types import Answer, AnswersMode, Grade, Ladder, Rule, Rung, find_ladder

__all__ = ["compare", "find_answer", "grade", "grade_answer", "normalise"]

LONGEST = 2000  # characters of an answer that are compared as text

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DAY_FIRST = re.compile(rf"([0-9]{{1,2}})(?:st|nd|rd|th)?(?: of)? ({MONTHS})", re.IGNORECASE)

MIXED = re.compile(r"(?<![0-9.,/^_])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9./])")
# Not after an exponent or an index: 2^3 5 is a product.
NEIGHBOURS = re.compile(r"(?<![\^_0-9.])(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?: +|['\"]+)\.?[0-9]")
LOOSE_BRACES = re.compile(r"(?<![\^_}\]A-Za-z])\{ ?([0-9.]+) ?\}")
LAST_LETTERS = re.compile(r"(?:(?<=[0-9})\]])|(?<=[0-9A-Za-z})\]] ))[A-Za-z]{1,2}$")
# Text that is not a unit: it offers another number, negates the number, or modifies it.
NOT_DROPPED = re.compile(
    r"(?<![A-Za-z^0-9])[0-9]|\b(?:or|than|plus|minus|squared|cubed|factorial|divided|multiplied|not|never|wrong|"
    r"incorrect|half|halves|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|"
    r"thousandths?|hundred|thousand|[mbtr]+illion|two|three|four|five|six|seven|eight|nine|ten)\b",
    re.IGNORECASE,
)


def normalise(answer: str, ladder: Ladder) -> str:
    """The text that the first rung compares.

    Example:
        normalise(r"$1{,}250.0\\text{ m}$", LADDERS["gsm8k"]) == "1250"
        normalise(r"\\left( \\dfrac{x}{2}, \\sqrt 3 \\right)", LADDERS["math"]) == r"(\\frac{x}{2},\\sqrt{3})"
    """
    number = parse_number(answer, units=ladder.units, algebra=not ladder.literal)
    if number is not None:
        return number.text
    text = tidy(plain_text(answer[:LONGEST]))
    text = _braced(DAY_FIRST.sub(r"\2 \1", text))
    return re.sub(r"(?<![0-9.]) | (?![0-9.])", "", text)  # 1 3 is not 13


def _braced(text: str) -> str:
    """Put braces around single-digit arguments of fractions and roots: as in LaTeX, \\frac134 is a third, then a 4."""
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\(frac|sqrt) ?([0-9])", r"\\\1{\2}", text)
    return re.sub(r"(\\frac ?\{[^{}]*\}) ?([0-9])", r"\1{\2}", text)


def compare(gold: str, answer: str, ladder: Ladder) -> tuple[bool, Rung]:
    """Whether an extracted answer equals the gold one, and the rung that decided.

    Example:
        compare("40%", "0.4", LADDERS["cmath"]) == (True, Rung.NUMBER)
    """
    gold_text, answer_text = normalise(gold, ladder), normalise(answer, ladder)
    algebra = not ladder.literal
    gold_number = parse_number(gold, units=ladder.units, algebra=algebra)
    number = parse_number(answer, units=ladder.units, algebra=algebra)
    if ladder.literal and number is None:
        return False, Rung.NOT_LITERAL
    if gold_text and gold_text == answer_text:
        return True, Rung.STRING
    if gold_number is not None and number is not None:
        return same_number(gold_number, number, ladder.tolerance), Rung.NUMBER
    if ladder.literal or ":" in gold_text:
        return False, Rung.STRING
    gold_formula = _formula(gold) if gold_number is None else _escaped(gold_number.text)
    formula = _formula(answer) if number is None else _escaped(number.text)
    if _has_neighbours(gold_formula) or _has_neighbours(formula):
        return False, Rung.STRING
    return compare_formulas(gold_formula, formula, ladder.seconds)


def _formula(answer: str) -> str:
    """LaTeX for math-verify, wrappers included, since it handles `\\text` and units itself by dropping them."""
    text = tidy(plain_text(answer[:LONGEST]), unwrap=False)
    text = WRAPPER.sub(lambda found: f" {found[1]} " if NOT_DROPPED.search(found[1]) else found[0], text)
    text = _braced(MIXED.sub(r"\1\\frac{\2}{\3}", text))
    if (last := LAST_LETTERS.search(text)) and not SHORT_UNITS.fullmatch(last[0]) and "\\in " not in text:
        text += "^{1}"  # math-verify takes trailing h, t, ab etc. for units, and reads 2ab as 2
    return _escaped(text)


def _has_neighbours(formula: str) -> bool:
    """Whether two numbers are side by side, which math-verify misreads: 1 3 as 4, 1'3 as 13 and 5 1/2 as 3."""
    text = tidy(formula)
    for _ in range(2):
        text = LOOSE_BRACES.sub(r" \1 ", text)
    return NEIGHBOURS.search(text) is not None


def _escaped(formula: str) -> str:
    return re.sub(r"(?<!\\)%", r"\\%", formula)


def grade(
    completion: str,
    gold: str | Sequence[str],
    ladder: str | Ladder = "math",
    answers_mode: AnswersMode = "last",
    output: str | None = None,
) -> Grade:
    """Grade a completion against a reference answer or worked solution.

    `answers_mode` says what several golds mean: "all" requires every one of them (in boxes of the last line that has
    any), "any" one of them; "last" and "same" take a single gold. `output` is what the model's last program printed;
    see `extract`.

    Example:
        grade("16 - 3 - 4 = 9, so \\\\boxed{18 eggs}", "#### 18", "gsm8k").correct is True
    """
    ladder = find_ladder(ladder)
    return grade_answer(find_answer(completion, ladder, answers_mode, output), gold, ladder, answers_mode)


def find_answer(
    completion: str, ladder: Ladder, answers_mode: AnswersMode = "last", output: str | None = None
) -> Answer | None:
    """The first step of `grade`: the answer of a completion, or None.

    Example:
        find_answer(r"\\boxed{2} and \\boxed{5}", LADDERS["math"], "all") == Answer("2, 5", Rule.BOX)
    """
    if answers_mode == "all" and (joined := boxes_of_the_last_line(completion)) is not None:
        return Answer(joined, Rule.BOX)
    return extract(completion, ladder, output)


def grade_answer(
    answer: Answer | None, gold: str | Sequence[str], ladder: Ladder, answers_mode: AnswersMode = "last"
) -> Grade:
    """The second step of `grade`: compare the extracted answer with the reference.

    Example:
        grade_answer(Answer("18 eggs", Rule.BOX), "#### 18", LADDERS["gsm8k"]).correct is True
    """
    if answers_mode not in get_args(AnswersMode):
        raise ConfigError(f"answers_mode={answers_mode!r} must be one of {', '.join(get_args(AnswersMode))}.")
    golds = [gold] if isinstance(gold, str) else list(gold)
    if answers_mode not in ("all", "any") and len(golds) != 1:
        raise ConfigError(f'{len(golds)} golds need answers_mode="all" or "any", not {answers_mode!r}.')
    found_golds = [text for each in golds if (text := extract_gold(each, ladder)) is not None]
    if not found_golds or (answers_mode == "all" and len(found_golds) < len(golds)):
        return Grade(None, Rung.NO_GOLD)
    if answers_mode == "all":
        found_golds = [", ".join(found_golds)]
    if answer is None:
        return Grade(False, Rung.NO_ANSWER, gold=found_golds[0])
    grades = []
    for each in found_golds:
        correct, rung = compare(each, answer.text, ladder)
        grades.append(Grade(correct, rung, gold=each, answer=answer.text, rule=answer.rule))
        if correct:
            break
    return next((g for g in grades if g.correct), grades[0])
