"""Test a reward before a run: on right, wrong, odd and hostile completions, each under a time limit."""

import asyncio
import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gruppo.errors import ConfigError, DataError, RewardError
from gruppo.rewards.calling import Arguments, Reply, call, check_arguments, lost
from gruppo.rewards.cases import PLACE, Case, cases_of, prompt_text
from gruppo.rewards.marks import innermost, names_environments
from gruppo.rewards.outcomes import Kind

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gruppo.rewards.pool import Bounds

__all__ = ["Case", "RewardCheck", "Trial", "check_reward"]

GOLD_COLUMNS = ("answer", "solution", "gold", "target", "label")
MOST_TIMEOUTS = 3  # after this many, the remaining cases are skipped
NO_SCORE = "never gives a score"
SECONDS = "check_reward/seconds"  # the metric by which a worker reports the time


@dataclass(frozen=True)
class Trial:
    """The result of a reward on one case of one row.

    Example:
        Trial(row=0, case=Case("empty", "", False), kind=Kind.SCORE, score=0.0, seconds=0.001)
    """

    row: int
    case: Case
    kind: Kind
    score: float | None
    seconds: float
    error: str | None = None


@dataclass
class RewardCheck:
    """The result of `check_reward`: every trial, and warnings as text."""

    name: str
    trials: list[Trial] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.warnings

    def of(self, case: str) -> list[Trial]:
        """The trials of one case, by its name."""
        return [trial for trial in self.trials if trial.case.name == case]

    def table(self) -> "Table":
        """One line per case: scores over the rows, abstentions, errors, and the longest time."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.name} on {len({t.row for t in self.trials})} row(s)", title_justify="left")
        for column in ("completion", "score", "abstains", "errors", "longest"):
            table.add_column(column, justify="left" if column == "completion" else "right")
        for name in dict.fromkeys(trial.case.name for trial in self.trials):
            trials = self.of(name)
            scores = sorted({t.score for t in trials if t.score is not None})
            shown = f"{scores[0]:g}" if len(scores) == 1 else f"{scores[0]:g} to {scores[-1]:g}" if scores else "–"
            abstained = sum(t.kind is Kind.ABSTAIN for t in trials)
            failed = sum(t.kind.failed for t in trials)
            longest = max(t.seconds for t in trials)
            cells = [name, shown, str(abstained or ""), str(failed or ""), f"{longest:.3f} s"]
            table.add_row(*(Text(cell) for cell in cells), style="red" if failed else None)
        return table

    def print(self, console: "Console | None" = None) -> None:
        """Print the table and the warnings."""
        from rich.console import Console

        console = console or Console()
        console.print(self.table())
        for warning in self.warnings or ["No problems found."]:
            console.print(f"- {warning}" if self.warnings else warning, markup=False, highlight=False, soft_wrap=True)


def check_reward(
    fn: Callable[..., Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    gold: str | None = None,
    template: str | None = None,
    timeout: float = 10.0,
    slow: float = 1.0,
    max_rows: int = 3,
    worker_env: Sequence[str] | None = None,
    show: bool = True,
    console: "Console | None" = None,
) -> RewardCheck:
    """Run a reward on gold answers and on empty, huge, non-Latin and hostile completions, and print the results.

    `rows` are dataset rows, of which `max_rows` are tried; `gold` names the column with the right answer (default:
    `answer`, `solution`, …), and `template` is the form that the reward requires, with {} for the answer (default:
    boxed, and in a sentence). Every call scores one completion, in a worker process that is killed after `timeout`
    seconds; calls over `slow` seconds are reported. `worker_env` is the setting of the config; an async reward sees
    all variables, as it does in a run. The ids in `completion_ids` are placeholders, one per character.

    Example:
        report = check_reward(my_reward, dataset.select(range(3)))
        assert report.ok, report.warnings
        check_reward(exact_match, rows, template="A: {}").of("gold, in the template")[0].score == 1.0
    """
    if not callable(fn) or hasattr(fn, "state_dict"):
        raise ConfigError(f"check_reward tests functions, not {type(fn).__name__}; wrap a model in a function.")
    if names_environments(fn):
        raise ConfigError("check_reward has no environments to pass to a reward with a parameter `environments`.")
    if timeout <= 0 or slow <= 0 or max_rows < 1:
        raise ConfigError(f"timeout={timeout}, slow={slow} and max_rows={max_rows} must be positive.")
    chosen = [dict(row) for row, _ in zip(rows, range(max_rows), strict=False)]
    if not chosen:
        raise DataError("check_reward needs at least one row.")
    column = _gold_column(chosen[0], gold)
    if template is not None and (PLACE not in template or column is None):
        raise ConfigError(
            f"template={template!r} must have {PLACE} where the answer goes, and the rows must have a gold answer."
        )

    name = getattr(innermost(fn), "__name__", None) or type(fn).__name__
    report = RewardCheck(name)
    with _asker(fn, name, _bounds(fn, timeout, worker_env), report) as ask:
        _try_all(report, ask, fn, [(row, list(cases_of(row, column, template))) for row in chosen])
    report.warnings += _warnings(report, slow, timeout, formless=template is None and column is not None)
    if show:
        report.print(console)
    return report


def _gold_column(row: Mapping[str, Any], gold: str | None) -> str | None:
    if gold is not None and gold not in row:
        raise DataError(f"The rows have no column {gold!r}; they have {', '.join(row)}.")
    return gold or next((name for name in GOLD_COLUMNS if row.get(name) is not None), None)


# ---- calling the reward

Ask = Callable[[Arguments], tuple[Reply, float]]


class _Timed:
    """Wraps a reward to log how long it took, and to await it if it is asynchronous."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        # The pool reads this to decide whether to send the code by value.
        self.__module__ = getattr(innermost(function), "__module__", None) or type(function).__module__

    def __call__(self, log_metric: Callable[[str, float], None], **arguments: Any) -> list[Any]:
        begin = time.monotonic()
        output = self.function(log_metric=log_metric, **arguments)
        if inspect.isawaitable(output):
            output = asyncio.run(_wait_for(output))
        if not isinstance(output, str | bytes | Mapping) and hasattr(output, "__iter__"):
            output = list(output)  # a generator does its work while it is consumed
        log_metric(SECONDS, time.monotonic() - begin)
        return output


async def _wait_for(output: Any) -> Any:
    return await output


def _bounds(fn: Callable[..., Any], timeout: float, worker_env: Sequence[str] | None) -> "Bounds":
    from gruppo.rewards.pool import Bounds
    from gruppo.rewards.resolve import is_async

    variables = os.environ if is_async(fn) else worker_env or ()
    return Bounds(timeout, timeout, workers=1, variables=tuple(variables))


@contextlib.contextmanager
def _asker(fn: Callable[..., Any], name: str, bounds: "Bounds", report: RewardCheck) -> Iterator[Ask]:
    """Yields a function that calls the reward in a worker, or in this process if it cannot be sent to one."""
    from gruppo.rewards.pool import Pool, packed_arguments

    timed = _Timed(fn)
    try:
        pool = Pool(timed, name, bounds)
    except ConfigError:
        report.warnings.append(
            "cannot be sent to a worker process, because something it uses cannot be pickled: it was tested in this "
            "process, where it cannot be stopped; a run with reward_timeout will reject it"
        )
        yield lambda arguments: _ask_in_thread(timed, name, bounds.seconds, arguments)
        return

    def ask(arguments: Arguments) -> tuple[Reply, float]:
        packed, kept = packed_arguments(arguments, lambda column: None)
        begin = time.monotonic()
        pool.begin(packed, kept)
        reply = pool.finish()
        return reply, dict(reply.log.metrics).get(SECONDS, time.monotonic() - begin)

    try:
        yield ask
    finally:
        pool.close()


def _ask_in_thread(timed: _Timed, name: str, timeout: float, arguments: Arguments) -> tuple[Reply, float]:
    answers: list[Reply | RewardError] = []

    def work() -> None:
        try:
            answers.append(call(timed, name, arguments))
        except RewardError as error:
            answers.append(error)

    begin = time.monotonic()
    thread = threading.Thread(target=work, daemon=True, name=f"gruppo-check-{name}")
    thread.start()
    thread.join(timeout)
    if not answers:
        return lost(Kind.TIMEOUT, f"It took longer than {timeout:g} s.", 1), time.monotonic() - begin
    if isinstance(answers[0], RewardError):
        raise answers[0]
    return answers[0], dict(answers[0].log.metrics).get(SECONDS, time.monotonic() - begin)


def _arguments(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The arguments that a trainer would pass for one completion of this row."""
    prompt = row.get("prompt", prompt_text(row))
    completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")}
    return {
        **columns,
        "prompts": [prompt],
        "completions": [completion],
        "completion_ids": [[ord(character) for character in text]],
        "trainer_state": SimpleNamespace(global_step=0, max_steps=1, epoch=0.0, log_history=[]),
    }


def _try_all(report: RewardCheck, ask: Ask, fn: Any, rows: Sequence[tuple[Mapping[str, Any], list[Case]]]) -> None:
    """Try all cases of all rows; the first twice, since its first call may load things, and to compare the scores."""
    check_arguments(fn, report.name, _arguments(rows[0][0], ""))
    first = _try(ask, 0, rows[0][0], rows[0][1][0])
    for i, (row, cases) in enumerate(rows):
        for case in cases:
            report.trials.append(_try(ask, i, row, case))
            if sum(trial.kind is Kind.TIMEOUT for trial in report.trials) >= MOST_TIMEOUTS:
                report.warnings.append(f"timed out {MOST_TIMEOUTS} times; the remaining cases were skipped")
                return
    if first.score != report.trials[0].score:
        again = f"{_shown(first)}, then {_shown(report.trials[0])}"
        report.warnings.append(f"gives different results for the same completion: {again}")


def _try(ask: Ask, i: int, row: Mapping[str, Any], case: Case) -> Trial:
    try:
        reply, seconds = ask(_arguments(row, case.text))
    except RewardError as error:
        return Trial(i, case, Kind.FAILURE, None, 0.0, str(error))
    outcome = reply.outcomes[0]
    score = outcome.value if outcome.kind is Kind.SCORE else None
    return Trial(i, case, outcome.kind, score, seconds, outcome.error)


def _shown(trial: Trial) -> str:
    return trial.kind.name.lower() if trial.score is None else f"{trial.score:g}"


# ---- warnings


def _warnings(report: RewardCheck, slow: float, timeout: float, *, formless: bool) -> list[str]:
    return [*_about_trouble(report, slow, timeout), *_about_scores(report, formless)]


def _about_trouble(report: RewardCheck, slow: float, timeout: float) -> Iterator[str]:
    for name in dict.fromkeys(trial.case.name for trial in report.trials):
        trials = report.of(name)
        failed = next((t for t in trials if t.kind is Kind.FAILURE), None)
        if failed is not None:
            lines = (failed.error or "").strip().splitlines()
            yield f"fails on '{name}': {lines[-1] if lines else 'no message'}"
        if any(t.kind is Kind.TIMEOUT for t in trials):
            yield f"does not finish within {timeout:g} s on '{name}'"
        longest = max((t.seconds for t in trials if not t.kind.failed), default=0.0)
        if longest > slow:
            yield f"takes {longest:.1f} s on '{name}'"


def _about_scores(report: RewardCheck, formless: bool) -> Iterator[str]:
    scored = [t for t in report.trials if t.score is not None]
    values = {t.score for t in scored}
    if not scored:
        yield NO_SCORE
        return
    if len(values) == 1 and len(report.trials) > 1:
        form = "; if it requires the answer in a certain form, pass template='A: {}'" if formless else ""
        yield f"gives the same score to everything: {scored[0].score:g}{form}"
        return
    for i in sorted({t.row for t in report.trials}):
        right = [t for t in report.trials if t.row == i and t.case.right]
        if right and all(t.kind is Kind.ABSTAIN for t in right):
            yield f"abstains on the gold answer of row {i}"
    yield from _about_ranks(scored)


def _about_ranks(scored: list[Trial]) -> Iterator[str]:
    """Warn of wrong completions that score at least as high as the best form of the gold answer of their row."""
    best = {
        t.row: max(g.score or 0.0 for g in scored if g.row == t.row and g.case.right) for t in scored if t.case.right
    }
    lowest = min(t.score or 0.0 for t in scored)
    seen: set[str] = set()
    for trial in scored:
        score, top = trial.score or 0.0, best.get(trial.row)
        if trial.case.right is not False or trial.case.name in seen:
            continue
        if top is None and score > lowest and trial.case.name in ("empty", "white space"):
            seen.add(trial.case.name)
            yield f"scores '{trial.case.name}' {score:g}, and other completions less"
        elif top is not None and score >= top:
            seen.add(trial.case.name)
            yield f"scores '{trial.case.name}' {score:g}, and the gold answer {top:g}"
    if any((t.score or 0.0) > best[t.row] for t in scored if not t.case.right and t.row in best):
        yield "the gold answer does not get the highest score"
