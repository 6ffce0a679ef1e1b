"""One run, with everything that the page needs to know about it."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gruppo.errors import DataError
from gruppo.runs import Run
from gruppo.runs.follow import read_text
from gruppo.runs.lock import NAME as LOCK
from gruppo.runs.lock import Owner
from gruppo.runs.rollouts import REWARD, REWARD_KIND
from gruppo.view import prompts
from gruppo.view.curves import Curves, finite
from gruppo.view.groups import Groups, Passing, plain, summarise
from gruppo.view.index import Frame, Index, failed_answers
from gruppo.view.tokens import Decoder, load_decoder, token_view

__all__ = ["RunSource"]

CHARACTERS = 20_000  # maximum length of a text in an answer; the whole text has a separate query
SNIPPET = 240
ENDS = {"finished", "failed", "stopped"}
QUIET = 600  # seconds without a new line after which a run on another machine is no longer reported as running
OF_A_ROW = ("row", "completion", "completion_format", "reward", "advantage", "stop", "truncated", "turns", "extra")
OF_TOKENS = (
    *("update", "generation", "row", "replaced", "completion_tokens", "model_mask", "logps", "entropies"),
    *("advantage", "advantages"),
)
OF_A_GROUP = (
    *("update", "generation", "round", "group", "size", "reward", "spread", "lowest", "highest", "length"),
    *("truncated", "tool_failures", "reward_failures", "disagreement"),
)


class RunSource:
    """A run folder, read lazily.

    Example:
        source = RunSource(Path("runs/demo"), "demo")
        source.index.refresh()
        source.groups(split="train", update=3, order="spread", descending=True)["groups"][0]["prompt"]
    """

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.run = Run(path)
        self.curves = Curves(self.run)
        self.index = Index(self.run)
        self._groups = summarise(self.index.frame)

    # ---- the run as a whole

    def state(self) -> dict[str, Any]:
        """The values that change while a run is in progress."""
        return {
            "metrics": self.curves.version,
            "rollouts": self.index.frame.version,
            "completions": len(self.index.frame),
            "update": self.curves.last_update,
            "time": self.curves.last_time,
            "status": self._status(),
            "indexed": self.index.frame.version > 0,
        }

    def _status(self) -> str:
        """The status of the run: how it ended, or whether it is running.

        If the run recorded no end, it is running if the process named in its lock file is. For a process on another
        machine that cannot be checked; the run then counts as running as long as it keeps writing. The lock is only
        read, never taken: a run that is about to start must be able to acquire it.
        """
        kinds = [str(event.get("event")) for event in self.curves.events]
        ends = [kind for kind in kinds if kind in ENDS or kind in ("started", "resumed")]
        if ends and ends[-1] in ENDS:
            return ends[-1]
        try:
            lock = read_text(self.run, LOCK)
        except (
            DataError,
            OSError,
            UnicodeDecodeError,
        ):  # the lock has disappeared meanwhile, or was not written by gruppo
            lock = None
        if lock is None:
            return "not finished"
        owner = Owner.read(lock.encode())
        if owner is not None and owner.host == platform.node():
            return "running" if owner.may_run() else "not finished"
        return "running" if time.time() - self.curves.changed() < QUIET else "no news"

    def overview(self) -> dict[str, Any]:
        frame, columns = self.index.frame, self.index.frame.columns
        splits = {}
        for name in sorted(frame.names["split"], key=lambda name: (name != "train", name)):
            if (own := columns["split"] == frame.code("split", name)).any():
                splits[name] = np.unique(columns["update"][own]).tolist()
        return {
            "name": self.name,
            "path": str(self.path),
            "run_id": self.run.info.get("run_id"),
            "started": self.run.info.get("started"),
            "metrics": self.curves.names,
            "splits": splits,
            "rewards": list(frame.rewards),
            "events": [finite(event) or {} for event in self.curves.events[-50:]],
            "state": self.state(),
        }

    def settings(self) -> dict[str, Any]:
        """The settings of config.yaml, each value as JSON text because values can be of any type."""
        try:
            return {name: json.dumps(value, default=str) for name, value in self.run.config.items()}
        except DataError:
            return {}

    # ---- groups

    def all_groups(self) -> Groups:
        """The groups of the newest frame, computed once per frame; the first call waits until there is a frame."""
        if not self.index.frame.version:
            self.index.refresh()
        if self._groups.frame is not self.index.frame:
            self._groups = summarise(self.index.frame)
        return self._groups

    def groups(
        self,
        *,
        split: str | None = None,
        update: int | None = None,
        order: str = "update",
        descending: bool = False,
        filters: Sequence[str] = (),
        search: str = "",
        passing: Passing | None = None,
        first: int = 0,
        count: int = 50,
    ) -> dict[str, Any]:
        """One page of the groups that pass the filters; `search` matches text in prompts and completions."""
        passing = passing or Passing()
        groups = self.all_groups()
        chosen = groups.select(filters, split=split, update=update)
        hits = None
        if search:
            asked = groups.rows[np.repeat(chosen, groups.columns["size"])]
            hits = groups.any_row(self.index.matches(groups.frame, search, asked))
            chosen &= (hits > 0) | self._prompt_matches(groups, search)
        ordered = groups.order(chosen, order, descending=descending, passing=passing)
        accuracy = groups.accuracy(passing)
        page = ordered[first : first + count]
        return {
            "total": len(ordered),
            "completions": int(groups.columns["size"][ordered].sum()),
            "first": first,
            "groups": [
                {
                    **self._group(groups, int(group)),
                    "accuracy": plain(accuracy[group]),
                    "hits": None if hits is None else plain(hits[group]),
                }
                for group in page
            ],
        }

    def _group(self, groups: Groups, group: int) -> dict[str, Any]:
        prompt_id = groups.frame.names["prompt_id"][groups.columns["prompt_id"][group]]
        return {
            **{name: plain(groups.columns[name][group]) for name in OF_A_GROUP},
            "split": groups.frame.names["split"][groups.columns["split"][group]],
            "zero_spread": bool(groups.columns["zero_spread"][group]),
            "replaced": bool(groups.columns["replaced"][group]),
            "prompt_id": prompt_id,
            "prompt": snippet(groups.frame.prompts.get(prompt_id, "")),
        }

    def _prompt_matches(self, groups: Groups, search: str) -> Any:
        wanted = search.casefold()
        ids = groups.frame.names["prompt_id"]
        has = np.array([wanted in groups.frame.prompts.get(each, "").casefold() for each in ids], bool)
        return has[groups.columns["prompt_id"]] if len(has) else np.zeros(len(groups), bool)

    def group(self, generation: int, round: int, group: int, passing: Passing | None = None) -> dict[str, Any]:
        """One group: its prompt, and all its completions with rewards and advantages."""
        passing = passing or Passing()
        groups = self.all_groups()
        found = self._find(groups, generation, round, group)
        rows = groups.of(found)
        prompt = self.index.rows(groups.frame, rows[:1], ["prompt", "prompt_format"])[0]
        lines = self.index.rows(groups.frame, rows, [*OF_A_ROW, REWARD, REWARD_KIND])
        passes = passing.rows(groups.frame)
        return {
            **self._group(groups, found),
            "accuracy": plain(groups.accuracy(passing)[found]),
            "prompt": content(prompt["prompt"], prompt["prompt_format"]),
            "completions": [
                _completion(line, int(groups.frame.columns["length"][row]), bool(passes[row]))
                for row, line in zip(rows, lines, strict=True)
            ],
        }

    def _find(self, groups: Groups, generation: int, round: int, group: int) -> int:
        columns = groups.columns
        same = (columns["generation"] == generation) & (columns["round"] == round) & (columns["group"] == group)
        found = np.flatnonzero(same)
        if not len(found):
            raise DataError(f"This run has no group {group} in generation {generation}, round {round}.")
        return int(found[0])

    # ---- one completion

    @cached_property
    def decoder(self) -> Decoder | None:
        return load_decoder(self.run)

    def tokens(self, generation: int, round: int, row: int, first: int = 0, count: int = 4096) -> dict[str, Any]:
        """One completion token by token."""
        frame, place = self._row(generation, round, row)
        own = [frame.columns[name] == frame.columns[name][place] for name in ("generation", "round", "group")]
        return {
            **token_view(self.run, self.decoder, self.index.rows(frame, [place], OF_TOKENS)[0], first, count),
            "group": plain(frame.columns["group"][place]),
            "rows": np.sort(frame.columns["row"][np.logical_and.reduce(own)]).tolist(),  # all rows of its group
        }

    def text(self, generation: int, round: int, row: int) -> dict[str, Any]:
        """The whole text of one completion, however long it is."""
        frame, place = self._row(generation, round, row)
        line = self.index.rows(frame, [place], ["completion", "completion_format"])[0]
        return content(line["completion"], line["completion_format"], most=None)

    def _row(self, generation: int, round: int, row: int) -> tuple[Frame, int]:
        frame = self.all_groups().frame
        columns = frame.columns
        same = (columns["generation"] == generation) & (columns["round"] == round) & (columns["row"] == row)
        found = np.flatnonzero(same)
        if not len(found):
            raise DataError(f"This run has no row {row} in generation {generation}, round {round}.")
        return frame, int(found[0])

    # ---- prompts

    def prompts(
        self,
        *,
        split: str | None = None,
        order: str = "hardest",
        passing: Passing | None = None,
        search: str = "",
        first: int = 0,
        count: int = 50,
    ) -> dict[str, Any]:
        """One page of the prompts, with their pass rates over training."""
        groups = self.all_groups()
        table = prompts.prompt_table(groups, passing or Passing(), split)
        ids = groups.frame.names["prompt_id"]
        ordered = table.order(order)
        if search:
            wanted = search.casefold()
            texts = groups.frame.prompts
            ordered = np.array(
                [p for p in ordered if wanted in texts.get(ids[table.codes[p]], "").casefold()], np.int64
            )
        return {
            "total": len(ordered),
            "first": first,
            "solved": int((table.columns["last"] >= 1).sum()),
            "never": int((table.columns["rate"] == 0).sum()),
            "prompts": [
                {
                    "prompt_id": ids[table.codes[place]],
                    "prompt": snippet(groups.frame.prompts.get(ids[table.codes[place]], "")),
                    **{name: plain(values[place]) for name, values in table.columns.items()},
                }
                for place in ordered[first : first + count]
            ],
        }

    def prompt(self, prompt_id: str, passing: Passing | None = None) -> dict[str, Any]:
        """One prompt over the course of training."""
        groups = self.all_groups()
        text = groups.frame.prompts.get(prompt_id, "")
        found = prompts.history(groups, passing or Passing(), prompt_id)
        return {"prompt_id": prompt_id, "prompt": snippet(text, most=2000), "history": found}


def snippet(stored: str, most: int = SNIPPET) -> str:
    """The beginning of a prompt on one line; for a conversation, that of the last user message."""
    text = stored
    if stored.startswith("["):
        try:
            messages = json.loads(stored)
            spoken = [str(m.get("content", "")) for m in messages if isinstance(m, dict) and m.get("role") == "user"]
            text = spoken[-1] if spoken else stored
        except (ValueError, RecursionError):  # plain text that begins with "[", or a conversation that was cut
            text = stored
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def content(stored: str, kind: str, most: int | None = CHARACTERS) -> dict[str, Any]:
    """A stored prompt or completion for the page: a list of texts, each with the role of its author.

    Example:
        content("4", "text")["parts"] == [{"role": None, "text": "4", "failed": False}]
    """
    parts: list[dict[str, Any]] = _messages(stored) if kind == "messages" else []
    parts = parts or [{"role": None, "text": stored, "failed": False}]
    characters = sum(len(part["text"]) for part in parts)
    left = characters if most is None else most
    for part in parts:
        part["text"] = part["text"][:left]
        left -= len(part["text"])
    return {"parts": parts, "characters": characters, "cut": most is not None and characters > most}


def _messages(stored: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(stored)
    except (ValueError, RecursionError):
        return []
    failed = set(failed_answers(stored))
    found = []
    for place, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            own = message.get("content")
            text = own if isinstance(own, str) else json.dumps(own, ensure_ascii=False) if own is not None else ""
            if calls := message.get("tool_calls"):
                text = f"{text}\n{json.dumps(calls, ensure_ascii=False, indent=1)}".strip()
            found.append({"role": str(message.get("role")), "text": text, "failed": place in failed})
    return found


def _completion(line: Mapping[str, Any], length: int, passes: bool) -> dict[str, Any]:
    rewards = {name.removeprefix(REWARD): plain(value) for name, value in line.items() if name.startswith(REWARD)}
    kinds = {name.removeprefix(REWARD_KIND): value for name, value in line.items() if name.startswith(REWARD_KIND)}
    return {
        **{name: plain(line[name]) for name in ("row", "reward", "advantage", "stop", "truncated", "turns")},
        "length": length,
        "passes": passes,
        "rewards": rewards,
        "kinds": {name: kind for name, kind in kinds.items() if kind not in (None, "score")},
        "extra": (line["extra"] or "")[:CHARACTERS],
        "content": content(line["completion"], line["completion_format"]),
    }
