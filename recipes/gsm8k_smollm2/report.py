"""Result files, figures and tables from the archives of sittings.

    python -m recipes.gsm8k_smollm2.report RUNS      archives → benchmarks/results/learn_smollm2_*.json → pages
    python -m recipes.gsm8k_smollm2.report           the pages again, from the result files

RUNS holds the archives, in folders of any depth. Runs are compared with the warm-up beside them, so the archives of
sittings that began with the same warm-up belong into one folder, and those with another one into another. The figures
go to docs/figures, the tables into docs/experiments.md.
"""

import argparse
import json
import math
import re
import statistics
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gruppo.errors import DataError
from gruppo.evaluation.compare import compare
from recipes.gsm8k_smollm2 import pages

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PROVENANCE = ("commit", "date", "device", "python", "versions", "command")
COLUMNS = ("accuracy", "reward", "length", "clipped", "entropy", "flat", "prompts")  # of steps, for the figures
MOST_STEPS = 300

Facts = dict[str, Any]
Correct = Mapping[str, Mapping[str, Sequence[float]]]  # pass → problem → its attempts


@dataclass(frozen=True)
class Run:
    """What one job left: its folder, the record of its training, and its evaluation."""

    folder: Path
    record: Facts | None  # None: the model was evaluated as it is
    results: Facts | None
    correct: Correct | None

    @property
    def experiment(self) -> str:
        if self.record is None:
            return "base"
        return str(self.record.get("experiment", "warmup"))


# ---- reading


def load(runs: Path) -> list[Run]:
    """All jobs under a folder, those in archives included."""
    for archive in sorted(runs.rglob("*.tar.gz")):
        with tarfile.open(archive) as packed:
            packed.extractall(archive.parent, filter="data")
    found = {path.parent for name in ("record.json", "warmup.json") for path in runs.rglob(name)}
    found |= {path.parent.parent for path in runs.rglob("eval/results.json")}
    if not found:
        raise DataError(f"{runs} has no record.json, warmup.json or eval/results.json, in archives or beside them.")
    return [_run(folder) for folder in sorted(found)]


def _run(folder: Path) -> Run:
    def read(name: str) -> Any:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    return Run(folder, read("record.json") or read("warmup.json"), read("eval/results.json"), read("correct.json"))


# ---- numbers


def evaluation_of(run: Run) -> Facts | None:
    """The numbers of an evaluation that tables show; None if there was none."""
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


def gains(starts: Correct | None, ends: Sequence[Correct]) -> Facts:
    """By pass: how much better the ends are than the start, in percentage points, paired by problem.

    Runs of several seeds are put together: the score of a problem is its mean over all of them.
    """
    if starts is None or not ends:
        return {}
    result = {}
    for decoding in starts:
        pooled: dict[str, list[float]] = {}
        for end in ends:
            for problem, attempts in end.get(decoding, {}).items():
                pooled.setdefault(problem, []).extend(map(float, attempts))
        if pooled:
            found = compare({problem: list(map(float, a)) for problem, a in starts[decoding].items()}, pooled)
            chosen = {"difference": found.difference, "interval": list(found.interval), "p_value": found.p_value}
            result[decoding] = rounded({**chosen, "problems": found.problems, "runs": len(ends)})
    return result


def thin(steps: Sequence[Facts], most: int = MOST_STEPS) -> dict[str, list[float]]:
    """Steps as columns, at most so many: means of neighbours, and the step and the second of the last of them.

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
    """The same with numbers of six digits after the point."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


# ---- result files


def start_result(runs: Iterable[Run]) -> Facts:
    """Where every experiment begins: the model as it is, and after each warm-up."""
    warmups = [run for run in runs if run.experiment == "warmup"]
    bases = [run for run in runs if run.experiment == "base"]
    records = [run.record for run in warmups if run.record is not None]
    if not records:
        raise DataError("There is no warm-up among the runs: nothing to compare them with.")
    kept = ("seed", "config", "rows", "tokens", "updates", "load_seconds", "train_seconds", "weights")
    return {
        **{name: records[0][name] for name in PROVENANCE},
        "experiment": "start",
        "base": evaluation_of(bases[0]) if bases else None,
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


def experiment_result(name: str, runs: Sequence[Run]) -> Facts:
    """One experiment: its settings, and the runs of all its seeds."""
    members = sorted((run for run in runs if run.experiment == name), key=lambda run: _seed(run))
    starts = {run.folder.parent: run.correct for run in runs if run.experiment == "warmup"}
    first = members[0].record
    assert first is not None
    for run in members[1:]:
        if run.record is not None and run.record["config"] != first["config"]:
            raise DataError(f"{run.folder} and {members[0].folder} are both {name}, with different settings.")
    result = {key: first[key] for key in (*PROVENANCE, "experiment", "library", "config")}
    result["runs"] = [_member(run, starts.get(run.folder.parent)) for run in members]
    by_start: dict[Path, list[Correct]] = {}
    for run in members:
        if run.correct is not None:
            by_start.setdefault(run.folder.parent, []).append(run.correct)
    if len(by_start) == 1:  # seeds with different starts have no common difference
        ((folder, ends),) = by_start.items()
        result["gain"] = gains(starts.get(folder), ends)
    return result


def _seed(run: Run) -> int:
    return int((run.record or {}).get("seed", 0))


def _member(run: Run, start: Correct | None) -> Facts:
    record = run.record or {}
    steps = record["steps"]
    ends = [0.0, *(step["seconds"] for step in steps)]
    accuracies = [step["accuracy"] for step in steps]
    laps = [after - before for before, after in pairwise(ends)]
    return {
        "seed": record["seed"],
        "updates": len(steps),
        "construct_seconds": record.get("construct_seconds"),
        "train_seconds": record["train_seconds"],
        "seconds_per_update": round(statistics.median(laps), 3),
        "first_accuracy": round(statistics.fmean(accuracies[: pages.ENDS]), 6),
        "last_accuracy": round(statistics.fmean(accuracies[-pages.ENDS :]), 6),
        "evaluation": evaluation_of(run),
        "gain": gains(start, [run.correct] if run.correct is not None else []),
        "steps": thin(steps),
    }


def dump(result: Facts) -> str:
    """JSON with lists of numbers on one line each."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[\s+([-+\d.eE,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def write_results(runs: Sequence[Run], folder: Path) -> list[Path]:
    """One file for the start and one for each experiment that has a step."""
    trained = [run for run in runs if run.record is not None and run.record.get("steps")]
    results = {"start": start_result(runs)}
    for name in dict.fromkeys(run.experiment for run in trained):
        results[name] = experiment_result(name, [run for run in runs if run in trained or run.experiment == "warmup"])
    paths = []
    for name, result in results.items():
        paths.append(folder / f"{pages.PREFIX}{name}.json")
        paths[-1].write_text(dump(result), encoding="utf-8")
    return paths


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", help="folder of archives; without it, only the pages are made")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of experiments.md and figures/")
    options = parser.parse_args(argv)
    if options.runs is not None:
        for path in write_results(load(options.runs), options.results):
            print(path)
    for path in pages.write(pages.read_results(options.results), options.docs):
        print(path)


if __name__ == "__main__":
    main()
