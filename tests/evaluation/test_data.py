"""Problems from files and from the hub, and what is said of rows that cannot be used."""

import ast
import gzip
import json
import operator
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.benchmarks import BENCHMARKS
from gruppo.evaluation.data import load_problems, spread
from gruppo.evaluation.types import Benchmark, Problem
from gruppo.grading import LADDERS, grade

SAMPLE = Path(__file__).parent / "sample"
REAL = Path(__file__).parents[3] / "shared" / "data"
GSM8K, MATH, CMATH = BENCHMARKS["gsm8k"], BENCHMARKS["math"], BENCHMARKS["cmath"]
OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SUM = re.compile(r"([0-9(][-0-9+*/(). ]*) = ([0-9./]+)")


def write(folder: Path, *rows: object, file: str = "gsm8k/test.jsonl") -> Path:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return folder


def exact(text: str) -> Fraction:
    """The value of an arithmetic expression, in fractions."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            result: Fraction = OPERATORS[type(node.op)](value(node.left), value(node.right))
            return result
        assert isinstance(node, ast.Constant)
        return Fraction(str(node.value))

    return value(ast.parse(text.strip().rstrip("."), mode="eval").body)


# ---- the sample


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_sample_loads_and_its_solutions_are_right(name: str) -> None:
    benchmark = BENCHMARKS[name]
    problems = load_problems(benchmark, SAMPLE)
    rows = [json.loads(line) for line in (SAMPLE / benchmark.file).read_text(encoding="utf-8").splitlines()]
    assert [problem.id for problem in problems] == [row["id"] for row in rows]
    assert len(problems) >= (6 if name == "cmath_validation" else 12)
    for problem, row in zip(problems, rows, strict=True):
        for answer in problem.answers:
            assert grade(rf"\boxed{{{answer}}}", answer, benchmark.ladder).correct, problem
        if row["solution"] is not None:
            result = grade(row["solution"], problem.answers, benchmark.ladder, problem.answers_mode)
            assert result.correct, (problem, result)


@pytest.mark.parametrize("name", ["gsm8k", "cmath", "cmath_validation"])
def test_the_arithmetic_of_the_sample(name: str) -> None:
    for line in (SAMPLE / BENCHMARKS[name].file).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps = SUM.findall(row["solution"])
        assert steps, row
        assert all(exact(left) == exact(right) for left, right in steps), row
        assert exact(steps[-1][1]) == exact(row["answer"].rstrip("%")), row


def test_the_chinese_sample_translates_the_english_one() -> None:
    english = {problem.id: problem for problem in load_problems(GSM8K, SAMPLE)}
    rows = [json.loads(line) for line in (SAMPLE / "mgsm_zh/test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["answer"],) for row in rows] == [english[row["gsm8k_id"]].answers for row in rows]


def test_levels_subjects_and_several_answers_of_the_sample() -> None:
    problems = load_problems(MATH, SAMPLE)
    assert {problem.level for problem in problems} == set("12345")
    assert {problem.subject for problem in problems} >= {"Algebra", "Geometry", "Number Theory", "Precalculus"}
    modes = {problem.answers_mode: problem for problem in problems}
    assert set(modes) == {"last", "same", "all", "any"}
    assert modes["all"].answers == ("2", "5")
    assert {len(problem.answers) for problem in problems if problem.answers_mode in ("last", "same")} == {1}
    assert [problem.level for problem in load_problems(CMATH, SAMPLE)] == list("112233445566")


# ---- the real sets


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the benchmark sets are not at {REAL}")
@pytest.mark.parametrize("name", ["gsm8k", "mgsm_zh", "cmath", "cmath_validation"])
def test_the_real_sets_load_whole(name: str) -> None:
    problems = load_problems(BENCHMARKS[name], REAL)
    assert len(problems) == BENCHMARKS[name].rows
    assert problems[17].id == f"{BENCHMARKS[name].file.removesuffix('.jsonl')}/17"
    assert load_problems(BENCHMARKS[name], REAL, limit=10) == spread(problems, 10)


# ---- the first so many


@given(rows=st.integers(0, 300), limit=st.integers(1, 400))
def test_some_problems_are_spread_evenly(rows: int, limit: int) -> None:
    chosen = spread(range(rows), limit)
    assert len(chosen) == min(rows, limit)
    assert chosen[:1] == list(range(min(rows, 1)))
    distances = [b - a for a, b in pairwise([*chosen, rows])]
    assert all(distance >= 1 for distance in distances)
    assert max(distances, default=0) - min(distances, default=0) <= 1


def test_the_rows_that_a_limit_takes() -> None:
    assert spread(range(1319), 4) == [0, 329, 659, 989]
    assert spread("abc", None) == ["a", "b", "c"]
    assert [problem.id for problem in load_problems(GSM8K, SAMPLE, limit=3)] == [
        *("gsm8k/test/0", "gsm8k/test/4", "gsm8k/test/8"),
    ]
    with pytest.raises(ConfigError, match="limit=0: it must be at least 1"):
        load_problems(GSM8K, SAMPLE, limit=0)


def test_a_bad_row_is_found_even_if_a_limit_leaves_it_out(tmp_path: Path) -> None:
    good = {"question": "q", "answer": "1"}
    with pytest.raises(DataError, match=r"test\.jsonl:3: there is no `answer`"):
        load_problems(GSM8K, write(tmp_path, good, good, {"question": "q"}), limit=1)


# ---- rows


ROWS = [
    ({"question": " q ", "answer": "18"}, Problem("gsm8k/test/0", " q ", ("18",))),
    ({"id": "x", "question": "q", "answer": 18}, Problem("x", "q", ("18",))),
    ({"id": 3, "question": "q", "answer": 2.5}, Problem("3", "q", ("2.5",))),
    ({"question": "q", "answer": "9 * 2 = 18\n#### 18"}, Problem("gsm8k/test/0", "q", ("18",))),
    ({"question": "q", "answer": r"so \boxed{18}"}, Problem("gsm8k/test/0", "q", ("18",))),
    ({"question": "q", "answer": " 4/6\n"}, Problem("gsm8k/test/0", "q", ("4/6",))),
    ({"question": "q", "answer": "1", "level": None, "subject": None}, Problem("gsm8k/test/0", "q", ("1",))),
    ({"question": "q", "answer": "1", "level": "Level 4"}, Problem("gsm8k/test/0", "q", ("1",), level="4")),
    ({"question": "q", "answer": "1", "level": 4}, Problem("gsm8k/test/0", "q", ("1",), level="4")),
    ({"question": "q", "answers": ["1"]}, Problem("gsm8k/test/0", "q", ("1",))),
    ({"question": "q", "answer": "1", "answers": ["1"]}, Problem("gsm8k/test/0", "q", ("1",))),
    ({"question": "q", "answers": ["1", "2"], "answers_mode": "any"}, Problem("gsm8k/test/0", "q", ("1", "2"), "any")),
    (
        {"question": "q", "answer": "2", "answers": ["1", "2"], "answers_mode": "last"},
        Problem("gsm8k/test/0", "q", ("2",), "last"),
    ),
    (
        {"question": "q", "answer": "2", "answers_mode": "same", "solution": 7},
        Problem("gsm8k/test/0", "q", ("2",), "same"),
    ),
]


@pytest.mark.parametrize(("row", "problem"), ROWS)
def test_a_row_and_its_problem(tmp_path: Path, row: dict[str, Any], problem: Problem) -> None:
    assert load_problems(GSM8K, write(tmp_path, row)) == [problem]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"We get \boxed{3} and then \boxed{\text{(C)}}.", r"\text{(C)}"),
        (r"x \in [-2,7]", r"x \in [-2,7]"),
    ],
)
def test_formulas_as_answers(tmp_path: Path, answer: str, gold: str) -> None:
    folder = write(tmp_path, {"question": "q", "answer": answer}, file=MATH.file)
    assert load_problems(MATH, folder)[0].answers == (gold,)


def test_a_file_saved_from_the_hub_as_it_is(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"problem": "p", "solution": r"\boxed{\sqrt{2}}", "level": "Level 5", "type": "Geometry"},
        file=MATH.file,
    )
    assert load_problems(MATH, tmp_path) == [
        Problem("math/test/0", "p", (r"\sqrt{2}",), level="5", subject="Geometry"),
    ]


BAD_ROWS = [
    ({"answer": "1"}, r"no `question`; the keys are \['answer'\]"),
    ({"question": None, "answer": "1"}, "`question` must be a string, but is None"),
    ({"question": "  ", "answer": "1"}, "`question` must be a string, but is '  '"),
    ({"question": ["q"], "answer": "1"}, r"`question` must be a string, but is \['q'\]"),
    ({"question": "q"}, r"no `answer`; the keys are \['question'\]"),
    ({"question": "q", "answer": None}, "but is None. Correct or remove the row"),
    ({"question": "q", "answer": ""}, "the answer must be a string or a number, but is ''"),
    ({"question": "q", "answer": True}, "but is True"),
    ({"question": "q", "answer": ["1"]}, r"but is \['1'\]"),
    ({"question": "q", "answer": "x + 1"}, r"against the answer 'x \+ 1'; it must be a literal number"),
    ({"question": "q", "answer": "no number here\n#### none"}, "nothing can be graded"),
    ({"question": "q", "answer": "1", "level": True}, "`level` must be a string or a whole number, but is True"),
    ({"question": "q", "answer": "1", "subject": ["a"]}, "`subject` must be a string"),
    ({"question": "q", "answer": "1", "id": ""}, "`id` must be a string"),
    ({"question": "q", "answers": []}, "`answers` must be a list that is not empty"),
    ({"question": "q", "answers": "1"}, "`answers` must be a list"),
    ({"question": "q", "answers": ["1", None], "answers_mode": "all"}, "but is None"),
    ({"question": "q", "answers": ["1", "2"]}, "2 answers need `answers_mode`"),
    ({"question": "q", "answer": "1", "answers": ["1", "2"]}, "2 answers need `answers_mode`"),
    ({"question": "q", "answers": ["1", "2"], "answers_mode": "last"}, "no `answer`"),
    ({"question": "q", "answer": "1", "answers_mode": "some"}, "one of last, same, all, any, but is 'some'"),
    (["q", "1"], "each line holds one JSON object, but this is a list"),
    ("q", "but this is a str"),
    (
        {"id": "gsm8k/test/0", "question": "q", "answer": "1"},
        r"was already used at .*test\.jsonl:1; ids must be unique",
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    write(tmp_path, {"question": "q", "answer": "1"}, row)
    with pytest.raises(DataError, match=rf"test\.jsonl:2: .*{message}"):
        load_problems(GSM8K, tmp_path)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("question", {"question": "\ud800"}),
        ("id", {"id": "x\udfff"}),
        ("level", {"level": "Level \ud800"}),
        ("subject", {"subject": "\ud800"}),
        ("answer", {"answer": "1 \ud800"}),
        ("answer", {"answer": "so \ud800\n#### 1"}),
        ("answer", {"answers": ["1", "x\ud800"], "answers_mode": "all"}),
    ],
)
@pytest.mark.parametrize("benchmark", [GSM8K, MATH], ids=lambda benchmark: benchmark.name)
def test_text_that_is_no_text(tmp_path: Path, benchmark: Benchmark, key: str, change: dict[str, Any]) -> None:
    row = {"question": "q", "answer": "1"} | change
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=rf"one\.jsonl:1: `{key}` is not valid text"):
        load_problems(benchmark, tmp_path / "one.jsonl")


def test_a_set_of_formulas_takes_no_essay(tmp_path: Path) -> None:
    folder = write(tmp_path, {"question": "q", "answer": "a" * 501}, file=MATH.file)
    with pytest.raises(DataError, match="it must be a formula or short text"):
        load_problems(MATH, folder)


# ---- files


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf\n{"question": "q", "answer": "1"}\r\n\n{"question": "r\xe2\x80\xa8", "answer": "2"}'
    )
    assert [(problem.id, problem.question) for problem in load_problems(GSM8K, path)] == [
        ("gsm8k/one/0", "q"),
        ("gsm8k/one/1", "r\u2028"),
    ]


@pytest.mark.parametrize(
    ("benchmark", "file", "name"),
    [
        (GSM8K, "gsm8k/test.jsonl", "gsm8k/test/0"),
        (GSM8K, "gsm8k/test.jsonl.gz", "gsm8k/test/0"),
        (GSM8K, "mine/train.v2.jsonl", "gsm8k/train/0"),
        (BENCHMARKS["cmath_validation"], "cmath/validation.jsonl", "cmath_validation/validation/0"),
    ],
)
def test_an_id_says_which_file_it_is_of(tmp_path: Path, benchmark: Benchmark, file: str, name: str) -> None:
    write(tmp_path, {"question": "q", "answer": "1"}, file=file)
    if file.endswith(".gz"):
        (tmp_path / file).write_bytes(gzip.compress((tmp_path / file).read_bytes()))
    assert load_problems(benchmark, tmp_path / file)[0].id == name
    if file.startswith(benchmark.file):
        assert load_problems(benchmark, tmp_path)[0].id == name, "the same in its folder"


def test_a_packed_file_is_found_and_a_plain_one_comes_first(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    with gzip.open(tmp_path / "gsm8k/test.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write('{"question": "packed", "answer": "1"}\n')
    assert load_problems(GSM8K, tmp_path)[0].question == "packed"
    assert load_problems(GSM8K, str(tmp_path / "gsm8k/test.jsonl.gz"))[0].question == "packed"
    write(tmp_path, {"question": "plain", "answer": "1"})
    assert load_problems(GSM8K, tmp_path)[0].question == "plain"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "there are no problems in .*a.jsonl"),
        ("a.jsonl", b"\n\n", "there are no problems"),
        ("a.jsonl", b'{"question": "q", "answer": "1"}\n{"question": ', r"a\.jsonl:2: this is not valid JSON"),
        ("a.jsonl", b'{"question": "\xff", "answer": "1"}', "damaged, or not UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(b'{"question": "q", "answer": "1"}\n[]\n'), r"a\.jsonl\.gz:2: each line holds"),
        ("a.jsonl.gz", b"no gzip", "damaged"),
        ("a.jsonl.gz", gzip.compress(b'{"question": "q", "answer": "1"}\n' * 100)[:-10], "damaged"),
    ],
    ids=["empty", "blank", "cut short", "not UTF-8", "a list", "no gzip", "gzip cut short"],
)
def test_a_damaged_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_problems(GSM8K, tmp_path / name)


def test_a_folder_without_the_file_says_what_was_looked_for(tmp_path: Path) -> None:
    wanted = (
        rf"there is no {tmp_path}/math500/test\.jsonl and no test\.jsonl\.gz .*HuggingFaceH4/MATH-500 from the hub"
    )
    with pytest.raises(ConfigError, match=wanted):
        load_problems(BENCHMARKS["math500"], tmp_path)
    with pytest.raises(ConfigError, match=r"there is no .*nowhere/gsm8k"):
        load_problems(GSM8K, tmp_path / "nowhere")


def test_without_a_copy_on_the_hub_the_file_is_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Benchmark("own", "Own", file="own.jsonl", ladder=LADDERS["gsm8k"])
    monkeypatch.chdir(write(tmp_path, {"question": "q", "answer": "1"}, file="own.jsonl"))
    assert load_problems(own) == [Problem("own/own/0", "q", ("1",))]
    (tmp_path / "own.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"own: there is no own\.jsonl(?!.*hub)"):
        load_problems(own)


# ---- the hub


def pretend_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    asked = []

    def load_dataset(path: str, name: str | None, *, split: str) -> Any:
        asked.append((path, name, split))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_problems_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"q{i}", "golden": f"{i}", "grade": i} for i in range(1, 5)]
    asked = pretend_hub(monkeypatch, Dataset.from_list(rows))
    assert load_problems(CMATH, limit=2) == [
        Problem("cmath/test/0", "q1", ("1",), level="1"),
        Problem("cmath/test/2", "q3", ("3",), level="3"),
    ]
    assert asked == [("weitianwen/cmath", None, "test")]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("gsm8k", ("openai/gsm8k", "main", "test")),
        ("math", ("DigitalLearningGmbH/MATH-lighteval", "default", "test")),
        ("math500", ("HuggingFaceH4/MATH-500", None, "test")),
        ("mgsm_zh", ("juletxara/mgsm", "zh", "test")),
        ("cmath_validation", ("weitianwen/cmath", None, "validation")),
    ],
)
@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("offline"),
        FileNotFoundError("no such set"),
        ValueError("Unknown split"),
        RuntimeError("Dataset scripts are no longer supported"),
        datasets.exceptions.DatasetGenerationError("broken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_hub_that_fails_is_named_and_so_is_the_way_around_it(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: tuple[Any, ...], error: Exception
) -> None:
    calls = pretend_hub(monkeypatch, error)
    with pytest.raises(DataError, match=rf"{asked[0]} could not be loaded .*{error}\).*--data-dir.* a JSONL file"):
        load_problems(BENCHMARKS[name])
    assert calls == [asked]


def test_the_hub_is_not_reached_offline() -> None:
    with pytest.raises(DataError, match="openai/gsm8k could not be loaded"):
        load_problems(GSM8K)


def test_columns_of_the_hub_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_hub(monkeypatch, Dataset.from_list([{"question": "q", "label": "1"}]))
    with pytest.raises(DataError, match=r"weitianwen/cmath, test, row 0: there is no 'golden' among .*label"):
        load_problems(CMATH)
