"""A whole unattended sitting: train, evaluate, archive the small files; one job after another, within a time limit.

    python -m recipes.gsm8k_smollm2.sitting --model smollm2 --data DATA --out OUT --jobs base,warmup,grpo:0 --limit 580

A job is base (evaluates the original model), warmup, trl, or the name of a YAML file in this folder, optionally with a
seed after a colon. All but the first two start from the model that warmup left in the folder --work, in this sitting
or an earlier one. For a sweep they accept changes from sweep.yaml: grpo@lr1e-5+g8:0 is a separate experiment,
grpo_lr1e-5_g8. With --at-once 3, three such jobs share the device: more updates in total, fewer for each; their
records note this. OUT gets an archive for each job, without weights, and sitting.json with the outcome of each job.
Both are updated after every training and evaluation, so a sitting that is cut short leaves its results up to then.
report.py reads the archives.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rollout_vllm import ENVIRONMENT
from gruppo.errors import ConfigError
from gruppo.evaluation.store import EvaluationFolder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = "recipes.gsm8k_smollm2"
RECIPES = ("grpo", "rloo", "dapo", "dr_grpo", "trl")  # each has a YAML file
CHANGES: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "sweep.yaml").read_text(encoding="utf-8"))
PACKED = (
    *("record.json", "warmup.json", "metrics.jsonl", "config.yaml", "environment.json", "events.jsonl"),
    *("train.log", "eval.log", "eval/results.json", "eval/results.md", "correct.json"),
)
SHORTEST = 20.0  # seconds of training; with less time left it is not started
LONGEST_LOG = 2**20  # bytes of a log, from its end, that are archived


@dataclass(frozen=True)
class Job:
    """A job of the sitting: `grpo:1` is Job("grpo", 1), and `grpo@lr1e-5` is Job("grpo", changes=("lr1e-5",))."""

    recipe: str
    seed: int = 0
    changes: tuple[str, ...] = ()  # keys of sweep.yaml

    def __str__(self) -> str:
        return self.experiment if self.recipe == "base" else f"{self.experiment}-{self.seed}"

    @property
    def experiment(self) -> str:
        return "_".join([self.recipe, *self.changes])

    @property
    def learns_from_rewards(self) -> bool:
        return self.recipe not in ("base", "warmup")


def parse_jobs(text: str) -> list[Job]:
    """Parse a comma-separated list of jobs.

    Example:
        parse_jobs("base,grpo:1,grpo@lr1e-5") == [Job("base"), Job("grpo", 1), Job("grpo", 0, ("lr1e-5",))]
    """
    jobs = [_parse_job(part.strip()) for part in text.split(",")]
    if len(set(jobs)) < len(jobs):
        raise ConfigError(f"--jobs {text!r} names a job twice; give it another seed.")
    return jobs


def _parse_job(text: str) -> Job:
    name, colon, seed = text.partition(":")
    recipe, at, changed = name.partition("@")
    if recipe not in ("base", "warmup", *RECIPES):
        raise ConfigError(f"--jobs {text!r}: choose from base, warmup, {', '.join(RECIPES)}.")
    if colon and not seed.isdecimal():
        raise ConfigError(f"--jobs {text!r}: a seed is a whole number, as in {recipe}:1.")
    names = changed.split("+") if at else []
    if (names and recipe not in RECIPES) or not set(names) <= set(CHANGES):
        raise ConfigError(f"--jobs {text!r}: changes are for {', '.join(RECIPES)}; choose from {', '.join(CHANGES)}.")
    settings = [setting for name in names for setting in CHANGES[name]]
    if len(set(settings)) < len(settings):
        raise ConfigError(f"--jobs {text!r} changes the same thing twice.")
    # In the order of the file, so that lr1e-5+g8 and g8+lr1e-5 are one experiment.
    return Job(recipe, int(seed or 0), tuple(name for name in CHANGES if name in names))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=parse_jobs, required=True, help="comma-separated; see above")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model before the warm-up")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds the folder gsm8k")
    parser.add_argument("--out", type=Path, required=True, help="folder of the archives")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/gsm8k_smollm2", help="folder of models and records")
    parser.add_argument("--warmup-seed", type=int, default=0, help="which warmed-up model the other jobs begin with")
    parser.add_argument("--limit", type=float, default=580, help="seconds of the sitting (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=420, help="and of each training (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="trainings that share the device")
    parser.add_argument("--reserve", type=float, default=90, help="kept for its start and its evaluation")
    parser.add_argument("--benchmark", default="gsm8k", help="for `gruppo eval`; gsm8k:100 is a part of it")
    parser.add_argument("--samples", type=int, default=8, help="of each problem, beside the greedy one; 0: none")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="in the evaluation (default: %(default)s)")
    parser.add_argument("--vllm-site", type=Path, help="folder that vLLM is installed in, if not this environment")
    parser.add_argument("--warmup-arguments", type=shlex.split, default=[], help="further ones, in quotes")
    parser.add_argument("--train-arguments", type=shlex.split, default=[], help="the same for every other training")
    options = parser.parse_args(argv)
    for name in ("model", "data", "out", "work"):
        setattr(options, name, getattr(options, name).resolve())
    return options


class Sitting:
    """Runs the jobs within the time limit and keeps the outcome of each."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.end: float = time.monotonic() + options.limit
        self.start_model = options.work / str(Job("warmup", options.warmup_seed))
        self.summary: dict[str, Any] = {str(job): {} for job in options.jobs}
        self._writing = threading.Lock()
        made_here = Job("warmup", options.warmup_seed) in options.jobs
        if any(job.learns_from_rewards for job in options.jobs) and not made_here and not is_model(self.start_model):
            raise ConfigError(f"{self.start_model} has no model; begin with --jobs warmup:{options.warmup_seed},…")

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def sharing(self) -> int:
        """How many trainings share the device, as long as there are enough of them."""
        return min(self.options.at_once, sum(job.learns_from_rewards for job in self.options.jobs))

    def run(self) -> bool:
        """Run every job; return whether all of them were evaluated successfully."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        for job in self.options.jobs:
            if not job.learns_from_rewards:
                self.do(job)
        with ThreadPoolExecutor(self.options.at_once) as pool:
            list(pool.map(self.do, (job for job in self.options.jobs if job.learns_from_rewards)))
        return all(facts.get("evaluated") for facts in self.summary.values())

    def do(self, job: Job) -> None:
        """Train, then evaluate the model if there is one."""
        folder = self.options.work / str(job)
        set_aside(folder)
        folder.mkdir(parents=True)
        facts = self.summary[str(job)]
        seconds = min(self.options.seconds, self.left - self.options.reserve)
        if job.learns_from_rewards and not is_model(self.start_model):
            facts["skipped"] = f"{self.start_model.name} left no model"
        elif job.recipe != "base" and seconds < SHORTEST:
            facts["skipped"] = f"{self.left:.0f} s were left"
        elif job.recipe != "base":
            facts["train"] = self.call(job, self.training(job, folder, seconds), folder / "train.log")
            self.keep(job, folder)
        model = self.options.model if job.recipe == "base" else folder
        if is_model(model):
            facts["eval"] = self.call(job, self.evaluation(model, folder), folder / "eval.log")
            facts["evaluated"] = facts["eval"]["exit_code"] == 0
        self.keep(job, folder)

    def training(self, job: Job, folder: Path, seconds: float) -> list[str]:
        """The training command."""
        options = self.options
        python = [sys.executable, "-m"]
        if job.recipe == "warmup":
            paths = ["--model", str(options.model), "--data", str(options.data), "--output-dir", str(folder)]
            return [*python, f"{PACKAGE}.warmup", *paths, "--seed", str(job.seed), *options.warmup_arguments]
        script = "peer" if job.recipe == "trl" else "train"
        paths = ["--model", str(self.start_model), "--data", str(options.data), "--output_dir", str(folder)]
        paths = ["--config", str(HERE / f"{job.recipe}.yaml"), *paths]
        limits = ["--seed", str(job.seed), "--max_seconds", f"{seconds:.0f}", "--at_once", str(self.sharing)]
        settings = {"experiment": job.experiment} if job.changes else {}
        for name in job.changes:
            settings |= CHANGES[name]
        changed = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        return [*python, f"{PACKAGE}.{script}", *paths, *limits, *changed, *options.train_arguments]

    def evaluation(self, model: Path, folder: Path) -> list[str]:
        """The evaluation command."""
        asked = ["--benchmarks", self.options.benchmark, "--data-dir", str(self.options.data)]
        asked += ["--max-new-tokens", str(self.options.max_new_tokens), "--samples", str(self.options.samples)]
        return [sys.executable, "-m", "gruppo", "eval", str(model), *asked, "--output-dir", str(folder / "eval")]

    def call(self, job: Job, command: list[str], log: Path) -> dict[str, Any]:
        """Run a command until it ends or the sitting's time is over; return its exit code and duration."""
        print(f"{job}: {log.stem}, {self.left:.0f} s left", flush=True)
        start = time.monotonic()
        variables = self.environment(with_vllm=job.recipe == "trl" and log.stem == "train")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(max(1.0, self.left))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # including its workers
                code = process.wait()
        result = {"exit_code": code, "seconds": round(time.monotonic() - start, 1)}
        print(f"{job}: {log.stem} ended with {code} after {result['seconds']} s", flush=True)
        if code:
            print(log.read_bytes()[-3000:].decode("utf-8", "replace"), flush=True)
        return result

    def environment(self, with_vllm: bool) -> dict[str, str]:
        """The environment variables of a process; gruppo's processes do not see vLLM's packages."""
        variables = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        if not with_vllm:
            return variables
        paths = [str(self.options.vllm_site or ""), os.environ.get("PYTHONPATH", "")]
        return {**ENVIRONMENT, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def keep(self, job: Job, folder: Path) -> None:
        """Archive the files of the job so far, and update the summary."""
        write_correct(folder)
        pack(folder, self.options.out / f"{job}.tar.gz")
        with self._writing:
            (self.options.out / "sitting.json").write_text(json.dumps(self.summary, indent=1) + "\n", encoding="utf-8")


def set_aside(folder: Path) -> None:
    """Rename the folder of an earlier sitting, so that its files are not mistaken for those of this one."""
    if folder.exists():
        number = 1 + sum(1 for _ in folder.parent.glob(f"{folder.name}.earlier-*"))
        folder.rename(folder.with_name(f"{folder.name}.earlier-{number}"))


def is_model(folder: Path) -> bool:
    """Whether the folder has the weights of a model or an adapter; a training that was killed leaves none."""
    return any(folder.glob("*config.json")) and any(folder.glob("*model*.safetensors"))


def write_correct(folder: Path) -> None:
    """Write correct.json: for every attempt at every problem, whether it is correct, and its vote.

    {"greedy": {"gsm8k/test/0": [[1, 0]], …}, "sampled": {"gsm8k/test/0": [[1, 0], [0, 1], [0, null], …], …}}
    """
    evaluation = EvaluationFolder(folder / "eval")
    if not (folder / "eval/results.json").exists():
        return
    correct: dict[str, dict[str, list[tuple[int, int | None]]]] = {}
    for benchmark, decoding in evaluation.passes():
        problems = correct.setdefault(decoding, {})
        for row in sorted(evaluation.attempts(benchmark, decoding), key=lambda row: row.attempt.sample):
            problems.setdefault(row.attempt.problem, []).append((int(row.correct), row.vote))
    (folder / "correct.json").write_text(json.dumps(correct) + "\n", encoding="utf-8")


def pack(folder: Path, archive: Path) -> None:
    """Pack the small files of a job into one archive; long logs are cut to their end."""
    unfinished = archive.with_suffix(".new")
    with tarfile.open(unfinished, "w:gz") as packed:
        for path in (folder / name for name in PACKED):
            if path.exists():
                if path.suffix == ".log" and path.stat().st_size > LONGEST_LOG:
                    path.write_bytes(path.read_bytes()[-LONGEST_LOG:])
                packed.add(path, f"{folder.name}/{path.relative_to(folder)}")
    unfinished.replace(archive)


if __name__ == "__main__":
    sys.exit(0 if Sitting(parse()).run() else 1)
