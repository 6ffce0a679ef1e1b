"""Scores every completion with every reward. A failing reward does not stop a run: failures are recorded as data.

worker      with `reward_timeout`, or marked `gruppo_worker`; killed on timeout           (pool.py, worker.py)
async       on event loops; with `reward_timeout`, sample by sample under a time limit    (asynchronous.py)
model       in this process, in batches of limited token count                            (models.py)
in process  all others, and those with a parameter `environments`
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ConfigError, RewardError
from gruppo.rewards.asynchronous import AsyncRewards, Patience
from gruppo.rewards.calling import Arguments, Log, Reply, call, check_arguments, count, join, lost, sample
from gruppo.rewards.marks import names_environments, wants_whole_batch, wants_worker
from gruppo.rewards.models import score_completions, token_budget
from gruppo.rewards.outcomes import Kind, Outcome, Steps, clip, read_value, shorten
from gruppo.rewards.pool import Bounds, Pool, packed_arguments
from gruppo.rewards.resolve import is_async, is_reward_model

logger = logging.getLogger(__name__)

# Columns that reward functions get under another name, or not at all.
OWN_COLUMNS = ("prompt", "completion", "completion_ids")

WORKER_SECONDS = 120.0  # time limit for a batch in workers if `reward_timeout` is not set
LOGS_IN_SNAPSHOT = 100  # latest entries of the log history that a worker's `trainer_state` contains

# A retry in this process stops if the first HOPELESS_SAMPLES samples all fail, or after RETRY_FACTOR times the time of
# the failed call of the batch, or RETRY_SECONDS if that is longer.
HOPELESS_SAMPLES, RETRY_FACTOR, RETRY_SECONDS = 8, 4, 10.0


@dataclass(frozen=True)
class RewardInputs:
    """The inputs of reward functions, one entry per completion of this process.

    Example:
        RewardInputs(
            rows=[{"prompt": "2+2=", "answer": "4"}], prompts=["2+2="], completions=[" 4"], completion_ids=[[4, 2]]
        )
    """

    rows: Sequence[dict[str, Any]]
    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.prompts)

    def columns(self) -> dict[str, list[Any]]:
        """All other columns of the rows; None where a row lacks one."""
        names = dict.fromkeys(name for row in self.rows for name in row if name not in OWN_COLUMNS)
        return {name: [row.get(name) for row in self.rows] for name in names}


@dataclass(frozen=True)
class RewardSettings:
    """How rewards are run: the `reward_*` fields of the config without that prefix, and `worker_env`."""

    timeout: float | None = None
    sample_timeout: float | None = None
    workers: int | None = None
    memory_gb: float | None = None
    concurrency: int = 32
    retries: int = 2
    on_error: str = "abstain"
    worker_env: Sequence[str] | None = None

    @property
    def bounds(self) -> Bounds:
        seconds = WORKER_SECONDS if self.timeout is None else self.timeout
        workers = min(4, os.cpu_count() or 1) if self.workers is None else self.workers
        return Bounds(seconds, self._per_sample(seconds), workers, self.memory_gb, tuple(self.worker_env or ()))

    @property
    def patience(self) -> Patience:
        per_sample = None if self.timeout is None else self._per_sample(self.timeout)
        return Patience(self.timeout, per_sample, self.concurrency, self.retries)

    def _per_sample(self, seconds: float) -> float:
        return max(1.0, seconds / 10) if self.sample_timeout is None else self.sample_timeout


@dataclass
class RewardScores:
    """The scores of all rewards for the completions of this process.

    Example, two rewards of two completions, the second of which made a reward fail:
        values_BR [[1.0, 0.5], [nan, nan]]     kinds_BR [[0, 0], [3, 0]]     (codes of `Kind`)
    """

    values_BR: Tensor  # float32; NaN where there is no score, and in the whole row if any reward failed
    kinds_BR: Tensor  # int8
    steps: list[list[Steps | None]] | None  # per row and reward; None if no reward returned steps


class RewardRunner:
    """Scores completions with every reward: workers concurrently, the others in order, async ones together."""

    def __init__(
        self,
        functions: Sequence[Any],
        names: Sequence[str],
        tokenizers: Sequence[Any],
        *,
        device: torch.device,
        settings: RewardSettings | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        timer: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ):
        self.names, self.tokenizers = names, tokenizers
        self.device = device
        self.settings = settings or RewardSettings()
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.timer = timer
        self._async = AsyncRewards(self.settings.patience, timer)
        self._pools: dict[int, Pool] = {}
        self.latest_failures: dict[str, str] = {}  # by reward: description of the last batch with failures
        self._reported: set[str] = set()  # rewards whose first failure was logged, and columns not sent to workers
        self.functions = functions

    @property
    def functions(self) -> Sequence[Any]:
        return self._functions

    @functions.setter
    def functions(self, functions: Sequence[Any]) -> None:
        self.close()
        self._functions = functions
        self._pools = {
            i: Pool(function, name, self.settings.bounds)
            for i, (function, name) in enumerate(zip(functions, self.names, strict=True))
            if self._runs_in_worker(function)
        }
        if self.settings.memory_gb is not None:
            check_memory_limit(self.settings.memory_gb, bool(self._pools))

    def _runs_in_worker(self, function: Any) -> bool:
        if is_reward_model(function) or is_async(function) or names_environments(function):
            return False
        return self.settings.timeout is not None or wants_worker(function)

    @property
    def has_workers(self) -> bool:
        """Whether some reward runs in worker processes."""
        return bool(self._pools)

    @property
    def has_async(self) -> bool:
        """Whether some reward is an async function."""
        return any(is_async(function) for function in self.functions)

    @property
    def in_step(self) -> bool:
        """Whether some reward synchronizes with the other processes internally."""
        return any(hasattr(function, "keep_up") for function in self.functions)

    def keep_up(self) -> None:
        """For a process without completions: take part in the collective calls of the others."""
        for function in self.functions:
            _keep_up(function)

    def close(self) -> None:
        """End all workers; the next call starts new ones."""
        for pool in self._pools.values():
            pool.close()

    def score(self, batch: RewardInputs, **shared: Any) -> RewardScores:
        """The scores of every reward for every completion. `shared` is passed to every function."""
        arguments = {
            **batch.columns(),
            **shared,
            "prompts": list(batch.prompts),
            "completions": list(batch.completions),
            "completion_ids": [list(ids) for ids in batch.completion_ids],
        }
        sinks = {name: arguments.pop(name, None) for name in ("log_extra", "log_metric")}
        try:
            replies = self._ask_all(batch, arguments)
        except BaseException:
            self.close()  # replies of workers still running would be taken for those of the next call
            raise
        for reply in replies:
            replay(reply.log, **sinks)
        outcomes_RB = [reply.outcomes for reply in replies]
        for name, outcomes in zip(self.names, outcomes_RB, strict=True):
            self._report_failures(name, outcomes, batch)
        scores = self._tensors(outcomes_RB)
        self._warn_unscorable(scores.kinds_BR, batch)
        return scores

    def _ask_all(self, batch: RewardInputs, arguments: Arguments) -> list[Reply]:
        replies: dict[int, Reply] = {}
        waiting: dict[int, tuple[Any, str]] = {}
        self._begin_pools(arguments)
        for i, (function, name) in enumerate(zip(self.functions, self.names, strict=True)):
            if i in self._pools:
                continue
            if is_reward_model(function):
                with self.timer(name):
                    replies[i] = self._ask_model(function, name, self.tokenizers[i], batch)
                continue
            check_arguments(function, name, arguments)
            if is_async(function):
                waiting[i] = (function, name)
            else:
                with self.timer(name):
                    replies[i] = ask_in_process(function, name, arguments)
        if waiting:
            replies |= self._async.score(waiting, arguments)
        for i, pool in self._pools.items():
            with self.timer(self.names[i]):
                replies[i] = pool.finish()
        return [replies[i] for i in range(len(self.functions))]

    def _begin_pools(self, arguments: Arguments) -> None:
        """Send the batch to the workers of all rewards; it is pickled only once."""
        if not self._pools:
            return
        arguments = {name: value for name, value in arguments.items() if name != "environments"}
        if "trainer_state" in arguments:
            arguments["trainer_state"] = snapshot(arguments["trainer_state"])
        packed, arguments = packed_arguments(arguments, self._warn_left_out)
        for i, pool in self._pools.items():
            check_arguments(self.functions[i], self.names[i], arguments)
            pool.begin(packed, arguments)

    def _ask_model(self, model: nn.Module, name: str, tokenizer: Any, batch: RewardInputs) -> Reply:
        texts = (batch.prompts, batch.completions, self.chat_template_kwargs)
        budget = token_budget(self.device)
        scores = score_completions(model, tokenizer, *texts, tokens=budget, device=self.device)
        _keep_up(model)
        outcomes = [
            Outcome(Kind.FAILURE, error=clip(score)) if isinstance(score, str) else read_value(score, name, i, 0)
            for i, score in enumerate(scores)
        ]
        return Reply(outcomes, Log(len(batch)))

    def _tensors(self, outcomes_RB: list[list[Outcome]]) -> RewardScores:
        kinds_RB = [[outcome.kind for outcome in outcomes] for outcomes in outcomes_RB]
        values_RB = [[outcome.value for outcome in outcomes] for outcomes in outcomes_RB]
        kinds_BR = torch.tensor(kinds_RB, dtype=torch.int8, device=self.device).T.contiguous()
        values_BR = torch.tensor(values_RB, dtype=torch.float32, device=self.device).T.contiguous()
        values_BR[failed_rows(kinds_BR)] = torch.nan
        has_steps = any(outcome.steps is not None for outcomes in outcomes_RB for outcome in outcomes)
        steps = [[o.steps for o in row] for row in zip(*outcomes_RB, strict=True)] if has_steps else None
        return RewardScores(values_BR, kinds_BR, steps)

    # ---- reporting failures

    def _report_failures(self, name: str, outcomes: list[Outcome], batch: RewardInputs) -> None:
        """Raise if so configured; otherwise log a reward's first failure and only count later ones."""
        failed = [i for i, outcome in enumerate(outcomes) if outcome.kind.failed]
        if not failed:
            return
        i = failed[0]
        what = (
            f"The reward '{name}' failed on {len(failed)} of {len(outcomes)} completions. The first one: prompt "
            f"{shorten(batch.prompts[i])}, completion {shorten(batch.completions[i])}.\n"
            f"{clip(outcomes[i].error or '', 4000)}"
        )
        self.latest_failures[name] = what
        if self.settings.on_error == "raise":
            raise RewardError(what)
        if name not in self._reported:
            self._reported.add(name)
            logger.warning(
                f"{what}\nCompletions like these are left out of the baseline and of the update. Further failures of "
                f"this reward are counted in rewards/{name}/failures and rewards/{name}/timeouts."
            )

    def _warn_left_out(self, column: str) -> None:
        if column not in self._reported:
            self._reported.add(column)
            logger.warning(f"The column `{column}` cannot be pickled; rewards that run in workers do not get it.")

    def _warn_unscorable(self, kinds_BR: Tensor, batch: RewardInputs) -> None:
        unscorable = (kinds_BR == Kind.ABSTAIN).all(dim=1).nonzero()
        if len(unscorable):
            i = int(unscorable[0])
            logger.warning(
                f"{len(unscorable)} of {len(batch)} completions were not scored by any reward function; they are left "
                f"out of the baseline. The first one: prompt {shorten(batch.prompts[i])}, completion "
                f"{shorten(batch.completions[i])}, columns {shorten(dict(batch.rows[i]))}."
            )


def _keep_up(function: Any) -> None:
    """Let a model with weights sharded over processes make as many forward passes here as in the other processes."""
    if hasattr(function, "keep_up"):
        function.keep_up()


def ask_in_process(function: Any, name: str, arguments: Arguments) -> Reply:
    """Call a reward in this process; if it raises, retry each completion alone, so that one cannot fail the others."""
    start, rows = time.monotonic(), count(arguments)
    reply = call(function, name, arguments)
    if not reply.lost or rows == 1 or wants_whole_batch(function):
        return reply
    now = time.monotonic()
    deadline = now + max(RETRY_FACTOR * (now - start), RETRY_SECONDS)
    replies: list[Reply] = []
    for i in range(rows):
        if len(replies) == HOPELESS_SAMPLES and all(reply.lost for reply in replies):
            break
        if time.monotonic() >= deadline:
            break
        replies.append(call(function, name, sample(arguments, i), i))
    unasked = (
        f"The reward '{name}' was not retried on this completion, because too many others failed or took too long."
    )
    return join([*replies, *(lost(Kind.FAILURE, unasked, 1) for _ in range(rows - len(replies)))])


def replay(log: Log, log_extra: Any, log_metric: Any) -> None:
    """Forward the logs of a reward."""
    if log_extra is not None:
        for column, values in log.columns.items():
            log_extra(column, values)
    if log_metric is not None:
        for name, value in log.metrics:
            log_metric(name, value)


def failed_rows(kinds_BR: Tensor) -> Tensor:
    """Bool (B,): rows on which any reward timed out or failed; the whole row is unscorable."""
    rows: Tensor = (kinds_BR >= Kind.TIMEOUT).any(dim=1)
    return rows


def snapshot(state: Any) -> Any:
    """A copy of the trainer's state that a worker can unpickle without importing the class of the state."""
    if not hasattr(state, "__dict__"):
        return state
    values = {name: value for name, value in vars(state).items() if name != "stateful_callbacks"}
    if "log_history" in values:
        values["log_history"] = values["log_history"][-LOGS_IN_SNAPSHOT:]
    return SimpleNamespace(**values)


def check_memory_limit(memory_gb: float, any_worker: bool) -> None:
    if not any_worker:
        raise ConfigError(
            f"reward_memory_gb={memory_gb} limits rewards in workers, but there are none: set reward_timeout."
        )
    if not Path("/proc/self/status").exists():
        raise ConfigError(f"reward_memory_gb={memory_gb} needs Linux; leave it out on this machine.")
