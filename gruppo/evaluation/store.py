"""The files that an evaluation writes, and how an interrupted evaluation continues.

    results.json   results.md   results.tex                      the numbers
    completions/<benchmark>/<pass>/00000.parquet …               every attempt, a file per chunk

Each file of attempts records the model and settings that produced it. A later call with the same model and settings
continues from the stored attempts; with different ones it is refused, so that no number mixes two configurations. If
only the version of the grader differs, the attempts are kept and graded again.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.types import PASSES, Attempt, GradedAttempt, Problem, ToolUse
from gruppo.grading import Grade, Rule, Rung
from gruppo.runs.lines import write_file
from gruppo.runs.links import no_link
from gruppo.types import StopReason

__all__ = ["EvaluationFolder"]

logger = logging.getLogger(__name__)

Regrade = Callable[[Mapping[str, Problem], Sequence[Attempt]], list[GradedAttempt]]

FORMAT = 1
RESULT_FILES = ("results.json", "results.md", "results.tex")
IDENTITY = b"gruppo.evaluation"

COLUMNS: dict[str, pa.DataType] = {
    "problem": pa.string(),
    "sample": pa.int32(),
    "question": pa.string(),
    "gold": pa.list_(pa.string()),
    "answers_mode": pa.string(),
    "level": pa.string(),
    "subject": pa.string(),
    "text": pa.string(),
    "tokens": pa.int32(),
    "stop": pa.string(),
    "correct": pa.bool_(),
    "answer": pa.string(),
    "rule": pa.string(),
    "rung": pa.string(),
    "paper": pa.bool_(),
    "program": pa.bool_(),
    "vote": pa.int32(),
    "rounds": pa.int32(),
    "executions": pa.int32(),
    "errors": pa.int32(),
    "timeouts": pa.int32(),
    "output": pa.string(),
    "segments": pa.list_(pa.struct([("kind", pa.string()), ("text", pa.string())])),
}


class EvaluationFolder:
    """The folder of one evaluation.

    Example:
        folder = EvaluationFolder(Path("evaluations/smollm2"))
        folder.scores("gsm8k", "greedy")        {"gsm8k/test/0": [True], …}
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file: name a folder for the results of the evaluation.")

    # ---- writing

    def add(
        self,
        benchmark: str,
        decoding: str,
        problems: Mapping[str, Problem],
        scored: Sequence[GradedAttempt],
        identity: Mapping[str, Any],
    ) -> None:
        """Store the attempts of one chunk. The file is written atomically: in full or not at all."""
        folder = self._attempts(benchmark, decoding)
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.stem) for path in self._files(benchmark, decoding)), default=-1)
        _write(folder / f"{number:05}.parquet", problems, scored, identity)

    def restart(self) -> None:
        """Delete all attempts, and the results computed from them."""
        for benchmark, decoding in self.passes():
            for path in self._files(benchmark, decoding):
                path.unlink()
        for name in RESULT_FILES:
            (self.path / name).unlink(missing_ok=True)

    def write_results(self, results: Mapping[str, Any], tables: Mapping[str, str]) -> None:
        """Write the numbers, and the tables by file name."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_file(self.path / "results.json", text.encode())
        for name, table in tables.items():
            write_file(self.path / name, table.encode())

    # ---- reading

    def results(self) -> dict[str, Any] | None:
        """The contents of results.json; None if it does not exist yet."""
        path = no_link(self.path / "results.json")
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(
                f"{path} is not valid JSON ({error}). Remove it: it is created again from the attempts."
            ) from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise DataError(f"{path} is not of format {FORMAT}, which this version reads. Choose another folder.")
        return found

    def identity(self, benchmark: str, decoding: str) -> dict[str, Any]:
        """What produced the attempts of a pass: weights, settings, prompts."""
        for path in self._files(benchmark, decoding):
            return _identity_of(_read(path, ["problem"]))
        return {}

    def kept(
        self,
        benchmark: str,
        decoding: str,
        problems: Mapping[str, Problem],
        identity: Mapping[str, Any],
        regrade: Regrade | None = None,
    ) -> list[GradedAttempt]:
        """The attempts at these problems from earlier calls with the same identity.

        A file that differs only in the version of the grader is graded again by `regrade`, and replaced.
        """
        kept: list[GradedAttempt] = []
        wanted = {"format": FORMAT, **identity}
        for path in self._files(benchmark, decoding):
            table = _read(path)
            found = _identity_of(table)
            other = [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]
            changes = "; ".join(f"{key}: {found.get(key)!r}, now {wanted.get(key)!r}" for key in other)
            if other and (other != ["grader"] or regrade is None):
                self._refuse(path, changes)
            asked = _problems(table, path)
            for name, problem in asked.items():
                what = _difference(problem, problems.get(name, problem))  # problems not asked now are not checked
                if what is not None:
                    self._refuse(path, f"the data has another {what} for {name}")
            scored = [_scored(row) for row in table.to_pylist()]
            if other and regrade is not None:
                logger.warning(f"{path}: {len(scored)} attempts are graded again ({changes}).")
                scored = regrade(asked, [each.attempt for each in scored])
                _write(path, asked, scored, identity)
            kept += [each for each in scored if each.attempt.problem in problems]
        return kept

    def _refuse(self, path: Path, why: str) -> None:
        raise ConfigError(
            f"{path.parent} holds attempts of another evaluation ({why}). Choose another folder (--output-dir, "
            "output_dir=…), or start over (--restart, restart=True), which deletes the results and the attempts at "
            f"all benchmarks in {self.path}."
        )

    def attempts(self, benchmark: str, decoding: str) -> list[GradedAttempt]:
        """All attempts of a pass, whatever their identity."""
        return [_scored(row) for path in self._files(benchmark, decoding) for row in _read(path).to_pylist()]

    def questions(self, benchmark: str, decoding: str) -> dict[str, str]:
        """The question of each problem, by id."""
        tables = [_read(path, ["problem", "question"]) for path in self._files(benchmark, decoding)]
        return {row["problem"]: row["question"] for table in tables for row in table.to_pylist()}

    def problems(self, benchmark: str, decoding: str) -> dict[str, Problem]:
        """The problems with their gold answers, by id."""
        files = self._files(benchmark, decoding)
        return {name: each for path in files for name, each in _problems(_read(path), path).items()}

    def scores(self, benchmark: str, decoding: str, column: str = "correct") -> dict[str, list[bool]]:
        """For each problem, by id, whether each of its attempts is right."""
        found: dict[str, dict[int, bool]] = {}
        for path in self._files(benchmark, decoding):
            for row in _read(path, ["problem", "sample", column]).to_pylist():
                found.setdefault(row["problem"], {})[row["sample"]] = bool(row[column])
        return {problem: [samples[i] for i in sorted(samples)] for problem, samples in found.items()}

    def passes(self) -> Iterator[tuple[str, str]]:
        """Every (benchmark, pass) of which this folder has attempts."""
        for folder in sorted((self.path / "completions").glob("*/*")):
            if folder.name in PASSES and self._files(folder.parent.name, folder.name):
                yield folder.parent.name, folder.name

    def _attempts(self, benchmark: str, decoding: str) -> Path:
        """The folder of a pass, which no link may lead to: files are written and removed there."""
        return no_link(no_link(no_link(self.path / "completions") / benchmark) / decoding)

    def _files(self, benchmark: str, decoding: str) -> list[Path]:
        found = sorted(path for path in self._attempts(benchmark, decoding).glob("*.parquet") if path.stem.isdigit())
        return [no_link(path) for path in found]


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}). Remove it: its problems are attempted again.") from error


def _identity_of(table: pa.Table) -> dict[str, Any]:
    return dict(json.loads((table.schema.metadata or {}).get(IDENTITY, b"{}")))


def _write(
    path: Path, problems: Mapping[str, Problem], scored: Sequence[GradedAttempt], identity: Mapping[str, Any]
) -> None:
    rows = [_row(problems[each.attempt.problem], each) for each in scored]
    schema = pa.schema(list(COLUMNS.items()), metadata={IDENTITY: json.dumps({"format": FORMAT, **identity})})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, compression="zstd")
    write_file(path, sink.getvalue())


def _problems(table: pa.Table, path: Path) -> dict[str, Problem]:
    """The problems of a file. Files of versions that did not store `answers_mode` get the default, "last"."""
    columns = ["problem", "question", "gold", "level", "subject"]
    try:
        asked = table.select([*columns, *(name for name in ("answers_mode",) if name in table.schema.names)])
        return {
            row["problem"]: Problem(
                id=row["problem"],
                question=row["question"],
                answers=tuple(row["gold"]),
                answers_mode=row.get("answers_mode") or "last",
                level=row["level"],
                subject=row["subject"],
            )
            for row in asked.to_pylist()
        }
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} does not hold problems as `gruppo eval` writes them: {error}") from error


def _difference(first: Problem, second: Problem) -> str | None:
    """Which field makes these different problems, so that a stored grade is not valid; None if they match."""
    if (first.question, first.answers) != (second.question, second.answers):
        return "question or answer"
    return "answers_mode" if first.answers_mode != second.answers_mode else None


def _row(problem: Problem, scored: GradedAttempt) -> dict[str, Any]:
    attempt, grade = scored.attempt, scored.grade
    return {
        "problem": problem.id,
        "sample": attempt.sample,
        "question": problem.question,
        "gold": list(problem.answers),
        "answers_mode": problem.answers_mode,
        "level": problem.level,
        "subject": problem.subject,
        "text": attempt.text,
        "tokens": attempt.tokens,
        "stop": str(attempt.stop),
        "correct": grade.correct,
        "answer": grade.answer,
        "rule": None if grade.rule is None else str(grade.rule),
        "rung": str(grade.rung),
        "paper": scored.paper,
        "program": scored.program,
        "vote": scored.vote,
        **({} if attempt.tools is None else attempt.tools.to_dict()),
        "segments": [{"kind": kind, "text": text} for kind, text in attempt.segments],
    }


def _scored(row: Mapping[str, Any]) -> GradedAttempt:
    tools = None
    if row["rounds"] is not None:
        tools = ToolUse(row["rounds"], row["executions"], row["errors"], row["timeouts"], row["output"])
    segments = tuple((each["kind"], each["text"]) for each in row["segments"])
    return GradedAttempt(
        Attempt(row["problem"], row["sample"], row["text"], row["tokens"], StopReason(row["stop"]), tools, segments),
        Grade(
            row["correct"],
            Rung(row["rung"]),
            gold=row["gold"][0],
            answer=row["answer"],
            rule=None if row["rule"] is None else Rule(row["rule"]),
        ),
        paper=row["paper"],
        program=row["program"],
        vote=row["vote"],
    )
