import sys
import threading
import time

import pytest

from gruppo.errors import RewardError
from gruppo.rewards import accuracy_reward, reasoning_accuracy_reward

try:
    import math_verify
except ImportError:
    math_verify = None

needs_math = pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")


def chat(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


# completion, solution, reward, gold_parsed, answer_parsed
ANSWERS = [
    (r"\boxed{63}", "$63$", 1.0, "[63, '63']", "[63, '63']"),
    (r"\boxed{64}", "63", 0.0, "[63, '63']", "[64, '64']"),
    ("no idea", "63", 0.0, "[63, '63']", "[unparseable]"),
    ("63", "63", 0.0, "[63, '63']", "[unparseable]"),  # a bare number is not LaTeX
    ("$63$", "63", 0.0, "[63, '63']", "[unparseable]"),  # nor is it announced as the answer
    ("The final answer is $63$.", "63", 1.0, "[63, '63']", "[63, '63']"),
    (r"$1$, so \boxed{3}", r"\boxed{3}", 1.0, "[3, '3']", "[3, '3']"),  # the box comes first
    (r"\boxed{10 \text{ cm}}", "10", 1.0, "[10, '10']", "[10, '10']"),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0, "[0.500000000000000, '0.5']", r"[1/2, '\\frac{1}{2}']"),
    (r"\boxed{x}", "not math at all", None, "[unparseable]", "[skipped]"),
]


@needs_math
def test_accuracy_table():
    columns = {}
    completions = chat(*(row[0] for row in ANSWERS))
    solution = [row[1] for row in ANSWERS]
    rewards = accuracy_reward(completions, solution, log_extra=columns.__setitem__, prompts=["p"] * len(ANSWERS))
    assert rewards == [row[2] for row in ANSWERS]
    assert columns == {
        "solution": solution,
        "gold_parsed": [row[3] for row in ANSWERS],
        "answer_parsed": [row[4] for row in ANSWERS],
    }


# completion, solution, reward
PROSE = [
    ("Great question! There were 12000 eggs, so the answer is $42$.", "$42$", 1.0),
    ("That's it (finally)! Nice! The final answer is $42$.", "$42$", 1.0),
    ("We use " + " ".join(f"$(x+{i})^2$ ," for i in range(17)) + " so the answer is $7$.", "$7$", 1.0),
    ("We have $3$ eggs! There were **120000** before, so the answer is $7$.", "$7$", 1.0),
    (r"From $9^{100000}$ we get \boxed{7}", "$7$", 1.0),  # the box is what counts
    (r"\boxed{5}", "Wow! There are 12000 eggs. So the answer is $5$.", 1.0),
    (r"\boxed{5}", "Of **120000** eggs $5$ are left", 1.0),
]


@needs_math
@pytest.mark.parametrize(("completion", "solution", "reward"), PROSE)
def test_prose_is_not_taken_for_a_formula(completion, solution, reward):
    assert accuracy_reward([completion], [solution]) == [reward]


@needs_math
def test_plain_strings_count_too():
    assert accuracy_reward([r"\boxed{1}", r"\boxed{2}"], ["1", "1"]) == [1.0, 0.0]


@needs_math
def test_reasoning_is_cut_off():
    columns = {}
    completions = chat(
        r"<think>\boxed{1}</think>\boxed{63}",
        r"\boxed{63}",  # never stops thinking
        r"</think>\boxed{1}</think>\boxed{63}",  # the last part counts
        r"\boxed{63}</think>",
        r"</think>\boxed{63}",
    )
    solution = ["63", "63", "63", "63", "not math at all"]
    rewards = reasoning_accuracy_reward(completions, solution, log_extra=columns.__setitem__)
    assert rewards == [1.0, 0.0, 1.0, 0.0, None]
    incomplete = "[incomplete reasoning]"
    assert columns["gold_parsed"] == ["[63, '63']", incomplete, "[63, '63']", "[63, '63']", "[unparseable]"]
    assert columns["answer_parsed"] == ["[63, '63']", incomplete, "[63, '63']", "[unparseable]", "[skipped]"]


@needs_math
def test_first_delimiter_of_the_list_wins():
    completions = chat(r"</think>\boxed{1}<|end|>\boxed{63}", r"</think>\boxed{63}")
    assert reasoning_accuracy_reward(completions, ["63", "63"], ["<|end|>", "</think>"]) == [1.0, 1.0]
    # With the delimiters the other way round the first text holds two answers.
    assert reasoning_accuracy_reward(completions, ["63", "63"], ["</think>", "<|end|>"]) == [0.0, 1.0]
    assert reasoning_accuracy_reward(completions, ["63", "63"], []) == [0.0, 0.0]


def anywhere(on_main, work):
    """Run in this thread or in another one."""
    if on_main:
        return work()
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@needs_math
@pytest.mark.parametrize("on_main", [True, False])
def test_no_alarm_is_set_in_any_thread(monkeypatch, on_main):
    seen = []
    real_parse, real_verify = math_verify.parse, math_verify.verify

    def parse(*args, parsing_timeout=5, **kwargs):
        seen.append(parsing_timeout)
        return real_parse(*args, parsing_timeout=parsing_timeout, **kwargs)

    def verify(*args, timeout_seconds=5, **kwargs):
        seen.append(timeout_seconds)
        return real_verify(*args, timeout_seconds=timeout_seconds, **kwargs)

    monkeypatch.setattr(math_verify, "parse", parse)
    monkeypatch.setattr(math_verify, "verify", verify)
    assert anywhere(on_main, lambda: accuracy_reward([r"\boxed{1}"], ["1"])) == [1.0]
    assert seen == [None, None, None]


@needs_math
@pytest.mark.parametrize("on_main", [True, False])
def test_time_runs_out(monkeypatch, on_main):
    def stuck(*args, **kwargs):
        while True:
            pass

    monkeypatch.setattr("gruppo.rewards.accuracy.VERIFY_SECONDS", 0.3)
    monkeypatch.setattr(math_verify, "verify", stuck)
    assert anywhere(on_main, lambda: accuracy_reward([r"\boxed{1}"], ["1"])) == [0.0]
    monkeypatch.setattr("gruppo.rewards.accuracy.PARSE_SECONDS", 0.3)
    monkeypatch.setattr(math_verify, "parse", stuck)
    assert anywhere(on_main, lambda: accuracy_reward([r"\boxed{1}"], ["1"])) == [None]


@needs_math
@pytest.mark.parametrize(
    "completion",
    [
        r"\boxed{9^{9^{9^9}}}",
        r"The final answer is $9^{9^{9^9}}$.",
        r"\boxed{((9!)!)!}",
        r"\boxed{\sqrt{9^{99999}+1}}",
        r"\boxed{9^{9^{9^9}}",
        r"The answer is \[9^{9^{9^9}}\]",
        r"The answer is \(9^{9^{9^9}}\)",
        "The answer is [9^{9^{9^9}}] ",
        "$answer$ 9^{9^{9^9}} $",
        r"The final answer is $9^{9^{9^9}}$. I hope \boxed{7}",
        r"The answer is $9^{9^{9^9}}$ \fbox{7}",
        r"\boxed{" * 700 + "}" * 700,
        "{" * 100_000,
        r"\[" * 50_000,
        r"\boxed{" * 15_000,
        "$" * 100_000,
        "\x00" * 1000,
    ],
    ids=lambda text: text[:20],
)
def test_hostile_completions_are_wrong_and_quick(completion):
    begin = time.monotonic()
    assert accuracy_reward([completion], ["7"]) == [0.0]
    assert time.monotonic() - begin < 30


@needs_math
def test_the_end_of_a_long_completion_counts():
    assert accuracy_reward(["We think. " * 10_000 + r"\boxed{63}"], ["63"]) == [1.0]


@needs_math
def test_a_gold_that_cannot_be_worked_out_is_none():
    for gold in ("$9^{9^{9^9}}$", "9^9^9^9", "9**9**9**9"):
        assert accuracy_reward([r"\boxed{1}"], [gold]) == [None]


@pytest.mark.parametrize("solution", [["1"], ["1", "2", "3"], "12"])
def test_wrong_number_of_solutions(solution):
    with pytest.raises(RewardError, match="2 completions but"):
        accuracy_reward(["a", "b"], solution)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match='pip install "math-verify>='):
        accuracy_reward(["a"], ["1"])
