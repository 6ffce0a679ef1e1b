"""The page's queries and their answers as plain JSON, for the server and for exported reports."""

import difflib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.errors import DataError
from gruppo.view.curves import thin
from gruppo.view.evaluations import Evaluation, compare_two
from gruppo.view.folders import Folders, search_again, short_names
from gruppo.view.groups import FILTERS, Passing
from gruppo.view.source import RunSource
from gruppo.view.tokens import COLOURINGS

__all__ = ["Desk", "Question"]

logger = logging.getLogger(__name__)

MOST = 500  # maximum number of items in one answer
SEARCH_EVERY = 5.0  # seconds between two searches for new folders


class Question:
    """The parameters of a query, validated when they are read.

    Example:
        Question({"run": ["0"], "update": ["3"]}).number("update") == 3
    """

    def __init__(self, values: Mapping[str, Sequence[str]]):
        self._values = values

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, [default])[0]

    def texts(self, name: str) -> list[str]:
        return [value for value in self._values.get(name, []) if value]

    def optional(self, name: str) -> str | None:
        return self.text(name) or None

    def number(self, name: str, default: int | None = None) -> int:
        found = self.maybe_number(name)
        if found is None and default is None:
            raise DataError(f"The question lacks {name!r}.")
        return default if found is None else found  # type: ignore[return-value]

    def maybe_number(self, name: str) -> int | None:
        if not (text := self.text(name)):
            return None
        try:
            return int(text)
        except ValueError as error:
            raise DataError(f"{name}={text!r} is not a whole number.") from error

    def page(self) -> dict[str, int]:
        first, count = self.number("first", 0), self.number("count", 50)
        if first < 0 or not 0 < count <= MOST:
            raise DataError(f"first={first}, count={count}: first must be at least 0, and count 1 to {MOST}.")
        return {"first": first, "count": count}

    def passing(self) -> Passing:
        try:
            at = float(self.text("pass_at", "0.5"))
        except ValueError as error:
            raise DataError(f"pass_at={self.text('pass_at')!r} is not a number.") from error
        if not math.isfinite(at):
            raise DataError(f"pass_at={at} is not finite.")
        return Passing(self.text("pass_reward", "reward"), at)


class Desk:
    """Answers queries about a set of runs and evaluations.

    Example:
        desk = Desk(find_folders([Path("runs/demo")]))
        desk.refresh()
        desk.answer("groups", Question({"run": ["0"], "order": ["spread"]}))["total"]
    """

    def __init__(self, folders: Folders):
        run_names, evaluation_names = short_names(folders.runs), short_names(folders.evaluations)
        self.runs = [RunSource(path, name) for path, name in zip(folders.runs, run_names, strict=True)]
        pairs = zip(folders.evaluations, evaluation_names, strict=True)
        self.evaluations = [Evaluation(path, name) for path, name in pairs]
        self._paths = folders.paths
        self._refused: set[Path] = set()
        self._searched = time.monotonic()
        self._searching = threading.Lock()
        self.answers: dict[str, Callable[[Question], Any]] = {
            "overview": self._overview,
            "state": self._state,
            "curves": self._curves,
            "settings": lambda asked: self._run(asked).settings(),
            "groups": self._groups,
            "group": self._group,
            "tokens": self._tokens,
            "text": lambda asked: self._run(asked).text(*_place(asked, "row")),
            "prompts": self._prompts,
            "prompt": lambda asked: self._run(asked).prompt(asked.text("prompt_id"), asked.passing()),
            "compare": self._compare,
            "problem": self._problem,
        }

    def refresh(self) -> None:
        """Read new data of all runs: the metrics of all runs first, because they are read quickly."""
        for source in self.runs:
            source.curves.refresh()
        for source in self.runs:
            source.index.refresh()

    def search(self) -> None:
        """Add runs and evaluations that appeared since the last search; known ones keep their indices."""
        with self._searching:
            found = search_again(self._paths)
            self._add(self.runs, RunSource, found.runs)
            self._add(self.evaluations, Evaluation, found.evaluations)
            self._searched = time.monotonic()

    def _add(self, own: list[Any], kind: Callable[[Path, str], Any], paths: Sequence[Path]) -> None:
        known = {each.path for each in own}
        for path in paths:
            if path in known:
                continue
            try:
                own.append(kind(path, path.name))
            except (DataError, OSError) as error:  # incomplete, or refused as unsafe; the others are still shown
                if path not in self._refused:
                    logger.warning("%s is left out: %s", path, error)
                self._refused.add(path)
        if len(own) > len(known):  # a new folder may have the same name as a known one
            for each, name in zip(own, short_names([each.path for each in own]), strict=True):
                each.name = name

    def warm_up(self) -> None:
        """Read everything that queries need, so that the first query of each kind is as fast as later ones."""
        self.refresh()
        for source in self.runs:
            source.all_groups()
            source.index.preload()

    def answer(self, name: str, asked: Question) -> Any:
        if name not in self.answers:
            near = difflib.get_close_matches(name, self.answers, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(self.answers)}."
            raise DataError(f"There is no question {name!r}. {hint}")
        return self.answers[name](asked)

    def _run(self, asked: Question) -> RunSource:
        number = asked.number("run", 0)
        if not 0 <= number < len(self.runs):
            raise DataError(f"There is no run {number}; there are {len(self.runs)}.")
        return self.runs[number]

    def _evaluation(self, asked: Question, name: str) -> Evaluation:
        number = asked.number(name)
        if not 0 <= number < len(self.evaluations):
            raise DataError(f"There is no evaluation {number}; there are {len(self.evaluations)}.")
        return self.evaluations[number]

    def _overview(self, asked: Question) -> dict[str, Any]:
        self.search()
        for source in self.runs:
            source.curves.refresh()
        return {
            "runs": [source.overview() for source in self.runs],
            "evaluations": [evaluation.overview() for evaluation in self.evaluations],
            "filters": FILTERS,
            "colourings": COLOURINGS,
        }

    def _state(self, asked: Question) -> dict[str, Any]:
        if time.monotonic() - self._searched >= SEARCH_EVERY:
            self.search()
        for source in self.runs:
            source.curves.refresh()
            source.index.refresh_unless_busy()
        return {
            "runs": [source.state() for source in self.runs],
            "results": [evaluation.version() for evaluation in self.evaluations],
        }

    def _curves(self, asked: Question) -> list[dict[str, Any]]:
        found = []
        for name in asked.texts("name")[:MOST]:
            for number, source in enumerate(self.runs):
                curve = source.curves.of(name)
                if curve.updates:
                    updates, values = thin(curve.updates, curve.values)
                    found.append({"run": number, "name": name, "updates": updates, "values": values})
        return found

    def _groups(self, asked: Question) -> dict[str, Any]:
        return self._run(asked).groups(
            split=asked.optional("split"),
            update=asked.maybe_number("update"),
            order=asked.text("order", "update"),
            descending=asked.text("descending") == "1",
            filters=asked.texts("filter"),
            search=asked.text("search")[:200],
            passing=asked.passing(),
            **asked.page(),
        )

    def _group(self, asked: Question) -> dict[str, Any]:
        return self._run(asked).group(*_place(asked, "group"), asked.passing())

    def _tokens(self, asked: Question) -> dict[str, Any]:
        first, count = asked.number("first", 0), asked.number("count", 4096)
        return self._run(asked).tokens(*_place(asked, "row"), first=first, count=min(count, 16_384))

    def _prompts(self, asked: Question) -> dict[str, Any]:
        return self._run(asked).prompts(
            split=asked.optional("split"),
            order=asked.text("order", "hardest"),
            passing=asked.passing(),
            search=asked.text("search")[:200],
            **asked.page(),
        )

    def _compare(self, asked: Question) -> dict[str, Any]:
        first, second = self._evaluation(asked, "first"), self._evaluation(asked, "second")
        return compare_two(first, second, asked.text("benchmark"), asked.text("pass", "greedy"))

    def _problem(self, asked: Question) -> dict[str, Any]:
        found = self._evaluation(asked, "evaluation")
        return found.problem(asked.text("benchmark"), asked.text("pass", "greedy"), asked.text("problem"))


def _place(asked: Question, what: str) -> tuple[int, int, int]:
    """The generation, the round, and the group or row (`what`) of a query."""
    return asked.number("generation"), asked.number("round", 0), asked.number(what)
