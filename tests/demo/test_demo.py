"""The demo as a user runs it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gruppo import cli, demo
from gruppo.cli import main
from gruppo.demo.run import STEPS, config, how_to_view
from tests.evaluation.demo import write_problems

LAST_LINE = re.compile(r"held-out accuracy: (0\.\d{3}|1\.000) -> (0\.\d{3}|1\.000)")


def test_import_is_light():
    code = "import sys, gruppo.demo; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_example_is_short_and_asks_for_the_same_training(tmp_path):
    assert len(demo.EXAMPLE.splitlines()) <= 12
    args = config(tmp_path, STEPS, 0)
    for name in ("learning_rate", "num_generations", "per_device_train_batch_size", "max_completion_length"):
        assert float(re.search(rf"{name}=([\d.e-]+)", demo.EXAMPLE).group(1)) == getattr(args, name)
    assert f"max_steps={STEPS}," in demo.EXAMPLE


@pytest.mark.medium
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(demo.EXAMPLE.replace(f"max_steps={STEPS}", "max_steps=2"), {})
    assert LAST_LINE.fullmatch(capsys.readouterr().out.rstrip("\n").splitlines()[-1])


@pytest.mark.medium
def test_a_few_steps_through_the_command_line(tmp_path, capsys):
    assert main(["demo", "--steps", "3", "--seed", "1", "--output-dir", str(tmp_path)]) == 0
    check_what_is_printed_and_kept(tmp_path, capsys)
    check_that_it_can_be_evaluated(tmp_path, capsys)


@pytest.mark.parametrize(("known", "program"), [(True, "gruppo"), (False, "{bin}/gruppo")])
def test_it_says_how_to_look_at_the_run(known, program, tmp_path, monkeypatch):
    own = tmp_path / "bin" / "gruppo"
    own.parent.mkdir()
    own.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(own)])
    monkeypatch.setenv("PATH", str(own.parent) if known else "")
    said = how_to_view(Path("runs/the demo"))
    assert f": {shlex.quote(program.format(bin=own.parent))} view 'runs/the demo'" in said
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert said.partition(" (")[0] + ' (first: pip install "starlette' in how_to_view(Path("runs/the demo"))


def check_what_is_printed_and_kept(tmp_path, capsys):
    out, said = capsys.readouterr()
    assert f" view {tmp_path}" in said.rstrip("\n").splitlines()[-1]
    lines = out.rstrip("\n").splitlines()
    assert LAST_LINE.fullmatch(lines[-1])
    assert sum(line.startswith("step ") for line in lines) == 3
    assert sum(line.startswith("  before  ") for line in lines) == 3
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert len(record["steps"]) == 3
    assert record["before"]["accuracy"] < 0.45
    assert f"{record['after']['accuracy']:.3f}" == lines[-1].split()[-1]
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def check_that_it_can_be_evaluated(tmp_path, capsys):
    assert not list(tmp_path.glob("checkpoint-*")), "the demo saves its last model only"
    write_problems(tmp_path, 8)
    (tmp_path / "bench.py").write_text("from tests.evaluation.demo import DEMO\n")
    asked = ["--benchmarks", f"{tmp_path}/bench.py:DEMO", "--data-dir", str(tmp_path), "--max-new-tokens", "40"]
    assert main(["eval", str(tmp_path), *asked, "--output-dir", str(tmp_path / "evaluation")]) == 0
    assert f"| **{tmp_path.name}** |" in capsys.readouterr().out.replace("\\_", "_")
    trained = load_file(tmp_path / "model.safetensors")
    start = load_file(f"{demo.model_path()}/model.safetensors")
    assert any(not trained[name].equal(start[name]) for name in trained), "the model after training"


def test_the_help_and_the_readme_agree_on_how_long_it_takes():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"\((under \w+ minutes), CPU only\)", cli.demo.__doc__)
    assert said in readme
