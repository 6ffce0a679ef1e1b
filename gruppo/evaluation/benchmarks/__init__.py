"""The benchmarks, one file each, and the lookup of a benchmark by name.

    gsm8k               GSM8K, 1319 problems       mgsm_zh            MGSM-zh, 250
    math                MATH, 5000                 cmath              CMATH, 1098
    math500             MATH-500, 500              cmath_validation   CMATH's validation split, 600

You can also define a `Benchmark` in your own file or module: `my_bench.py:BENCH`, `package.module:BENCH`.
"""

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from gruppo.errors import ConfigError
from gruppo.evaluation.benchmarks.cmath import CMATH, CMATH_VALIDATION
from gruppo.evaluation.benchmarks.gsm8k import GSM8K
from gruppo.evaluation.benchmarks.math import MATH
from gruppo.evaluation.benchmarks.math500 import MATH500
from gruppo.evaluation.benchmarks.mgsm_zh import MGSM_ZH
from gruppo.evaluation.types import Benchmark

__all__ = ["BENCHMARKS", "find_benchmark"]

BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": GSM8K,
    "math": MATH,
    "math500": MATH500,
    "mgsm_zh": MGSM_ZH,
    "cmath": CMATH,
    "cmath_validation": CMATH_VALIDATION,
}


def find_benchmark(spec: str | Benchmark) -> tuple[Benchmark, int | None]:
    """Find a benchmark by name; also returns how many of its problems are requested (None: all).

    A number after a colon selects that many problems, spread evenly over the set (see `load_problems`): the same ones
    every time. `file.py:NAME` or `module:NAME` finds a user-defined benchmark.

    Example:
        find_benchmark("gsm8k")                  # (GSM8K, None)
        find_benchmark("gsm8k:200")              # (GSM8K, 200)
        find_benchmark("my_bench.py:BENCH:50")   # (BENCH of that file, 50)
    """
    if isinstance(spec, Benchmark):
        return _not_reserved(spec), None
    if not isinstance(spec, str):
        raise ConfigError(f"A benchmark is a name or a Benchmark, but this is {spec!r}.")
    name, limit = _split_limit(spec.strip())
    place, colon, constant = name.rpartition(":")
    return (_not_reserved(_own(place, constant)) if colon else _known(name)), limit


def _split_limit(spec: str) -> tuple[str, int | None]:
    name, colon, last = spec.rpartition(":")
    if colon and last.isascii() and last.isdecimal():
        if int(last) < 1:
            raise ConfigError(f"{spec!r} asks for 0 problems; the number must be at least 1.")
        return name, int(last)
    if name in BENCHMARKS:
        raise ConfigError(f"{spec!r}: a number of problems must follow the colon, as in '{name}:200'.")
    return spec, None


def _known(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        near = get_close_matches(name.lower().replace("-", "_"), BENCHMARKS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"There is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}.{hint} Your own benchmark is "
            "given by its file and its name there, as in 'my_bench.py:BENCH'."
        )
    return BENCHMARKS[name]


def _own(place: str, constant: str) -> Benchmark:
    """The benchmark of that name in a user's file or module."""
    module = _import_file(place) if place.endswith(".py") else _import_module(place)
    found = getattr(module, constant, None)
    if not isinstance(found, Benchmark):
        there = [name for name, value in vars(module).items() if isinstance(value, Benchmark)]
        what = "has no such name" if found is None else f"has a {type(found).__name__} of that name, not a Benchmark"
        raise ConfigError(f"'{place}:{constant}': {place} {what}; its benchmarks are {', '.join(there) or 'none'}.")
    return found


def _not_reserved(benchmark: Benchmark) -> Benchmark:
    """Reject a user's benchmark under a built-in name: tables would put published numbers next to its results."""
    if benchmark != BENCHMARKS.get(benchmark.name, benchmark):
        raise ConfigError(
            f"Benchmark(name={benchmark.name!r}, title={benchmark.title!r}): that name belongs to a built-in "
            "benchmark, whose published results would be shown next to yours. Give yours another name, as in "
            f"'my_{benchmark.name}'."
        )
    return benchmark


def _import_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{place!r}: there is no such file ({path}).")
    name = f"gruppo_benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{place!r}: Python cannot import this file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class up by its module
    spec.loader.exec_module(module)
    return module


def _import_module(place: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"{place!r} is neither a module nor a file that ends in .py; write 'my_bench.py:BENCH'.")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # If the module exists but one of its own imports is missing, that error propagates unchanged.
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"There is no module {place!r} to take a benchmark from. Write the path of its file instead, as in "
            "'my_bench.py:BENCH'."
        ) from None
