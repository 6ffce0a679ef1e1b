"""Notes for passes in one table row that were sampled or graded with different settings.

Later calls may add benchmarks to a folder with other settings; all benchmarks of a folder are in one row.
"""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["unlike_the_others"]

# The same for the whole row (weights, dtype, mode), specific to each benchmark (prompt, grading), or without influence
# on the number (paper: a second, separate grade).
NOT_COMPARED = frozenset({"weights", "dtype", "mode", "prompt", "grading", "paper"})
# A greedy pass records these too, but they have no effect on it.
OF_SAMPLES = frozenset({"samples", "temperature", "top_p", "seed"})


def unlike_the_others(passes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """For each benchmark, the settings in which the passes differ, with its own values; "" if all are equal.

    A setting missing from a pass, such as one written by an earlier version, is not compared for that pass.

    Example:
        unlike_the_others({"gsm8k": greedy_with_512_tokens, "cmath": greedy_with_64_tokens})
        == {"gsm8k": "asked with max_new_tokens=512", "cmath": "asked with max_new_tokens=64"}
    """
    settings = {name: dict(_compared(summary)) for name, summary in passes.items()}
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    # Compared as strings: a list, such as stop ids, is not hashable.
    differing = [key for key in keys if len({str(each[key]) for each in settings.values() if key in each}) > 1]
    said = {name: [f"{key}={each[key]}" for key in differing if key in each] for name, each in settings.items()}
    return {name: f"asked with {', '.join(values)}" if values else "" for name, values in said.items()}


def _compared(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in (summary.get("settings") or {}).items():
        if key == "grader":  # "gruppo 0.1.0, math-verify 0.8.0": math-verify is used only where formulas are compared
            for part in value.split(", "):
                package, _, number = part.partition(" ")
                yield f"grader {package}", number
        elif key not in NOT_COMPARED and not (key in OF_SAMPLES and "pass" not in summary):
            yield key, value
