"""The benchmarks: their names, their constants, and benchmarks of one's own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gruppo.errors import ConfigError
from gruppo.evaluation.benchmarks import BENCHMARKS, find_benchmark
from gruppo.evaluation.data import load_problems
from gruppo.evaluation.prompts import render
from gruppo.evaluation.types import Benchmark
from gruppo.grading import LADDERS, grade
from tests.helpers import tiny_tokenizer

# The example of docs/evaluation.md as it stands there, and its two data files.
DOCS = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
(OWN,) = re.findall(r"```python\n(from pathlib.*?)```", DOCS, re.DOTALL)
SUMS = """
{"question": "What is 3 + 4?", "answer": "7", "level": 1}
{"question": "What is 31 + 42?", "answer": 73, "level": 2}
{"question": "What is 58 + 67?", "answer": "58 + 67 = 125 #### 125", "level": 2}
"""
SOLVED = r"""
{"question": "What is 2 + 2?", "cot": "2 + 2 = 4. The answer is 4.", "tir": "```python\nprint(2 + 2)\n```\n```output\n4\n```\nThe answer is 4."}
{"question": "What is 1 + 8?", "cot": "1 + 8 = 9. The answer is 9.", "tir": "```python\nprint(1 + 8)\n```\n```output\n9\n```\nThe answer is 9."}
"""  # noqa: E501


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my_bench.py"
    path.write_text(OWN)
    (tmp_path / "sums.jsonl").write_text(SUMS)
    (tmp_path / "sums_solved.jsonl").write_text(SOLVED)
    return path


# ---- the constants


@pytest.mark.parametrize(
    ("name", "rows", "language", "ladder", "shots", "groups"),
    [
        ("gsm8k", 1319, "en", "gsm8k", 8, ()),
        ("math", 5000, "en", "math", 4, ("level", "subject")),
        ("math500", 500, "en", "math", 4, ("level", "subject")),
        ("mgsm_zh", 250, "zh", "mgsm_zh", 8, ()),
        ("cmath", 1098, "zh", "cmath", 6, ("level",)),
        ("cmath_validation", 600, "zh", "cmath", 6, ("level",)),
    ],
)
def test_what_the_protocol_says_of_each_set(
    name: str, rows: int, language: str, ladder: str, shots: int, groups: tuple[str, ...]
) -> None:
    benchmark = BENCHMARKS[name]
    assert benchmark.few_shot is not None
    assert (benchmark.name, benchmark.rows, benchmark.language) == (name, rows, language)
    assert (benchmark.ladder, benchmark.few_shot.shots, benchmark.group_by) == (LADDERS[ladder], shots, groups)


def test_no_two_share_a_name_a_title_or_a_file() -> None:
    for key in ("name", "title", "file", "hub"):
        assert len({getattr(benchmark, key) for benchmark in BENCHMARKS.values()}) == len(BENCHMARKS), key


# A row of the hub's copy in its columns, and in ours.
HUB_ROWS = [
    ("gsm8k", {"question": "q", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}, {"answer": "1200"}),
    (
        "math",
        {"problem": "q", "solution": r"\boxed{1}, so \boxed{\frac{1}{2}}", "level": "Level 3", "type": "Algebra"},
        {"answer": r"\frac{1}{2}", "level": "Level 3", "subject": "Algebra"},
    ),
    (
        "math500",
        {"problem": "q", "solution": r"\boxed{3}", "answer": "3", "level": 5, "subject": "Geometry", "unique_id": "x"},
        {"answer": "3", "level": 5, "subject": "Geometry"},
    ),
    ("mgsm_zh", {"question": "q", "answer": None, "answer_number": 18, "equation_solution": None}, {"answer": "18"}),
    ("cmath", {"question": "q", "golden": "1,380", "grade": 4}, {"answer": "1380", "level": 4}),
    ("cmath_validation", {"question": "q", "golden": "27.3%", "grade": 6}, {"answer": "27.3%", "level": 6}),
]


@pytest.mark.parametrize(("name", "theirs", "ours"), HUB_ROWS, ids=[row[0] for row in HUB_ROWS])
def test_rows_of_the_hub_get_our_keys(name: str, theirs: dict[str, object], ours: dict[str, object]) -> None:
    hub = BENCHMARKS[name].hub
    assert hub is not None
    assert hub.row(theirs) == {"question": "q", **ours}


# ---- finding one


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_name_finds_its_benchmark(name: str) -> None:
    assert find_benchmark(name) == (BENCHMARKS[name], None)
    assert find_benchmark(f" {name}:200") == (BENCHMARKS[name], 200)
    assert find_benchmark(BENCHMARKS[name]) == (BENCHMARKS[name], None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8", r"no benchmark 'gsm8'; there are gsm8k, .*Did you mean 'gsm8k'\?"),
        ("MATH-500", r"Did you mean 'math500'\?"),
        ("mgsm-zh:20", r"Did you mean 'mgsm_zh'\?"),
        ("", "no benchmark ''"),
        ("zzz", r"There is no benchmark 'zzz'; there are [a-z0-9_, ]*\. Your own benchmark"),
        ("gsm8k:0", "asks for 0 problems"),
        ("gsm8k:all", "a number of problems must follow the colon, as in 'gsm8k:200'"),
        ("gsm8k:-3", "a number of problems must follow the colon"),
        ("gsm8k:1.5", "a number of problems must follow the colon"),
        ("gsm8k:", "a number of problems must follow the colon"),
        ("no/such/file.py:BENCH", "there is no such file"),
        ("no_such_module:BENCH", "no module 'no_such_module'"),
        ("gruppo.no_such_module:BENCH", "no module 'gruppo.no_such_module'"),
        ("my bench:BENCH", "neither a module nor a file"),
        (":BENCH", "neither a module nor a file"),
        ("gruppo.evaluation.benchmarks:BENCHMARKS", "has a dict of that name, not a Benchmark; .* GSM8K"),
        ("gruppo.evaluation.benchmarks.gsm8k:MATH", "has no such name; its benchmarks are GSM8K"),
        ("gruppo.errors:X", "its benchmarks are none"),
        (7, "a name or a Benchmark, but this is 7"),
    ],
)
def test_what_is_not_there_is_said(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_benchmark(spec)  # type: ignore[arg-type]


def test_the_names_of_the_library_are_taken(tmp_path: Path) -> None:
    easy = Benchmark("gsm8k", "My easy GSM8K", file="easy.jsonl", ladder=LADDERS["gsm8k"])
    (tmp_path / "easy.py").write_text(
        "from dataclasses import replace\nfrom gruppo.evaluation.benchmarks import BENCHMARKS\n"
        "EASY = replace(BENCHMARKS['math'], file='easy.jsonl')\nSAME = replace(BENCHMARKS['math'])\n"
    )
    for spec, name in ((easy, "my_gsm8k"), (f"{tmp_path}/easy.py:EASY:5", "my_math")):
        with pytest.raises(ConfigError, match=f"published results .* another name, as in '{name}'"):
            find_benchmark(spec)
    assert find_benchmark(f"{tmp_path}/easy.py:SAME") == (BENCHMARKS["math"], None)
    assert find_benchmark(BENCHMARKS["gsm8k"]) == (BENCHMARKS["gsm8k"], None)


def test_a_module_and_a_name() -> None:
    assert find_benchmark("gruppo.evaluation.benchmarks.cmath:CMATH:9") == (BENCHMARKS["cmath"], 9)


def test_a_module_that_lacks_an_import_of_its_own_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        find_benchmark("needs_more:BENCH")


# ---- one of your own


def test_the_example_of_the_docs(own: Path) -> None:
    benchmark, limit = find_benchmark(f"{own}:BENCH")
    assert isinstance(benchmark, Benchmark)
    assert (benchmark.name, limit) == ("sums", None)
    problems = load_problems(benchmark)
    assert [problem.id for problem in problems] == ["sums/sums/0", "sums/sums/1", "sums/sums/2"]
    assert [problem.answers for problem in problems] == [("7",), ("73",), ("125",)]
    assert [problem.level for problem in problems] == ["1", "2", "2"]
    prompt = render(problems[0], benchmark, "cot", rendering="plain", shots=2, tokenizer=tiny_tokenizer())
    assert prompt.text == (
        "Q: What is 2 + 2?\nA: 2 + 2 = 4. The answer is 4.\n\n"
        "Q: What is 1 + 8?\nA: 1 + 8 = 9. The answer is 9.\n\n"
        "Q: What is 3 + 4?\nA:"
    )
    assert grade(r"\boxed{7}", problems[0].answers, benchmark.ladder, problems[0].answers_mode).correct
    assert not grade(r"\boxed{3 + 4}", problems[0].answers, benchmark.ladder).correct, "a literal ladder"


def test_the_example_of_the_docs_is_short() -> None:
    assert len(OWN.strip().splitlines()) <= 30


def test_a_file_may_be_named_relative_to_the_current_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    benchmark, limit = find_benchmark("my_bench.py:BENCH:2")
    assert limit == 2
    assert [problem.id for problem in load_problems(benchmark, limit=limit)] == ["sums/sums/0", "sums/sums/1"]


def test_a_file_is_read_anew_each_time(own: Path) -> None:
    find_benchmark(f"{own}:BENCH")
    own.write_text(OWN.replace('title="Sums"', 'title="Other sums"'))
    assert find_benchmark(f"{own}:BENCH")[0].title == "Other sums"


def test_an_error_in_the_file_is_not_hidden(own: Path) -> None:
    own.write_text("BENCH = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        find_benchmark(f"{own}:BENCH")


def test_finding_and_loading_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from gruppo.evaluation.benchmarks import find_benchmark; import gruppo.evaluation.data, "
        "gruppo.evaluation.prompts; find_benchmark('gsm8k:5'); "
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
