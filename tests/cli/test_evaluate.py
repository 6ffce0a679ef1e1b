"""`gruppo eval` as it is typed."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from gruppo.cli import main
from gruppo.cli.evaluate import default_folder, parser
from gruppo.evaluation.settings import Settings
from gruppo.evaluation.tir import TirSettings
from tests.evaluation.demo import model, save_model, tokenizer, write_problems

SAMPLE = Path(__file__).parents[1] / "evaluation" / "sample"
DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a benchmark and its data."""
    folder = tmp_path_factory.mktemp("eval")
    save_model(folder / "model")
    write_problems(folder, 12)
    (folder / "bench.py").write_text("from tests.evaluation.demo import DEMO\n")
    return folder


def run_eval(place: Path, *more: str) -> int:
    benchmark = ["--benchmarks", f"{place}/bench.py:DEMO", "--data-dir", str(place), "--max-new-tokens", "40"]
    return main(["eval", str(place / "model"), *benchmark, *more])


def test_there_is_an_option_for_each_setting() -> None:
    actions = {action.dest: action for action in parser()._actions}
    assert {field.name for field in fields(Settings)} <= set(actions)
    for name, default in (("max_new_tokens", 1024), ("rounds", 4), ("max_total_tokens", 2048), ("temperature", 0.7)):
        assert f"default: {default}" in str(actions[name].help)
    assert Settings().max_new_tokens == 1024
    assert Settings(samples=2).passes()[1].temperature == 0.7
    assert (TirSettings().rounds, TirSettings().max_total_tokens) == (4, 2048)


def test_a_model_and_a_comparison(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = place / "first", place / "second"
    assert run_eval(place, "--output-dir", str(first), "--samples", "2") == 0
    shown = capsys.readouterr().out
    assert "| **model** |" in shown
    assert re.search(r"demo: top-1 \d+\.\d% .* of 12 problems.*avg@2 .*pass@2 .*maj@2", shown)
    assert {"results.json", "results.md", "results.tex", "completions"} <= {path.name for path in first.iterdir()}
    assert "DeepSeekMath-RL" in (first / "results.md").read_text(encoding="utf-8")

    assert run_eval(place, "--output-dir", str(second), "--samples", "2", "--temperature", "2.0") == 0
    capsys.readouterr()
    assert main(["eval", "--compare", str(first), str(second)]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("demo, ")] == [
        *("demo, greedy: same settings", "demo, top-1"),
        "demo, sampled: settings differ: temperature 0.7 and 2.0",
        *("demo, avg@2", "demo, pass@2", "demo, maj@2"),
    ]
    assert "first" in shown
    assert "second" in shown


def test_other_problems_under_the_same_ids_are_not_compared(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ["--output-dir", str(tmp_path / "sums")]
    assert run_eval(place, *shown) == 0
    for name, change in (("same", 0), ("other", 1)):
        rows = [json.loads(line) for line in (place / "demo.jsonl").read_text().splitlines()]
        rows[3]["answer"] = int(rows[3]["answer"]) + change
        (tmp_path / name).mkdir()
        (tmp_path / name / "demo.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert run_eval(place, "--data-dir", str(tmp_path / name), "--output-dir", str(tmp_path / f"eval-{name}")) == 0
    capsys.readouterr()
    assert main(["eval", "--compare", str(tmp_path / "sums"), str(tmp_path / "eval-same")]) == 0
    assert "same settings" in capsys.readouterr().out
    assert main(["eval", "--compare", str(tmp_path / "sums"), str(tmp_path / "eval-other")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "1 of 12 problems with the same id differ. The first is demo/demo/3: sums has " in said.err


def test_samples_alone_have_a_number_in_the_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_eval(place, "--output-dir", str(place / "sampled"), "--samples", "2", "--no-greedy") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| Model | Size | Demo |" in lines, "only the column that was asked for"
    (row,) = (line for line in lines if line.startswith("| **model** |"))
    assert re.search(r"\| \d+\.\d \[.*\] <sup>a</sup> \|$", row)
    assert "<sup>a</sup> Mean over 2 samples (avg@2), not top-1." in lines


def test_checkpoints_of_two_runs_have_folders_of_their_own(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--benchmarks", f"{place}/bench.py:DEMO:2", "--data-dir", str(place), "--max-new-tokens", "4"]
    for run, factor in (("a", 1.0), ("b", 2.0)):
        changed = model()
        changed.lm_head.weight.data.mul_(factor)
        changed.save_pretrained(tmp_path / f"runs/{run}/checkpoint-40")
        tokenizer().save_pretrained(tmp_path / f"runs/{run}/checkpoint-40")
        assert main(["eval", f"runs/{run}/checkpoint-40", *asked]) == 0
    folders = {path.name for path in (tmp_path / "evaluations").iterdir()}
    assert folders == {"runs--a--checkpoint-40-cot", "runs--b--checkpoint-40-cot"}
    kept = list((tmp_path / "evaluations").rglob("*.parquet"))
    assert main(["eval", "./runs/../runs/b/checkpoint-40/", *asked]) == 0
    assert list((tmp_path / "evaluations").rglob("*.parquet")) == kept, "the same model finds its attempts again"

    capsys.readouterr()
    there = ["--output-dir", "evaluations/runs--a--checkpoint-40-cot"]
    assert main(["eval", "runs/b/checkpoint-40", *asked, *there]) == 2
    said = capsys.readouterr().err
    assert "(--output-dir, output_dir=…)" in said
    deletes = "(--restart, restart=True), which deletes the results and the attempts at all benchmarks in evaluations/"
    assert f"{deletes}runs--a--checkpoint-40-cot." in said


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen--Qwen2.5-0.5B-cot"),
        ("gpt2", "gpt2-cot"),
        ("here/checkpoint-1", "here--checkpoint-1-cot"),
        ("here/checkpoint-1/", "here--checkpoint-1-cot"),
    ],
)
def test_the_default_folder(name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "checkpoint-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert default_folder(name, "cot") == Path("evaluations") / folder
    monkeypatch.chdir(tmp_path / "here")
    elsewhere = default_folder(str(tmp_path), "tir").name
    assert elsewhere == "--".join(tmp_path.resolve().parts[1:]) + "-tir"
    assert default_folder(".", "tir").name == elsewhere.removesuffix("-tir") + "--here-tir"


def test_a_long_path_has_a_name_that_a_disk_can_hold() -> None:
    names = {default_folder(f"{start}/{'x' * 400}", "cot").name for start in "ab"}
    assert len(names) == 2
    assert all(len(name) < 200 for name in names)


def test_mistakes_are_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_eval(place, "--output-dir", str(place / "third"), "--no-greedy") == 2
    assert main(["eval", "--compare", str(place), str(place)]) == 2
    assert main(["eval", "--check-gold"]) == 2
    assert main(["eval", "--check-gold", "--data-dir", str(place / "model")]) == 2
    errors = capsys.readouterr().err.splitlines()
    said = [line for line in errors if line.startswith("gruppo eval: ")]
    assert len(said) == 4
    assert said[0].endswith("otherwise there is nothing to do.")
    assert not any("Traceback" in line for line in errors)
    with pytest.raises(SystemExit, match="2"):
        main(["eval"])


def test_gold_answers_of_the_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--check-gold", "--data-dir", str(SAMPLE)]) == 0
    shown = capsys.readouterr().out
    for name in ("gsm8k", "math", "math500", "mgsm_zh", "cmath", "cmath_validation"):
        assert name in shown


def test_a_grader_that_is_too_loose_fails(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n / 10)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bench.py").write_text(
        "from gruppo import Benchmark\nfrom gruppo.grading import Ladder\n"
        'EXACT = Benchmark("exact", "E", file="rows.jsonl", ladder=Ladder(literal=True))\n'
        'LOOSE = Benchmark("loose", "L", file="rows.jsonl", ladder=Ladder(literal=True, tolerance=0.5))\n'
    )
    arguments = ["eval", "--check-gold", "--data-dir", str(tmp_path), "--benchmarks"]
    assert main([*arguments, f"{tmp_path}/bench.py:EXACT"]) == 0
    assert main([*arguments, f"{tmp_path}/bench.py:LOOSE"]) == 1


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the benchmark sets are not at {DATA}")
def test_gold_answers_of_the_real_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--check-gold", "--data-dir", str(DATA)]) == 0
    shown = capsys.readouterr().out
    assert all(count in shown for count in ("1319", "250", "1098", "600"))
