"""The paper's table as data, and tables in Markdown and LaTeX that can be read back."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.paper_results import PAPER_BENCHMARKS, PAPER_RESULTS
from gruppo.evaluation.summary import summarise
from gruppo.evaluation.tables import Cell, TableRow, columns_of, latex, markdown, rows_of
from gruppo.evaluation.types import Attempt, Benchmark, Decoding, GradedAttempt, Problem
from gruppo.grading import LADDERS, Grade, Rule, Rung
from gruppo.types import StopReason

# ---- the paper's rows


def values(benchmark, mode=None):
    rows = [row for row in PAPER_RESULTS if mode in (None, row.mode)]
    return [row.cells[benchmark].value for row in rows if benchmark in row.cells]


def test_all_rows_of_the_paper_are_there():
    assert len(PAPER_RESULTS) == 26
    assert [row.mode for row in PAPER_RESULTS] == ["cot"] * 19 + ["tir"] * 7
    assert len({(row.mode, row.model) for row in PAPER_RESULTS}) == 26
    assert sum(len(row.cells) for row in PAPER_RESULTS) == 26 + 26 + 10 + 11
    assert all(set(row.cells) <= set(PAPER_BENCHMARKS) for row in PAPER_RESULTS)


@pytest.mark.parametrize(
    ("benchmark", "mode", "count", "tenths"),
    [
        ("gsm8k", "cot", 19, 15722),
        ("gsm8k", "tir", 7, 5924),
        ("math", "cot", 19, 7011),
        ("math", "tir", 7, 3839),
        ("mgsm_zh", "cot", 6, 4228),
        ("mgsm_zh", "tir", 4, 2680),
        ("cmath", "cot", 7, 5498),
        ("cmath", "tir", 4, 3107),
    ],
)
def test_the_sums_of_its_columns(benchmark, mode, count, tenths):
    found = values(benchmark, mode)
    assert len(found) == count
    assert sum(round(10 * value) for value in found) == tenths


@pytest.mark.parametrize(
    ("mode", "model", "size", "cells"),
    [
        ("cot", "DeepSeekMath-Instruct", "7B", (82.9, 46.8, 73.2, 84.6)),
        ("cot", "DeepSeekMath-RL", "7B", (88.2, 51.7, 79.6, 88.8)),
        ("tir", "DeepSeekMath-Instruct", "7B", (83.7, 57.4, 72.0, 84.3)),
        ("tir", "DeepSeekMath-RL", "7B", (86.7, 58.8, 78.4, 87.6)),
        ("cot", "GPT-4", None, (92.0, 52.9, None, 86.0)),
        ("cot", "SeaLLM-v2", "7B", (78.2, 27.5, 64.8, None)),
        ("tir", "ToRA", "34B", (80.7, 50.8, 41.2, 53.4)),
        ("tir", "GPT-4 Code Interpreter", None, (97.0, 69.7, None, None)),
    ],
)
def test_rows_of_the_paper(mode, model, size, cells):
    (row,) = (row for row in PAPER_RESULTS if (row.mode, row.model) == (mode, model))
    assert row.size == size
    assert {name: cell.value for name, cell in row.cells.items()} == {
        name: value for name, value in zip(PAPER_BENCHMARKS, cells, strict=True) if value is not None
    }


def test_two_numbers_of_the_paper_are_votes():
    votes = [
        (row.model, name, cell.value) for row in PAPER_RESULTS for name, cell in row.cells.items() if cell.majority
    ]
    assert votes == [("Gemini Ultra", "gsm8k", 94.4), ("Gemini Pro", "gsm8k", 86.5)]


def test_models_without_a_size_are_the_closed_ones():
    closed = [row.model for row in PAPER_RESULTS if row.size is None]
    assert closed == [
        *("Gemini Ultra", "GPT-4", "Inflection-2", "GPT-3.5", "Gemini Pro", "Grok-1", "Baichuan-3", "GLM-4"),
        "GPT-4 Code Interpreter",
    ]


# ---- readers


def cells_of(line):
    """The cells of a line of a Markdown table."""
    assert line.startswith("| ")
    assert line.endswith(" |")
    return [cell.strip() for cell in re.split(r"(?<!\\)(?:\\\\)*\|", line[1:-1])]


def read_markdown(text):
    """The rows of the table in a Markdown text, the head first, and what stands below it."""
    parts = text.strip().split("\n\n")
    lines = parts[1].split("\n")
    rows = [cells_of(line) for line in lines]
    assert len({len(row) for row in rows}) == 1, "every row has as many cells"
    assert all(re.fullmatch(r"-+:?", cell) for cell in rows[1])
    return [rows[0], *rows[2:]], parts[2:]


def bare(text):
    """LaTeX without what is escaped."""
    return re.sub(r"\\[#$%&_{}\\]", "", text)


def read_latex(text):
    """The rows of a LaTeX table, after a check that braces, environments and columns match."""
    depth = 0
    for sign in re.sub(r"\\[\\{}]", "", text):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    assert bare(text).count("$") % 2 == 0
    assert re.findall(r"\\(begin|end)\{(\w+)\}", text) == [
        *(("begin", "table"), ("begin", "tabular"), ("end", "tabular"), ("end", "table"))
    ]
    (columns,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    body = text.split("\\toprule")[1].split("\\bottomrule")[0]
    body = re.sub(r"\\midrule|\\cmidrule\(lr\)\{\d+-\d+\}", "", body)
    rows = []
    for line in filter(None, (line.strip() for line in body.split("\n"))):
        assert line.endswith(" \\\\")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)&", line[:-3])]
        spans = [int(match[1]) if (match := re.match(r"\\multicolumn\{(\d+)\}", cell)) else 1 for cell in cells]
        assert sum(spans) == len(columns)
        rows.append(cells)
    return rows


OWN = TableRow("org/my-model", "1.7B", "cot", {"gsm8k": Cell(48.25, interval=(45.5, 50.9)), "cmath": Cell(60.04)})
PART = TableRow("part", None, "cot", {"gsm8k": Cell(31.5, note="200 of 1319 problems")})

# ---- Markdown


def test_the_papers_table_in_markdown():
    rows, notes = read_markdown(markdown([]))
    assert rows[0] == ["Model", "Size", "GSM8K", "MATH", "MGSM-zh", "CMATH"]
    assert [row[0] for row in rows if row[0].startswith("*")] == [
        *("**Chain-of-Thought Reasoning**", "*Closed-Source Models*", "*Open-Source Models*"),
        *("**Tool-Integrated Reasoning**", "*Closed-Source Models*", "*Open-Source Models*"),
    ]
    assert len(rows) == 1 + 6 + 26
    assert ["Gemini Ultra", "–", "94.4\\*", "53.2", "–", "–"] in rows
    assert ["DeepSeekMath-RL", "7B", "86.7", "58.8", "78.4", "87.6"] in rows
    assert notes[0].startswith("\\* Majority vote over 32")
    assert "2402.03300" in notes[1]


def test_own_rows_come_last_in_bold():
    rows, _ = read_markdown(markdown([OWN]))
    assert rows[-2][0] == "*This evaluation*"
    assert rows[-1] == ["**org/my-model**", "1.7B", "**48.2**", "–", "–", "**60.0**"]
    assert not any("Tool-Integrated" in row[0] for row in rows), "there is nothing of one's own to compare there"


def test_both_modes():
    tir = replace(OWN, mode="tir", model="with tools")
    names = [row[0] for row in read_markdown(markdown([tir, OWN]))[0]]
    assert (
        names.index("**org/my-model**") < names.index("**Tool-Integrated Reasoning**") < names.index("**with tools**")
    )
    assert names.count("*This evaluation*") == 2


def test_without_references():
    rows, notes = read_markdown(markdown([OWN], references=False))
    assert [row[0] for row in rows] == [
        *("Model", "**Chain-of-Thought Reasoning**", "*This evaluation*", "**org/my-model**")
    ]
    assert notes == []


@pytest.mark.parametrize(("intervals", "expected"), [(False, "**48.2**"), (True, "**48.2** [45.5, 50.9]")])
def test_intervals(intervals, expected):
    text = markdown([OWN], intervals=intervals)
    row = read_markdown(text)[0][-1]
    assert row[2] == expected
    assert row[5] == "**60.0**", "without an interval there is none to show"
    assert ("95 %" in text) is intervals
    assert expected.replace("**48.2**", "\\textbf{48.2}") in latex([OWN], intervals=intervals)


def test_parts_of_a_set_are_marked_and_not_bold():
    other = TableRow("other", None, "cot", {"gsm8k": Cell(30.0, note="100 of 1319 problems"), "math": Cell(2.0)})
    third = replace(PART, model="third")
    rows, notes = read_markdown(markdown([PART, other, third]))
    assert [row[2] for row in rows[-3:]] == ["31.5 <sup>a</sup>", "30.0 <sup>b</sup>", "31.5 <sup>a</sup>"]
    assert rows[-2][3] == "**2.0**"
    assert notes[1:3] == ["<sup>a</sup> 200 of 1319 problems.", "<sup>b</sup> 100 of 1319 problems."]


def test_only_what_is_shown_has_a_footnote():
    text = markdown([PART], benchmarks=("math",))
    assert "1319" not in text
    assert "Majority" not in text


def test_more_notes_than_letters():
    rows = [replace(PART, model=f"m{i}", cells={"gsm8k": Cell(1.0, note=f"note {i}")}) for i in range(30)]
    table, notes = read_markdown(markdown(rows, references=False))
    assert [row[2] for row in table[-5:]] == [f"1.0 <sup>{mark}</sup>" for mark in ("z", "aa", "ab", "ac", "ad")]
    assert len(notes) == 30


def test_math_500_is_a_column_of_its_own_and_only_if_asked_for():
    row = TableRow("m", None, "cot", {"math500": Cell(55.5)})
    assert "55.5" not in markdown([row])
    table, _ = read_markdown(markdown([row], benchmarks=("math", "math500")))
    assert table[0] == ["Model", "Size", "MATH", "MATH-500"]
    assert table[-1] == ["**m**", "–", "–", "**55.5**"]
    assert all(row[3] in ("", "–") for row in table[1:-1]), "the paper has no numbers for it"


def test_columns_of_ones_own():
    row = TableRow("m", None, "cot", {"aime": Cell(3.3), "gsm8k": Cell(50.0)})
    assert columns_of([row]) == ("gsm8k", "math", "mgsm_zh", "cmath", "aime")
    assert columns_of([]) == PAPER_BENCHMARKS
    assert columns_of([row], references=False) == ("gsm8k", "aime")
    text = markdown([row], benchmarks=columns_of([row]), titles={"aime": "AIME|24"})
    assert read_markdown(text)[0][0][-1] == "AIME\\|24"
    assert read_markdown(markdown([row], benchmarks=["aime"]))[0][0][-1] == "aime"
    assert text.startswith("Top-1 accuracy in percent. English: GSM8K, MATH. Chinese: MGSM-zh, CMATH.\n")


NAMES = st.text(st.sampled_from(list("ab |*_`\\<>[]&~$#%^{}-–\n\"'")), max_size=12)


@given(NAMES, NAMES)
def test_any_name_leaves_the_tables_whole(model, note):
    row = TableRow(model, "1B", "cot", {"gsm8k": Cell(1.0, note=note)})
    rows, _ = read_markdown(markdown([row], references=False))
    assert rows[-1][1] == "1B"
    rows = read_latex(latex([row], references=False))
    assert rows[-1][1] == "1B"


# ---- LaTeX


def test_the_papers_table_in_latex():
    text = latex([])
    rows = read_latex(text)
    assert rows[0] == [*("", "", "\\multicolumn{2}{c}{English Benchmarks}", "\\multicolumn{2}{c}{Chinese Benchmarks}")]
    assert rows[1] == ["Model", "Size", "GSM8K", "MATH", "MGSM-zh", "CMATH"]
    assert len(rows) == 2 + 6 + 26
    assert ["Gemini Ultra", "--", "94.4$^{*}$", "53.2", "--", "--"] in rows
    assert "\\cmidrule(lr){3-4}\\cmidrule(lr){5-6}" in text
    assert re.findall(r"\\usepackage\{(\w+)\}", text) == ["booktabs"]
    assert not re.search(r"\\(hline|cline|toprule\w|multirow|rowcolor)", text)


def test_own_rows_in_latex():
    text = latex([OWN, PART])
    rows = read_latex(text)
    assert rows[-2] == ["\\textbf{org/my-model}", "1.7B", "\\textbf{48.2}", "--", "--", "\\textbf{60.0}"]
    assert rows[-1] == ["\\textbf{part}", "--", "31.5$^{a}$", "--", "--", "--"]
    assert "$^{a}$ 200 of 1319 problems.\\par" in text


def test_languages_are_headings_over_neighbours():
    text = latex([], benchmarks=("cmath", "gsm8k", "math500", "aime"))
    assert read_latex(text)[0][2:] == [
        "\\multicolumn{1}{c}{Chinese Benchmarks}",
        "\\multicolumn{2}{c}{English Benchmarks}",
        "\\multicolumn{1}{c}{}",
    ]
    assert "\\cmidrule(lr){3-3}\\cmidrule(lr){4-5}\n" in text


def test_a_table_without_footnotes():
    assert "footnotesize" not in latex([OWN], references=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a_b#1 & 50% $x$", "a\\_b\\#1 \\& 50\\% \\$x\\$"),
        ("{x}\\y", "\\{x\\}\\textbackslash{}y"),
        ("^~`", "\\textasciicircum{}\\textasciitilde{}\\`{}"),
        ("<a|b>", "\\textless{}a\\textbar{}b\\textgreater{}"),
        ("models--org--name", "models-{}-org-{}-name"),
        ("a---b – c", "a-{}-{}-b -- c"),
        ("two\nlines", "two lines"),
    ],
)
def test_names_in_latex(name, expected):
    assert read_latex(latex([replace(OWN, model=name)]))[-1][0] == f"\\textbf{{{expected}}}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a_b|c", "a\\_b\\|c"),
        ("*x* `y` <b>", "\\*x\\* \\`y\\` \\<b\\>"),
        ("a\\|b", "a\\\\\\|b"),
        ("two\nlines", "two lines"),
    ],
)
def test_names_in_markdown(name, expected):
    assert f"\n| **{expected}** | 1.7B |" in markdown([replace(OWN, model=name)])


# ---- from results


def summary(marks, rows, *, asked=None, data=None, paper=None, name="gsm8k"):
    """The summary of a greedy pass, 1 being right, over the first problems of a set of `rows`, or of `data`."""
    benchmark = Benchmark(name, "T", "f", LADDERS["gsm8k"], rows=rows)
    problems = [Problem(f"p{i}", "?", ("1",)) for i in range(asked or len(marks))]
    scored = [
        GradedAttempt(
            Attempt(f"p{i}", 0, "", 5, StopReason.EOS),
            Grade(mark == "1", Rung.NUMBER, "1", "1", Rule.BOX),
            paper=None if paper is None else paper[i] == "1",
        )
        for i, mark in enumerate(marks)
    ]
    return summarise(benchmark, problems, scored, Decoding(), "cot", rows=data)


def results(**benchmarks):
    return {"model": "m", "mode": "cot", "benchmarks": benchmarks}


def test_rows_of_results():
    (row,) = rows_of(results(gsm8k={"title": "GSM8K", "greedy": summary("1101", 4)}))
    assert (row.model, row.size, row.mode) == ("m", None, "cot")
    cell = row.cells["gsm8k"]
    assert (cell.value, cell.note, cell.majority) == (75.0, "", False)
    assert cell.interval == pytest.approx((28.91, 96.59), abs=0.01)


@pytest.mark.parametrize(
    ("greedy", "note"),
    [
        (summary("1101", 1319), "4 of 1319 problems"),
        (summary("1101", 3), "4 problems, not the 3 of the set"),
        (summary("11", 4, asked=4), "unfinished: 2 of 4 problems"),
        (summary("11", None, asked=3), "unfinished: 2 of 3 problems"),
        (summary("1101", None), ""),
        (summary("11", 1319, data=3), "2 of 3 problems in the data; the set has 1319"),
        (summary("111", 1319, data=3), "3 of 3 problems in the data; the set has 1319"),
    ],
)
def test_results_that_are_not_of_the_whole_set_say_so(greedy, note):
    (row,) = rows_of(results(gsm8k={"title": "GSM8K", "greedy": greedy}))
    assert row.cells["gsm8k"].note == note


def test_500_problems_of_math_are_not_the_whole_of_it():
    text = markdown(rows_of(results(math={"title": "MATH", "greedy": summary("10" * 250, 5000, name="math")})))
    assert "| 50.0 <sup>a</sup> |" in text
    assert "<sup>a</sup> 500 of 5000 problems." in text


ASKED = {"rendering": "chat", "max_new_tokens": 512, "stop_ids": [2], "grader": "gruppo 1", "temperature": 0.0}


@pytest.mark.parametrize(
    ("first", "second", "notes"),
    [
        ({}, {"prompt": "other", "grading": {"tolerance": 1}}, ("", "")),
        ({}, {"grader": "gruppo 1, math-verify 2"}, ("", "")),
        ({}, {"grader": "gruppo 2, math-verify 2"}, ("asked with grader gruppo=1", "asked with grader gruppo=2")),
        ({}, {"stop_ids": [2, 7]}, ("asked with stop_ids=[2]", "asked with stop_ids=[2, 7]")),
        (
            {"max_new_tokens": 8},
            {"rendering": "plain"},
            ("asked with rendering=chat, max_new_tokens=8", "asked with rendering=plain, max_new_tokens=512"),
        ),
    ],
)
def test_one_row_of_two_ways_of_asking_says_so(first, second, notes):
    passes = {
        name: {"title": name, "greedy": summary("10", 2, paper="11") | {"settings": ASKED | change}}
        for name, change in (("gsm8k", first), ("cmath", second))
    }
    for row in rows_of(results(**passes)):  # ours, and by the paper's grading
        assert tuple(row.cells[name].note for name in ("gsm8k", "cmath")) == notes
    text = markdown(rows_of(results(**passes)))
    assert ("**50.0**" in text) is not any(notes)


def test_settings_of_samples_are_compared_among_samples():
    hot, cold = (sampled("10", 2) | {"settings": ASKED | {"temperature": value}} for value in (1.0, 0.7))
    greedy = summary("10", 2) | {"settings": ASKED}
    passes = {"a": {"greedy": greedy}, "b": {"sampled": hot}, "c": {"sampled": cold}}
    (row,) = rows_of(results(**passes))
    assert [row.cells[name].note.rpartition("; ")[2] for name in "abc"] == [
        "",
        "asked with temperature=1.0",
        "asked with temperature=0.7",
    ]


def sampled(values, rows, **more):
    """What a pass of two samples would be summarised as."""
    return {**summary(values, rows, **more), "avg": {"2": 0.5}, "pass": {"1": 0.5, "2": 0.5}}


@pytest.mark.parametrize(
    ("passes", "value", "note"),
    [
        ({"sampled": sampled("1101", 4)}, 75.0, "mean over 2 samples (avg@2), not top-1"),
        ({"sampled": sampled("10", 9)}, 50.0, "mean over 2 samples (avg@2), not top-1; 2 of 9 problems"),
        ({"sampled": sampled("10", 2) | {"avg": {}}}, 50.0, "mean over samples, not top-1"),
        ({"sampled": sampled("1101", 4), "greedy": summary("1000", 4)}, 25.0, ""),
    ],
)
def test_samples_stand_in_for_top_1_with_a_note(passes, value, note):
    (row,) = rows_of(results(gsm8k={"title": "GSM8K", **passes}))
    assert (row.cells["gsm8k"].value, row.cells["gsm8k"].note) == (value, note)


def test_the_mean_over_samples_is_marked():
    text = markdown(rows_of(results(gsm8k={"title": "GSM8K", "sampled": sampled("1101", 4)})), references=False)
    assert "| 75.0 <sup>a</sup> |" in text
    assert "<sup>a</sup> Mean over 2 samples (avg@2), not top-1." in text


def test_the_papers_grading_is_a_second_row():
    graded = {"title": "GSM8K", "greedy": summary("1100", 4, paper="1110")}
    rows = rows_of(results(gsm8k=graded, math={"title": "MATH", "greedy": summary("1", 1)}))
    assert [row.model for row in rows] == ["m", "m (paper's grading)"]
    assert [row.cells["gsm8k"].value for row in rows] == [50.0, 75.0]
    assert list(rows[1].cells) == ["gsm8k"]


def test_a_pass_that_has_not_begun_has_no_value():
    text = markdown(rows_of(results(gsm8k={"title": "GSM8K", "greedy": summary("", 4, asked=4)})), references=False)
    assert read_markdown(text)[0][-1][2] == "–"


def test_the_size_is_taken_if_it_is_there():
    (row,) = rows_of(results() | {"size": "135M"})
    assert row.size == "135M"


@pytest.mark.parametrize("key", ["model", "mode", "benchmarks"])
def test_results_without_what_a_row_needs(key):
    broken = {name: value for name, value in results().items() if name != key}
    with pytest.raises(DataError, match=f"no '{key}'; pass the contents of a results.json"):
        rows_of(broken)


# ---- mistakes


@pytest.mark.parametrize("table", [markdown, latex])
@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([OWN], {"benchmarks": ()}, "at least one benchmark"),
        ([OWN], {"benchmarks": ("math", "math")}, "each only once"),
        ([], {"references": False}, "needs rows"),
    ],
)
def test_tables_that_cannot_be(table, rows, options, message):
    with pytest.raises(ConfigError, match=message):
        table(rows, **options)


@pytest.mark.parametrize("value", [-1, 100.1, float("nan")])
def test_a_value_is_in_percent(value):
    with pytest.raises(ConfigError, match="in percent"):
        Cell(value)


def test_a_mode_is_one_of_two():
    with pytest.raises(ConfigError, match="mode='pot'"):
        TableRow("m", None, "pot", {})
