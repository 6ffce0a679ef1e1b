"""How often the intervals of an evaluation contain the true value, and how wide they are.

python -m benchmarks.intervals --out benchmarks/results/intervals.json

Problems differ: the chance of a right sample has a beta distribution over problems, and its `correlation` is that of
two samples of one problem; at 1 all samples of a problem are alike. With one sample each, the coverage is a sum over
all outcomes; elsewhere it is the share of simulated evaluations, with a standard error of 0.005 at 2,000 of them.
`width` is the mean width divided by that of a normal interval of the same scores without additions, which is what a
bootstrap over problems gives; that one has no width where all scores are equal.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import provenance
from gruppo.evaluation.statistics import majority_at_k, mean_interval, paired_difference, pass_at_k

CHANCES = (0.0, 0.005, 0.02, 0.1, 0.5, 0.98, 1.0)
PROBLEMS = (20, 100, 1000)
SAMPLES = (2, 8)
CORRELATIONS = (0.2, 0.5, 0.9)
SHIFTS = ((0.0, 0.0), (0.02, 0.0), (0.02, 0.05), (0.1, 0.1), (0.5, 0.0), (0.5, 0.1), (0.98, 0.0))
Z = 1.959964
SLACK = 1e-12

Numbers = NDArray[np.float64]
Table = list[float]  # the score of a problem by the number of its right samples


def binary_cell(chance: float, problems: int, seed: int) -> dict[str, float]:
    """The exact coverage with one right or wrong sample of each problem."""
    covered = 0.0
    for right in range(problems + 1):
        low, high = mean_interval([1.0] * right + [0.0] * (problems - right))
        if low - SLACK <= chance <= high + SLACK:
            covered += math.comb(problems, right) * chance**right * (1 - chance) ** (problems - right)
    return {"coverage": round(covered, 4)}


def draw_chances(rng: np.random.Generator, chance: float, problems: int, correlation: float) -> Numbers:
    if chance in (0.0, 1.0) or correlation == 0:
        return np.full(problems, chance)
    if correlation == 1:
        return (rng.random(problems) < chance).astype(float)
    spread = (1 - correlation) / correlation
    return rng.beta(chance * spread, (1 - chance) * spread, problems)


def true_mean(table: Table, chance: float, correlation: float) -> float:
    """The expected score of a problem: over the beta-binomial distribution of its right samples."""
    samples = len(table) - 1
    if chance in (0.0, 1.0) or correlation == 1:
        return chance * table[-1] + (1 - chance) * table[0]
    if correlation == 0:
        weights = [math.comb(samples, c) * chance**c * (1 - chance) ** (samples - c) for c in range(samples + 1)]
    else:
        a, b = chance * (1 - correlation) / correlation, (1 - chance) * (1 - correlation) / correlation

        def log_beta(x: float, y: float) -> float:
            return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

        weights = [
            math.comb(samples, c) * math.exp(log_beta(c + a, samples - c + b) - log_beta(a, b))
            for c in range(samples + 1)
        ]
    return math.fsum(weight * score for weight, score in zip(weights, table, strict=True))


def normal_width(scores: Numbers, least: float, most: float) -> float:
    margin = Z * float(scores.std()) / math.sqrt(len(scores))
    return min(most, float(scores.mean()) + margin) - max(least, float(scores.mean()) - margin)


def cell(table: Table, chance: float, problems: int, correlation: float, repeats: int, seed: int) -> dict[str, float]:
    """Coverage and relative width for scores of several samples."""
    rng, truth = np.random.default_rng(seed), true_mean(table, chance, correlation)
    score_C, samples = np.array(table), len(table) - 1
    covered, width, before = 0, 0.0, 0.0
    for _ in range(repeats):
        scores = score_C[rng.binomial(samples, draw_chances(rng, chance, problems, correlation))]
        low, high = mean_interval(scores.tolist())
        covered += low - SLACK <= truth <= high + SLACK
        width, before = width + high - low, before + normal_width(scores, 0.0, 1.0)
    return {"coverage": round(covered / repeats, 4), "width": round(width / before, 3) if before else math.inf}


def paired_cell(
    chance: float, shift: float, samples: int, problems: int, correlation: float, repeats: int, seed: int
) -> dict[str, float]:
    """The same for the difference of two models; the second always solves a share of the problems besides."""
    rng, more = np.random.default_rng(seed), shift / (1 - chance)
    covered, width, before = 0, 0.0, 0.0
    for _ in range(repeats):
        first_P = draw_chances(rng, chance, problems, correlation)
        second_P = np.where(rng.random(problems) < more, 1.0, first_P)
        differences = (rng.binomial(samples, second_P) - rng.binomial(samples, first_P)) / samples
        found = paired_difference(differences.tolist())
        covered += found.low - SLACK <= shift <= found.high + SLACK
        width, before = width + found.high - found.low, before + normal_width(differences, -1.0, 1.0)
    return {"coverage": round(covered / repeats, 4), "width": round(width / before, 3) if before else math.inf}


def tables(samples: int) -> dict[str, Table]:
    """avg@k, pass@k and maj@k as functions of the number of right samples; wrong ones are all alike."""

    def vote(right: int) -> float:
        marks = [True] * right + [False] * (samples - right)
        return majority_at_k([0 if mark else 1 for mark in marks], marks, samples)

    counts = range(samples + 1)
    return {
        f"avg@{samples}": [c / samples for c in counts],
        f"pass@{samples // 2}": [pass_at_k(samples, c, samples // 2) for c in counts],
        f"maj@{samples}": [vote(c) for c in counts],
    }


def rows(repeats: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(measure: Callable[[int], dict[str, float]], **facts: Any) -> None:
        found.append({**facts, **measure(len(found))})
        print(json.dumps(found[-1]), flush=True)

    for problems in PROBLEMS:
        for chance in CHANCES:
            place: dict[str, Any] = {"problems": problems, "chance": chance}
            add(partial(binary_cell, chance, problems), score="top-1", **place)
            for samples in SAMPLES:
                for name, table in tables(samples).items():
                    for r in CORRELATIONS:
                        measure = partial(cell, table, chance, problems, r, repeats)
                        add(measure, score=name, correlation=r, **place)
        for chance, shift in SHIFTS:
            for samples in (1, *SAMPLES):
                for r in CORRELATIONS:
                    paired = partial(paired_cell, chance, shift, samples, problems, r, repeats)
                    facts = {"score": f"difference of avg@{samples}", "correlation": r, "problems": problems}
                    add(paired, chance=chance, shift=shift, **facts)
    return found


def least(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The lowest coverage of each kind of score."""
    kinds: dict[str, float] = {}
    for row in found:
        kinds[row["score"]] = min(kinds.get(row["score"], 1.0), row["coverage"])
    return kinds


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repeats", type=int, default=2000)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    found = rows(chosen.repeats)
    # JSON has no infinity: null, where a bootstrap has no width.
    plain = [{key: None if value == math.inf else value for key, value in row.items()} for row in found]
    result = {**provenance(), "repeats": chosen.repeats, "lowest_coverage": least(found), "cells": plain}
    print(json.dumps(result["lowest_coverage"], indent=1))
    if chosen.out is not None:
        lines = ",\n  ".join(json.dumps(row) for row in plain)
        head = json.dumps({**result, "cells": []}, indent=1)
        chosen.out.write_text(head.replace('"cells": []', f'"cells": [\n  {lines}\n ]') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
