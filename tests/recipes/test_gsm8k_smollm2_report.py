"""What becomes of runs: sittings, archives, result files, tables and figures."""

import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.store import EvaluationFolder
from gruppo.evaluation.types import PASSES, Attempt, GradedAttempt, Problem
from gruppo.grading import Grade, Rung
from gruppo.types import StopReason
from recipes.gsm8k_smollm2 import figures, kept, pages, report, sitting, train
from recipes.gsm8k_smollm2.sitting import Job, Sitting, parse_jobs

ROOT = Path(__file__).parents[2]

# ---- sittings


def test_jobs() -> None:
    assert parse_jobs("base, warmup,grpo:1,trl") == [Job("base"), Job("warmup"), Job("grpo", 1), Job("trl")]
    assert [str(job) for job in parse_jobs("base,dr_grpo:2")] == ["base", "dr_grpo-2"]
    assert [str(job) for job in parse_jobs("grpo,grpo@lr1e-5,grpo@g8+lr1e-5:1")] == [
        *("grpo-0", "grpo_lr1e-5-0", "grpo_lr1e-5_g8-1"),
    ]


@pytest.mark.parametrize(
    ("jobs", "named"),
    [
        ("ppo", "choose from base"),
        ("grpo:x", "a whole number"),
        ("grpo,grpo:0", "names a job twice"),
        ("grpo@lr1e-5+g8,grpo@g8+lr1e-5:0", "names a job twice"),
        ("grpo@lr7", "choose from lr1e-5, lr2e-5, lr1e-4"),
        ("grpo@", "choose from lr1e-5"),
        ("warmup@lr1e-5", "changes are for grpo"),
        ("grpo@lr1e-5+lr1e-4", "the same thing twice"),
    ],
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
shutil.copytree(sys.argv[2], folder)
(folder / "results.json").write_text("{}")
"""


def scored(problem: str, sample: int, correct: bool, vote: int | None) -> GradedAttempt:
    grade = Grade(correct, Rung.NUMBER if correct else Rung.NO_ANSWER, gold="2")
    return GradedAttempt(Attempt(problem, sample, "", 1, StopReason.EOS), grade, vote=vote)


class Rehearsal(Sitting):
    """Runs small programs in the place of trainings and evaluations."""

    train = TRAIN

    def training(self, job: Job, folder: Path, seconds: float) -> list[str]:
        return [sys.executable, "-c", self.train, str(folder)]

    def evaluation(self, model: Path, folder: Path) -> list[str]:
        attempts = self.options.data / "attempts"
        if not attempts.exists():
            kept, problems = EvaluationFolder(attempts), {name: Problem(name, "1 + 1?", ("2",)) for name in "ab"}
            kept.add("gsm8k", "greedy", problems, [scored("a", 0, True, 0), scored("b", 0, False, None)], {})
            rows = [scored("a", 1, False, 1), scored("a", 0, True, 0), scored("b", 0, False, None)]
            kept.add("gsm8k", "sampled", problems, [*rows, scored("b", 1, True, 0)], {})
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
    assert correct == {
        "greedy": {"a": [[1, 0]], "b": [[0, None]]},
        "sampled": {"a": [[1, 0], [0, 1]], "b": [[0, None], [1, 0]]},
    }
    assert (tmp_path / "work/grpo-1.earlier-1/record.json").exists(), "what was there is not lost"


def test_trainings_can_share_the_device(tmp_path: Path) -> None:
    class Together(Rehearsal):
        """Each training waits until all three have begun."""

        train = TRAIN + "\nimport time\nwhile len(list(folder.parent.glob('*/record.json'))) < 4: time.sleep(0.01)"

    class WarmedUp(Together):
        def training(self, job: Job, folder: Path, seconds: float) -> list[str]:
            chosen = Rehearsal if job.recipe == "warmup" else Together
            return [sys.executable, "-c", chosen.train, str(folder)]

    plan = WarmedUp(options(tmp_path, "warmup,grpo:0,grpo:1,rloo", **{"at-once": 3, "limit": 60, "reserve": 0}))
    assert plan.run()
    assert set(json.loads((tmp_path / "out/sitting.json").read_text())) == {"warmup-0", "grpo-0", "grpo-1", "rloo-0"}
    asked = Sitting(plan.options).training(Job("grpo"), tmp_path, 30)
    assert asked[asked.index("--at_once") + 1] == "3"


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
    assert ours[-8:] == ["--seed", "1", "--max_seconds", "100", "--at_once", "1", "--learning_rate", "2e-5"]
    theirs = plan.training(Job("trl", 2), tmp_path / "trl-2", 99.6)
    assert theirs[2] == "recipes.gsm8k_smollm2.peer"
    assert theirs[theirs.index("--model") + 1] == str(tmp_path / "work/warmup-0")
    assert "--learning-rate" not in plan.training(Job("warmup"), tmp_path / "warmup-0", 99.6)
    swept = plan.training(Job("grpo", 1, ("lr1e-5", "g8")), tmp_path / "x", 99.6)
    recipe, args = train.parse([*swept[3:-2], "--use_cpu", "true"])
    assert (recipe.experiment, recipe.max_seconds, args.seed) == ("grpo_lr1e-5_g8", 100, 1)
    assert (args.learning_rate, args.num_generations, args.generation_batch_size) == (1e-5, 8, 1024)
    named = train.parse([*ours[3:], *["--use_cpu", "true", "--experiment", "grpo_lr2e-5"]])
    assert (named[0].experiment, named[1].learning_rate) == ("grpo_lr2e-5", 2e-5)
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


def evaluated(folder: Path, solved: int, decodings: Sequence[str] = PASSES) -> None:
    """An evaluation of ten problems of which so many are solved, by every attempt."""
    (folder / "eval").mkdir(parents=True)
    if not decodings:
        return
    share = solved / 10
    greedy = {"problems": 10, "accuracy": share, "interval": [0.0, 1.0]}
    greedy |= {"boxed_rate": 1.0, "truncation_rate": 0.0, "mean_tokens": 80.0}
    several = {"avg": {"2": share}, "pass": {"1": share, "2": share}, "maj": {"2": share}}
    passes = {name: each for name, each in {"greedy": greedy, "sampled": several}.items() if name in decodings}
    results = {"benchmarks": {"gsm8k": {"title": "GSM8K", **passes}}}
    (folder / "eval/results.json").write_text(json.dumps(results))
    counts = {"greedy": 1, "sampled": 2}
    correct = {each: {f"p{i}": [[int(i < solved), 0]] * counts[each] for i in range(10)} for each in decodings}
    (folder / "correct.json").write_text(json.dumps(correct))


def warmed(folder: Path, solved: int, weights: str = "00ff", seed: int = 0, decodings: Sequence[str] = PASSES) -> None:
    """A warm-up and its evaluation."""
    evaluated(folder, solved, decodings)
    facts = {"seed": seed, "config": {}, "rows": 7, "tokens": 70, "updates": 25, "weights": weights}
    facts |= {"load_seconds": 1.0, "train_seconds": 2.0, "losses": [2.0] * 10 + [1.0] * 15}
    (folder / "warmup.json").write_text(json.dumps({**ORIGIN, **facts}))


def trained(
    folder: Path,
    experiment: str,
    seed: int,
    solved: int,
    pace: float,
    updates: int,
    start: str = "00ff",
    decodings: Sequence[str] = PASSES,
    **config: Any,
) -> None:
    """A run whose samples become better with every update."""
    evaluated(folder, solved, decodings)
    steps = [
        {"step": i + 1, "seconds": pace * (i + 1), "accuracy": 0.1 + 0.01 * i, "reward": 0.1, "length": 80.0}
        for i in range(updates)
    ]
    library = "trl" if experiment == "trl" else "gruppo"
    facts: dict[str, Any] = {"experiment": experiment, "seed": seed, "at_once": 1, "library": library}
    facts["config"] = {"learning_rate": 3e-5} | config
    facts |= {"start_weights": start, "construct_seconds": 5.0, "train_seconds": pace * updates, "steps": steps}
    (folder / "record.json").write_text(json.dumps({**ORIGIN, **facts}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Archives as a sitting leaves them."""
    folder = tmp_path / "runs" / "first"
    evaluated(folder / "base", 0)
    warmed(folder / "warmup-0", 2)
    trained(folder / "grpo-0", "grpo", 0, solved=4, pace=2.0, updates=20)
    trained(folder / "grpo-1", "grpo", 1, solved=6, pace=2.0, updates=30)
    trained(folder / "dapo-0", "dapo", 0, solved=5, pace=3.0, updates=20)
    trained(folder / "trl-0", "trl", 0, solved=3, pace=20.0, updates=3)
    sitting.pack(folder / "grpo-0", folder / "grpo-0.tar.gz")
    for path in sorted((folder / "grpo-0").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return tmp_path / "runs"


def test_result_files(runs: Path, tmp_path: Path) -> None:
    written = report.write_results(kept.read_archives(runs), tmp_path)
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
    assert [run["gain"]["avg@2"]["difference"] for run in grpo["runs"]] == [20, 40]
    assert list(grpo["gain"]) == ["top-1", "avg@2", "maj@2", "pass@2"]
    assert {gain["difference"] for gain in grpo["gain"].values()} == {30}
    assert grpo["gain"]["maj@2"]["significant"] is False, "four problems that differ cannot tell"
    assert grpo["runs"][0]["first_accuracy"] == pytest.approx(0.12)
    assert grpo["runs"][0]["last_accuracy"] == pytest.approx(0.27)
    lines = (tmp_path / "learn_smollm2_grpo.json").read_text().splitlines()
    assert sum('"accuracy": [0.1, 0.11,' in line for line in lines) == 2, "a column a line"


def test_runs_of_an_experiment_share_their_settings(runs: Path, tmp_path: Path) -> None:
    trained(runs / "first/grpo-2", "grpo", 2, 4, 2.0, 5, learning_rate=1.0)
    with pytest.raises(DataError, match="different settings"):
        report.write_results(kept.read_archives(runs), tmp_path)


def test_a_run_is_compared_with_the_warm_up_that_it_began_with(runs: Path, tmp_path: Path) -> None:
    """Two warm-ups side by side: the second one solves more than runs that began with the first."""
    warmed(runs / "first/warmup-1", solved=7, weights="77aa", seed=1)
    trained(runs / "second/grpo-2", "grpo", 2, solved=8, pace=2.0, updates=5, start="77aa")
    report.write_results(kept.read_archives(runs), tmp_path)
    results = pages.read_results(tmp_path)
    assert [run["gain"]["top-1"]["difference"] for run in results["grpo"]["runs"]] == [20, 40, 10]
    assert [run["start_weights"] for run in results["grpo"]["runs"]] == ["00ff", "00ff", "77aa"]
    assert "gain" not in results["grpo"], "seeds with different starts have no common difference"
    race = next(chapter for chapter in pages.chapters(results) if chapter.name == "race")
    assert "| gruppo | 3 | +23.3 (+10.0 to +40.0) |" in pages.gain_table(results, race)
    assert [(run["seed"], run["weights"]) for run in results["start"]["runs"]] == [(0, "00ff"), (1, "77aa")]
    table = pages.accuracy_table(results, race)
    assert "learn_smollm2_start.json)) | 2 | 25 (25 to 25) | 45.0 (20.0 to 70.0) |" in table


def test_sittings_whose_warm_ups_made_the_same_weights_count_together(runs: Path, tmp_path: Path) -> None:
    """The other sitting has a shorter evaluation of the same warm-up, and no samples of its run."""
    warmed(runs / "another/warmup-0", solved=2, decodings=("greedy",))
    trained(runs / "another/grpo-2", "grpo", 2, 9, 2.0, 5, decodings=("greedy",))
    report.write_results(kept.read_archives(runs), tmp_path)
    grpo = pages.read_results(tmp_path)["grpo"]
    assert (grpo["gain"]["top-1"]["difference"], grpo["gain"]["top-1"]["runs"]) == (pytest.approx(130 / 3), 3)
    assert (grpo["gain"]["avg@2"]["difference"], grpo["gain"]["avg@2"]["runs"]) == (30, 2)
    (start,) = pages.read_results(tmp_path)["start"]["runs"]
    assert start["evaluation"]["avg"] == 0.2, "the fuller evaluation is shown"


def test_a_start_that_is_not_clear(runs: Path, tmp_path: Path) -> None:
    trained(runs / "second/grpo-2", "grpo", 2, 4, 2.0, 5, start="77aa")
    with pytest.raises(DataError, match=r"grpo-2 began with the weights 77aa.*there are 00ff \(.*Add the archive"):
        report.write_results(kept.read_archives(runs), tmp_path)
    warmed(runs / "second/warmup-1", solved=3, weights="77aa", decodings=())
    with pytest.raises(DataError, match=r"warmup-1, which .*grpo-2 began with, was not evaluated"):
        report.write_results(kept.read_archives(runs), tmp_path)
    warmed(runs / "third/warmup-0", solved=3)
    with pytest.raises(DataError, match=r"the same weights and different evaluations \(greedy\). Take one of them"):
        report.write_results(kept.read_archives(runs), tmp_path)


def test_runs_are_kept_and_joined_with_those_of_a_later_sitting(runs: Path, tmp_path: Path) -> None:
    place = tmp_path / "kept"
    kept.keep(kept.read_archives(runs), place)
    first = {path.name: path.read_bytes() for path in place.iterdir()}
    assert "grpo-0.json.gz" in first, "from an archive"
    later = tmp_path / "later"
    warmed(later / "warmup-0", solved=2, decodings=("greedy",))
    trained(later / "grpo-2", "grpo", 2, solved=8, pace=2.0, updates=5)
    kept.keep(kept.read_archives(later), place)
    assert {name: (place / name).read_bytes() for name in first} == first, "the fuller evaluation stays"
    report.write_results(kept.read_kept(place), tmp_path)
    assert pages.read_results(tmp_path)["grpo"]["gain"]["top-1"]["runs"] == 3
    trained(tmp_path / "again/grpo-2", "grpo", 2, solved=3, pace=2.0, updates=5)
    with pytest.raises(DataError, match=r"grpo-2 was kept before, with other numbers.*another seed"):
        kept.keep(kept.read_archives(tmp_path / "again"), place)
    warmed(tmp_path / "other/warmup-0", solved=2, weights="77aa")
    with pytest.raises(DataError, match=r"2 passes, weights 00ff, now 2 passes, weights 77aa"):
        kept.keep(kept.read_archives(tmp_path / "other"), place)


def test_what_is_kept_says_nothing_of_where_it_lay(tmp_path: Path) -> None:
    trained(tmp_path / "grpo-0", "grpo", 0, solved=3, pace=2.0, updates=5)
    (tmp_path / "grpo-0/config.yaml").write_text(f"output_dir: {tmp_path}/grpo-0\nseed: 0\n")
    results = tmp_path / "grpo-0/eval/results.json"
    results.write_text(json.dumps(json.loads(results.read_text()) | {"source": f"{tmp_path}/grpo-0"}))
    (tmp_path / "grpo-0/metrics.jsonl").write_text('{"loss": 1.0}\n')
    kept.keep(kept.read_archives(tmp_path), tmp_path / "kept")
    (run,) = kept.read_kept(tmp_path / "kept")
    assert (run.config, run.metrics) == ({"output_dir": "grpo-0", "seed": 0}, [{"loss": 1.0}])
    assert str(tmp_path) not in json.dumps([run.record, run.results, run.config])


def test_a_seed_counts_once(runs: Path, tmp_path: Path) -> None:
    trained(runs / "second/grpo-1", "grpo", 1, 4, 2.0, 5)
    with pytest.raises(DataError, match="are both grpo with seed 1; keep one"):
        report.write_results(kept.read_archives(runs), tmp_path)


def test_gains_by_metric() -> None:
    """Right once of four before and twice after: the vote turns, and some attempt is right both times."""
    before: list[tuple[int, int | None]] = [(1, 0), (0, 1), (0, 1), (0, None)]
    after: list[tuple[int, int | None]] = [(1, 0), (0, 1), (1, 0), (0, None)]
    problems = [f"p{i}" for i in range(8)]
    start: report.Correct = {
        "greedy": {p: [(0, 0)] for p in problems},
        "sampled": dict.fromkeys(problems, before),
    }
    ends: list[report.Correct] = [
        {"greedy": {p: [(int(p == "p0"), 0)] for p in problems}, "sampled": dict.fromkeys(problems, after)},
        {"sampled": {p: after if p == "p0" else before for p in problems}},
    ]
    found = report.gains(start, ends)
    assert {metric: gain["difference"] for metric, gain in found.items()} == {
        "top-1": 12.5,  # one of 8 problems, in the one run that has the pass
        "avg@4": 14.0625,  # 25 points in the one run, an eighth of that in the other
        "maj@4": 56.25,
        "pass@4": 0.0,
    }
    assert [found[metric]["significant"] for metric in found] == [False, True, True, False]
    assert found["maj@4"]["interval"][0] > 0
    assert [found[metric]["runs"] for metric in found] == [1, 2, 2, 2]
    assert report.gains(start, []) == {}
    assert list(report.scores({"p": before[:1]}, "sampled", 1)) == ["avg@1"], "one sample has no vote"


def test_an_empty_folder_and_runs_without_a_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no record\.json"):
        kept.read_archives(tmp_path)
    trained(tmp_path / "grpo-0", "grpo", 0, 4, 2.0, 5)
    with pytest.raises(DataError, match="no warm-up"):
        report.write_results(kept.read_archives(tmp_path), tmp_path)


def test_the_page_and_the_figures(runs: Path, tmp_path: Path) -> None:
    trained(runs / "first/grpo_lr1e-5-0", "grpo_lr1e-5", 0, 9, 2.0, 20, learning_rate=1e-5)
    docs, results = tmp_path / "docs", tmp_path / "results"
    docs.mkdir()
    results.mkdir()
    folders = ["--kept", str(tmp_path / "kept"), "--results", str(results), "--docs", str(docs)]
    report.main([str(runs), *folders])
    page = (docs / "experiments.md").read_text(encoding="utf-8")
    race, others = page.split("<!-- learning: others -->")
    assert "| gruppo ([file](../benchmarks/results/learn_smollm2_grpo.json)) | 1 (1 to 1) | 50 (40 to 60) |" in race
    assert "| the first 3 updates | seconds | right among samples (%) |" in race, "as far as TRL came"
    assert "| gruppo | 6.0 (6.0 to 6.0) | 11.0 (11.0 to 11.0) |\n| TRL 1.16 + vLLM 0.24 | 60.0 | 11.0 |" in race
    assert f"| gruppo | 2 | {' | '.join(['+30.0 (-9.0 to +56.3)'] * 4)} |" in race
    assert "| SmolLM2-135M-Instruct | – | – | 0.0 | 0.0 | 0.0 | 0.0 |" in others
    assert "| seeds | top-1 | avg@2 | maj@2 | pass@2 |" in others
    assert f"| GRPO + lr1e-5 | 1 | {' | '.join(['**+70.0** (+16.2 to +91.5)'] * 4)} |" in others
    assert (
        "| DAPO ([file](../benchmarks/results/learn_smollm2_dapo.json)) | 1 | 60 | 20 | 3.00 | 12.0 | 27.0 |" in others
    )
    drawings = {path.stem: path.read_text(encoding="utf-8") for path in (docs / "figures").iterdir()}
    assert set(drawings) == {"learn_smollm2_race", "learn_smollm2_others"}
    for name, figure in drawings.items():
        assert f"figures/{name}.svg" in page
        assert len(figure) < 100_000
        drawn = {called: called in figure for called in ("TRL", "DAPO", "GRPO + lr1e-5", "seconds of training")}
        assert drawn == {"TRL": (here := "race" in name), "DAPO": not here, "GRPO + lr1e-5": not here} | {
            "seconds of training": here
        }
    before = {path: path.read_bytes() for path in docs.rglob("*.*")}
    report.main(folders)
    assert {path: path.read_bytes() for path in docs.rglob("*.*")} == before, (
        "nothing changes with the numbers the same"
    )


def test_a_page_keeps_its_words(runs: Path, tmp_path: Path) -> None:
    report.write_results(kept.read_archives(runs), tmp_path)
    results = pages.read_results(tmp_path)
    begins = [pages.BEGINS.format(name) for name in ("race", "others")]
    page = f"before\n{begins[0]}\nold\n{pages.ENDS}\nbetween\n{begins[1]}\n{pages.ENDS}\nafter\n"
    filled = pages.fill(page, results)
    assert filled.startswith("before\n<!-- learning: race -->\n|")
    assert "<!-- end of learning -->\nbetween\n<!-- learning: others -->\n|" in filled
    assert filled.endswith("<!-- end of learning -->\nafter\n")
    assert "\nold\n" not in filled
    with pytest.raises(DataError, match="no place for dapo"):
        pages.fill(page.replace(begins[1], ""), results)
    with pytest.raises(DataError, match=r"start\.json"):
        pages.fill(page, {})


def test_every_experiment_of_a_chapter_can_be_run() -> None:
    """Names in chapters.yaml are those that jobs of a sitting make."""
    listed = [name for chapter in pages.CHAPTERS.values() for name in chapter["experiments"]]
    assert len(set(listed)) == len(listed)
    for name in listed:
        recipe = max((each for each in sitting.RECIPES if name == each or name.startswith(f"{each}_")), key=len)
        changes = "+".join(name.removeprefix(recipe).split("_")[1:])
        (job,) = parse_jobs(f"{recipe}@{changes}" if changes else recipe)
        assert job.experiment == name


def test_how_far_a_run_was_when() -> None:
    steps = {"step": [2, 4, 6], "seconds": [5, 7, 9], "accuracy": [0.1, 0.3, 0.5]}
    assert pages.up_to({"steps": steps}, 4) == (7, pytest.approx(0.2))
    assert pages.up_to({"steps": steps}, 5) == (9, pytest.approx(0.3)), "steps may have been put together"


def test_thinning_and_smoothing() -> None:
    steps = [{"step": i, "seconds": 2.0 * i, "accuracy": 0.1 * i} for i in range(1, 6)]
    assert report.thin(steps, most=3) == {"step": [2, 4, 5], "seconds": [4, 8, 10], "accuracy": [0.15, 0.35, 0.5]}
    assert report.thin(steps)["step"] == [1, 2, 3, 4, 5]
    assert figures.smooth([0, 3, 6], width=3) == [1.5, 3, 4.5]
    assert pages.span([0.101, 0.12], pages.percent) == "11.1 (10.1 to 12.0)"
    assert pages.span([None], pages.percent) == "–"
    assert [pages.title(name) for name in ("grpo", "dr_grpo_lr1e-5_g8", "mine")] == [
        *("GRPO", "Dr. GRPO + lr1e-5 + g8", "mine"),
    ]


@pytest.mark.skipif(not (ROOT / "docs/experiments.md").exists(), reason="nothing was measured yet")
def test_the_page_says_what_the_files_say() -> None:
    page = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    results = pages.read_results(ROOT / "benchmarks/results")
    assert pages.fill(page, results) == page, "run `python -m recipes.gsm8k_smollm2.report`"


@pytest.mark.slow
def test_a_whole_sitting_with_a_tiny_model(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # nothing here runs a kernel
    small = "--use_cpu true --bf16 false --num_generations 4 --per_device_train_batch_size 4 --max_steps 2 "
    small += "--gradient_accumulation_steps 2 --max_completion_length 8 --parity_check off"
    given = {"benchmark": "gsm8k:4", "samples": 2, "max-new-tokens": 8, "train-arguments": small, "limit": 300}
    assert Sitting(options(tmp_path, "warmup,grpo:0", data=data, model=model, **given)).run()
    report.write_results(kept.read_archives(tmp_path / "out"), tmp_path)
    results = pages.read_results(tmp_path)
    assert results["grpo"]["runs"][0]["updates"] == 2
    assert results["grpo"]["runs"][0]["evaluation"]["problems"] == 4
    assert results["grpo"]["gain"]["avg@2"]["problems"] == 4
    assert list(results["grpo"]["gain"]) == ["top-1", "avg@2", "maj@2", "pass@2"]
    # A probe of other settings from the same warm-up, with greedy answers only.
    probe = given | {"samples": 0, "out": tmp_path / "out/probe"}
    assert Sitting(options(tmp_path, "grpo@lr1e-5:0", data=data, model=model, **probe)).run()
    report.write_results(kept.read_archives(tmp_path / "out"), tmp_path)
    swept = pages.read_results(tmp_path)["grpo_lr1e-5"]
    assert swept["config"]["learning_rate"] == 1e-5
    assert list(swept["gain"]) == ["top-1"]
