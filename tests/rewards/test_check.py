"""`check_reward` says what is wrong with a reward, and nothing about a good one."""

import asyncio
import io
import os
import threading
import time

import pytest
from rich.console import Console

from gruppo import check_reward
from gruppo.demo.task import exact_match
from gruppo.errors import ConfigError, DataError, RewardError
from gruppo.rewards import get_math_answer_reward, get_soft_overlong_punishment
from gruppo.rewards.cases import cases_of
from gruppo.rewards.outcomes import Kind

ROWS = [
    {"prompt": "What is 40 + 2?", "answer": "42", "level": 3},
    {"prompt": [{"role": "user", "content": "What is 3 * 3?"}], "answer": "3 * 3 = 9\n#### 9", "level": 1},
]


def check(fn, rows=ROWS[:1], **settings):
    return check_reward(fn, rows, show=False, **settings)


def texts(completions):
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]


def test_a_good_reward_passes():
    report = check(get_math_answer_reward("cmath"), ROWS)
    assert report.ok, report.warnings
    assert {trial.row for trial in report.trials} == {0, 1}
    assert all(trial.kind is Kind.SCORE for trial in report.trials)
    assert [trial.score for trial in report.of("gold, boxed")] == [1.0, 1.0]
    assert [trial.score for trial in report.of("several boxes, the last one wrong")] == [0.0, 0.0]
    longest = max(len(trial.case.text) for trial in report.trials)
    assert longest > 99_000


def test_what_is_printed():
    screen = io.StringIO()
    check_reward(get_math_answer_reward("cmath"), ROWS, console=Console(file=screen, width=100))
    printed = screen.getvalue()
    for part in ("math_answer_reward on 2 row(s)", "gold, boxed", "unbalanced braces", "No problems found."):
        assert part in printed


def finds_it(completions, answer, **kwargs):
    return [float(gold in text) for text, gold in zip(texts(completions), answer, strict=True)]


def test_a_substring_is_not_an_answer():
    report = check(finds_it)
    assert "scores 'gold inside a wrong answer' 1, and the gold answer 1" in report.warnings
    assert "scores 'several boxes, the last one wrong' 1, and the gold answer 1" in report.warnings
    assert [t.score for t in report.of("wrong, boxed")] == [0.0]


def likes_silence(completions, **kwargs):
    return [1.0 if not text.strip() else 0.5 for text in texts(completions)]


def test_the_empty_completion_wins():
    report = check(likes_silence)
    assert "scores 'empty' 1, and the gold answer 0.5" in report.warnings
    assert "the gold answer does not get the highest score" in report.warnings
    without_gold = check(likes_silence, [{"prompt": "p"}])
    assert "scores 'empty' 1, and other completions less" in without_gold.warnings


async def always_one(completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0] * len(completions)


class AlwaysNone:
    def __call__(self, completions, **kwargs):
        return [None] * len(completions)


def abstains_on_gold(completions, answer, **kwargs):
    return [None if gold in text else 0.1 * len(text) for text, gold in zip(texts(completions), answer, strict=True)]


def first_character(completions, **kwargs):
    return [float(ord(text[0])) for text in texts(completions)]


def wrong_length(completions, **kwargs):
    return [0.0, 1.0]


def not_finite(completions, **kwargs):
    return [float("nan") if not text else 1.0 for text in texts(completions)]


def leaves(completions, **kwargs):
    if "\x00" in texts(completions)[0]:
        os._exit(3)
    return [float(len(texts(completions)[0]))]


def fickle(completions, **kwargs):
    return [time.monotonic()]


@pytest.mark.parametrize(
    ("fn", "warning"),
    [
        (always_one, "gives the same score to everything: 1"),
        (AlwaysNone(), "never gives a score"),
        (abstains_on_gold, "abstains on the gold answer of row 0"),
        (first_character, "fails on 'empty': IndexError: string index out of range"),
        (wrong_length, "returned 2 rewards for 1 completions"),
        (not_finite, "fails on 'empty': The reward function 'not_finite' returned nan"),
        (leaves, "fails on 'nul characters'"),
        (fickle, "gives different results for the same completion"),
    ],
)
def test_warnings_in_words(fn, warning):
    report = check(fn)
    assert not report.ok
    assert any(warning in said for said in report.warnings), report.warnings


def hangs(completions, **kwargs):
    while len(texts(completions)[0]) > 50_000:
        pass
    return [0.0]


def slow_on_long(completions, **kwargs):
    time.sleep(0.3 if len(texts(completions)[0]) > 50_000 else 0.0)
    return [float(len(texts(completions)[0]))]


def test_a_hanging_reward_is_killed():
    begin = time.monotonic()
    report = check(hangs, timeout=1.0)
    assert "does not finish within 1 s on 'very long'" in report.warnings
    assert "timed out 3 times; the remaining cases were skipped" in report.warnings
    assert time.monotonic() - begin < 60


def test_a_slow_reward_is_told():
    report = check(slow_on_long, slow=0.2)
    assert any(said.startswith("takes 0.") and said.endswith("'very long'") for said in report.warnings)


def test_a_reward_that_cannot_be_sent_is_tried_here():
    lock = threading.Lock()

    def guarded(completions, answer, **kwargs):
        with lock:
            while len(texts(completions)[0]) > 50_000 and "{" not in texts(completions)[0]:
                time.sleep(0.01)
            return finds_it(completions, answer)

    report = check(guarded, timeout=0.5)
    assert report.warnings[0].startswith("cannot be sent to a worker process")
    assert any("does not finish within 0.5 s on 'very long'" in said for said in report.warnings)


def test_what_the_reward_is_given():
    def looks(prompts, completions, completion_ids, level, trainer_state, log_extra, log_metric, **kwargs):
        assert (len(prompts), level, trainer_state.global_step) == (1, [1], 0)
        assert completions[0][0]["role"] == "assistant"
        assert len(completion_ids[0]) == len(completions[0][0]["content"])
        log_extra("seen", ["it"])
        return [float(len(completion_ids[0]))]

    report = check(looks, ROWS[1:])
    assert not any(trial.error for trial in report.trials)


def test_rows_and_gold_column():
    report = check(finds_it, [{**ROWS[0], "final": "7"}] * 9, gold="answer", max_rows=2)
    assert {trial.row for trial in report.trials} == {0, 1}
    assert check(get_soft_overlong_punishment(100, 50), [{"prompt": "p"}]).of("very long")[0].score == -1.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check("a model"), ConfigError, "not str"),
        (lambda: check(finds_it, []), DataError, "at least one row"),
        (lambda: check(finds_it, gold="nope"), DataError, "no column 'nope'; they have prompt, answer, level"),
        (lambda: check(finds_it, timeout=0), ConfigError, "timeout=0"),
        (lambda: check(finds_it, [{"prompt": "p"}]), RewardError, "cannot be called: missing a required argument"),
        (lambda: check(lambda environments, **kwargs: [1.0]), ConfigError, "no environments"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- a form of its own


def exact(completions, answer, **kwargs):
    return [float(text == f"A: {gold.split()[-1]}") for text, gold in zip(texts(completions), answer, strict=True)]


def starts_well(completions, answer, **kwargs):
    return [float(t.startswith(f"A: {gold.split()[-1]}")) for t, gold in zip(texts(completions), answer, strict=True)]


def test_a_reward_with_a_form_of_its_own_is_told_the_form():
    warnings = check(exact, ROWS).warnings
    assert warnings == [
        "gives the same score to everything: 0; if it requires the answer in a certain form, pass template='A: {}'"
    ]
    report = check(exact, ROWS, template="A: {}")
    assert report.ok, report.warnings
    assert [trial.case.text for trial in report.of("gold, in the template")] == ["A: 42", "A: 9"]
    assert [trial.score for trial in report.of("gold, in the template")] == [1.0, 1.0]
    assert [trial.score for trial in report.of("wrong, in the template")] == [0.0, 0.0]


def test_the_demos_reward_in_its_form():
    report = check(exact_match, [{"prompt": "Q: 1 + 2?\n", "answer": "3"}], template="A: {}")
    assert report.ok, report.warnings


def test_a_loose_reward_in_its_form():
    report = check(starts_well, template="A: {}")
    assert "scores 'several answers, the last one wrong' 1, and the gold answer 1" in report.warnings


def test_a_template_may_have_braces_of_its_own():
    cases = {case.name: case for case in cases_of({"answer": "3"}, "answer", "<{a}> \\boxed{{}}")}
    assert cases["gold, in the template"].text == "<{a}> \\boxed{3}"
    assert [name for name, case in cases.items() if case.right] == ["gold, in the template"]


@pytest.mark.parametrize(("template", "row"), [("A: ", ROWS[0]), ("A: {}", {"prompt": "p"})])
def test_a_template_without_an_answer_is_refused(template, row):
    with pytest.raises(ConfigError, match=r"template='A: .*' must have \{\} where the answer goes"):
        check(exact, [row], template=template)
