"""Finds the answer in a completion, by the first rule that matches, and reports the rule.

1. the last complete `\\boxed{…}`            4. the last "the answer is …", "答案是…"
2. "final answer is $…$"                     5. what the last program printed, if one ran
3. the last "#### 18"                        6. the last number

Every rule takes time linear in the length of the text.
"""

import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache

from gruppo.grading.numbers import numbers_in, parse_number
from gruppo.grading.text import JOINT, close_joints, join_thousands, plain_text, without_emphasis
from gruppo.grading.types import Answer, Ladder, Rule

__all__ = ["box_contents", "boxes_of_the_last_line", "extract", "extract_gold", "is_grade_school", "last_box"]

LONGEST = 100_000  # characters of a completion that are read, counted from its end
HEADLINES = 200  # lines with ####, and announcements of an answer, that are tried, also counted from the end

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,20}")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BARE_BOX = re.compile(r"[^\s${}]{1,200}(?:\{[^{}\s]{0,100}\}){0,2}")
PERCENT = re.compile(r" ?\\?%")
# As in pandoc: no space inside math delimiters, so that the dollars of "$18 and $20" are money.
INLINE_MATH = r"\${1,2}(?![\s$])((?:\\.|[^$\\\n]){1,500}?)(?<!\s)\${1,2}(?![0-9])"
MINERVA = re.compile(rf"final answer is:?\s{{0,20}}{INLINE_MATH}", re.IGNORECASE)
HASHES = re.compile(r"####[ \t]{0,20}([^\n]{1,500})")
SENTENCE = {
    "en": re.compile(r"\b(?:(?:the|final) answer is|answer ?\*{0,2} ?:)", re.IGNORECASE),
    "zh": re.compile(r"答案(?:是|为|:| :)|答 ?:"),
}
LEAD = re.compile(r"(?:[\s*:=]|\\\[|\$\$(?=\s)){0,40}")
SENTENCE_END = re.compile(r"\n|。|[.!](?=\s|$|\*\*)")
# The start of a second clause: the answer comes before it, unless the clause offers another answer.
CLAUSE = re.compile(r",(?![0-9]{3})|(?<!\\)\(")
ANOTHER = re.compile(r"^\s*(?:and\b|和)|\bor\b|或", re.IGNORECASE)
PHRASE = re.compile(r" (?:after|for|from|in|within) (?=[0-9$])")  # "7 eggs are left after 3 days"
HEADLINE = re.compile(r"\s{0,20}[0-9.]{1,10} [A-Z][a-z]")
THIN_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:\\,[0-9]{3})+(?![0-9])")
# In prose, "in 3 200 came" may be two numbers. A group that begins with a zero cannot be a number by itself.
BLANK_THOUSANDS = re.compile(r"(?<![0-9.,/])[1-9][0-9]{0,2}(?: [0-9]{3}){0,4} 0[0-9]{2}(?: [0-9]{3}){0,4}(?![0-9/])")
# "The answer is not 18", "is negative 18", "is 18 or twenty"
TAKEN_BACK = re.compile(
    r"(?:\b(?:not|never|minus|negative|(?:less|more|fewer|greater) than)|n['’]t|不是|不到|零下) ?$", re.IGNORECASE
)
# Words around a lone number that make it another amount; the same after a number as a whole (NOT_UNITS, CJK_AMOUNT).
TAKEN_PART = re.compile(
    r"\b(?:half|halves|twice|thrice|double|triple|thirds?|quarters?|fourths?|fifths?|roots?|square|cube|reciprocal|"
    r"factorial|log) (?:of )?(?:the )?(?:number )?$",
    re.IGNORECASE,
)
CHANGED = re.compile(
    r" ?(?:squared|cubed|k|dozens?|and (?:a|one|two|three) (?:half|halves|thirds?|quarters?|fourths?|fifths?))\b|"
    r" ?[\u4e00-\u9fff]?半|[十百千](?![克米瓦卡])|成(?![人员绩])|折| ?的(?:[平立]方|.{1,3}次方|.{1,3}分之)",
    re.IGNORECASE,
)
OFFERED = re.compile(r" ?(?:or\b|或)", re.IGNORECASE)
LABEL = re.compile(r"[^\W\d][^:=]{0,60}: (?=\S)")  # "Percent error: 4"


def extract(completion: str, ladder: Ladder, output: str | None = None) -> Answer | None:
    """The answer of a completion, or None.

    `output` is what the model's last program printed, if it ran without an error. It is a separate argument and is
    never searched for in the completion, where the model could fake it.

    Example:
        extract(r"so \\boxed{3}, no: \\boxed{18}", LADDERS["gsm8k"]) == Answer("18", Rule.BOX)
        extract("See above, in 2 steps.", LADDERS["gsm8k"], output="17\\n18\\n") == Answer("18", Rule.OUTPUT)
    """
    text = plain_text(completion[-LONGEST:])[-LONGEST:]
    rules: list[tuple[Rule, Callable[[], str | None]]] = [
        (Rule.BOX, lambda: last_box(text)),
        (Rule.MINERVA, lambda: _minerva(text)),
        (Rule.HASHES, lambda: _hashes(text, ladder)),
        (Rule.SENTENCE, lambda: _sentence(text, ladder)),
        (Rule.OUTPUT, lambda: None if output is None else _printed(output, ladder)),
        (Rule.LAST_NUMBER, lambda: _last_number(text)),
    ]
    for rule, find in rules:
        found = find()
        if found is not None:
            return Answer(found, rule)
    return None


@lru_cache(maxsize=256)  # the completions of a group share one reference
def extract_gold(reference: str, ladder: Ladder) -> str | None:
    """The answer of a reference: boxed, after ####, announced, or the whole text if it is short.

    A worked solution that announces no answer has none, since its last number may be anything.

    Example:
        extract_gold("16 - 3 = 13 eggs.\\n#### 13", LADDERS["gsm8k"]) == "13"
    """
    text = plain_text(reference[-LONGEST:]).strip()
    marked = _marked(text, ladder)
    if marked is not None:
        return marked if _usable(marked, ladder) else None
    if _usable(text, ladder):
        return text
    found = _sentence(text, ladder)
    return found if found is not None and _usable(found, ladder) else None


def _marked(text: str, ladder: Ladder) -> str | None:
    return last_box(text) or _minerva(text) or _hashes(text, ladder)


def is_grade_school(reference: str) -> bool:
    """Whether a reference gives its answer as in grade-school data sets: a literal number after ####."""
    text = plain_text(reference[-LONGEST:]).strip()
    ladder = Ladder(literal=True)
    gold = _hashes(text, ladder)
    return gold is not None and gold == _marked(text, ladder) and _usable(gold, ladder)


def _usable(gold: str, ladder: Ladder) -> bool:
    if ladder.literal:
        return parse_number(gold, units=ladder.units) is not None
    return bool(gold.strip(" .$")) and "\n" not in gold and len(gold) <= 500


def _content(text: str, box: re.Match[str], closing: dict[int, int]) -> str | None:
    """The content of a box; None if it is empty or never closed."""
    start = box.end()
    percent = None
    if text[start : start + 1] == "{":
        if start not in closing:
            return None
        end = closing[start]
        content = text[start + 1 : end].strip()
        percent = PERCENT.match(text, end + 1)
    else:
        bare = BARE_BOX.match(text, start)
        content = bare[0] if bare else ""
    if not content.strip(" .$"):
        return None
    return content + "%" if percent and not content.endswith("%") else content


def _matching_braces(text: str) -> dict[int, int]:
    """The position of the closing brace of each `{`; braces that are never closed are absent."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for found in BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            closing[opened.pop()] = found.start()
    return closing


def last_box(text: str) -> str | None:
    """The content of the last complete box that is not empty.

    Example:
        last_box(r"\\boxed{3}, then \\boxed{\\frac{1}{2}}, then \\boxed{") == r"\\frac{1}{2}"
    """
    closing = _matching_braces(text)
    for box in reversed(list(BOX.finditer(text))):
        if (content := _content(text, box, closing)) is not None:
            return content
    return None


def box_contents(text: str) -> list[str]:
    """The contents of all complete boxes that are not empty, in order."""
    closing = _matching_braces(text)
    contents = (_content(text, box, closing) for box in BOX.finditer(text))
    return [content for content in contents if content is not None]


def boxes_of_the_last_line(completion: str) -> str | None:
    """All boxes of the last line that has any, joined with commas; for rows that require several answers."""
    text = plain_text(completion[-LONGEST:])[-LONGEST:]
    closing = _matching_braces(text)
    line: int | None = None
    found: list[str] = []
    for box in reversed(list(BOX.finditer(text))):
        if line is not None and box.start() < line:
            break
        if (content := _content(text, box, closing)) is not None:
            found.append(content)
            line = text.rfind("\n", 0, box.start()) if line is None else line
    return ", ".join(reversed(found)) or None


def _minerva(text: str) -> str | None:
    found = MINERVA.findall(text)
    return found[-1].strip() if found else None


def _hashes(text: str, ladder: Ladder) -> str | None:
    for found in reversed(list(HASHES.finditer(text))[-HEADLINES:]):
        line = found[1]
        # "#### Step 3" is a heading, and so is "#### 3 Sum" if text follows it.
        if HEADLINE.match(line) and text[found.end() :].strip():
            continue
        if parse_number(line) is not None or (not ladder.literal and line.lstrip()[:1] in ("\\", "$", "(", "[")):
            return line.strip()
        if ladder.literal and parse_number(first := PHRASE.split(line)[0]) is not None:
            return first.strip()
    return None


def _sentence(text: str, ladder: Ladder) -> str | None:
    ends = sorted(found.end() for language in ladder.languages for found in SENTENCE[language].finditer(text))
    for end in reversed(ends[-HEADLINES:]):
        lead = LEAD.match(text, end)
        start = lead.end() if lead else end
        line = text[start : start + 1000]
        stop = SENTENCE_END.search(line)
        span = _closed(line[: stop.start()] if stop else line, lead[0] if lead else "").strip(" *")
        if span and not ladder.literal:
            return _math_in(span)
        # "Let me check if the answer is right." announces nothing.
        if span and next(numbers_in(_without_math_signs(span)), None) is not None:
            return _literal_in(span, ladder)
    return None


def _closed(span: str, lead: str) -> str:
    """Remove the stars that close emphasis opened just before the span, as in "The answer is **18** eggs"."""
    stars = len(lead) - len(lead.rstrip("*"))
    return re.sub(rf"(?<=[^\s*])\*{{{stars}}}(?![*0-9A-Za-z(\\])", "", span, count=1) if stars else span


def _literal_in(span: str, ladder: Ladder) -> str:
    """The number that a sentence gives as its answer: the whole span, the part after "=", or the only number in it."""
    if parse_number(span, units=ladder.units) is not None:
        return span
    for whole in _clauses(span):
        result = whole.rpartition("=")[2]
        for candidate in (whole, result):
            if parse_number(candidate, units=ladder.units) is not None:
                return candidate.strip()
        readable = _without_math_signs(result)
        within = list(numbers_in(readable))
        if len(within) == 1:
            before, _, behind = readable.partition(within[0])
            changed = TAKEN_BACK.search(before) or TAKEN_PART.search(before) or CHANGED.match(behind)
            return span if changed or OFFERED.match(behind) else within[0]
    return span


def _clauses(span: str) -> list[str]:
    """A sentence and its first clause; the clause comes first if a bracket follows it, second if a comma does."""
    clause = CLAUSE.search(span)
    if clause is None:
        return [span]
    first, rest = span[: clause.start()], span[clause.end() :]
    if ANOTHER.search(rest) or (clause[0] == "," and parse_number(rest) is not None):
        return [span]
    return [span, first] if clause[0] == "," else [first, span]


def _math_in(span: str) -> str:
    found = re.findall(INLINE_MATH, span)
    return found[-1] if found else span


def _printed(output: str, ladder: Ladder) -> str | None:
    """The answer in the last line that a program printed: the announced answer, or the line without its label."""
    lines = [line for line in plain_text(output[-LONGEST:])[-LONGEST:].splitlines() if line.strip()]
    if not lines:
        return None
    line = lines[-1].strip()
    announced = _marked(line, ladder) or _sentence(line, ladder)
    if announced is not None:
        return announced
    label = LABEL.match(line)
    return _math_in(line[label.end() :] if label else line)


def _last_number(text: str) -> str | None:
    readable = _without_math_signs(text)
    if not (found := deque(numbers_in(readable), maxlen=1)):
        return None
    _, number, behind = readable.rpartition(found[0])
    changed = CHANGED.match(behind)
    return number + changed[0] if changed else number


def _without_math_signs(text: str) -> str:
    """Remove math delimiters, write fractions as a/b, and join groups of thousands."""
    text = without_emphasis(text)
    text = re.sub(r" ?\\[dtc]?frac\s?\{(-?[0-9.]{1,50})\}\s?\{([0-9.]{1,50})\}", r" \1/\2 ", text)
    text = THIN_THOUSANDS.sub(lambda found: found[0].replace("\\,", ""), text)
    text = BLANK_THOUSANDS.sub(lambda found: join_thousands(found[0]), text)
    text = re.sub(r"\\?\$|\\[()\[\]!,]", JOINT, text.replace("{,}", ","))
    return close_joints(text).replace("\\%", "%")
