"""What the demo leaves behind."""

import builtins
import io
import json

import pytest
from rich.console import Console

from gruppo.demo.progress import StepRow
from gruppo.demo.report import Score, curve, score, show, write_metrics

ROWS = [StepRow(1, 0.3, None, 10.0, 2.0), StepRow(2, 0.6, 0.5, 10.0, 0.0)]
BEFORE, AFTER = Score(0.3, 0.0, 5.0), Score(0.9, 1.0, 20.0)


def test_score():
    assert score(["A: 1", "1+1=2. A: 2"], ["3", "2"]) == Score(accuracy=0.5, worked_share=0.5, mean_characters=7.5)


def test_show_prints_table_and_samples():
    console = Console(file=io.StringIO(), width=100)
    show(console, BEFORE, AFTER, [("Q: [b]what?\n", "2", "A: 1", "1+1=2. A: 2")], problem_count=500)
    text = console.file.getvalue()
    assert "500 held-out problems" in text
    assert "30.0%" in text
    assert "Q: [b]what?" in text
    assert "before  A: 1  (wrong)" in text
    assert "after   1+1=2. A: 2  (right)" in text


def test_metrics_file(tmp_path):
    write_metrics(tmp_path / "metrics.json", BEFORE, AFTER, ROWS, seed=1)
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert record["seed"] == 1
    assert record["after"]["accuracy"] == 0.9
    assert [row["held_out"] for row in record["steps"]] == [None, 0.5]


def test_curve_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    assert curve(tmp_path / "curve.png", BEFORE, AFTER, ROWS)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_no_matplotlib_no_curve(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert not curve(tmp_path / "curve.png", BEFORE, AFTER, ROWS)
    assert not list(tmp_path.iterdir())
