"""`evaluate`: a model's accuracy on benchmarks, with everything it wrote on the way.

load ─► for each benchmark and pass: what is kept from before, then chunk by chunk the rest ─► summaries ─► files
"""

import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from gruppo.errors import ConfigError
from gruppo.evaluation.benchmarks import find_benchmark
from gruppo.evaluation.data import load_problems
from gruppo.evaluation.models import Backend, Subject, load_subject, make_backend, weights_fingerprint
from gruppo.evaluation.programs import tool_versions
from gruppo.evaluation.progress import Progress
from gruppo.evaluation.sampling import Evaluator
from gruppo.evaluation.scoring import Graders
from gruppo.evaluation.store import FORMAT, EvaluationFolder
from gruppo.evaluation.summary import summarise
from gruppo.evaluation.tables import columns_of, latex, markdown, rows_of
from gruppo.evaluation.tir import TirSettings
from gruppo.evaluation.types import Benchmark, Decoding, Mode, Problem, Rendering, Scored
from gruppo.runs.lock import RunLock
from gruppo.runs.machine import source_commit, versions

__all__ = ["Results", "Settings", "evaluate"]


@dataclass(frozen=True)
class Settings:
    """How a model is asked and graded. `evaluate` takes these as keyword arguments.

    Example, greedy and eight samples of each problem:
        evaluate("HuggingFaceTB/SmolLM2-135M-Instruct", "gsm8k", samples=8, max_new_tokens=256)
    """

    mode: Mode = "cot"  # chain of thought, or "tir": reasoning with programs that are run
    rendering: Rendering | Literal["auto"] = "auto"  # "chat", "plain" (User: … Assistant:), or what the model has
    shots: int = 0  # exemplars before each problem
    greedy: bool = True  # one greedy attempt at each problem: top-1
    samples: int = 0  # sampled attempts at each problem, for avg@k, maj@k and pass@k
    temperature: float = 0.7  # of the sampled ones
    top_p: float = 1.0
    seed: int = 0
    ks: tuple[int, ...] = ()  # for pass@k and maj@k, besides the powers of two
    max_new_tokens: int = 1024  # of a completion; tir: of each round
    rounds: int = 4  # tir: times that the model may speak; the DeepSeekMath paper has 2
    max_total_tokens: int = 2048  # tir: new tokens of all rounds
    paper: bool = False  # also grade as that paper's code does, which is looser

    def __post_init__(self) -> None:
        if not self.greedy and not self.samples:
            raise ConfigError("greedy=False needs samples: there would be nothing to do.")
        if self.shots < 0 or self.samples < 0:
            raise ConfigError(f"shots={self.shots} and samples={self.samples} must not be negative.")
        if any(not 1 <= k <= self.samples for k in self.ks):
            raise ConfigError(f"ks={self.ks} must be between 1 and samples={self.samples}.")

    def passes(self) -> list[Decoding]:
        """The passes over each benchmark."""
        common: dict[str, Any] = dict(max_new_tokens=self.max_new_tokens, seed=self.seed)
        greedy = [Decoding(**common)] if self.greedy else []
        if not self.samples:
            return greedy
        return [*greedy, Decoding(samples=self.samples, temperature=self.temperature, top_p=self.top_p, **common)]

    def tir(self, allow_unconfined: Collection[str] = ()) -> TirSettings | None:
        if self.mode != "tir":
            return None
        return TirSettings(
            rounds=self.rounds, max_total_tokens=self.max_total_tokens, allow_unconfined=tuple(allow_unconfined)
        )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Settings":
        """From keyword arguments; a name that there is not is an error that says which one is near."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                raise ConfigError(
                    f"evaluate() has no setting {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")
                )
        return cls(**given)


@dataclass(frozen=True)
class Results:
    """What came out.

    `summary` is what results.json holds; `scored[benchmark][pass]` are all attempts with their grades.
    """

    summary: dict[str, Any]
    scored: dict[str, dict[str, list[Scored]]] = field(default_factory=dict, repr=False)
    folder: Path | None = None

    def add(self, attempts: "Attempts", settings: Settings, restart: bool) -> None:
        """Run one benchmark and take in what came of it."""
        name = attempts.benchmark.name
        self.scored[name] = {each.name: attempts.collect(each, restart=restart) for each in settings.passes()}
        self.summary["benchmarks"][name] = attempts.summary(self.scored[name], settings)

    def tables(self) -> dict[str, str]:
        """By the name of the file."""
        return {"results.md": self.markdown(), "results.tex": self.latex()}

    def accuracy(self, benchmark: str, decoding: str = "greedy") -> float:
        """Top-1 accuracy, or the mean over samples ("sampled")."""
        return float(self.summary["benchmarks"][benchmark][decoding]["accuracy"])

    def markdown(self, *, references: bool = True) -> str:
        """The results table of the DeepSeekMath paper with these rows; without `references` these rows alone."""
        return self._table(markdown, references)

    def latex(self, *, references: bool = True) -> str:
        """The same in LaTeX."""
        return self._table(latex, references)

    def _table(self, layout: Callable[..., str], references: bool) -> str:
        rows = rows_of(self.summary)
        titles = {name: each["title"] for name, each in self.summary["benchmarks"].items()}
        return layout(rows, references=references, benchmarks=columns_of(rows), titles=titles, intervals="half")


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
    """Accuracy of a model on GSM8K, MATH, MGSM-zh, CMATH or benchmarks of your own; see docs/evaluation.md.

    `model` is a name, a folder (also of a training run) or an object, which needs its `tokenizer`. `benchmarks` are
    names, "gsm8k:200" for a part, or `Benchmark`s. `settings` are the fields of `Settings`. With `output_dir` every
    completion is kept, and a call that was interrupted goes on where it stopped.

    Example:
        evaluate("runs/demo", "gsm8k:200", data_dir="data", samples=8).accuracy("gsm8k")
    """
    wanted = Settings.of(settings)
    tasks = _tasks(benchmarks, data_dir)
    folder = None if output_dir is None else EvaluationFolder(output_dir)
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(RunLock(folder.path))
        start = time.perf_counter()
        subject = load_subject(model, tokenizer, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        loaded = time.perf_counter()
        symbolic = any(not task.benchmark.ladder.literal for task in tasks)
        evaluator = Evaluator(
            make_backend(subject, backend),
            subject.tokenizer,
            mode=wanted.mode,
            rendering=wanted.rendering,
            shots=wanted.shots,
            tir=wanted.tir(allow_unconfined),
            paper=wanted.paper,
            graders=stack.enter_context(Graders()) if symbolic else None,
            rows=batch_size,
        )
        ready = time.perf_counter()
        bar = stack.enter_context(Progress(show=progress))
        results = Results(_facts(subject, evaluator, wanted, name), folder=None if folder is None else folder.path)
        for task in tasks:
            results.add(Attempts(task, evaluator, folder, results.summary, bar), wanted, restart)
            seconds = {"load": loaded - start, "sampler": ready - loaded, "after_load": time.perf_counter() - loaded}
            results.summary["seconds"] = {key: round(value, 3) for key, value in seconds.items()}
            if folder is not None:  # after each benchmark: the next one may be interrupted
                folder.write_results(results.summary, results.tables())
    return results


class Task(NamedTuple):
    """A benchmark, and the problems of it that are asked."""

    benchmark: Benchmark
    problems: list[Problem]


def _tasks(benchmarks: str | Benchmark | Sequence[str | Benchmark], data_dir: str | Path | None) -> list[Task]:
    """All problems, before anything is loaded or sampled."""
    listed = [benchmarks] if isinstance(benchmarks, str | Benchmark) else list(benchmarks)
    if not listed:
        raise ConfigError("There is no benchmark to evaluate: name at least one.")
    chosen = [find_benchmark(each) for each in listed]
    names = [benchmark.name for benchmark, _ in chosen]
    if len(set(names)) < len(names):
        raise ConfigError(f"A benchmark is named twice: {', '.join(names)}.")
    if len(names) > 1 and data_dir is not None and Path(data_dir).is_file():
        raise ConfigError(
            f"data_dir={str(data_dir)!r} is one file, but there are {len(names)} benchmarks: give a folder."
        )
    return [Task(benchmark, load_problems(benchmark, data_dir, limit)) for benchmark, limit in chosen]


def _facts(subject: Subject, evaluator: Evaluator, settings: Settings, name: str | None) -> dict[str, Any]:
    """What results.json says beside the numbers."""
    device = next(subject.model.parameters()).device
    tools = {"tools": tool_versions()} if settings.mode == "tir" else {}
    return {
        "format": FORMAT,
        "model": name or subject.name,
        "source": subject.source,
        "weights": weights_fingerprint(subject.model),
        "mode": settings.mode,
        "settings": asdict(settings) | {"rendering": evaluator.rendering, "dtype": subject.dtype},
        "backend": evaluator.backend.name,
        "environment": {
            "versions": versions(),
            "commit": source_commit(),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            **tools,
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "benchmarks": {},
    }


class Attempts:
    """The attempts at one benchmark: those that an earlier call has kept, and the others."""

    def __init__(
        self,
        task: Task,
        evaluator: Evaluator,
        folder: EvaluationFolder | None,
        facts: Mapping[str, Any],
        bar: Progress,
    ):
        self.benchmark, self.problems = task
        self.known = {problem.id: problem for problem in task.problems}
        self.evaluator = evaluator
        self.folder = folder
        self.facts = facts
        self.bar = bar
        self.seconds: dict[str, float] = {}

    def collect(self, decoding: Decoding, *, restart: bool = False) -> list[Scored]:
        """Every attempt of one pass, in the order of the problems."""
        kept = self._kept(decoding, restart)
        counts = Counter(each.attempt.problem for each in kept)
        left = [problem for problem in self.problems if counts[problem.id] < decoding.samples]
        scored = [each for each in kept if counts[each.attempt.problem] >= decoding.samples]
        start = time.perf_counter()
        with self.bar.over(f"{self.benchmark.title} {decoding.name}", len(self.problems), decoding.samples) as advance:
            advance(scored)
            for chunk in self.evaluator.attempts(self.benchmark, left, decoding):
                if self.folder is not None:
                    self.folder.add(self.benchmark.name, decoding.name, self.known, chunk, self._identity(decoding))
                scored += chunk
                advance(chunk)
        self.seconds[decoding.name] = time.perf_counter() - start
        place = {problem.id: position for position, problem in enumerate(self.problems)}
        return sorted(scored, key=lambda each: (place[each.attempt.problem], each.attempt.sample))

    def summary(self, scored: Mapping[str, Sequence[Scored]], settings: Settings) -> dict[str, Any]:
        """What results.json says about this benchmark."""
        passes = {
            decoding.name: summarise(
                self.benchmark,
                self.problems,
                scored[decoding.name],
                decoding,
                settings.mode,
                () if decoding.greedy else settings.ks,
            )
            | {"seconds": round(self.seconds[decoding.name], 3)}
            for decoding in settings.passes()
        }
        return {"title": self.benchmark.title, **passes}

    def _kept(self, decoding: Decoding, restart: bool) -> list[Scored]:
        if self.folder is None:
            return []
        if restart:
            self.folder.restart(self.benchmark.name, decoding.name)
        return self.folder.kept(self.benchmark.name, decoding.name, self.known, self._identity(decoding))

    def _identity(self, decoding: Decoding) -> dict[str, Any]:
        """What must not change while attempts are added to a pass."""
        settings = self.facts["settings"]
        names = ["rendering", "shots", "paper", "dtype"] + ["rounds", "max_total_tokens"] * (
            self.facts["mode"] == "tir"
        )
        return {
            "benchmark": self.benchmark.name,
            "weights": self.facts["weights"],
            "mode": self.facts["mode"],
            **{name: settings[name] for name in names},
            **asdict(decoding),
        }
