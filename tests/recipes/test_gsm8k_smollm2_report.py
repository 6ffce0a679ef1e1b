"""What becomes of runs: sittings, archives, result files, tables and figures."""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gruppo.errors import ConfigError, DataError
from recipes.gsm8k_smollm2 import pages, report, sitting
from recipes.gsm8k_smollm2.sitting import Job, Sitting, parse_jobs

ROOT = Path(__file__).parents[2]

# ---- sittings


def test_jobs() -> None:
    assert parse_jobs("base, warmup,grpo:1,trl") == [Job("base"), Job("warmup"), Job("grpo", 1), Job("trl")]
    assert [str(job) for job in parse_jobs("base,dr_grpo:2")] == ["base", "dr_grpo-2"]


@pytest.mark.parametrize(
    ("jobs", "named"), [("ppo", "choose from base"), ("grpo:x", "a whole number"), ("grpo,grpo:0", "twice")]
)
def test_jobs_that_are_none(jobs: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_jobs(jobs)


TRAIN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
for name in ("config.json", "model.safetensors", "record.json", "optimizer.bin"):
    (folder / name).write_text(json.dumps({"made": "here"}))
"""
EVALUATE = """
import pathlib, shutil, sys
folder = pathlib.Path(sys.argv[1]) / "eval"
shutil.copytree(sys.argv[2], folder / "completions/gsm8k/greedy")
(folder / "results.json").write_text("{}")
"""


class Rehearsal(Sitting):
    """Runs small programs in the place of trainings and evaluations."""

    train = TRAIN

    def training(self, job: Job, folder: Path, seconds: float) -> list[str]:
        return [sys.executable, "-c", self.train, str(folder)]

    def evaluation(self, model: Path, folder: Path) -> list[str]:
        attempts = self.options.data / "attempts"
        attempts.mkdir(exist_ok=True)
        table = pa.table({"problem": ["a", "b"], "sample": [0, 0], "correct": [True, False]})
        pq.write_table(table, attempts / "00000.parquet")
        return [sys.executable, "-c", EVALUATE, str(folder), str(attempts)]


def options(tmp_path: Path, jobs: str, **further: Any) -> Any:
    given = {"model": tmp_path / "model", "data": tmp_path, "out": tmp_path / "out", "work": tmp_path / "work"}
    given |= {"jobs": jobs} | further
    return sitting.parse([text for key, value in given.items() for text in (f"--{key}", str(value))])


def test_a_sitting_packs_what_is_small(tmp_path: Path) -> None:
    for turn in (1, 2):
        assert Rehearsal(options(tmp_path, "warmup,grpo:1")).run(), f"sitting {turn}"
    summary = json.loads((tmp_path / "out/sitting.json").read_text())
    assert [facts["train"]["exit_code"] for facts in summary.values()] == [0, 0]
    with tarfile.open(tmp_path / "out/grpo-1.tar.gz") as archive:
        names = {name.removeprefix("grpo-1/") for name in archive.getnames()}
        correct = json.load(archive.extractfile("grpo-1/correct.json"))  # type: ignore[arg-type]
    assert names == {"record.json", "train.log", "eval.log", "eval/results.json", "correct.json"}
    assert correct == {"greedy": {"a": [True], "b": [False]}}
    assert (tmp_path / "work/grpo-1.earlier-1/record.json").exists(), "what was there is not lost"


def test_a_sitting_goes_on_after_a_failure_and_skips_what_has_no_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Rehearsal):
        train = "raise SystemExit('no room')"

    assert not Failing(options(tmp_path, "warmup,grpo:0")).run()
    summary = json.loads((tmp_path / "out/sitting.json").read_text())
    assert summary["warmup-0"]["train"]["exit_code"] == 1
    assert "eval" not in summary["warmup-0"]
    assert summary["grpo-0"] == {"skipped": "warmup-0 left no model"}
    assert "no room" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="begin with --jobs warmup:0"):
        Rehearsal(options(tmp_path, "grpo:0"))


def test_a_sitting_ends_in_time(tmp_path: Path) -> None:
    class Endless(Rehearsal):
        train = "import time; time.sleep(60)"

    slow = Endless(options(tmp_path, "warmup,warmup:1", limit=21, reserve=0))
    slow.end -= 20  # as if the second before the end had come
    slow.options.out.mkdir()
    facts = slow.call(Job("warmup"), slow.training(Job("warmup"), tmp_path, 1), tmp_path / "train.log")
    assert facts["exit_code"] == -9
    assert facts["seconds"] < 10
    slow.do(Job("warmup", 1))
    assert "were left" in slow.summary["warmup-1"]["skipped"]


def test_the_commands_of_a_sitting(tmp_path: Path) -> None:
    chosen = options(tmp_path, "warmup,grpo:1,trl:2", **{"train-arguments": "--learning_rate 2e-5"})
    plan = Sitting(chosen)
    ours = plan.training(Job("grpo", 1), tmp_path / "grpo-1", 99.6)
    assert ours[1:3] == ["-m", "recipes.gsm8k_smollm2.train"]
    assert ours[-6:] == ["--seed", "1", "--max_seconds", "100", "--learning_rate", "2e-5"]
    theirs = plan.training(Job("trl", 2), tmp_path / "trl-2", 99.6)
    assert theirs[2] == "recipes.gsm8k_smollm2.peer"
    assert theirs[theirs.index("--model") + 1] == str(tmp_path / "work/warmup-0")
    assert "--learning-rate" not in plan.training(Job("warmup"), tmp_path / "warmup-0", 99.6)
    from gruppo.cli.evaluate import parser

    asked = parser().parse_args(plan.evaluation(tmp_path / "grpo-1", tmp_path / "grpo-1")[4:])
    assert (asked.benchmarks, asked.samples, asked.max_new_tokens) == (["gsm8k"], 8, 256)


# ---- reports

ORIGIN = {
    "commit": "c0ffee",
    "date": "2026-01-01",
    "device": "a device",
    "python": "3.12",
    "versions": {"torch": "2.11"},
    "command": "python -m recipes.gsm8k_smollm2.train",
}


def evaluated(folder: Path, solved: int, samples: int = 2) -> None:
    """An evaluation of ten problems of which so many are solved, by every attempt."""
    (folder / "eval").mkdir(parents=True)
    share = solved / 10
    greedy = {"problems": 10, "accuracy": share, "interval": [0.0, 1.0]}
    greedy |= {"boxed_rate": 1.0, "truncation_rate": 0.0, "mean_tokens": 80.0}
    several = {"avg": {"2": share}, "pass": {"1": share, "2": share}, "maj": {"2": share}}
    results = {"benchmarks": {"gsm8k": {"title": "GSM8K", "greedy": greedy, "sampled": several}}}
    (folder / "eval/results.json").write_text(json.dumps(results))
    correct = {
        "greedy": {f"p{i}": [i < solved] for i in range(10)},
        "sampled": {f"p{i}": [i < solved] * samples for i in range(10)},
    }
    (folder / "correct.json").write_text(json.dumps(correct))


def trained(folder: Path, experiment: str, seed: int, solved: int, pace: float, updates: int, **config: Any) -> None:
    """A run whose samples become better with every update."""
    evaluated(folder, solved)
    steps = [
        {"step": i + 1, "seconds": pace * (i + 1), "accuracy": 0.1 + 0.01 * i, "reward": 0.1, "length": 80.0}
        for i in range(updates)
    ]
    library = "trl" if experiment == "trl" else "gruppo"
    facts = {"experiment": experiment, "seed": seed, "library": library, "config": {"learning_rate": 1e-5} | config}
    facts |= {"construct_seconds": 5.0, "train_seconds": pace * updates, "steps": steps}
    (folder / "record.json").write_text(json.dumps({**ORIGIN, **facts}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Archives as a sitting leaves them."""
    folder = tmp_path / "runs" / "first"
    evaluated(folder / "base", 0)
    evaluated(folder / "warmup-0", 2)
    warmed = {
        "seed": 0,
        "config": {},
        "rows": 7,
        "tokens": 70,
        "updates": 25,
        "load_seconds": 1.0,
        "train_seconds": 2.0,
        "weights": "00ff",
    }
    (folder / "warmup-0/warmup.json").write_text(json.dumps({**ORIGIN, **warmed, "losses": [2.0] * 10 + [1.0] * 15}))
    trained(folder / "grpo-0", "grpo", 0, solved=4, pace=2.0, updates=20)
    trained(folder / "grpo-1", "grpo", 1, solved=6, pace=2.0, updates=30)
    trained(folder / "dapo-0", "dapo", 0, solved=5, pace=3.0, updates=20)
    trained(folder / "trl-0", "trl", 0, solved=3, pace=20.0, updates=3)
    sitting.pack(folder / "grpo-0", folder / "grpo-0.tar.gz")
    for path in sorted((folder / "grpo-0").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return tmp_path / "runs"


def test_result_files(runs: Path, tmp_path: Path) -> None:
    written = report.write_results(report.load(runs), tmp_path)
    names = {path.stem.removeprefix("learn_smollm2_") for path in written}
    assert names == {"start", "grpo", "dapo", "trl"}
    start = json.loads((tmp_path / "learn_smollm2_start.json").read_text())
    assert start["base"]["greedy"] == 0
    assert start["runs"][0]["evaluation"]["avg"] == 0.2
    assert start["runs"][0]["losses"] == [2.0, 1.0, 1.0]
    grpo = json.loads((tmp_path / "learn_smollm2_grpo.json").read_text())
    assert (grpo["commit"], grpo["device"], grpo["library"]) == ("c0ffee", "a device", "gruppo")
    assert [(run["seed"], run["updates"], run["seconds_per_update"]) for run in grpo["runs"]] == [
        (0, 20, 2),
        (1, 30, 2),
    ]
    # From 2 of 10 to 4 and to 6: 20 and 40 points, 30 together.
    assert [run["gain"]["sampled"]["difference"] for run in grpo["runs"]] == [20, 40]
    assert grpo["gain"]["greedy"]["difference"] == 30
    assert grpo["runs"][0]["first_accuracy"] == pytest.approx(0.12)
    assert grpo["runs"][0]["last_accuracy"] == pytest.approx(0.27)
    lines = (tmp_path / "learn_smollm2_grpo.json").read_text().splitlines()
    assert sum('"accuracy": [0.1, 0.11,' in line for line in lines) == 2, "a column a line"


def test_runs_of_an_experiment_share_their_settings(runs: Path, tmp_path: Path) -> None:
    trained(runs / "first/grpo-2", "grpo", 2, 4, 2.0, 5, learning_rate=1.0)
    with pytest.raises(DataError, match="different settings"):
        report.write_results(report.load(runs), tmp_path)


def test_seeds_with_other_starts_are_compared_with_those(runs: Path, tmp_path: Path) -> None:
    evaluated(runs / "second/warmup-0", 3)
    (runs / "second/warmup-0/warmup.json").write_text((runs / "first/warmup-0/warmup.json").read_text())
    trained(runs / "second/grpo-2", "grpo", 2, solved=4, pace=2.0, updates=5)
    report.write_results(report.load(runs), tmp_path)
    results = pages.read_results(tmp_path)
    assert [run["gain"]["greedy"]["difference"] for run in results["grpo"]["runs"]] == [20, 40, 10]
    assert "gain" not in results["grpo"]
    assert "| +23.3 (+10.0 to +40.0) |" in pages.accuracy_table(results)
    assert (
        "| after the warm-up ([file](../benchmarks/results/learn_smollm2_start.json)) | 2 | 25 (25 to 25) | 25.0 ("
        in (pages.accuracy_table(results))
    )


def test_an_empty_folder_and_runs_without_a_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no record\.json"):
        report.load(tmp_path)
    trained(tmp_path / "grpo-0", "grpo", 0, 4, 2.0, 5)
    with pytest.raises(DataError, match="no warm-up"):
        report.write_results(report.load(tmp_path), tmp_path)


def test_the_page_and_the_figures(runs: Path, tmp_path: Path) -> None:
    docs, results = tmp_path / "docs", tmp_path / "results"
    docs.mkdir()
    results.mkdir()
    report.main([str(runs), "--results", str(results), "--docs", str(docs)])
    page = (docs / "experiments.md").read_text()
    assert "| SmolLM2-135M-Instruct | – | – | 0.0 | 0.0 | 0.0 | 0.0 | – |" in page
    assert (
        "| GRPO ([file](../benchmarks/results/learn_smollm2_grpo.json)) | 2 | 25 (20 to 30) | 50.0 (40.0 to 60.0) |"
        in page
    )
    assert "| DAPO | 60 | 20 | 3.00 | 12.0 | 27.0 |" in page
    assert "| GRPO with TRL 1.16 + vLLM 0.24 | 60 | 3 | 20.00 | 11.0 | 11.0 |" in page
    for name in ("time", "steps"):
        figure = docs / "figures" / f"learn_smollm2_{name}.svg"
        assert f"figures/{figure.name}" in page
        assert "GRPO" in figure.read_text()
        assert figure.stat().st_size < 100_000
    assert "DAPO" in (docs / "figures/learn_smollm2_steps.svg").read_text()
    assert "TRL" in (docs / "figures/learn_smollm2_time.svg").read_text()
    before = {path: path.read_bytes() for path in docs.rglob("*.*")}
    report.main(["--results", str(results), "--docs", str(docs)])
    assert {path: path.read_bytes() for path in docs.rglob("*.*")} == before, (
        "nothing changes with the numbers the same"
    )


def test_a_page_keeps_its_words(runs: Path, tmp_path: Path) -> None:
    report.write_results(report.load(runs), tmp_path)
    results = pages.read_results(tmp_path)
    filled = pages.fill("before\n" + "\nold\n".join(pages.MARKS) + "\nafter\n", results)
    assert filled.startswith("before\n<!-- learning")
    assert filled.endswith("<!-- end of learning -->\nafter\n")
    assert "\nold\n" not in filled
    with pytest.raises(DataError, match="no place for the tables"):
        pages.fill("nothing here", results)
    with pytest.raises(DataError, match=r"start\.json"):
        pages.block({})


def test_thinning_and_smoothing() -> None:
    steps = [{"step": i, "seconds": 2.0 * i, "accuracy": 0.1 * i} for i in range(1, 6)]
    assert report.thin(steps, most=3) == {"step": [2, 4, 5], "seconds": [4, 8, 10], "accuracy": [0.15, 0.35, 0.5]}
    assert report.thin(steps)["step"] == [1, 2, 3, 4, 5]
    assert pages.smooth([0, 3, 6], width=3) == [1.5, 3, 4.5]
    assert pages.span([0.101, 0.12], pages.percent) == "11.1 (10.1 to 12.0)"
    assert pages.span([None], pages.percent) == "–"


@pytest.mark.skipif(not (ROOT / "docs/experiments.md").exists(), reason="nothing was measured yet")
def test_the_page_says_what_the_files_say() -> None:
    page = (ROOT / "docs/experiments.md").read_text()
    results = pages.read_results(ROOT / "benchmarks/results")
    assert pages.fill(page, results) == page, "run `python -m recipes.gsm8k_smollm2.report`"


@pytest.mark.medium
def test_a_whole_sitting_with_a_tiny_model(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # nothing here runs a kernel
    small = "--use_cpu true --bf16 false --num_generations 4 --per_device_train_batch_size 4 --max_steps 2 "
    small += "--gradient_accumulation_steps 2 --max_completion_length 8 --parity_check off"
    given = {"benchmark": "gsm8k:4", "samples": 2, "max-new-tokens": 8, "train-arguments": small, "limit": 300}
    assert Sitting(options(tmp_path, "warmup,grpo:0", data=data, model=model, **given)).run()
    report.write_results(report.load(tmp_path / "out"), tmp_path)
    results = pages.read_results(tmp_path)
    assert results["grpo"]["runs"][0]["updates"] == 2
    assert results["grpo"]["runs"][0]["evaluation"]["problems"] == 4
    assert results["grpo"]["gain"]["sampled"]["problems"] == 4
