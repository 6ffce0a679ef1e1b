"""A report: the page and some of the data in one file, which opens without a server and loads nothing from elsewhere.

It holds all curves, settings, events and results, and a part of the completions: groups of updates that are spread
evenly over the run, with their tokens up to a total limit. The report states where something is left out.
"""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from gruppo.errors import DataError
from gruppo.runs.lines import write_file
from gruppo.view.groups import Passing
from gruppo.view.queries import Desk, Question
from gruppo.view.server import STATIC
from gruppo.view.source import ENDS, RunSource

__all__ = ["bundle", "export"]

# Limits on what a report holds.
GROUPS = 200  # per run
GROUPS_PER_UPDATE = 8
CHARACTERS = 4000  # per text
TOKENS = 150_000  # over all completions
PROMPTS = 500  # per run
PROBLEMS = 200  # per comparison

_IMPORT = re.compile(r'^import \* as (\w+) from "\./(\w+)\.js";\n|^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function|const|let) (\w+)", re.M)


def export(desk: Desk, path: Path) -> int:
    """Write a report and return its size in bytes."""
    if path.is_dir() or not path.parent.is_dir():
        raise DataError(f"--export {path}: name a file in a folder that exists, such as report.html.")
    desk.refresh()
    page = page_with(report_data(desk)).encode("utf-8", "replace")
    write_file(path, page)
    return len(page)


# ---- the data


def report_data(desk: Desk) -> dict[str, Any]:
    """The answers that the page will ask for. Folders appear by name only: their paths on this machine are removed."""
    overview = desk.answer("overview", Question({}))
    for each in (*overview["runs"], *overview["evaluations"]):
        del each["path"]
    names = list(dict.fromkeys(name for source in desk.runs for name in source.curves.names))
    groups, room = [], TOKENS
    tokens: dict[str, Any] = {}
    for number, source in enumerate(desk.runs):
        groups.append(chosen_groups(source))
        room = _add_tokens(tokens, source, number, groups[-1], room)
    for run, own in zip(overview["runs"], groups, strict=True):
        run["splits"] = _splits(own)
        if run["state"]["status"] not in ENDS:  # a run that is running now may not be when the report is read
            run["state"]["status"] = "not finished"
    return {
        "overview": overview,
        "curves": [curve for name in names for curve in desk.answer("curves", Question({"name": [name]}))],
        "settings": [source.settings() for source in desk.runs],
        "groups": groups,
        "tokens": tokens,
        **_prompts(desk, groups),
        **_evaluations(desk),
    }


def chosen_groups(source: RunSource) -> list[dict[str, Any]]:
    """The groups with the most reward spread, of updates spread evenly over the run, including the first and last."""
    groups = source.all_groups()
    splits = source.index.frame.names["split"]
    most = max(GROUPS // GROUPS_PER_UPDATE // max(len(splits), 1), 1)  # updates
    found: list[dict[str, Any]] = []
    for code, split in enumerate(splits):
        updates = np.unique(groups.columns["update"][groups.columns["split"] == code])
        spread = np.unique(np.linspace(0, len(updates) - 1, min(most, len(updates))).round().astype(int))
        for update in updates[spread]:
            asked: dict[str, Any] = dict(split=split, update=int(update), order="spread", descending=True)
            for each in source.groups(**asked, count=GROUPS_PER_UPDATE)["groups"]:
                whole = source.group(each["generation"], each["round"], each["group"], Passing())
                found.append(_cut(whole) | {"snippet": each["prompt"]})
    return found


def _cut(group: dict[str, Any]) -> dict[str, Any]:
    """The group with its texts cut to CHARACTERS, in place."""
    for own in (group["prompt"], *(each["content"] for each in group["completions"])):
        left = CHARACTERS
        for part in own["parts"]:
            part["text"] = part["text"][:left]
            left -= len(part["text"])
        own["cut"] = own["characters"] > CHARACTERS
    return group


def _splits(groups: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The updates of which the report has groups, by split."""
    found: dict[str, set[int]] = {}
    for group in groups:
        found.setdefault(group["split"], set()).add(group["update"])
    return {split: sorted(updates) for split, updates in sorted(found.items(), key=lambda item: item[0] != "train")}


def _add_tokens(found: dict[str, Any], source: RunSource, run: int, groups: list[dict[str, Any]], room: int) -> int:
    """Add the tokens of completions, starting with the first completion of each group; return the remaining budget."""
    places = [(place, group) for group in groups for place in range(len(group["completions"]))]
    for place, group in sorted(places, key=lambda item: item[0]):
        each = group["completions"][place]
        if each["length"] <= room:
            view = source.tokens(group["generation"], group["round"], each["row"], count=max(each["length"], 1))
            found[f"{run}/{group['generation']}/{group['round']}/{each['row']}"] = view
            room -= each["length"]
    return room


def _prompts(desk: Desk, groups: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The hardest and the most solved prompts, and the history of every prompt that the report mentions."""
    lists, histories = [], {}
    for number, source in enumerate(desk.runs):
        halves = [source.prompts(order=order, count=PROMPTS // 2) for order in ("hardest", "solved")]
        merged = {each["prompt_id"]: each for half in halves for each in half["prompts"]}
        lists.append(halves[0] | {"prompts": list(merged.values())})
        for prompt_id in {*merged, *(group["prompt_id"] for group in groups[number])}:
            histories[f"{number}/{prompt_id}"] = source.prompt(prompt_id)
    return {"prompts": lists, "histories": histories}


def _evaluations(desk: Desk) -> dict[str, Any]:
    """Comparisons of every ordered pair of evaluations, and up to PROBLEMS problems of each, differing ones first."""
    comparisons: dict[str, Any] = {}
    problems: dict[str, Any] = {}
    passes = [set(evaluation.folder.passes()) for evaluation in desk.evaluations]
    pairs = [(a, b) for a in range(len(passes)) for b in range(len(passes)) if a != b]
    for first, second in pairs:
        for benchmark, decoding in sorted(passes[first] & passes[second]):
            about = {"benchmark": [benchmark], "pass": [decoding]}
            answer = desk.answer("compare", Question(about | {"first": [str(first)], "second": [str(second)]}))
            answer["rates"] = sorted(answer["rates"], key=lambda rate: rate["first"] == rate["second"])[:PROBLEMS]
            comparisons[f"{first}/{second}/{benchmark}/{decoding}"] = answer
            for problem, side in ((rate["problem"], side) for rate in answer["rates"] for side in (first, second)):
                asked = Question(about | {"evaluation": [str(side)], "problem": [problem]})
                problems[f"{side}/{benchmark}/{decoding}/{problem}"] = desk.answer("problem", asked)
    return {"comparisons": comparisons, "problems": problems}


# ---- the page


def page_with(data: dict[str, Any]) -> str:
    """The page with its files and data inlined. Its policy only permits scripts whose hashes it lists."""
    vendor = (STATIC / "vendor" / "uPlot.iife.min.js").read_text(encoding="utf-8")
    scripts = [(STATIC / "theme.js").read_text(encoding="utf-8"), vendor, bundle("app")]
    styles = [(STATIC / name).read_text(encoding="utf-8") for name in ("vendor/uPlot.min.css", "style.css")]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    # `<` is written as an escape, so that nothing in the data can close the script element that holds it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    body = page.partition("<body>")[2].partition("</body>")[0]
    theme, chart, app = scripts
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>gruppo view</title>\n',
            *(f"<style>{style}</style>\n" for style in styles),
            f"<script>{theme}</script>\n</head>\n<body>{body}",
            f'<script type="application/json" id="report">{text}</script>\n',
            f"<script>{chart}</script>\n",
            f'<script type="module">{app}</script>\n</body>\n</html>\n',
        ]
    )


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def bundle(start: str) -> str:
    """A module and everything it imports as one script: each module in its own function, dependencies first."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        source = (STATIC / f"{name}.js").read_text(encoding="utf-8")
        for match in _IMPORT.finditer(source):
            add(match[2] or match[4])
        exported = ", ".join(_EXPORT.findall(source))
        inner = re.sub(r"^export ", "", _IMPORT.sub(_taken, source), flags=re.M)
        done[name] = f"const module_{name} = (() => {{\n{inner}\nreturn {{ {exported} }};\n}})();\n"

    add(start)
    whole = "".join(done.values())
    if "</script" in whole.lower() or re.search(r"^(import|export) ", whole, re.M):
        raise DataError("The page's modules cannot be joined: one has an import or export of another form.")
    return whole


def _taken(match: re.Match[str]) -> str:
    if match[1]:
        return f"const {match[1]} = module_{match[2]};\n"
    return f"const {{{match[3].replace(' as ', ': ')}}} = module_{match[4]};\n"
