"""The tables and figures of docs/experiments.md, made from the result files as chapters.yaml specifies."""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gruppo.errors import DataError
from recipes.gsm8k_smollm2.figures import LABELS, draw

PREFIX = "learn_smollm2_"
CHAPTERS = yaml.safe_load(Path(__file__).with_name("chapters.yaml").read_text(encoding="utf-8"))
REST = "others"  # the chapter of experiments that no other chapter lists
BEGINS, ENDS = "<!-- learning: {} -->", "<!-- end of learning -->"
RECIPES = {"grpo": "GRPO", "rloo": "RLOO", "dapo": "DAPO", "dr_grpo": "Dr. GRPO", "trl": "TRL"}
GAINS = ("top-1", "avg", "maj", "pass")  # the order of their columns
WINDOW = 5  # number of updates at the beginning and at the end of a run over which means are taken
NONE = "–"

Results = Mapping[str, Mapping[str, Any]]


def read_results(folder: Path) -> Results:
    """The contents of the result files, keyed by experiment."""
    paths = sorted(folder.glob(f"{PREFIX}*.json"))
    return {path.stem.removeprefix(PREFIX): json.loads(path.read_text(encoding="utf-8")) for path in paths}


@dataclass(frozen=True)
class Chapter:
    """Some experiments, and how they are shown."""

    name: str
    experiments: Mapping[str, str]  # experiments that have results, with their titles
    tables: Sequence[str]
    figure: str  # the x axis of the figure: step or seconds

    @property
    def picture(self) -> str:
        return f"{PREFIX}{self.name}.svg"


def chapters(results: Results) -> list[Chapter]:
    """The chapters that have results to show."""
    titles = {name: dict(chapter["experiments"]) for name, chapter in CHAPTERS.items()}
    placed = {"start"}.union(*titles.values())
    titles[REST] = {name: title(name) for name in results if name not in placed}
    found = [
        Chapter(
            name,
            {each: called for each, called in titles[name].items() if each in results},
            chapter["tables"],
            chapter["figure"],
        )
        for name, chapter in CHAPTERS.items()
    ]
    return [chapter for chapter in found if chapter.experiments]


def title(name: str) -> str:
    """The title of an experiment that no chapter names: its recipe and changes.

    Example:
        title("dr_grpo_lr1e-5_g8") == "Dr. GRPO + lr1e-5 + g8"
    """
    recipe = next((recipe for recipe in RECIPES if name == recipe or name.startswith(f"{recipe}_")), None)
    if recipe is None:
        return name
    return " + ".join([RECIPES[recipe], *name.removeprefix(recipe).split("_")[1:]])


# ---- cells


def span(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """Some numbers as one cell: their mean, and the minimum and maximum if there are several.

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


def whole(value: float) -> str:
    return f"{value:.0f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(*head), "|---" * len(head) + "|", *(_row(*row) for row in rows)])


def _linked(name: str, called: str) -> str:
    return f"{called} ([file](../benchmarks/results/{PREFIX}{name}.json))"


def _accuracies(evaluations: Sequence[Mapping[str, Any] | None]) -> list[str]:
    found = [evaluation for evaluation in evaluations if evaluation is not None]
    return [span([evaluation.get(key) for evaluation in found], percent) for key in ("greedy", "avg", "maj", "pass")]


def _gain(result: Mapping[str, Any], metric: str) -> str:
    """The gain over all seeds with its interval, bold if significant; if the starts differ, the span over seeds."""
    together = result.get("gain", {}).get(metric)
    if together:
        low, high = together["interval"]
        shown = f"{together['difference']:+.1f}"
        return f"{f'**{shown}**' if together['significant'] else shown} ({low:+.1f} to {high:+.1f})"
    apart = [run["gain"].get(metric) for run in result["runs"]]
    return span([gain["difference"] for gain in apart if gain], "{:+.1f}".format)


def up_to(run: Mapping[str, Any], update: int) -> tuple[float, float]:
    """The time at which an update was done, and the share of correct samples up to then.

    Example:
        up_to({"steps": {"step": [1, 2, 3], "seconds": [5, 7, 9], "accuracy": [0.1, 0.3, 0.5]}}, 2) == (7, 0.2)
    """
    steps = run["steps"]
    place = next(place for place, step in enumerate(steps["step"]) if step >= update)
    return float(steps["seconds"][place]), statistics.fmean(steps["accuracy"][: place + 1])


# ---- tables


def accuracy_table(results: Results, chapter: Chapter) -> str:
    """Accuracy on the test set before and after."""
    start = results["start"]
    evaluations = [start["base"], *(run["evaluation"] for run in start["runs"])]
    k = next((each["samples"] for each in evaluations if each and "samples" in each), "k")
    rows = [["SmolLM2-135M-Instruct", NONE, NONE, *_accuracies([start["base"]])]]
    for name, called in {"start": "after the warm-up", **chapter.experiments}.items():
        runs = results[name]["runs"]
        updates = span([run["updates"] for run in runs], whole)
        scores = _accuracies([run["evaluation"] for run in runs])
        rows.append([_linked(name, called), str(len(runs)), updates, *scores])
    return _table(("", "seeds", "updates", "top-1", f"avg@{k}", f"maj@{k}", f"pass@{k}"), rows)


def gain_table(results: Results, chapter: Chapter) -> str:
    """How many points each experiment gained over its start, by metric."""
    of = {called: results[name] for name, called in chapter.experiments.items()}
    found = {metric: None for result in of.values() for run in result["runs"] for metric in run["gain"]}
    metrics = sorted(found, key=lambda metric: GAINS.index(metric.partition("@")[0]))
    rows = [
        [called, str(len(result["runs"])), *(_gain(result, metric) for metric in metrics)]
        for called, result in of.items()
    ]
    return _table(("points gained (bold: significant at 95 %)", "seeds", *metrics), rows)


def speed_table(results: Results, chapter: Chapter) -> str:
    """The progress of each experiment within its training time."""
    head = ["", "runs at once", "seconds of training", "updates", "seconds an update"]
    head += [f"right among samples, {end} {WINDOW} updates (%)" for end in ("first", "last")]
    rows = []
    for name, called in chapter.experiments.items():
        runs = results[name]["runs"]
        cells = [
            span([run["at_once"] for run in runs], whole),
            span([run["train_seconds"] for run in runs], whole),
            span([run["updates"] for run in runs], whole),
            span([run["seconds_per_update"] for run in runs], "{:.2f}".format),
            span([run["first_accuracy"] for run in runs], percent),
            span([run["last_accuracy"] for run in runs], percent),
        ]
        rows.append([_linked(name, called), *cells])
    return _table(head, rows)


def race_table(results: Results, chapter: Chapter) -> str:
    """The time that each experiment took for the number of updates that all of them completed."""
    runs_of = {called: results[name]["runs"] for name, called in chapter.experiments.items()}
    common = min(run["updates"] for runs in runs_of.values() for run in runs)
    rows = []
    for called, runs in runs_of.items():
        seconds, right = zip(*(up_to(run, common) for run in runs), strict=True)
        rows.append([called, span(seconds, "{:.1f}".format), span(right, percent)])
    return _table((f"the first {common} updates", "seconds", "right among samples (%)"), rows)


TABLES = {"accuracy": accuracy_table, "gain": gain_table, "speed": speed_table, "race": race_table}


# ---- the page


def block(results: Results, chapter: Chapter) -> str:
    """The text between the markers of a chapter."""
    parts = [TABLES[table](results, chapter) for table in chapter.tables]
    picture = f"![accuracy of samples against {LABELS[chapter.figure]}](figures/{chapter.picture})"
    return "\n\n".join([*parts, picture])


def fill(text: str, results: Results) -> str:
    """The page with the text between the markers replaced."""
    found = chapters(results)
    if "start" not in results or not found:
        raise DataError(f"{PREFIX}start.json and a file of an experiment are needed; run report.py on some archives.")
    for chapter in found:
        begins = BEGINS.format(chapter.name)
        place = re.compile(f"{re.escape(begins)}.*?{re.escape(ENDS)}", flags=re.DOTALL)
        if len(place.findall(text)) != 1:
            names = ", ".join(chapter.experiments)
            raise DataError(f"The page has no place for {names}; it needs {begins} and {ENDS}, once each.")
        filled = f"{begins}\n{block(results, chapter)}\n{ENDS}"
        text = place.sub(lambda _, filled=filled: filled, text)
    return text


def empty_page(results: Results) -> str:
    """A page with a pair of markers for every chapter that has results to show."""
    places = [f"{BEGINS.format(chapter.name)}\n{ENDS}" for chapter in chapters(results)]
    return "\n\n".join(["# Experiments", *places]) + "\n"


def write(results: Results, docs: Path) -> list[Path]:
    """Draw the figures and fill the page, which is created if it does not exist."""
    page = docs / "experiments.md"
    filled = fill(page.read_text(encoding="utf-8") if page.exists() else empty_page(results), results)
    made = [page]
    for chapter in chapters(results):
        made.append(docs / "figures" / chapter.picture)
        draw({called: results[name]["runs"] for name, called in chapter.experiments.items()}, chapter.figure, made[-1])
    page.write_text(filled, encoding="utf-8")
    return made
