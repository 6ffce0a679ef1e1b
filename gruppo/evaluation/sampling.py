"""One pass over a benchmark: prompts, attempts and their grades, chunk by chunk."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal
from zlib import crc32

import torch

from gruppo.engine.noise import derive_key
from gruppo.errors import ConfigError
from gruppo.evaluation.grading import Graders, grade_attempts
from gruppo.evaluation.models import bare_generation_config, decoding_config
from gruppo.evaluation.prompts import PromptText, choose_rendering, cut, render
from gruppo.evaluation.tir import TirSettings, run_rounds
from gruppo.evaluation.types import Attempt, Benchmark, Decoding, GradedAttempt, Mode, Problem, Rendering
from gruppo.rollout.base import RolloutBackend
from gruppo.types import SampleRequest

__all__ = ["Evaluator"]

# Completions sampled together. More keep a GPU busier; fewer show progress more often and lose less on interruption.
ROWS = {name: {"cuda": 1024, "cpu": 64} for name in ("builtin", "vLLM")} | {"transformers": {"cuda": 128, "cpu": 16}}


class Evaluator:
    """Asks a model the problems of benchmarks through a rollout backend, and grades what it writes.

    Example:
        evaluator = Evaluator(backend, tokenizer)
        scored = [row for chunk in evaluator.attempts(benchmark, problems, Decoding()) for row in chunk]
    """

    def __init__(
        self,
        backend: RolloutBackend,
        tokenizer: Any,
        *,
        rendering: Rendering | Literal["auto"] = "auto",
        shots: int = 0,
        tir: TirSettings | None = None,
        paper: bool = False,
        graders: Graders | None = None,
        rows: int | None = None,
    ):
        if rows is not None and rows < 1:
            raise ConfigError(f"batch_size={rows} must be at least 1.")
        self.backend = backend
        self.tokenizer = tokenizer
        self.mode: Mode = "cot" if tir is None else "tir"
        self.rendering = choose_rendering(rendering, tokenizer, shots=shots)
        self.shots = shots
        self.tir = tir  # None: chain of thought
        self.sandbox = None if tir is None else tir.open_sandbox()  # raises before anything is sampled
        self.paper = paper
        self.graders = graders
        self.rows = rows

    def prompts(self, benchmark: Benchmark, problems: Sequence[Problem]) -> list[PromptText]:
        """The prompts of the problems."""
        ask = dict(rendering=self.rendering, shots=self.shots, tokenizer=self.tokenizer)
        return [render(problem, benchmark, self.mode, **ask) for problem in problems]

    def attempts(
        self,
        benchmark: Benchmark,
        problems: Sequence[Problem],
        decoding: Decoding,
        prompts: Mapping[str, PromptText] | None = None,
    ) -> Iterator[list[GradedAttempt]]:
        """Yield the graded attempts in chunks: all attempts at a few problems at a time, both in order.

        `prompts`: already rendered prompts by problem id, if there are any.
        """
        known = {problem.id: problem for problem in problems}
        size = max(self._rows() // decoding.samples, 1)
        for start in range(0, len(problems), size):
            chunk = problems[start : start + size]
            asked = self.prompts(benchmark, chunk) if prompts is None else [prompts[each.id] for each in chunk]
            yield self.grade(benchmark, known, self._sample(asked, chunk, decoding))

    def grade(
        self, benchmark: Benchmark, problems: Mapping[str, Problem], attempts: Sequence[Attempt]
    ) -> list[GradedAttempt]:
        """Grade attempts; all attempts at a problem must be passed together, because they vote."""
        few_shot = self.shots > 0
        return grade_attempts(
            problems, attempts, benchmark.ladder, paper=self.paper, few_shot=few_shot, workers=self.graders
        )

    def _rows(self) -> int:
        if self.rows is not None:
            return self.rows
        device = "cpu" if self.backend.policy is None else self.backend.policy().device.type
        return ROWS.get(self.backend.name, ROWS["transformers"])["cuda" if device == "cuda" else "cpu"]

    def _sample(self, prompts: Sequence[PromptText], problems: Sequence[Problem], decoding: Decoding) -> list[Attempt]:
        """All attempts at these problems; more samples per problem than fit in one call are split over several."""
        rows = self._rows()
        return [
            attempt
            for first in range(0, decoding.samples, rows)
            for attempt in self._call(
                prompts, problems, replace(decoding, samples=min(rows, decoding.samples - first)), first
            )
        ]

    def _call(
        self, prompts: Sequence[PromptText], problems: Sequence[Problem], decoding: Decoding, first: int
    ) -> list[Attempt]:
        """One call of the backend: samples `first`, `first` + 1, … of each problem."""
        # A problem's random numbers do not depend on which other problems are in the call.
        keys = [derive_key(decoding.seed % 2**64, crc32(problem.id.encode())) for problem in problems]
        stop = prompts[0].stop if prompts else ()
        with self._decoding(decoding, stop), _seeded([*keys, first] if first else keys):
            if self.tir is not None:
                return self._in_rounds(prompts, problems, decoding, keys, first)
            requests = [
                SampleRequest(prompt.ids, decoding.samples, noise_key=key, first_sample=first)
                for prompt, key in zip(prompts, keys, strict=True)
            ]
            completions = self.backend.sample(requests)
        texts = self.tokenizer.batch_decode([list(each.ids) for each in completions], skip_special_tokens=True)
        return [
            Attempt(problem, sample, cut(text, stop), len(each.ids), each.stop)
            for (problem, sample), text, each in zip(
                _places(problems, decoding, first), texts, completions, strict=True
            )
        ]

    def _in_rounds(
        self,
        prompts: Sequence[PromptText],
        problems: Sequence[Problem],
        decoding: Decoding,
        keys: Sequence[int],
        first: int,
    ) -> list[Attempt]:
        assert self.tir is not None
        assert self.sandbox is not None
        transcripts = run_rounds(
            self.backend,
            self.tokenizer,
            [prompt.ids for prompt in prompts],
            samples=decoding.samples,
            noise_keys=keys,
            max_new_tokens=decoding.max_new_tokens,
            settings=self.tir,
            sandbox=self.sandbox,
            first_sample=first,
        )
        return [
            Attempt(
                problem,
                sample,
                each.text,
                each.tokens,
                each.stop,
                each.tools,
                tuple((segment.kind, segment.text) for segment in each.segments),
            )
            for (problem, sample), each in zip(_places(problems, decoding, first), transcripts, strict=True)
        ]

    @contextmanager
    def _decoding(self, decoding: Decoding, stop: Sequence[str]) -> Iterator[None]:
        """Give the backend the settings of this pass, and restore its own afterwards."""
        before = self.backend.config
        strings = [*stop, self.tir.output_stop] if self.tir is not None else stop
        self.backend.config = decoding_config(
            self.tokenizer,
            before.eos_token_id,
            max_new_tokens=decoding.max_new_tokens,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            stop_strings=strings,
        )
        try:
            with nullcontext() if self.backend.policy is None else bare_generation_config(self.backend.policy()):
                yield
        finally:
            self.backend.config = before


def _places(problems: Sequence[Problem], decoding: Decoding, first: int) -> list[tuple[str, int]]:
    """The (problem id, sample number) of each row of a call."""
    return [(problem.id, sample) for problem in problems for sample in range(first, first + decoding.samples)]


@contextmanager
def _seeded(keys: Sequence[int]) -> Iterator[None]:
    """Seed torch's generators, for samplers that draw from them, and restore their state afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_key(*keys) % 2**63)
        yield
