"""One call of a reward function: what it is given, what it logs, and what becomes of its errors.

Reward workers import this, so it needs the standard library only.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gruppo.errors import RewardError
from gruppo.rewards.outcomes import Kind, Outcome, read_output

Arguments = Mapping[str, Any]


@dataclass
class Log:
    """Calls of `log_extra` and `log_metric`, kept until it is certain that the call of the reward counts."""

    rows: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Given to reward functions as `log_extra`."""
        values = list(values)
        if len(values) != self.rows:
            raise RewardError(
                f"log_extra({column!r}) got {len(values)} values for {self.rows} completions; pass one each."
            )
        self.columns[column] = values

    def metric(self, name: str, value: float) -> None:
        """Given to reward functions as `log_metric`."""
        self.metrics.append((name, float(value)))


@dataclass
class Reply:
    """What came of one call."""

    outcomes: list[Outcome]
    log: Log
    lost: bool = False  # there is no output: it may be worth asking sample by sample
    spent: bool = False  # memory ran out: nobody knows what state the worker is in
    broken: str | None = None  # the contract was broken: no other call will do better


def count(arguments: Arguments) -> int:
    """How many completions these are the arguments for."""
    return len(arguments["completions"])


def sample(arguments: Arguments, i: int) -> dict[str, Any]:
    """The arguments for completion i alone: lists with one entry per completion are cut."""
    rows = count(arguments)
    cut = {name: isinstance(value, list) and len(value) == rows for name, value in arguments.items()}
    return {name: [value[i]] if cut[name] else value for name, value in arguments.items()}


def with_log(arguments: Arguments, log: Log) -> dict[str, Any]:
    return {**arguments, "log_extra": log.extra, "log_metric": log.metric}


def check_arguments(function: Any, name: str, arguments: Arguments) -> None:
    """Raise if the function cannot be called at all: it names a column that is not there, say."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**with_log(arguments, Log(0)))
    except TypeError as error:
        raise RewardError(
            f"The reward function '{name}' cannot be called: {error}. It is given {', '.join(sorted(arguments))}, "
            "log_extra and log_metric; let it take **kwargs for what it does not need."
        ) from error


def call(function: Callable[..., Any], name: str, arguments: Arguments, first: int = 0) -> Reply:
    """Call a reward; what it raises fails its completions, except a broken contract, which is an error."""
    log = Log(count(arguments))
    try:
        return finished(function(**with_log(arguments, log)), name, arguments, log, first)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        return lost(Kind.FAILURE, traceback.format_exc(), log.rows, spent=isinstance(error, MemoryError))


def finished(output: Any, name: str, arguments: Arguments, log: Log, first: int = 0) -> Reply:
    lengths = [len(ids) for ids in arguments["completion_ids"]]
    return Reply(read_output(output, name, lengths, first), log)


def lost(kind: Kind, error: str, rows: int, *, spent: bool = False) -> Reply:
    """A call without an output: every completion gets the kind, and what was logged on the way is dropped."""
    return Reply([Outcome(kind, error=error)] * rows, Log(rows), lost=True, spent=spent)


def join(replies: Sequence[Reply]) -> Reply:
    """The replies to single samples as one; a column has None where a sample did not log it."""
    names = dict.fromkeys(name for reply in replies for name in reply.log.columns)
    columns = {
        name: [value for reply in replies for value in reply.log.columns.get(name, [None] * reply.log.rows)]
        for name in names
    }
    metrics = [metric for reply in replies for metric in reply.log.metrics]
    outcomes = [outcome for reply in replies for outcome in reply.outcomes]
    return Reply(outcomes, Log(len(outcomes), columns, metrics))
