"""Grading: find an answer in a text, normalise it, compare it with the gold answer, and report what decided.

    grade(completion, gold, "gsm8k")   a Grade: correct, the rung that decided, and the rule that found the answer
    extract, normalise, compare        its three steps
    LADDERS, Ladder                    how each data set is graded, and the class for other data sets

Pure functions, safe in threads and processes; the work is bounded for any model output.
"""

from gruppo.grading.extract import extract, extract_gold, last_box
from gruppo.grading.grade import compare, grade, normalise
from gruppo.grading.numbers import Number, parse_number
from gruppo.grading.types import LADDERS, Answer, AnswersMode, Grade, Ladder, Rule, Rung, find_ladder

__all__ = [
    "LADDERS",
    "Answer",
    "AnswersMode",
    "Grade",
    "Ladder",
    "Number",
    "Rule",
    "Rung",
    "compare",
    "extract",
    "extract_gold",
    "find_ladder",
    "grade",
    "last_box",
    "normalise",
    "parse_number",
]
