"""The output of the demo: tables on the screen, metrics as JSON, a learning curve as PNG."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gruppo.demo.progress import StepRow
from gruppo.demo.task import exact_match

__all__ = ["Score", "curve", "score", "show", "write_metrics"]


@dataclass(frozen=True)
class Score:
    """How the model did on the held-out problems."""

    accuracy: float
    worked_share: float
    mean_characters: float


def score(completions: list[str], answers: list[str]) -> Score:
    """Score greedy completions: exact match, share that works step by step, mean length."""
    count = len(completions)
    return Score(
        accuracy=sum(exact_match(completions, answers)) / count,
        worked_share=sum("=" in text for text in completions) / count,
        mean_characters=sum(map(len, completions)) / count,
    )


def show(
    console: Console, before: Score, after: Score, samples: list[tuple[str, str, str, str]], problem_count: int
) -> None:
    """Print the before/after table and `samples` of (prompt, right answer, completion before, completion after)."""
    table = Table(title=f"{problem_count} held-out problems, greedy decoding", title_justify="left")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("exact match", f"{before.accuracy:.1%}", f"{after.accuracy:.1%}")
    table.add_row("works step by step", f"{before.worked_share:.1%}", f"{after.worked_share:.1%}")
    table.add_row("mean length (characters)", f"{before.mean_characters:.1f}", f"{after.mean_characters:.1f}")
    console.print(table)
    for prompt, answer, first, last in samples:
        lines = [prompt.strip()]
        for label, text in (("before", first), ("after", last)):
            mark = "right" if exact_match([text], [answer]) == [1.0] else "wrong"
            lines.append(f"  {label:<6}  {text}  ({mark})")
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    console.print()


def write_metrics(path: Path, before: Score, after: Score, rows: list[StepRow], **facts: Any) -> None:
    """Write both scores, every step and other `facts` as JSON."""
    record = {**facts, "before": asdict(before), "after": asdict(after), "steps": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def curve(path: Path, before: Score, after: Score, rows: list[StepRow]) -> bool:
    """Draw reward and held-out accuracy over the steps; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([row.step for row in rows], [row.reward for row in rows], label="mean reward of the rollouts", alpha=0.7)
    measured = [(row.step, row.held_out) for row in rows if row.held_out is not None]
    axes.plot(*zip(*measured, strict=True), marker="o", label="held-out accuracy, small sample")
    ends = (0, rows[-1].step), (before.accuracy, after.accuracy)
    axes.plot(*ends, linestyle="", marker="D", color="black", label="held-out accuracy, all problems")
    axes.set(xlabel="step", ylim=(0, 1.02), title="GRPO on arithmetic word problems")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return True
