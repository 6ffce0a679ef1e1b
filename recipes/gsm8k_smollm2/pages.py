"""What docs/experiments.md shows of the result files: figures and three tables."""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.errors import DataError

PREFIX = "learn_smollm2_"
MARKS = ("<!-- learning: recipes/gsm8k_smollm2/report.py -->", "<!-- end of learning -->")
# Experiments in the order of tables and legends, what they are called there, and their colours (Okabe and Ito's).
TITLES = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "dapo": "DAPO",
    "dr_grpo": "Dr. GRPO",
    "trl": "GRPO with TRL 1.16 + vLLM 0.24",
}
# Others are parts of a sweep, with names that say what was changed; they have a figure of their own.
COLOURS = {"grpo": "#0072B2", "rloo": "#009E73", "dapo": "#D55E00", "dr_grpo": "#CC79A7", "trl": "#555555"}
RACE = {"grpo": "GRPO with gruppo", "trl": TITLES["trl"]}  # in the figure over seconds
GAINS = ("top-1", "avg", "maj", "pass")  # the order of their columns
ENDS = 5  # updates at the beginning and at the end of a run whose mean is shown
SMOOTH = 9  # updates whose mean is the bold line
NONE = "–"

Results = Mapping[str, Mapping[str, Any]]


def read_results(folder: Path) -> Results:
    """The result files by experiment."""
    paths = sorted(folder.glob(f"{PREFIX}*.json"))
    return {path.stem.removeprefix(PREFIX): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def experiments(results: Results) -> list[str]:
    """Those that there are results of, in their order; one that has no title here comes last, under its own name."""
    known = [name for name in TITLES if name in results]
    return known + [name for name in results if name not in (*TITLES, "start")]


def sweep(results: Results) -> list[str]:
    """What is drawn in the figure of the sweep: experiments with changed settings, and those that they change."""
    changed = [name for name in experiments(results) if name not in TITLES]
    plain = [name for name in TITLES if name in results and any(each.startswith(f"{name}_") for each in changed)]
    return [*plain, *changed] if changed and len([*plain, *changed]) > 1 else []


def title(name: str) -> str:
    """What tables call an experiment; one of a sweep by what it changes.

    Example:
        title("dr_grpo_lr1e-5_g8") == "Dr. GRPO + lr1e-5 + g8"
    """
    recipe = next((recipe for recipe in (*reversed(TITLES),) if name == recipe or name.startswith(f"{recipe}_")), None)
    if recipe is None:
        return name
    return " + ".join([TITLES[recipe], *name.removeprefix(recipe).split("_")[1:]])


# ---- tables


def span(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """Some numbers as one cell: their mean, and the least and the greatest where there are several.

    Example:
        span([0.101, 0.12], percent) == "11.1 (10.1 to 12.0)"
    """
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    mean = show(statistics.fmean(known))
    return mean if len(known) == 1 else f"{mean} ({show(min(known))} to {show(max(known))})"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _accuracies(evaluations: Sequence[Mapping[str, Any] | None]) -> list[str]:
    found = [evaluation for evaluation in evaluations if evaluation is not None]
    return [span([evaluation.get(key) for evaluation in found], percent) for key in ("greedy", "avg", "maj", "pass")]


def _gain(result: Mapping[str, Any], metric: str) -> str:
    """The gain of all seeds with its interval, bold if significant; where starts differ, the span over seeds."""
    together = result.get("gain", {}).get(metric)
    if together:
        low, high = together["interval"]
        shown = f"{together['difference']:+.1f}"
        return f"{f'**{shown}**' if together['significant'] else shown} ({low:+.1f} to {high:+.1f})"
    apart = [run["gain"].get(metric) for run in result["runs"]]
    return span([gain["difference"] for gain in apart if gain], "{:+.1f}".format)


def accuracy_table(results: Results) -> str:
    """Accuracy on the test set before and after, as a Markdown table."""
    start = results["start"]
    evaluations = [start["base"], *(run["evaluation"] for run in start["runs"])]
    k = next((each["samples"] for each in evaluations if each and "samples" in each), "k")
    head = ("", "seeds", "updates", "top-1", f"avg@{k}", f"maj@{k}", f"pass@{k}")
    lines = [_row(*head), "|---" * len(head) + "|"]
    link = f"([file](../benchmarks/results/{PREFIX}start.json))"
    lines.append(_row("SmolLM2-135M-Instruct", NONE, NONE, *_accuracies([start["base"]])))
    warmups = start["runs"]
    updates = span([run["updates"] for run in warmups], "{:.0f}".format)
    scores = _accuracies([run["evaluation"] for run in warmups])
    lines.append(_row(f"after the warm-up {link}", str(len(warmups)), updates, *scores))
    for name in experiments(results):
        runs = results[name]["runs"]
        link = f"([file](../benchmarks/results/{PREFIX}{name}.json))"
        updates = span([run["updates"] for run in runs], "{:.0f}".format)
        scores = _accuracies([run["evaluation"] for run in runs])
        lines.append(_row(f"{title(name)} {link}", str(len(runs)), updates, *scores))
    return "\n".join(lines)


def gain_table(results: Results) -> str:
    """How many points each experiment gained over its start, by metric, as a Markdown table."""
    names = experiments(results)
    found = {metric: None for name in names for run in results[name]["runs"] for metric in run["gain"]}
    metrics = sorted(found, key=lambda metric: GAINS.index(metric.partition("@")[0]))
    lines = [_row("points gained (bold: significant at 95 %)", "seeds", *metrics), "|---" * (len(metrics) + 2) + "|"]
    for name in names:
        gains = [_gain(results[name], metric) for metric in metrics]
        lines.append(_row(title(name), str(len(results[name]["runs"])), *gains))
    return "\n".join(lines)


def speed_table(results: Results) -> str:
    """How far each experiment came in its time, as a Markdown table."""
    shown = [f"right among samples, {end} {ENDS} updates (%)" for end in ("first", "last")]
    head = ("", "runs at once", "seconds of training", "updates", "seconds an update", *shown)
    lines = [_row(*head), "|---" * len(head) + "|"]
    for name in experiments(results):
        runs = results[name]["runs"]
        lines.append(
            _row(
                title(name),
                span([run["at_once"] for run in runs], "{:.0f}".format),
                span([run["train_seconds"] for run in runs], "{:.0f}".format),
                span([run["updates"] for run in runs], "{:.0f}".format),
                span([run["seconds_per_update"] for run in runs], "{:.2f}".format),
                span([run["first_accuracy"] for run in runs], percent),
                span([run["last_accuracy"] for run in runs], percent),
            )
        )
    return "\n".join(lines)


def block(results: Results) -> str:
    """What stands between the marks of the page."""
    if "start" not in results or not experiments(results):
        raise DataError(f"{PREFIX}start.json and a file of an experiment are needed; run report.py on some archives.")
    parts = [accuracy_table(results), gain_table(results)]
    if set(RACE) <= set(results):
        parts.append(f"![accuracy of samples against seconds](figures/{PREFIX}time.svg)")
    parts += [speed_table(results), f"![accuracy of samples against updates](figures/{PREFIX}steps.svg)"]
    if sweep(results):
        parts.append(f"![the same with other settings](figures/{PREFIX}sweep.svg)")
    return "\n\n".join(parts)


def fill(text: str, results: Results) -> str:
    """The page with what stands between the marks replaced."""
    first, last = MARKS
    if text.count(first) != 1 or text.count(last) != 1:
        raise DataError(f"The page has no place for the tables; it needs {first} and {last}, once each.")
    filled = f"{first}\n{block(results)}\n{last}"
    return re.sub(f"{re.escape(first)}.*?{re.escape(last)}", lambda _: filled, text, flags=re.DOTALL)


# ---- figures


def smooth(values: Sequence[float], width: int = SMOOTH) -> list[float]:
    """The mean of each value and its neighbours, fewer at the ends.

    Example:
        smooth([0, 3, 6], width=3) == [1.5, 3, 4.5]
    """
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def alone(result: dict[str, Any]) -> dict[str, Any]:
    """An experiment with only those of its runs that had the device to themselves, if there are any."""
    runs = result["runs"]
    return {**result, "runs": [run for run in runs if run["at_once"] == 1] or runs}


def draw(results: Results, names: Mapping[str, str], axis: str, label: str, path: Path) -> None:
    """Accuracy of samples against a column of the steps, for experiments and what the legend calls them.

    Each run is a thin line, as measured, and a bold one, smoothed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text and nothing is random: small files that change only with the numbers.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": PREFIX, "font.size": 9, "path.simplify": True}):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
        for place, (name, called) in enumerate(names.items()):
            colour = COLOURS.get(name, f"C{place}")
            for number, run in enumerate(results[name]["runs"]):
                where = run["steps"][axis]
                accuracies = [100 * value for value in run["steps"]["accuracy"]]
                axes.plot(where, accuracies, color=colour, alpha=0.25, linewidth=0.7)
                once = called if number == 0 else None
                axes.plot(where, smooth(accuracies), color=colour, linewidth=1.6, label=once)
        axes.set(xlabel=label, ylabel="right answers among samples (%)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def write(results: Results, docs: Path) -> list[Path]:
    """Make the figures and fill the page, which is begun if it is not there."""
    page, figures = docs / "experiments.md", docs / "figures"
    text = page.read_text(encoding="utf-8") if page.exists() else "# Experiments\n\n" + "\n".join(MARKS) + "\n"
    filled = fill(text, results)
    made = [figures / f"{PREFIX}steps.svg", page]
    ours = [name for name in experiments(results) if results[name]["library"] == "gruppo" and name in TITLES]
    draw(results, {name: title(name) for name in ours or experiments(results)}, "step", "update", made[0])
    if names := sweep(results):
        made.insert(0, figures / f"{PREFIX}sweep.svg")
        draw(results, {name: title(name) for name in names}, "step", "update", made[0])
    if set(RACE) <= set(results):
        made.insert(0, figures / f"{PREFIX}time.svg")
        draw({name: alone(results[name]) for name in RACE}, RACE, "seconds", "seconds of training", made[0])
    page.write_text(filled, encoding="utf-8")
    return made
