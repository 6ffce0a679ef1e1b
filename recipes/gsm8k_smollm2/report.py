"""Result files, figures and tables from the archives of sittings.

    python -m recipes.gsm8k_smollm2.report RUNS      archives → kept runs → result files → pages
    python -m recipes.gsm8k_smollm2.report           result files and pages again, from the kept runs

RUNS contains the archives of a sitting, in folders of any depth; its runs are added to those that are kept in
benchmarks/results/learn_smollm2/. A run is compared with the warm-up whose weights it started from; runs of all
sittings that started from the same weights are combined. The result files are
benchmarks/results/learn_smollm2_*.json, the figures go to docs/figures, the tables into docs/experiments.md.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from gruppo.errors import DataError
from gruppo.evaluation.compare import compare
from gruppo.evaluation.statistics import majority_at_k, pass_at_k
from recipes.gsm8k_smollm2 import pages
from recipes.gsm8k_smollm2.kept import KEPT, Attempts, Correct, Facts, Run, keep, read_archives, read_kept

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROVENANCE = ("commit", "date", "device", "python", "versions", "command")
COLUMNS = ("accuracy", "reward", "length", "clipped", "entropy", "flat", "prompts")  # kept of steps, for the figures
MOST_STEPS = 300

# ---- numbers


def evaluation_of(run: Run) -> Facts | None:
    """The numbers of an evaluation that the tables show; None if the run was not evaluated."""
    if run.results is None:
        return None
    ((benchmark, passes),) = run.results["benchmarks"].items()
    greedy, sampled = passes["greedy"], passes.get("sampled")
    facts = {"benchmark": benchmark, "problems": greedy["problems"], "greedy": greedy["accuracy"]}
    facts |= {name: greedy[name] for name in ("interval", "boxed_rate", "truncation_rate", "mean_tokens")}
    if sampled is not None:
        most = max(sampled["pass"], key=int)
        facts |= {"samples": int(most), "avg": sampled["avg"][most], "pass": sampled["pass"][most]}
        facts["maj"] = sampled["maj"].get(most)
    return {name: rounded(value) for name, value in facts.items()}


def scores(attempts: Attempts, decoding: str, k: int) -> dict[str, dict[str, list[float]]]:
    """By metric and problem: top-1 of a greedy pass, or avg@k, maj@k and pass@k of a sampled one.

    Example, one problem, right once of twice:
        scores({"p": [(1, 0), (0, 1)]}, "sampled", 2)
        == {"avg@2": {"p": [1, 0]}, "maj@2": {"p": [0.5]}, "pass@2": {"p": [1]}}
    """
    right = {problem: [float(correct) for correct, _ in each] for problem, each in attempts.items()}
    if decoding == "greedy":
        return {"top-1": right}
    found = {f"avg@{k}": right}
    if k > 1:
        votes = {problem: [vote for _, vote in each] for problem, each in attempts.items()}
        found[f"maj@{k}"] = {p: [majority_at_k(votes[p], [each == 1 for each in right[p]], k)] for p in right}
        found[f"pass@{k}"] = {p: [pass_at_k(len(each), int(sum(each)), k)] for p, each in right.items()}
    return found


def gains(start: Correct, ends: Sequence[Correct]) -> Facts:
    """By metric: the gain of the ends over the start in percentage points, paired by problem.

    Runs of several seeds are pooled: the score of a problem is its mean over all of them. `significant` is at 95 %
    with respect to problems; it does not account for the variation between seeds.
    """
    result = {}
    for decoding in start:
        having = [end[decoding] for end in ends if decoding in end]
        if not having:
            continue
        k = min(len(each) for attempts in (start[decoding], *having) for each in attempts.values())
        before, *after = (scores(attempts, decoding, k) for attempts in (start[decoding], *having))
        for metric, first in before.items():
            pooled: dict[str, list[float]] = {}
            for end in after:
                for problem, values in end[metric].items():
                    pooled.setdefault(problem, []).extend(values)
            found = compare(first, pooled)
            chosen = {name: getattr(found, name) for name in ("difference", "interval", "p_value", "significant")}
            result[metric] = rounded({**chosen, "problems": found.problems, "runs": len(having)})
    return result


def thin(steps: Sequence[Facts], most: int = MOST_STEPS) -> dict[str, list[float]]:
    """Steps as columns of at most `most` entries: means over neighbouring steps, and the last `step` and `seconds`.

    Example:
        thin([{"step": 1, "seconds": 2, "accuracy": 0.1}, {"step": 2, "seconds": 4, "accuracy": 0.3}], most=1)
        == {"step": [2], "seconds": [4], "accuracy": [0.2]}
    """
    size = max(1, math.ceil(len(steps) / most))
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    columns: dict[str, list[float]] = {name: [part[-1][name] for part in parts] for name in ("step", "seconds")}
    for name in COLUMNS:
        if all(name in step for step in steps):
            columns[name] = [round(statistics.fmean(step[name] for step in part), 4) for part in parts]
    return columns


def rounded(value: Any) -> Any:
    """The same value with all floats rounded to six decimals."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


# ---- starts


def starts_of(runs: Iterable[Run]) -> dict[str, Run]:
    """The warm-ups by their weights. If several have the same weights, the one with the most complete evaluation."""
    by_weights: dict[str, list[Run]] = {}
    for run in runs:
        if run.experiment == "warmup" and run.record is not None:
            by_weights.setdefault(run.record["weights"], []).append(run)
    return {weights: fullest(members) for weights, members in by_weights.items()}


def fullest(runs: Sequence[Run]) -> Run:
    """Of runs with the same weights, the one with the most evaluation passes; passes that others have must agree."""
    chosen = max(runs, key=lambda run: len(run.correct or ()))
    for run in runs:
        for decoding, attempts in (run.correct or {}).items():
            if chosen.correct is not None and attempts != chosen.correct.get(decoding):
                raise DataError(
                    f"{chosen.name} and {run.name} have the same weights and different evaluations ({decoding}). "
                    "Take one of them away, and its archive: all runs that began with them need the same start."
                )
    return chosen


def start_for(run: Run, starts: Mapping[str, Run]) -> Run:
    """The warm-up that a run started from."""
    weights = (run.record or {}).get("start_weights")
    start = starts.get(weights or "")
    if start is None:
        known = ", ".join(f"{each} ({warmup.name})" for each, warmup in starts.items())
        raise DataError(
            f"{run.name} began with the weights {weights}, and no warm-up here made those; there are {known}. "
            "Add the archive of the warm-up that it began with, or take the run away."
        )
    if start.correct is None and run.correct is not None:
        raise DataError(
            f"{start.name}, which {run.name} began with, was not evaluated: there is nothing to compare with. "
            "Add the archive of a sitting that evaluated it."
        )
    return start


# ---- result files


def start_result(runs: Sequence[Run]) -> Facts:
    """The starting points of all experiments: the original model, and the model after each warm-up."""
    warmups = list(starts_of(runs).values())
    bases = [run for run in runs if run.experiment == "base"]
    records = [run.record for run in warmups if run.record is not None]
    if not records:
        raise DataError("There is no warm-up among the runs: nothing to compare them with.")
    kept = ("seed", "config", "rows", "tokens", "updates", "load_seconds", "train_seconds", "weights")
    return {
        **{name: records[0][name] for name in PROVENANCE},
        "experiment": "start",
        "base": evaluation_of(fullest(bases)) if bases else None,
        "runs": [
            {
                **{name: record[name] for name in kept},
                "losses": [
                    round(statistics.fmean(record["losses"][i : i + 10]), 4) for i in range(0, record["updates"], 10)
                ],
                "evaluation": evaluation_of(run),
            }
            for run, record in zip(warmups, records, strict=True)
        ],
    }


def experiment_result(name: str, runs: Sequence[Run], starts: Mapping[str, Run]) -> Facts:
    """One experiment: its settings, and the runs of all its seeds."""
    members = sorted((run for run in runs if run.experiment == name), key=lambda run: run.seed)
    first = members[0].record
    assert first is not None
    for earlier, run in pairwise(members):
        if run.record is not None and run.record["config"] != first["config"]:
            raise DataError(f"{run.name} and {members[0].name} are both {name}, with different settings.")
        if run.seed == earlier.seed:
            raise DataError(f"{run.name} and {earlier.name} are both {name} with seed {run.seed}; keep one of them.")
    result = {key: first[key] for key in (*PROVENANCE, "experiment", "library", "config")}
    result["runs"] = [_member(run, start_for(run, starts)) for run in members]
    # If the seeds have different starts, there is no common gain.
    if len({run["start_weights"] for run in result["runs"]}) == 1:
        start = start_for(members[0], starts).correct
        result["gain"] = gains(start or {}, [run.correct for run in members if run.correct is not None])
    return result


def _member(run: Run, start: Run) -> Facts:
    record = run.record or {}
    steps = record["steps"]
    ends = [0.0, *(step["seconds"] for step in steps)]
    accuracies = [step["accuracy"] for step in steps]
    laps = [after - before for before, after in pairwise(ends)]
    return {
        "seed": record["seed"],
        "at_once": record["at_once"],
        "start_weights": record["start_weights"],
        "updates": len(steps),
        "construct_seconds": record.get("construct_seconds"),
        "train_seconds": record["train_seconds"],
        "seconds_per_update": round(statistics.median(laps), 3),
        "first_accuracy": round(statistics.fmean(accuracies[: pages.WINDOW]), 6),
        "last_accuracy": round(statistics.fmean(accuracies[-pages.WINDOW :]), 6),
        "evaluation": evaluation_of(run),
        "gain": gains(start.correct or {}, [run.correct] if run.correct is not None else []),
        "steps": thin(steps),
    }


def dump(result: Facts) -> str:
    """JSON with lists of numbers on one line each."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[\s+([-+\d.eE,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def write_results(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write one file for the start and one for each experiment with at least one step."""
    trained = [run for run in runs if run.record is not None and run.record.get("steps")]
    results = {"start": start_result(runs)}
    for name in dict.fromkeys(run.experiment for run in trained):
        results[name] = experiment_result(name, trained, starts_of(runs))
    paths = []
    for name, result in results.items():
        paths.append(folder / f"{pages.PREFIX}{name}.json")
        paths[-1].write_text(dump(result), encoding="utf-8")
    return paths


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", help="folder of archives to add to the kept runs")
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder of the kept runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of experiments.md and figures/")
    options = parser.parse_args(argv)
    if options.runs is not None:
        keep(read_archives(options.runs), options.kept)
    for path in write_results(read_kept(options.kept), options.results):
        print(path)
    for path in pages.write(pages.read_results(options.results), options.docs):
        print(path)


if __name__ == "__main__":
    main()
