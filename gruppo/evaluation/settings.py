"""Settings for prompting, sampling and grading, on the command line and during training."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from gruppo.errors import ConfigError
from gruppo.evaluation.tir import TirSettings
from gruppo.evaluation.types import Decoding, Mode, Rendering

__all__ = ["Asking", "Settings", "TrainingSettings"]

TEMPERATURE = 0.7  # of samples, where none is given
Own = TypeVar("Own", bound="Asking")


@dataclass(frozen=True)
class Asking:
    """The settings that all evaluations share."""

    mode: Mode = "cot"  # chain of thought, or "tir": reasoning with programs that are run
    rendering: Rendering | Literal["auto"] = "auto"  # "chat", "plain" (User: … Assistant:); "auto": chat if possible
    shots: int = 0  # exemplars before each problem
    max_new_tokens: int = 1024  # of a completion; tir: of each round
    samples: int = 0  # sampled attempts at each problem
    temperature: float | None = None  # of samples; None: 0.7
    top_p: float | None = None  # of samples; None: 1
    seed: int | None = None  # of samples; None: 0
    rounds: int | None = None  # tir: the most rounds of generation; None: 4. The DeepSeekMath paper has 2
    max_total_tokens: int | None = None  # tir: new tokens of all rounds together; None: 2048

    def __post_init__(self) -> None:
        if self.mode not in ("cot", "tir"):
            raise ConfigError(f"mode={self.mode!r} must be 'cot' or 'tir'.")
        if self.shots < 0 or self.samples < 0:
            raise ConfigError(f"shots={self.shots} and samples={self.samples} must not be negative.")
        if self.mode != "tir" and (self.rounds is not None or self.max_total_tokens is not None):
            raise ConfigError("rounds and max_total_tokens are settings for programs: they need mode='tir'.")
        if not self.samples and (self.temperature, self.top_p, self.seed) != (None, None, None):
            raise ConfigError(
                "temperature, top_p and seed are settings for samples: set their number, as in samples=8."
            )
        if self.samples and self.temperature == 0:
            raise ConfigError("temperature=0 makes all samples the same: leave samples out for a greedy attempt.")
        self.passes()  # raises for invalid numbers, as does `tir`
        self.tir()

    def greedy_pass(self) -> Decoding:
        return Decoding(max_new_tokens=self.max_new_tokens)

    def sampled_pass(self) -> Decoding:
        return Decoding(
            samples=self.samples,
            temperature=TEMPERATURE if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_new_tokens=self.max_new_tokens,
            seed=0 if self.seed is None else self.seed,
        )

    def passes(self) -> list[Decoding]:
        """The passes over each benchmark."""
        return [self.sampled_pass() if self.samples else self.greedy_pass()]

    def tir(self, allow_unconfined: Collection[str] = ()) -> TirSettings | None:
        """How programs run; None without them."""
        if self.mode != "tir":
            if allow_unconfined:
                raise ConfigError("allow_unconfined is a setting for programs: it needs mode='tir'.")
            return None
        given = {"rounds": self.rounds, "max_total_tokens": self.max_total_tokens}
        own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return TirSettings(**own, allow_unconfined=tuple(allow_unconfined))

    def asking(self, allow_unconfined: Collection[str] = ()) -> dict[str, Any]:
        """The arguments of an `Evaluator`."""
        return {"rendering": self.rendering, "shots": self.shots, "tir": self.tir(allow_unconfined)}

    @classmethod
    def of(cls: type[Own], given: Mapping[str, Any]) -> Own:
        """Build from keyword arguments; an unknown name raises an error that suggests the closest known one."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                raise ConfigError(f"There is no setting {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return cls(**given)


@dataclass(frozen=True)
class Settings(Asking):
    """What `evaluate` takes as keyword arguments.

    Example, a greedy attempt and eight samples at each problem:
        evaluate("HuggingFaceTB/SmolLM2-135M-Instruct", "gsm8k", samples=8, max_new_tokens=256)
    """

    greedy: bool = True  # one greedy attempt at each problem: top-1
    ks: tuple[int, ...] = ()  # for pass@k and maj@k, in addition to the powers of two and `samples`
    paper: bool = False  # also grade by the looser rules of the DeepSeekMath paper

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.greedy and not self.samples:
            raise ConfigError("greedy=False needs samples: otherwise there is nothing to do.")
        if any(not 1 <= k <= self.samples for k in self.ks):
            raise ConfigError(f"ks={self.ks} must be between 1 and samples={self.samples}.")

    def asking(self, allow_unconfined: Collection[str] = ()) -> dict[str, Any]:
        return {**super().asking(allow_unconfined), "paper": self.paper}

    def passes(self) -> list[Decoding]:
        greedy = [self.greedy_pass()] if self.greedy else []
        return [*greedy, self.sampled_pass()] if self.samples else greedy


@dataclass(frozen=True)
class TrainingSettings(Asking):
    """The keys of `eval_benchmarks_settings`: one pass at each evaluation, greedy unless `samples` is set.

    Example, four samples of each problem; accuracy is then their mean:
        TrainingSettings(samples=4, max_new_tokens=256)
    """

    max_new_tokens: int = 512

    @property
    def decoding(self) -> Decoding:
        return self.passes()[0]
