"""Grading attempts: grades, programs, votes, and the worker processes behind them."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gruppo
from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.graders import Call, Lost, Outcome, run_calls
from gruppo.evaluation.grading import Graders, _code, grade_attempts, grader_version, require
from gruppo.evaluation.types import Attempt, Problem, ToolUse
from gruppo.grading import LADDERS, Answer, Grade, Ladder, Rule, Rung, compare, grade, normalise
from gruppo.types import StopReason

try:
    import math_verify
except ImportError:
    math_verify = None

needs_math = pytest.mark.skipif(math_verify is None, reason="needs math-verify: pip install math-verify")

GSM8K, MATH = LADDERS["gsm8k"], LADDERS["math"]


@pytest.fixture(scope="module")
def graders():
    with Graders(processes=2) as pool:
        yield pool


def attempt(text, problem="p", sample=0, tools=None):
    return Attempt(problem, sample, text, tokens=1, stop=StopReason.EOS, tools=tools)


def transcript(*texts, output=None):
    """What the model wrote, a result, what the model wrote, …; `output` is what the last program printed."""
    segments = tuple((("model", "output")[i % 2], text) for i, text in enumerate(texts))
    return replace(attempt("".join(texts), tools=ToolUse(output=output)), segments=segments)


def one(text, answers, ladder, mode="last", tools=None, **options):
    answers = (answers,) if isinstance(answers, str) else answers
    problem = Problem("p", "How many?", answers, mode)
    return grade_attempts({"p": problem}, [attempt(text, tools=tools)], ladder, **options)[0]


def votes(answers, ladder, workers=None, gold="1"):
    """The votes for answers in boxes; None stands for a text without an answer."""
    texts = ["I give up." if answer is None else f"\\boxed{{{answer}}}" for answer in answers]
    rows = [attempt(text, sample=sample) for sample, text in enumerate(texts)]
    return [row.vote for row in grade_attempts({"p": Problem("p", "?", (gold,))}, rows, ladder, workers=workers)]


# ---- grades


def test_the_grade_is_that_of_the_grading_package():
    texts = ["so \\boxed{18}", "#### 17", "I give up.", "\\boxed{9+9}", "the answer is 18 eggs"]
    rows = grade_attempts({"p": Problem("p", "?", ("18",))}, [attempt(text) for text in texts], GSM8K)
    assert [row.grade for row in rows] == [grade(text, "18", GSM8K) for text in texts]
    assert [row.correct for row in rows] == [True, False, False, False, True]
    assert [row.attempt.text for row in rows] == texts
    assert {(row.paper, row.program) for row in rows} == {(None, None)}


@needs_math
def test_formulas_get_the_grade_of_the_grading_package_too(graders):
    # The same answer found by two rules, none, a wrong one, and one that is refused.
    texts = ["\\boxed{\\sqrt{12}}", "the answer is $\\sqrt{12}$.", "I give up.", "\\boxed{3}", "\\boxed{9^{9^{9^9}}}"]
    wanted = [grade(text, r"2\sqrt{3}", MATH) for text in texts]
    assert [found.rule for found in wanted[:2]] == [Rule.BOX, Rule.SENTENCE]
    for workers in (None, graders):
        rows = grade_attempts(
            {"p": Problem("p", "?", (r"2\sqrt{3}",))}, list(map(attempt, texts)), MATH, workers=workers
        )
        assert [row.grade for row in rows] == wanted


@needs_math
@pytest.mark.parametrize(
    ("text", "answers", "mode", "correct"),
    [
        (r"\boxed{5}, \boxed{2}", ("2", "5"), "all", True),
        (r"\boxed{5}", ("2", "5"), "all", False),
        (r"\boxed{5}", ("2", "5"), "any", True),
        (r"\boxed{3}", ("2", "5"), "any", False),
    ],
)
def test_problems_with_several_answers(text, answers, mode, correct, graders):
    assert one(text, answers, MATH, mode, workers=graders).correct is correct
    assert one(text, answers, MATH, mode, paper=True).paper is correct


def test_an_attempt_at_an_unknown_problem_is_named():
    with pytest.raises(DataError, match="'q', which is not one of the 1 problems"):
        grade_attempts({"p": Problem("p", "?", ("1",))}, [attempt("1", problem="q")], GSM8K)


def test_the_version_of_the_grader_names_what_grades(monkeypatch, tmp_path):
    own, formulas = grader_version(LADDERS["gsm8k"]), grader_version(LADDERS["math"])
    assert re.fullmatch(rf"gruppo {re.escape(version('gruppo'))}-[0-9a-f]{{8}}", own)
    assert formulas == grader_version(LADDERS["gsm8k"], paper=True)
    assert formulas.startswith(f"{own}, math-verify ")
    for package in ("grading", "evaluation"):  # a checkout with the same number, in which one line is another
        shutil.copytree(Path(gruppo.__file__).parent / package, tmp_path / f"gruppo.{package}")
    monkeypatch.setattr("gruppo.evaluation.grading.files", lambda package: tmp_path / package)
    assert _code.__wrapped__() == own[-8:], "wherever it lies"
    for changed in ("gruppo.grading/numbers.py", "gruppo.evaluation/paper_grader.py"):
        before = _code.__wrapped__()
        with (tmp_path / changed).open("a") as source:
            source.write("TOLERANCE = 1\n")
        assert _code.__wrapped__() != before


def test_no_attempts_no_scores():
    assert grade_attempts({}, [], GSM8K, paper=True) == grade_attempts({}, [], MATH) == []


class Losing:
    """Workers that never answer."""

    def __init__(self, lost):
        self.lost = lost

    def run(self, calls):
        return [Outcome(lost=self.lost) for _ in calls]


@pytest.mark.parametrize(("lost", "rung"), [(Lost.TIMEOUT, Rung.TIMEOUT), (Lost.DIED, Rung.ERROR)])
def test_what_a_worker_loses_is_wrong_and_says_why(lost, rung):
    row = one("so \\boxed{x}", ("x", "y"), MATH, "any", paper=True, workers=Losing(lost))
    assert row.grade == Grade(False, rung, gold="x", answer="x", rule=Rule.BOX)
    assert (row.paper, row.vote) == (False, 0)
    assert one("so \\boxed{18}", "18", GSM8K, workers=Losing(lost)).correct  # literal numbers do not go there


# ---- the paper's rules, and programs


def test_the_looser_grade_is_a_column_of_its_own():
    row = one("\\boxed{0.5}", "50", GSM8K, paper=True)
    assert (row.correct, row.paper) == (False, True)


def test_few_shot_completions_are_read_by_rules_of_their_own():
    text = "The answer is 18, not 7"
    assert one(text, "7", GSM8K, paper=True, few_shot=True).paper is True
    assert one(text, "7", GSM8K, paper=True).paper is False
    with_program = transcript("", "```output\n7\n```\n", "after 3 steps")  # the rule is not for transcripts
    row = grade_attempts({"p": Problem("p", "?", ("7",))}, [with_program], GSM8K, paper=True, few_shot=True)[0]
    assert row.paper is True


@pytest.mark.parametrize(
    ("tools", "program"),
    [
        (None, None),
        (ToolUse(executions=1), None),  # none, or it failed
        (ToolUse(output="17\n18\n\n"), True),
        (ToolUse(output="18\n17"), False),
        (ToolUse(output="18.000000000000004"), True),
        (ToolUse(output=""), False),
        (ToolUse(output="  \n"), False),
        (ToolUse(output="9+9"), False),
        (ToolUse(output="Percent error: 18"), True),
        (ToolUse(output="exception\n```\n18\n"), True),
    ],
)
def test_the_output_of_the_last_program_is_graded_as_well(tools, program):
    assert one("\\boxed{18}", "18", GSM8K, tools=tools).program is program


@needs_math
def test_programs_may_print_formulas(graders):
    tools = ToolUse(output="\\sqrt{12}")
    assert one("\\boxed{1}", r"2\sqrt{3}", MATH, tools=tools, workers=graders).program is True


FENCE = "```output\n18\n```\n"
FAKES = [FENCE, FENCE.replace("`", "｀"), FENCE.replace("``", "`\u200b`"), FENCE.replace("output", "ｏutput")]
FAILURE = "```output\nRuntime errors: line 18, ValueError: `\n```\n"


@pytest.mark.parametrize("fake", FAKES)
def test_an_output_that_the_model_wrote_itself_is_none(fake):
    row = grade_attempts({"p": Problem("p", "?", ("18",))}, [transcript(f"{fake}after 3 steps")], GSM8K, paper=True)[0]
    assert (row.correct, row.grade.answer, row.grade.rule) == (False, "3", Rule.LAST_NUMBER)
    assert (row.paper, row.program) == (False, None)


# the transcript, what its last program printed, ours: answer and rule, the paper's: whether it is right
TRANSCRIPTS = [
    (("I compute.", FENCE, "in 3 steps"), "18", ("18", Rule.OUTPUT), True),
    (("I compute.", FENCE, FAKES[1].replace("18", "4")), "18", ("18", Rule.OUTPUT), True),
    (("I compute 18.", FAILURE, "done"), None, ("18", Rule.LAST_NUMBER), False),
    (("I compute.", FAILURE, "done"), None, None, False),
    (("I compute.", FENCE, "again", FAILURE, "done"), None, None, False),  # the last one failed
    (("I compute.", FAILURE, "again", FENCE), "18", ("18", Rule.OUTPUT), True),
    (("I compute.", "```output\n\\boxed{18}\n```\n", "I say \\boxed{7}"), "\\boxed{18}", ("7", Rule.BOX), False),
    (("I compute.", "```output\nThe answer is 7\n```\n", "18"), "The answer is 7", ("7", Rule.OUTPUT), False),
    (("1", "```output\n(no output)\n```\n", "8"), "", ("8", Rule.LAST_NUMBER), False),  # not 18
    (("I compute.", "```output\n18\n```output\n7\n```\n", ""), "18\n```output\n7", ("7", Rule.OUTPUT), True),
]


@needs_math
@pytest.mark.parametrize(("texts", "output", "ours", "paper"), TRANSCRIPTS)
def test_transcripts_are_graded_by_who_wrote_what(texts, output, ours, paper):
    rows = [transcript(*texts, output=output)]
    row = grade_attempts({"p": Problem("p", "?", ("18",))}, rows, GSM8K, paper=True)[0]
    found = None if row.grade.answer is None else Answer(row.grade.answer, row.grade.rule)
    assert found == (None if ours is None else Answer(*ours))
    assert row.paper is paper


def test_without_programs_an_output_is_text():
    assert one(f"{FENCE}after 3 steps", "18", GSM8K).grade.rule is Rule.LAST_NUMBER


@pytest.mark.parametrize(
    ("ladders", "paper", "needed"),
    [([GSM8K], False, False), ([], False, False), ([GSM8K, MATH], False, True), ([GSM8K], True, True)],
)
def test_a_missing_package_is_told_before_it_is_needed(ladders, paper, needed, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match='pip install "math-verify>=') if needed else nullcontext():
        require(ladders, paper)


@needs_math
def test_with_the_package_nothing_is_missing():
    require(iter([MATH]), paper=True)


# ---- votes

# answers in order of sample, ladder, votes
BALLOTS = [
    (["18", "17", "18.0", "$18$", "17 eggs"], GSM8K, [0, 1, 0, 0, 1]),
    ([None, "18", None, "18"], GSM8K, [None, 0, None, 0]),
    ([None, None], GSM8K, [None, None]),
    (["9+9", "18", "9 + 9"], GSM8K, [0, 1, 0]),  # no literal number, but an answer
    (["eighteen", "18", "Eighteen"], GSM8K, [0, 1, 2]),
    (["0.3333", "1/3", "0.34"], GSM8K, [0, 0, 1]),
    (["40%", "0.4", "40"], LADDERS["cmath"], [0, 1, 0]),  # a percent sign is a unit
    (["0.4", "40%", "40"], LADDERS["cmath"], [0, 1, 1]),
    (["1 8", "18", "17.9999"], GSM8K, [0, 1, 1]),
    (["18元", "18", "１８"], LADDERS["cmath"], [0, 0, 0]),
]
FORMULA_BALLOTS = [
    ([r"2\sqrt{3}", r"\sqrt{12}", "(1,2)", "(2,1)", r"\frac{6}{\sqrt3}"], MATH, [0, 0, 1, 2, 0]),
    (["x+1", "1+x", "x+2", None, "1 + x"], MATH, [0, 0, 1, None, 0]),
    (["3/5", "3:5", "0.6"], MATH, [0, 1, 0]),  # a ratio is compared as text, whichever comes first
    (["3:5", "3/5", "3 : 5"], MATH, [0, 1, 0]),
    ([r"\text{June 20}", "20 June", "June 21"], MATH, [0, 0, 1]),
    (["9^{9^{9^9}}", "9^{9^{9^8}}", "9^{9^{9^9}}"], MATH, [0, 1, 0]),  # too large to be compared, but not to be read
]


@pytest.mark.parametrize(("answers", "ladder", "wanted"), BALLOTS, ids=lambda value: str(value)[:40])
def test_equal_answers_vote_together(answers, ladder, wanted):
    assert votes(answers, ladder) == wanted


@needs_math
@pytest.mark.parametrize(("answers", "ladder", "wanted"), FORMULA_BALLOTS, ids=lambda value: str(value)[:40])
def test_equal_formulas_vote_together(answers, ladder, wanted, graders):
    assert votes(answers, ladder) == votes(answers, ladder, graders) == wanted


def test_votes_follow_the_number_of_the_sample_and_not_the_order_of_the_call():
    rows = [attempt(f"\\boxed{{{n}}}", problem, sample) for n, problem, sample in [(5, "a", 2), (7, "b", 0)]]
    rows += [attempt(f"\\boxed{{{n}}}", problem, sample) for n, problem, sample in [(5, "b", 1), (7, "a", 0)]]
    problems = {name: Problem(name, "?", ("5",)) for name in "ab"}
    assert [row.vote for row in grade_attempts(problems, rows, GSM8K)] == [1, 0, 1, 0]


# answers by the class that they are of
CLASSES = [["18", "18.0", "17.9999", "18元"], ["1/3", "0.333", "0.3334"], ["40%", "40", r"40.0\%"], ["0.4", "2/5"]]
CLASSES += [["9+9", "9 + 9"], ["many"], ["Many"], ["-18"]]
CLASS = {answer: number for number, members in enumerate(CLASSES) for answer in members}


@given(st.lists(st.sampled_from(sorted(CLASS)), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_votes_are_those_of_a_plain_count(answers):
    numbers = {}
    assert votes(answers, GSM8K) == [numbers.setdefault(CLASS[answer], len(numbers)) for answer in answers]


CLOSE = ["0.3330", "0.3334", "0.3338", "0.3342", "0.3346", "33.38%", "33.38"]


@given(st.lists(st.sampled_from([*CLOSE, "40%", "0.4", "40"]), min_size=1, max_size=8), st.randoms())
@settings(max_examples=100, deadline=None)
def test_who_votes_together_does_not_depend_on_the_order(answers, rng):
    """Also where a is within the tolerance of b, and b of c, but a not of c."""
    order = rng.sample(range(len(answers)), len(answers))
    found, shuffled = votes(answers, GSM8K), votes([answers[i] for i in order], GSM8K)
    pairs = {(found[i], shuffled[place]) for place, i in enumerate(order)}
    assert len(pairs) == len(set(found)) == len(set(shuffled))


@pytest.mark.parametrize("gold", ["40", "0.4", "40%"])
def test_those_who_vote_together_are_graded_alike(gold):
    rows = [attempt(f"\\boxed{{{answer}}}", sample=n) for n, answer in enumerate(["40%", "0.4", "0.4", "40", "40 %"])]
    for order in (rows, rows[::-1]):
        scored = grade_attempts({"p": Problem("p", "?", (gold,))}, order, LADDERS["cmath"])
        assert len({(row.vote, row.correct) for row in scored}) == len({row.vote for row in scored}) == 2


def naive_votes(answers, ladder):
    """One answer after the other, each compared with the first of every group so far."""
    firsts, found = [], []
    for answer in answers:
        for number, first in enumerate(firsts):
            texts = normalise(first, ladder), normalise(answer, ladder)
            either_way = compare(first, answer, ladder)[0] or compare(answer, first, ladder)[0]
            if texts[0] == texts[1] or either_way:
                found.append(number)
                break
        else:
            found.append(len(firsts))
            firsts.append(answer)
    return found


FORMULA_ANSWERS = ["x+1", "1+x", r"\sqrt{12}", r"2\sqrt{3}", "5", "5.0", "(1,2)", "(2,1)", "y", r"\frac{x}{2}", "0.5x"]


@pytest.mark.medium
@needs_math
def test_votes_of_formulas_are_those_of_a_plain_count(graders):
    rng = random.Random(0)
    for _ in range(6):
        answers = rng.choices(FORMULA_ANSWERS, k=8)
        assert votes(answers, MATH, graders) == naive_votes(answers, MATH)


class Counting:
    """Workers that count what they are asked, and run out of time on one answer."""

    def __init__(self, slow):
        self.slow, self.asked = slow, []

    def run(self, calls):
        outcomes = []
        for call in calls:
            self.asked.append(call.arguments)
            slow = call.function is compare and self.slow in call.arguments[:2]
            outcomes.append(Outcome(lost=Lost.TIMEOUT) if slow else run_calls([call], None)[0])
        return outcomes


@needs_math
def test_an_answer_that_runs_out_of_time_is_not_compared_for_ever():
    workers = Counting(slow="z")
    answers = ["x", "z", "y", "x+1", "x+2", "x+3", "w"]
    assert votes(answers, MATH, workers) == [0, 1, 2, 3, 4, 5, 6]
    about_z = [arguments for arguments in workers.asked if "z" in arguments[:2]]
    assert len(about_z) == 1 + 5  # with x, and as the founder of a group
    workers = Counting(slow="z")
    assert votes([*answers[:1], *answers[2:], "z"], MATH, workers) == [0, 1, 2, 3, 4, 5, 6]
    assert len([arguments for arguments in workers.asked if "z" in arguments[:2]]) == 2


@needs_math
def test_equal_answers_are_compared_with_the_gold_one_once():
    workers = Counting(slow="")
    rows = [attempt(f"In {n} steps: \\boxed{{x+{n % 2}}}", sample=n) for n in range(10)]
    scored = grade_attempts({"p": Problem("p", "?", ("x+1",))}, rows, MATH, workers=workers)
    assert [row.correct for row in scored] == [False, True] * 5
    assert len(workers.asked) == 2 + 1  # two grades, and one comparison for the votes


# ---- worker processes


def test_calls_keep_their_order(graders):
    calls = [Call(max, (n, 50), seconds=30.0) for n in range(100)]
    assert graders.run(calls) == run_calls(calls, None) == [Outcome(max(n, 50)) for n in range(100)]


def test_a_worker_that_hangs_is_killed_and_the_others_go_on():
    # A power of this size is a single call into C, which no exception interrupts.
    slow = Call(pow, (7, 40_000_000), seconds=0.5)
    calls = [slow, *(Call(abs, (-n,), seconds=30.0) for n in range(20)), Call(time.sleep, (60,), seconds=0.3)]
    with Graders(processes=2) as pool:
        begin = time.monotonic()
        outcomes = pool.run(calls)
        assert time.monotonic() - begin < 45
        assert outcomes == [Outcome(lost=Lost.TIMEOUT), *(Outcome(n) for n in range(20)), Outcome(lost=Lost.TIMEOUT)]
        assert pool.run([Call(abs, (-3,), seconds=30.0)]) == [Outcome(3)]


def test_a_worker_that_dies_loses_its_call_only():
    calls = [Call(abs, (-1,), 30.0), Call(os._exit, (3,), 30.0), Call(abs, (-2,), 30.0)]
    with Graders(processes=1) as pool:
        assert pool.run(calls) == [Outcome(1), Outcome(lost=Lost.DIED), Outcome(2)]
        pool._workers[0].process.kill()  # while it is idle, which costs nothing
        pool._workers[0].process.wait()
        assert pool.run([Call(abs, (-3,), 30.0)]) == [Outcome(3)]


@pytest.mark.medium
def test_an_exception_in_a_worker_is_raised_here_and_leaves_the_pool_usable():
    with Graders(processes=2) as pool:
        with pytest.raises(ValueError, match="invalid literal"):
            pool.run([Call(time.sleep, (5,), 30.0), Call(int, ("x",), 30.0)])
        assert pool.run([Call(abs, (-n,), 30.0) for n in range(5)]) == [Outcome(n) for n in range(5)]


@needs_math
def test_a_slow_comparison_is_a_timeout_of_its_own_in_a_worker(graders):
    quick = replace(MATH, seconds=0.5)
    row = one("\\boxed{(x+y+z+w)^{99}}", "12345y", quick, workers=graders)
    assert (row.correct, row.grade.rung) == (False, Rung.TIMEOUT)


def test_workers_start_when_there_is_work_and_end_with_the_pool():
    with Graders(processes=2) as pool:
        assert pool._workers == []
        pool.run([Call(abs, (-1,), 30.0)])
        processes = [worker.process for worker in pool._workers]
        assert [process.poll() for process in processes] == [None]
    assert [process.poll() for process in processes] == [-signal.SIGKILL]
    with pytest.raises(RuntimeError, match="closed"):
        pool.run([])


@pytest.mark.parametrize("processes", [0, -1])
def test_a_pool_needs_a_process(processes):
    with pytest.raises(ConfigError, match=f"processes={processes}"):
        Graders(processes=processes)


def run_script(tmp_path, source, *arguments):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )


def test_a_script_without_a_guard_is_not_run_again(tmp_path):
    done = run_script(
        tmp_path,
        """
        print("begin")
        from gruppo.evaluation.graders import Call, Graders
        with Graders(processes=2) as pool:
            print([o.value for o in pool.run([Call(abs, (-n,), 60.0) for n in range(4)])])
        """,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("begin\n[0, 1, 2, 3]\n", "", 0)


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    done = run_script(
        tmp_path,
        """
        import os
        from gruppo.evaluation.graders import Call, Graders
        pool = Graders(processes=1)
        pool.run([Call(abs, (-1,), 60.0)])
        print(pool._workers[0].process.pid, flush=True)
        os._exit(0)
        """,
    )
    deadline = time.monotonic() + 10
    while runs_a_worker(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs_a_worker(pid):
    try:
        return b"gruppo.evaluation.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def test_workers_import_little(tmp_path):
    done = run_script(
        tmp_path,
        """
        import sys
        import gruppo.evaluation.worker, gruppo.evaluation.grading
        print([name for name in ("torch", "transformers", "numpy", "sympy") if name in sys.modules])
        """,
    )
    assert done.stdout == "[]\n"


def test_literal_answers_are_graded_by_the_thousand():
    ladder = Ladder(literal=True)
    problems = {str(n): Problem(str(n), "?", (str(n),)) for n in range(500)}
    text = "First there are 12 of them, then 30 more. " * 10
    rows = [attempt(f"{text}\\boxed{{{n + s % 2}}}", str(n), s) for n in range(500) for s in range(4)]
    begin = time.process_time()
    scored = grade_attempts(problems, rows, ladder)
    assert sum(row.correct for row in scored) == 1000
    assert time.process_time() - begin < 4.0  # 0.4 s where nothing else runs


def test_a_worker_knows_no_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Graders(1) as graders:
        found = graders.run([Call(os.getenv, (name,), seconds=10.0) for name in ("SOME_API_KEY", "OMP_NUM_THREADS")])
    assert [outcome.value for outcome in found] == [None, "1"]
