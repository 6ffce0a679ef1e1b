"""Kept runs: one compressed JSON file per run, with everything that result files and pages are made from.

Sittings leave archives (sitting.py). `read_archives` reads them, `keep` stores the essential data in a folder next to
the result files, and `read_kept` reads it back, so that runs of a later sitting are combined with earlier ones.
"""

import gzip
import json
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from gruppo.errors import DataError

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "learn_smollm2"

Facts = dict[str, Any]
Attempts = Mapping[str, Sequence[tuple[int, int | None]]]  # by problem: whether each attempt is correct, and its vote
Correct = Mapping[str, Attempts]  # by pass


@dataclass(frozen=True)
class Run:
    """The output of one job: the record of its training with settings and metrics, and its evaluation."""

    name: str  # of the job, e.g. grpo-0
    record: Facts | None  # None: the original model was evaluated, without training
    results: Facts | None
    correct: Correct | None
    config: Facts | None = None
    metrics: Sequence[Facts] = ()

    @property
    def experiment(self) -> str:
        if self.record is None:
            return "base"
        return str(self.record.get("experiment", "warmup"))

    @property
    def seed(self) -> int:
        return int((self.record or {}).get("seed", 0))

    @property
    def learned_from_rewards(self) -> bool:
        return self.experiment not in ("base", "warmup")


def read_archives(folder: Path) -> list[Run]:
    """All jobs under a folder, in archives or unpacked."""
    with tempfile.TemporaryDirectory() as unpacked:
        for number, archive in enumerate(sorted(folder.rglob("*.tar.gz"))):
            _unpack(archive, Path(unpacked) / str(number))
        found = {
            path.parents[len(Path(name).parts) - 1]
            for place in (folder, Path(unpacked))
            for name in ("record.json", "warmup.json", "eval/results.json")
            for path in place.rglob(name)
        }
        if not found:
            raise DataError(
                f"{folder} has no record.json, warmup.json or eval/results.json, in archives or beside them."
            )
        return [_read(path) for path in sorted(found)]


def _unpack(archive: Path, folder: Path) -> None:
    """What extractall(filter="data") does with the files that `pack` made; Python 3.11.0 to 3.11.3 lack the filter."""
    with tarfile.open(archive) as packed:
        for member in packed:
            path = (folder / member.name).resolve()
            if member.isfile() and path.is_relative_to(folder.resolve()):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(packed.extractfile(member).read())


def _read(folder: Path) -> Run:
    def read(name: str) -> Any:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    config, metrics = folder / "config.yaml", folder / "metrics.jsonl"
    results, settings = (
        read("eval/results.json"),
        yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else None,
    )
    # The folders of the files are meaningless on other machines.
    if results and "source" in results:
        results["source"] = Path(results["source"]).name
    if settings and "output_dir" in settings:
        settings["output_dir"] = Path(settings["output_dir"]).name
    return Run(
        name=folder.name,
        record=read("record.json") or read("warmup.json"),
        results=results,
        correct=read("correct.json"),
        config=settings,
        metrics=[json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        if metrics.exists()
        else (),
    )


def keep(runs: Iterable[Run], folder: Path = KEPT) -> None:
    """Write each run to a separate file. A run that is already kept is replaced only by one with more passes."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        path = folder / f"{run.name}.json.gz"
        if path.exists() and _differ(earlier := _open(path), run):
            raise DataError(
                f"{run.name} was kept before, with other numbers (weights or evaluation; {_said(earlier)}, now "
                f"{_said(run)}). Give the job another seed, or remove {path.name} if this run is to replace it."
            )
        if not path.exists() or len(earlier.correct or ()) < len(run.correct or ()):
            path.write_bytes(gzip.compress(json.dumps(asdict(run)).encode(), mtime=0))


def _differ(earlier: Run, now: Run) -> bool:
    if now.learned_from_rewards:
        return earlier.record != now.record or earlier.correct != now.correct
    weights = [(run.record or {}).get("weights") for run in (earlier, now)]
    both = [decoding for decoding in now.correct or {} if decoding in (earlier.correct or {})]
    return weights[0] != weights[1] or any((earlier.correct or {})[d] != (now.correct or {})[d] for d in both)


def _said(run: Run) -> str:
    weights = (run.record or {}).get("weights")
    return f"{len(run.correct or {})} passes" + (f", weights {weights}" if weights else "")


def read_kept(folder: Path = KEPT) -> list[Run]:
    return [_open(path) for path in sorted(folder.glob("*.json.gz"))]


def _open(path: Path) -> Run:
    return Run(**json.loads(gzip.decompress(path.read_bytes())))
