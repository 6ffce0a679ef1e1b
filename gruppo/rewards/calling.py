"""One call of a reward function: its arguments, its logs, and how its errors are handled.

Reward workers import this, so it needs the standard library only.
"""

import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gruppo.errors import RewardError
from gruppo.rewards.outcomes import Kind, Outcome, clip, read_output, shorten

Arguments = Mapping[str, Any]


@dataclass
class Log:
    """Calls of `log_extra` and `log_metric`, buffered until the call of the reward is known to count."""

    rows: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Passed to reward functions as `log_extra`."""
        values = list(values)
        if len(values) != self.rows:
            raise RewardError(
                f"log_extra({column!r}) got {len(values)} values for {self.rows} completions; pass one per completion."
            )
        self.columns[column] = values

    def metric(self, name: str, value: float) -> None:
        """Passed to reward functions as `log_metric`."""
        self.metrics.append((name, float(value)))


@dataclass
class Reply:
    """The result of one call."""

    outcomes: list[Outcome]
    log: Log
    lost: bool = False  # there is no output: a retry sample by sample may help
    spent: bool = False  # memory ran out: the state of the worker is unknown
    broken: str | None = None  # the error message if the contract was broken: a retry cannot help
    number: int = 0  # of the request that a worker replies to


def count(arguments: Arguments) -> int:
    """The number of completions in these arguments."""
    return len(arguments["completions"])


def sample(arguments: Arguments, i: int) -> dict[str, Any]:
    """The arguments for completion i alone: lists with one entry per completion are reduced to that entry."""
    rows = count(arguments)
    cut = {name: isinstance(value, list) and len(value) == rows for name, value in arguments.items()}
    return {name: [value[i]] if cut[name] else value for name, value in arguments.items()}


def given(arguments: Arguments, log: Log) -> dict[str, Any]:
    """The arguments of a function: copies, so that it cannot change what other functions get."""
    own = {name: copied(name, value) for name, value in arguments.items()}
    return {**own, "log_extra": log.extra, "log_metric": log.metric}


def copied(name: str, value: Any) -> Any:
    """A recursive copy of lists and dicts; other values in them (strings, images, environments) are shared."""
    if name == "completion_ids":  # much faster than checking every token
        return [list(ids) for ids in value]
    if name == "environments":
        return list(value) if isinstance(value, list) else value
    if type(value) is list:
        plain = {list, dict}.isdisjoint(map(type, value))
        return list(value) if plain else [copied("", item) for item in value]
    if type(value) is dict:
        return {key: copied("", item) for key, item in value.items()}
    return value


def check_arguments(function: Any, name: str, arguments: Arguments) -> None:
    """Raise if the function cannot be called at all, for example because it names a missing column."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**{**arguments, "log_extra": None, "log_metric": None})
    except TypeError as error:
        raise RewardError(
            f"The reward function '{name}' cannot be called: {error}. It receives {', '.join(sorted(arguments))}, "
            "log_extra and log_metric; add **kwargs for those that it does not use."
        ) from error


def call(function: Callable[..., Any], name: str, arguments: Arguments, first: int = 0) -> Reply:
    """Call a reward. An exception fails its completions, except for a broken contract, which raises."""
    log, process = Log(count(arguments)), os.getpid()
    try:
        return finished(function(**given(arguments, log)), name, arguments, log, first)
    except BaseException as error:
        end_fork(process, error)
        if isinstance(error, RewardError) or not isinstance(error, Exception | SystemExit):
            raise
        return lost(Kind.FAILURE, traceback.format_exc(), log.rows, spent=isinstance(error, MemoryError))
    finally:
        end_fork(process)


def end_fork(process: int, error: BaseException | None = None) -> None:
    """End this process if it is a fork that the reward made, not the process in which the reward was called.

    Such a fork returns from the call as its parent does, mostly by `sys.exit`, and would continue as a second run.
    """
    if os.getpid() == process:
        return
    with suppress(Exception):
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def finished(output: Any, name: str, arguments: Arguments, log: Log, first: int = 0) -> Reply:
    lengths = [len(ids) for ids in arguments["completion_ids"]]
    return Reply(read_output(output, name, lengths, first), log)


def lost(kind: Kind, error: str, rows: int, *, spent: bool = False) -> Reply:
    """The reply of a call without output: every completion gets `kind`, and its logs are dropped."""
    return Reply([Outcome(kind, error=clip(error))] * rows, Log(rows), lost=True, spent=spent)


def join(replies: Sequence[Reply]) -> Reply:
    """Merge the replies to single samples; a column has None where a sample did not log it.

    A metric becomes the mean of the logged values, so that it has the same weight as after a single call.
    """
    names = dict.fromkeys(name for reply in replies for name in reply.log.columns)
    columns = {
        name: [value for reply in replies for value in reply.log.columns.get(name, [None] * reply.log.rows)]
        for name in names
    }
    values: dict[str, list[float]] = {}
    for reply in replies:
        for name, value in reply.log.metrics:
            values.setdefault(name, []).append(value)
    metrics = [(name, sum(logged) / len(logged)) for name, logged in values.items()]
    outcomes = [outcome for reply in replies for outcome in reply.outcomes]
    return Reply(outcomes, Log(len(outcomes), columns, metrics))


# ---- sending logs from a worker


@dataclass(frozen=True)
class Packed:
    """A logged value, pickled, and as text in case it cannot be pickled or unpickled."""

    data: bytes | None
    text: str


def packed_log(log: Log) -> Log:
    """The log with each value pickled separately, so that none can make the whole message unreadable."""
    columns = {str(name): [_packed(value) for value in values] for name, values in log.columns.items()}
    return Log(log.rows, columns, [(str(name), value) for name, value in log.metrics])


def unpacked_log(log: Log) -> Log:
    """The log with its values restored; a value that could not be pickled or unpickled is replaced by its repr."""
    columns = {name: [_unpacked(value) for value in values] for name, values in log.columns.items()}
    return Log(log.rows, columns, log.metrics)


def _packed(value: Any) -> Any:
    if type(value) in (str, int, float, bool, type(None)):
        return value
    try:
        data = pickle.dumps(value, protocol=5)
    except Exception:
        data = None
    return Packed(data, shorten(value, 1000))


def _unpacked(value: Any) -> Any:
    if not isinstance(value, Packed):
        return value
    if value.data is None:
        return value.text
    try:
        return pickle.loads(value.data)
    except Exception:
        return value.text
