"""Load the problems of a benchmark from a JSONL file or the hub; every row is checked before anything is sampled.

A data folder has one folder per data set and one file per split, plain or gzipped:

    gsm8k/test.jsonl      mgsm_zh/test.jsonl      cmath/test.jsonl
    math/test.jsonl       math500/test.jsonl      cmath/validation.jsonl

One JSON object on each line:

    question       the problem, without an instruction
    answer         the gold answer, or a worked solution with its answer in a box or after ####
    id             optional; default: <benchmark>/<name of the file that is read>/<row>, counted from 0
    level, subject         optional
    answers, answers_mode  for several answers: "all" of the list are required, or "any" one of them

A row without `question` may also have the hub copy's own keys. Other keys are ignored.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.types import Benchmark, Problem
from gruppo.grading import AnswersMode, Ladder, extract_gold, last_box

__all__ = ["file_in", "load_problems", "spread"]

T = TypeVar("T")
Rows = Iterator[tuple[str, Mapping[str, Any]]]  # (location for error messages, row)

DAMAGED = (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error)


def load_problems(benchmark: Benchmark, data_dir: str | Path | None = None, limit: int | None = None) -> list[Problem]:
    """Load the problems of a benchmark in the order of its file, or `limit` of them, spread evenly.

    `data_dir` is a data folder (see above) or one JSONL file. Without it the problems come from the hub or, if the
    benchmark has no hub source, from its file in the current folder.

    Example:
        load_problems(BENCHMARKS["gsm8k"], "data", limit=200)[1].id == "gsm8k/test/6"
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}: it must be at least 1; leave it out for all problems.")
    path = _find_file(benchmark, data_dir)
    stem = f"{benchmark.name}/{_split(benchmark, path)}"
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for where, row in _rows_of_hub(benchmark) if path is None else _rows_of_file(benchmark, path):
        problem = _read_problem(row, where, benchmark, default=f"{stem}/{len(problems)}")
        if problem.id in places:
            raise DataError(
                f"{where}: the id {problem.id!r} was already used at {places[problem.id]}; ids must be unique."
            )
        places[problem.id] = where
        problems.append(problem)
    if not problems:
        raise DataError(f"{benchmark.name}: there are no problems in {path or 'the copy on the hub'}.")
    return spread(problems, limit)


def spread(rows: Sequence[T], limit: int | None) -> list[T]:
    """Select `limit` evenly spaced rows, always the same ones: row `i * len(rows) // limit` for each i.

    Example:
        spread("abcdefgh", 3) == ["a", "c", "f"]
    """
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // limit] for i in range(limit)]


# ---- where rows come from


def file_in(benchmark: Benchmark, folder: str | Path) -> Path | None:
    """The benchmark's file in a data folder, plain or gzipped; None if there is none."""
    path = Path(folder) / benchmark.file
    return next((each for each in (path, path.with_name(f"{path.name}.gz")) if each.is_file()), None)


def _split(benchmark: Benchmark, path: Path | None) -> str:
    """The stem of the file that is read; for rows from the hub, the stem of the benchmark's own file name."""
    return Path(path or benchmark.file).name.partition(".")[0]


def _find_file(benchmark: Benchmark, data_dir: str | Path | None) -> Path | None:
    """The file to read; None: the hub."""
    if data_dir is None and benchmark.hub is not None:
        return None
    folder = Path(data_dir or ".").expanduser()
    if folder.is_file():
        return folder
    path = folder / benchmark.file
    if (found := file_in(benchmark, folder)) is not None:
        return found
    hub = "" if benchmark.hub is None else f", or leave it out to load {benchmark.hub.path} from the hub"
    raise ConfigError(
        f"{benchmark.name}: there is no {path} and no {path.name}.gz beside it. Set data_dir (--data-dir) to the "
        f"folder that holds {benchmark.file}, or to a file of JSON lines with `question` and `answer`{hub}."
    )


def _rows_of_file(benchmark: Benchmark, path: Path) -> Rows:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: this is not valid JSON ({error}). Each line holds one JSON object.") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: each line holds one JSON object, but this is a {type(row).__name__}.")
        yield where, _in_our_keys(benchmark, row)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig") as lines:
                yield from enumerate(lines, start=1)
        else:
            with path.open(encoding="utf-8-sig") as lines:
                yield from enumerate(lines, start=1)
    except DAMAGED as error:
        raise DataError(f"{path}: the file is damaged, or not UTF-8 text ({error}).") from None


def _in_our_keys(benchmark: Benchmark, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a file's row with our keys; a row saved unchanged from the hub is converted."""
    if "question" in row or benchmark.hub is None:
        return row
    try:
        return benchmark.hub.row(row)
    except KeyError:
        return row  # neither format: a later check reports the missing key


def _rows_of_hub(benchmark: Benchmark) -> Rows:
    import datasets  # it takes a second

    source = benchmark.hub
    assert source is not None
    instead = (
        f"Set data_dir (--data-dir) to a JSONL file, or to a folder with {benchmark.file}, to do without the hub."
    )
    try:
        rows = datasets.load_dataset(source.path, source.name, split=source.split)
    # The errors that `datasets` raises for a missing set, split or network get one common message.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{benchmark.name}: the split {source.split!r} of {source.path} could not be loaded from the hub "
            f"({type(error).__name__}: {error}). {instead}"
        ) from error
    for number, row in enumerate(rows):
        where = f"{source.path}, {source.split}, row {number}"
        try:
            yield where, source.row(row)
        except KeyError as error:
            raise DataError(f"{where}: there is no {error} among its keys {sorted(row)}. {instead}") from None


# ---- what a row says


def _read_problem(row: Mapping[str, Any], where: str, benchmark: Benchmark, default: str) -> Problem:
    answers, mode = _read_answers(row, where, benchmark.ladder)
    identity = _text_or_none(row, "id", where)
    return Problem(
        id=default if identity is None else identity,
        question=_question(row, where),
        answers=answers,
        answers_mode=mode,
        level=_level(row, where),
        subject=_text_or_none(row, "subject", where),
    )


def _question(row: Mapping[str, Any], where: str) -> str:
    if "question" not in row:
        raise DataError(f"{where}: there is no `question`; the keys are {sorted(row)}.")
    question = row["question"]
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: `question` must be a string, but is {question!r}.")
    return _encodable(question, "question", where)


def _encodable(text: str, key: str, where: str) -> str:
    """Check that a text encodes as UTF-8: JSON can hold lone surrogates, which can be neither prompted nor stored."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: `{key}` is not valid text ({error}).") from None
    return text


def _text_or_none(row: Mapping[str, Any], key: str, where: str) -> str | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise DataError(f"{where}: `{key}` must be a string or a whole number, but is {value!r}.")
    return _encodable(str(value).strip(), key, where)


def _level(row: Mapping[str, Any], where: str) -> str | None:
    """Normalise the level: MATH has "Level 3" where other sets have 3."""
    level = _text_or_none(row, "level", where)
    return None if level is None else level.removeprefix("Level ")


def _read_answers(row: Mapping[str, Any], where: str, ladder: Ladder) -> tuple[tuple[str, ...], AnswersMode]:
    several, mode = row.get("answers"), row.get("answers_mode")
    if mode is not None and mode not in get_args(AnswersMode):
        raise DataError(f"{where}: `answers_mode` must be one of {', '.join(get_args(AnswersMode))}, but is {mode!r}.")
    if several is not None and (not isinstance(several, list) or not several):
        raise DataError(f"{where}: `answers` must be a list that is not empty, but is {several!r}.")
    if several is not None and len(several) > 1 and mode is None:
        raise DataError(
            f'{where}: {len(several)} answers need `answers_mode`: "all" if all are required, "any" if one is enough.'
        )
    if several is not None and (mode in ("all", "any") or (len(several) == 1 and "answer" not in row)):
        return tuple(_gold(answer, where, ladder) for answer in several), mode or "last"
    if "answer" not in row:
        raise DataError(f"{where}: there is no `answer`; the keys are {sorted(row)}.")
    return (_gold(row["answer"], where, ladder),), mode or "last"


def _gold(answer: object, where: str, ladder: Ladder) -> str:
    """Return a gold answer that the ladder can grade against, extracted from a worked solution if need be."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(
            f"{where}: the answer must be a string or a number, but is {answer!r}. Correct or remove the row."
        )
    _encodable(answer, "answer", where)
    boxed = last_box(answer)
    gold = boxed if boxed is not None else extract_gold(answer, ladder) if "####" in answer else answer
    gold = " ".join(gold.split()) if gold is not None else answer
    if extract_gold(gold, ladder) is None:
        wanted = "a literal number, fraction or percentage" if ladder.literal else "a formula or short text"
        raise DataError(f"{where}: nothing can be graded against the answer {answer[:80]!r}; it must be {wanted}.")
    return gold
