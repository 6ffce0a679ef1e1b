"""Results as a table, in Markdown or LaTeX, in the layout of the table in the DeepSeekMath paper.

    rows_of           the rows of a results.json
    columns_of        the columns they need: the paper's four if its rows are shown, then any others
    markdown, latex   the table: your rows last in each section, below the paper's

A number gets a mark and a footnote, and is not set in bold, if it does not cover the whole set, is not top-1, or was
obtained with other settings than the rest of its row. MATH-500 is a separate column, shown only on request.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase
from typing import Any

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.paper_results import PAPER_BENCHMARKS, PAPER_RESULTS, Cell, TableRow
from gruppo.evaluation.types import Mode
from gruppo.evaluation.unlike import unlike_the_others

__all__ = ["Cell", "TableRow", "columns_of", "latex", "markdown", "rows_of"]


SECTIONS: tuple[tuple[Mode, str], ...] = (
    ("cot", "Chain-of-Thought Reasoning"),
    ("tir", "Tool-Integrated Reasoning"),
)
TITLES = {"gsm8k": "GSM8K", "math": "MATH", "math500": "MATH-500", "mgsm_zh": "MGSM-zh", "cmath": "CMATH"}
LANGUAGES = {"gsm8k": "English", "math": "English", "math500": "English", "mgsm_zh": "Chinese", "cmath": "Chinese"}
OWN = "This evaluation"
PAPERS_GRADING = "(paper's grading)"

VOTE = "Majority vote over 32 samples; every other number is of one attempt."
REFERENCES = (
    "Rows other than those of this evaluation are as printed in the DeepSeekMath paper (arXiv 2402.03300), which "
    "grades more loosely. DeepSeekMath-RL was trained on GSM8K and MATH in chain-of-thought form only: its other "
    "numbers are of problems or a mode that it was not trained on."
)


# ---- rows


def rows_of(results: Mapping[str, Any]) -> list[TableRow]:
    """The rows of a results.json: top-1 of the greedy passes, and a second row for the paper's grading if it was used.

    A benchmark with only a sampled pass shows the mean over its samples, with a note that it is not top-1. If the
    settings differ between benchmarks, a note on each gives its values.

    Example:
        rows_of({"model": "m", "mode": "cot", "benchmarks": {"gsm8k": {"greedy": summary}}})[0].cells["gsm8k"].value
    """
    try:
        model, mode, benchmarks = results["model"], results["mode"], results["benchmarks"]
        shown = {name: each.get("greedy") or each.get("sampled") for name, each in benchmarks.items()}
        passes = {name: summary for name, summary in shown.items() if summary}
        notes = unlike_the_others(passes)
        ours = {name: _cell(summary, summary, notes[name]) for name, summary in passes.items()}
        papers = {
            name: _cell(summary, summary["paper"], notes[name])
            for name, summary in passes.items()
            if summary.get("paper")
        }
    except KeyError as error:
        raise DataError(f"The results have no {error}; pass the contents of a results.json.") from None
    size = results.get("size")
    rows = [TableRow(model, size, mode, ours)]
    if papers:
        rows.append(TableRow(f"{model} {PAPERS_GRADING}", size, mode, papers))
    return rows


def columns_of(rows: Iterable[TableRow], *, references: bool = True) -> tuple[str, ...]:
    """The paper's four benchmarks, then any others in the rows, such as MATH-500.

    With `references=False` only the benchmarks in the rows, in the same order.

    Example:
        rows = [TableRow("m", None, "cot", {"aime": Cell(3.3), "math": Cell(20.0)})]
        columns_of(rows) == ("gsm8k", "math", "mgsm_zh", "cmath", "aime")
        columns_of(rows, references=False) == ("math", "aime")
    """
    own = [name for row in rows for name in row.cells]
    return tuple(name for name in dict.fromkeys([*PAPER_BENCHMARKS, *own]) if references or name in own)


def _cell(summary: Mapping[str, Any], graded: Mapping[str, Any], unlike: str) -> Cell:
    value, interval = graded["accuracy"], graded["interval"]
    return Cell(
        None if value is None else 100 * value,
        note="; ".join(said for said in (_about_samples(summary), _about_size(summary), unlike) if said),
        interval=None if interval is None else (100 * interval[0], 100 * interval[1]),
    )


def _about_samples(summary: Mapping[str, Any]) -> str:
    if "pass" not in summary:  # greedy
        return ""
    k = next(iter(summary["avg"]), None)
    return "mean over samples, not top-1" if k is None else f"mean over {k} samples (avg@{k}), not top-1"


def _about_size(summary: Mapping[str, Any]) -> str:
    count, whole = summary["attempted"], summary["rows"]
    usual = summary.get("usual_rows", whole)
    if not summary["complete"]:
        return f"unfinished: {count} of {whole or summary['problems']} problems"
    if usual != whole:
        return f"{count} of {whole} problems in the data; the set has {usual}"
    if summary["whole_set"] is False:
        return f"{count} of {whole} problems" if count < whole else f"{count} problems, not the {whole} of the set"
    return ""


# ---- the layout common to both formats


@dataclass(frozen=True)
class _Layout:
    """A table without its markup."""

    columns: tuple[str, ...]
    titles: Mapping[str, str]
    sections: tuple[tuple[str, tuple[tuple[str, tuple[TableRow, ...]], ...]], ...]  # title, (group, its rows) …
    notes: Mapping[str, str]  # note -> its mark
    vote: bool  # whether any number is a majority vote
    references: bool
    intervals: bool

    def title(self, column: str) -> str:
        return self.titles.get(column) or TITLES.get(column, column)

    def languages(self) -> list[tuple[str, list[str]]]:
        """Runs of adjacent columns with the same language; "" for benchmarks whose language is not in LANGUAGES."""
        return [(name, list(run)) for name, run in groupby(self.columns, lambda column: LANGUAGES.get(column, ""))]

    def caption(self) -> str:
        return "Top-1 accuracy in percent" + (", with 95 % intervals" if self.intervals else "") + "."

    def footnotes(self) -> list[tuple[str, str]]:
        """(mark, text) pairs in the order of the marks; a remark on the whole table has no mark."""
        vote = [("*", VOTE)] if self.vote else []
        notes = [(mark, _sentence(note)) for note, mark in self.notes.items()]
        return [*vote, *notes, *([("", REFERENCES)] if self.references else [])]

    def spread(self, cell: Cell) -> str:
        """The suffix of a value: its interval, if intervals are shown."""
        if cell.interval is None or not self.intervals:
            return ""
        low, high = cell.interval  # not centred on the value
        return f" [{low:.1f}, {high:.1f}]"


def _layout(
    rows: Sequence[TableRow],
    references: bool,
    benchmarks: Sequence[str],
    titles: Mapping[str, str] | None,
    intervals: bool,
) -> _Layout:
    columns = tuple(benchmarks)
    if not columns or len(set(columns)) < len(columns):
        raise ConfigError(f"benchmarks={benchmarks!r} must name at least one benchmark, and each only once.")
    if not rows and not references:
        raise ConfigError("A table needs rows, or references=True for those of the paper.")
    modes = {row.mode for row in rows} or {mode for mode, _ in SECTIONS}
    sections = tuple(
        (title, _groups([row for row in rows if row.mode == mode], mode, references))
        for mode, title in SECTIONS
        if mode in modes
    )
    cells = [
        row.cells[column]
        for _, groups in sections
        for _, members in groups
        for row in members
        for column in columns
        if column in row.cells
    ]
    notes = dict.fromkeys(cell.note for cell in cells if cell.note)
    return _Layout(
        columns,
        titles or {},
        sections,
        {note: _letter(place) for place, note in enumerate(notes)},
        any(cell.majority for cell in cells),
        references,
        intervals,
    )


def _groups(own: Sequence[TableRow], mode: Mode, references: bool) -> tuple[tuple[str, tuple[TableRow, ...]], ...]:
    """The rows of a section: closed-source models, open-source models, and this evaluation."""
    known = [row for row in PAPER_RESULTS if row.mode == mode] if references else []
    groups = (
        ("Closed-Source Models", tuple(row for row in known if row.size is None)),
        ("Open-Source Models", tuple(row for row in known if row.size is not None)),
        (OWN, tuple(own)),
    )
    return tuple((title, rows) for title, rows in groups if rows)


def _letter(place: int) -> str:
    """a, b, …, z, aa, ab, …"""
    head, last = divmod(place, len(ascii_lowercase))
    return (_letter(head - 1) if head else "") + ascii_lowercase[last]


def _sentence(note: str) -> str:
    text = note[:1].upper() + note[1:]
    return text if text.endswith(".") else f"{text}."


# ---- Markdown


def markdown(
    rows: Sequence[TableRow],
    *,
    references: bool = True,
    benchmarks: Sequence[str] = PAPER_BENCHMARKS,
    titles: Mapping[str, str] | None = None,
    intervals: bool = False,
) -> str:
    """Your rows as a Markdown table, below the paper's rows of the same mode.

    Without rows it is the paper's table. `titles` gives column titles for user-defined benchmarks.

    Example:
        print(markdown(rows_of(results), benchmarks=("gsm8k", "math500"), intervals=True))
    """
    layout = _layout(rows, references, benchmarks, titles, intervals)
    width = 2 + len(layout.columns)
    heads = [_plain(layout.title(column)) for column in layout.columns]
    lines = [_line(["Model", "Size", *heads]), _line(["---", "---", *["---:"] * len(heads)])]
    for title, groups in layout.sections:
        lines.append(_line([f"**{title}**", *[""] * (width - 1)]))
        for group, members in groups:
            lines.append(_line([f"*{group}*", *[""] * (width - 1)]))
            lines += [_line(_markdown_row(row, layout, own=group == OWN)) for row in members]
    parts = [_caption(layout), "\n".join(lines)]
    for mark, text in layout.footnotes():
        sign = "\\*" if mark == "*" else f"<sup>{mark}</sup>" if mark else ""
        parts.append(f"{sign} {_plain(text)}".strip())
    return "\n\n".join(parts) + "\n"


def _caption(layout: _Layout) -> str:
    """The caption with the languages of the columns: Markdown has no cells that span columns, as LaTeX has."""
    languages = [f"{name}: {', '.join(map(layout.title, run))}." for name, run in layout.languages() if name]
    return _plain(" ".join([layout.caption(), *languages]))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_row(row: TableRow, layout: _Layout, *, own: bool) -> list[str]:
    name, size = _plain(row.model), _plain(row.size or "–")
    cells = [_markdown_cell(row.cells.get(column), layout, bold=own) for column in layout.columns]
    return [f"**{name}**" if own else name, size, *cells]


def _markdown_cell(cell: Cell | None, layout: _Layout, *, bold: bool) -> str:
    if cell is None or cell.value is None:
        return "–"
    value = f"{cell.value:.1f}" + ("\\*" if cell.majority else "")
    value = f"**{value}**" if bold and not cell.note else value
    mark = f" <sup>{layout.notes[cell.note]}</sup>" if cell.note else ""
    return value + layout.spread(cell) + mark


def _plain(text: str) -> str:
    """The text on one line, with Markdown markup escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|&~$])", r"\\\1", " ".join(text.split()))


# ---- LaTeX


def latex(
    rows: Sequence[TableRow],
    *,
    references: bool = True,
    benchmarks: Sequence[str] = PAPER_BENCHMARKS,
    titles: Mapping[str, str] | None = None,
    intervals: bool = False,
) -> str:
    """The same table for LaTeX: a `table` environment that needs only the booktabs package.

    Example:
        Path("results.tex").write_text(latex(rows_of(results)))
    """
    layout = _layout(rows, references, benchmarks, titles, intervals)
    width = 2 + len(layout.columns)
    body = []
    for title, groups in layout.sections:
        body += ["\\midrule", f"\\multicolumn{{{width}}}{{c}}{{\\textbf{{{title}}}}} \\\\"]
        for group, members in groups:
            body += ["\\midrule", f"\\multicolumn{{{width}}}{{l}}{{\\emph{{{group}}}}} \\\\"]
            body += [" & ".join(_latex_row(row, layout, own=group == OWN)) + " \\\\" for row in members]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{_escaped(layout.caption())}}}",
            f"\\begin{{tabular}}{{ll{'r' * len(layout.columns)}}}",
            "\\toprule",
            *_latex_head(layout),
            *body,
            "\\bottomrule",
            "\\end{tabular}",
            *_latex_footnotes(layout),
            "\\end{table}",
            "",
        ]
    )


def _latex_head(layout: _Layout) -> list[str]:
    spans, rules, column = [], [], 3
    for language, run in layout.languages():
        title = f"{language} Benchmarks" if language else ""
        spans.append(f"\\multicolumn{{{len(run)}}}{{c}}{{{title}}}")
        if language:
            rules.append(f"\\cmidrule(lr){{{column}-{column + len(run) - 1}}}")
        column += len(run)
    titles = [_escaped(layout.title(name)) for name in layout.columns]
    return [
        f" & & {' & '.join(spans)} \\\\",
        *(["".join(rules)] if rules else []),
        f"Model & Size & {' & '.join(titles)} \\\\",
    ]


def _latex_footnotes(layout: _Layout) -> list[str]:
    notes = [(f"$^{{{mark}}}$ " if mark else "") + _escaped(text) for mark, text in layout.footnotes()]
    if not notes:
        return []
    return ["", "\\smallskip", "{\\footnotesize\\raggedright", *(f"{note}\\par" for note in notes), "}"]


def _latex_row(row: TableRow, layout: _Layout, *, own: bool) -> list[str]:
    name, size = _escaped(row.model), "--" if row.size is None else _escaped(row.size)
    cells = [_latex_cell(row.cells.get(column), layout, bold=own) for column in layout.columns]
    return [f"\\textbf{{{name}}}" if own else name, size, *cells]


def _latex_cell(cell: Cell | None, layout: _Layout, *, bold: bool) -> str:
    if cell is None or cell.value is None:
        return "--"
    value = f"{cell.value:.1f}"
    value = f"\\textbf{{{value}}}" if bold and not cell.note else value
    marks = ("*" if cell.majority else "") + (layout.notes[cell.note] if cell.note else "")
    return value + layout.spread(cell) + (f"$^{{{marks}}}$" if marks else "")


_ESCAPES = {
    **{sign: f"\\{sign}" for sign in "#$%&_{}"},
    "\\": "\\textbackslash{}",
    "^": "\\textasciicircum{}",
    "~": "\\textasciitilde{}",
    "`": "\\`{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    "–": "--",
    "-": "-{}",  # before another hyphen: LaTeX would set the two as a dash
}


def _escaped(text: str) -> str:
    """The text on one line, with LaTeX special characters escaped."""
    return re.sub(r"[#$%&_{}\\^~`<>|–]|-(?=-)", lambda match: _ESCAPES[match[0]], " ".join(text.split()))
