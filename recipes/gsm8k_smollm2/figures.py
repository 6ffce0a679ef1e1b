"""The figures of docs/experiments.md: accuracy of samples over the course of a run."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SMOOTH = 9  # number of updates averaged for the bold line
COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#555555")  # Okabe and Ito's
LABELS = {"step": "update", "seconds": "seconds of training"}


def smooth(values: Sequence[float], width: int = SMOOTH) -> list[float]:
    """A moving average over `width` values, fewer at the ends.

    Example:
        smooth([0, 3, 6], width=3) == [1.5, 3, 4.5]
    """
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def shown_runs(runs: Sequence[Mapping[str, Any]], axis: str) -> Sequence[Mapping[str, Any]]:
    """The runs to draw: against seconds, only those that had the device to themselves, if there are any."""
    alone = [run for run in runs if run["at_once"] == 1]
    return alone if axis == "seconds" and alone else runs


def draw(runs_by_name: Mapping[str, Sequence[Mapping[str, Any]]], axis: str, path: Path) -> None:
    """Draw accuracy of samples against a column of the steps; keys of `runs_by_name` are the labels in the legend.

    Each run is drawn as a thin line (as measured) and a bold one (smoothed).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text is kept as text and ids are not random: the files are small and change only with the numbers.
    settings = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9, "path.simplify": True}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
        for place, (name, runs) in enumerate(runs_by_name.items()):
            colour = COLOURS[place % len(COLOURS)]
            for number, run in enumerate(shown_runs(runs, axis)):
                where = run["steps"][axis]
                accuracies = [100 * value for value in run["steps"]["accuracy"]]
                axes.plot(where, accuracies, color=colour, alpha=0.25, linewidth=0.7)
                once = name if number == 0 else None
                axes.plot(where, smooth(accuracies), color=colour, linewidth=1.6, label=once)
        axes.set(xlabel=LABELS[axis], ylabel="right answers among samples (%)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
