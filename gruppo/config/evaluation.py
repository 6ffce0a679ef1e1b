"""Benchmarks that are evaluated during training."""

from dataclasses import dataclass
from typing import Any

from gruppo.config.fields import option
from gruppo.config.hints import nearest
from gruppo.errors import ConfigError

# Keys of eval_benchmarks_settings and their types; `gruppo.evaluation.training` has the defaults.
BENCHMARK_SETTINGS: dict[str, tuple[type, ...]] = {
    "mode": (str,),
    "rendering": (str,),
    "shots": (int,),
    "max_new_tokens": (int,),
    "samples": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "seed": (int,),
    "rounds": (int,),
    "max_total_tokens": (int,),
}
WORDS = {(str,): "a string", (int,): "a whole number", (int, float): "a number"}


@dataclass
class EvaluationConfig:
    """Benchmarks in addition to the evaluation set, or instead of it."""

    eval_benchmarks: list[str] | None = option(
        None,
        "Benchmarks to run at each evaluation, such as `gsm8k`, `gsm8k:200` (200 of its problems) or one of your own, "
        "`file.py:NAME`. They are logged as `eval_<name>_accuracy` and never change what is trained.",
    )
    eval_benchmarks_dir: str | None = option(
        None, "Folder with the files of the benchmarks, such as gsm8k/test.jsonl; None loads them from the hub."
    )
    eval_benchmarks_settings: dict[str, Any] | str | None = option(
        None,
        "How benchmarks are run: mode, rendering, shots, max_new_tokens (512), samples (0: one greedy attempt), and "
        "for samples temperature (0.7), top_p, seed; with mode `tir` also rounds and max_total_tokens. The sampling "
        "settings of training have no effect on them.",
    )


def check_benchmarks(config: Any) -> None:
    """Check the fields above; whether a benchmark and its file exist is checked when the trainer is created."""
    names, settings = config.eval_benchmarks, config.eval_benchmarks_settings
    if names is not None and (
        not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names)
    ):
        raise ConfigError(f"eval_benchmarks={names!r} must be a list of names, such as ['gsm8k:200', 'cmath'].")
    if not names:
        for field in ("eval_benchmarks_dir", "eval_benchmarks_settings"):
            if getattr(config, field) is not None:
                raise ConfigError(f"{field}={getattr(config, field)!r} needs eval_benchmarks.")
        return
    for key, value in (settings or {}).items():
        if key not in BENCHMARK_SETTINGS:
            raise ConfigError(f"eval_benchmarks_settings has no field `{key}`.{nearest(key, BENCHMARK_SETTINGS)}")
        kinds = BENCHMARK_SETTINGS[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"eval_benchmarks_settings[{key!r}]={value!r} must be {WORDS[kinds]}.")
