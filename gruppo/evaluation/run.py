"""`evaluate`: a model's accuracy on benchmarks, together with all of its completions.

load ─► for each benchmark and pass: attempts kept from earlier calls, then the rest in chunks ─► summaries ─► files
"""

import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from gruppo.errors import ConfigError
from gruppo.evaluation.grading import Graders, grader_version, require
from gruppo.evaluation.models import Backend, Subject, load_subject, make_backend, weights_fingerprint
from gruppo.evaluation.programs import tool_versions
from gruppo.evaluation.progress import Progress
from gruppo.evaluation.sampling import Evaluator
from gruppo.evaluation.settings import Settings
from gruppo.evaluation.store import FORMAT, EvaluationFolder
from gruppo.evaluation.summary import summarise
from gruppo.evaluation.tables import columns_of, latex, markdown, rows_of
from gruppo.evaluation.tasks import Task, load_tasks
from gruppo.evaluation.types import Benchmark, Decoding, GradedAttempt, Problem
from gruppo.policy.loading import context_length
from gruppo.policy.unwrap import inner_model
from gruppo.runs.lock import RunLock
from gruppo.runs.machine import source_commit, versions

__all__ = ["Results", "evaluate"]

logger = logging.getLogger(__name__)

PROBE = Problem("probe", "1 + 1 = ?", ("2",))  # its rendered prompt identifies the chat template and the exemplars


@dataclass(frozen=True)
class Results:
    """The results of an evaluation.

    `summary` is the content of results.json; `scored[benchmark][pass]` are this call's attempts with their grades.
    """

    summary: dict[str, Any]
    scored: dict[str, dict[str, list[GradedAttempt]]] = field(default_factory=dict, repr=False)
    folder: Path | None = None

    def accuracy(self, benchmark: str, decoding: str = "greedy") -> float:
        """Top-1 accuracy, or the mean over samples ("sampled")."""
        return float(self.summary["benchmarks"][benchmark][decoding]["accuracy"])

    def markdown(self, *, references: bool = True) -> str:
        """These rows in the results table of the DeepSeekMath paper; without `references`, these rows alone."""
        return self._table(markdown, references)

    def latex(self, *, references: bool = True) -> str:
        """The same in LaTeX."""
        return self._table(latex, references)

    def tables(self) -> dict[str, str]:
        """The tables by file name."""
        return {"results.md": self.markdown(), "results.tex": self.latex()}

    def _table(self, layout: Callable[..., str], references: bool) -> str:
        rows = rows_of(self.summary)
        columns = columns_of(rows, references=references)
        titles = {name: each["title"] for name, each in self.summary["benchmarks"].items()}
        return layout(rows, references=references, benchmarks=columns, titles=titles, intervals=True)


def evaluate(
    model: Any,
    benchmarks: str | Benchmark | Sequence[str | Benchmark] = "gsm8k",
    *,
    tokenizer: Any = None,
    data_dir: str | Path | None = None,
    output_dir: str | Path | None = None,
    restart: bool = False,
    backend: Backend = "auto",
    dtype: str = "auto",
    device: str | None = None,
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    allow_unconfined: Collection[str] = (),
    name: str | None = None,
    progress: bool = False,
    **settings: Any,
) -> Results:
    """Accuracy of a model on GSM8K, MATH, MGSM-zh, CMATH or your own benchmarks; see docs/evaluation.md.

    `model` is a name, a folder (also of a training run) or an object, which needs its `tokenizer`. `benchmarks` are
    names, "gsm8k:200" for a part, or `Benchmark`s. `settings` are the fields of `Settings`. With `output_dir` every
    completion is kept, and repeating an interrupted call continues where it stopped.

    Example:
        evaluate("runs/demo", "gsm8k:200", data_dir="data", samples=8).accuracy("gsm8k")
    """
    wanted = Settings.of(settings)
    asking = wanted.asking(allow_unconfined)
    if restart and output_dir is None:
        raise ConfigError("restart=True deletes the attempts and results in output_dir: set output_dir.")
    tasks = load_tasks(benchmarks, data_dir)
    require([task.benchmark.ladder for task in tasks], wanted.paper)
    folder = None if output_dir is None else EvaluationFolder(output_dir)
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(RunLock(folder.path))
        clock = Clock()
        subject = load_subject(model, tokenizer, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        clock.note("load")
        evaluator = Evaluator(make_backend(subject, backend), subject.tokenizer, rows=batch_size, **asking)
        clock.note("sampler")
        if wanted.paper or any(not task.benchmark.ladder.literal for task in tasks):
            evaluator.graders = stack.enter_context(Graders())
        bar = stack.enter_context(Progress(show=progress))
        facts = _facts(subject, evaluator, wanted, name)
        asked = [Attempts(task, evaluator, folder, facts, bar) for task in tasks]  # all prompts, before any is sampled
        warn_of_long_prompts(asked, subject.model, wanted.max_new_tokens)
        if folder is not None and restart:
            folder.restart()
        where = None if folder is None else folder.path
        results = Results({**facts, "benchmarks": _earlier(folder, facts)}, {}, where)
        for attempts in asked:
            _take_in(results, attempts, wanted)
            clock.note("after_load", since="load")
            results.summary["seconds"] = clock.seconds
            if folder is not None:  # after each benchmark: the next one may be interrupted
                folder.write_results(results.summary, results.tables())
    return results


def _take_in(results: Results, attempts: "Attempts", settings: Settings) -> None:
    """Run one benchmark, and merge its results with those of earlier calls."""
    name = attempts.benchmark.name
    results.scored[name] = {each.name: attempts.collect(each) for each in settings.passes()}
    before = results.summary["benchmarks"].get(name, {})
    results.summary["benchmarks"][name] = before | attempts.summary(results.scored[name], settings)


class Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self._marks = {"": time.perf_counter()}
        self.seconds: dict[str, float] = {}

    def note(self, name: str, since: str | None = None) -> None:
        """Note the time since the last mark, or since the one that is named."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._marks[since or list(self._marks)[-1]], 3)
        self._marks[name] = now


def _facts(subject: Subject, evaluator: Evaluator, settings: Settings, name: str | None) -> dict[str, Any]:
    """The fields of results.json other than the benchmark results."""
    device = next(subject.model.parameters()).device
    tools = {"tools": tool_versions()} if settings.mode == "tir" else {}
    return {
        "format": FORMAT,
        "model": name or subject.name,
        "size": subject.size,
        "source": subject.source,
        "weights": weights_fingerprint(subject.model),
        "dtype": subject.dtype,
        "mode": settings.mode,
        "settings": asdict(settings) | {"rendering": evaluator.rendering},
        "backend": evaluator.backend.name,
        "environment": {
            "versions": versions(),
            "commit": source_commit(),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            **tools,
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _earlier(folder: EvaluationFolder | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The results of earlier calls with the same model in this folder; each pass records its own settings."""
    found = None if folder is None else folder.results()
    same = found is not None and all(found.get(key) == facts[key] for key in ("weights", "dtype", "mode"))
    return dict(found["benchmarks"]) if found is not None and same else {}


def warn_of_long_prompts(asked: Sequence["Attempts"], model: Any, new_tokens: int) -> None:
    """Warn how many prompts are too long for the model's context; they are sampled nevertheless."""
    limit = context_length(inner_model(model))
    if limit is None:
        return
    for attempts in asked:
        long = sum(len(prompt.ids) + new_tokens > limit for prompt in attempts.prompts.values())
        if long:
            logger.warning(
                f"{attempts.benchmark.name}: {long} of {len(attempts.prompts)} prompts with {new_tokens} new "
                f"tokens are longer than the {limit} positions that the model was made for."
            )


class Attempts:
    """The attempts at one benchmark: those kept from an earlier call, and the new ones."""

    def __init__(
        self,
        task: Task,
        evaluator: Evaluator,
        folder: EvaluationFolder | None,
        facts: Mapping[str, Any],
        bar: Progress,
    ):
        self.benchmark, self.problems, self.rows = task
        self.known = {problem.id: problem for problem in task.problems}
        rendered = evaluator.prompts(task.benchmark, task.problems)
        self.prompts = dict(zip(self.known, rendered, strict=True))
        self.evaluator = evaluator
        self.folder = folder
        self.facts = facts
        self.bar = bar
        self.seconds: dict[str, float] = {}

    def collect(self, decoding: Decoding) -> list[GradedAttempt]:
        """Every attempt of one pass, in the order of the problems."""
        name, identity = self.benchmark.name, self.identity(decoding)
        regrade = partial(self.evaluator.grade, self.benchmark)
        kept = [] if self.folder is None else self.folder.kept(name, decoding.name, self.known, identity, regrade)
        counts = Counter(each.attempt.problem for each in kept)
        left = [problem for problem in self.problems if counts[problem.id] < decoding.samples]
        scored = [each for each in kept if counts[each.attempt.problem] >= decoding.samples]
        start = time.perf_counter()
        with self.bar.over(f"{self.benchmark.title} {decoding.name}", len(self.problems), decoding.samples) as advance:
            advance(scored)
            for chunk in self.evaluator.attempts(self.benchmark, left, decoding, self.prompts):
                if self.folder is not None:
                    self.folder.add(name, decoding.name, self.known, chunk, identity)
                scored += chunk
                advance(chunk)
        self.seconds[decoding.name] = time.perf_counter() - start
        place = {problem.id: position for position, problem in enumerate(self.problems)}
        return sorted(scored, key=lambda each: (place[each.attempt.problem], each.attempt.sample))

    def summary(self, scored: Mapping[str, Sequence[GradedAttempt]], settings: Settings) -> dict[str, Any]:
        """The entry of this benchmark in results.json."""
        found: dict[str, Any] = {"title": self.benchmark.title}
        for decoding in settings.passes():
            ks = () if decoding.greedy else settings.ks
            rows = scored[decoding.name]
            numbers = summarise(self.benchmark, self.problems, rows, decoding, settings.mode, ks, rows=self.rows)
            seconds = round(self.seconds[decoding.name], 3)
            found[decoding.name] = {**numbers, "seconds": seconds, "settings": self.identity(decoding)}
        return found

    def identity(self, decoding: Decoding) -> dict[str, Any]:
        """The settings that must stay the same while attempts are added to a pass."""
        (probe,) = self.evaluator.prompts(self.benchmark, [PROBE])
        settings, tir = self.facts["settings"], self.evaluator.tir
        return {
            **{name: self.facts[name] for name in ("weights", "dtype", "mode", "backend")},
            **{name: settings[name] for name in ("rendering", "shots", "paper")},
            **({} if tir is None else {"rounds": tir.rounds, "max_total_tokens": tir.max_total_tokens}),
            **asdict(decoding),
            "stop_ids": sorted(self.evaluator.backend.config.eos_token_id),
            "grader": grader_version(self.benchmark.ladder, settings["paper"]),
            "grading": asdict(self.benchmark.ladder) | {"languages": list(self.benchmark.ladder.languages)},
            "prompt": blake2b(f"{probe.ids} {probe.stop}".encode(), digest_size=8).hexdigest(),
        }
