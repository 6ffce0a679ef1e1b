"""The table of every config field in docs/fields.md: `python docs/make/fields.py` regenerates it.

Names, defaults and meanings are read from the dataclasses, TRL's defaults from benchmarks/results/trl_fields.json, and
the differences from docs/from-trl.md, which describes them in full.
"""

import json
import re
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from gruppo import GRPOConfig, RLOOConfig
from gruppo.config import base, grpo, rloo
from gruppo.config.deprecated import ALIASES
from gruppo.config.validate import MEANINGLESS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fields.md"
MARKS = ("<!-- fields: docs/make/fields.py -->", "<!-- end of fields -->")
HEAD = "| field | default | TRL 1.16 | meaning | what differs |\n|---|---|---|---|---|"
LONGEST = 160  # characters of a difference; for a longer one there is a link instead
# One mixin per concern, in the order of the page.
CONCERNS = {
    base.SamplingConfig: "Sampling",
    base.BatchingConfig: "Batches",
    base.ObjectiveConfig: "Objective",
    grpo.GRPOObjectiveConfig: "Objective, GRPO only",
    rloo.RLOOObjectiveConfig: "Objective, RLOO only",
    grpo.EntropyConfig: "Entropy bonus, GRPO only",
    base.ReferenceConfig: "Reference",
    base.RewardConfig: "Rewards",
    base.ToolConfig: "Tools and environments",
    base.LoadingConfig: "Loading the policy",
    grpo.HeadConfig: "Head, GRPO only",
    base.UpdateConfig: "How the update is computed",
    base.RunConfig: "Record, resuming and audits",
    base.EvaluationConfig: "Benchmarks",
    base.CompletionLoggingConfig: "Tables of completions",
    grpo.HubLoggingConfig: "Tables on the hub, GRPO only",
    base.VLLMConfig: "vLLM",
    grpo.VLLMCorrectionConfig: "Correction of the sampler, GRPO only",
    base.DeprecatedConfig: "Old names",
}


def default(field: Field[Any]) -> Any:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return value.value if isinstance(value, Enum) else value


def defaults(config: type) -> dict[str, Any]:
    return {field.name: default(field) for field in fields(config)}


def differences() -> dict[str, str]:
    """What docs/from-trl.md says about each field: the text of the row about it, or a link to a row that names it."""
    found: dict[str, str] = {}
    section = ""
    for line in (ROOT / "docs" / "from-trl.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:].lower().replace(" ", "-")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 3:
            continue
        topic, _, ours = cells
        names = re.findall(r"`([^`]*)`", topic)
        about = re.fullmatch(r"(`\w+`(, )?)+", topic) is not None
        words = ours if about and len(ours) <= LONGEST / len(names) else f"[more](from-trl.md#{section})"
        for code in names if not topic.startswith("values of") else ():
            for name in re.findall(r"[a-z]\w+", code):
                found.setdefault(name, words)
    return found


def shown(value: Any) -> str:
    return "" if value is MISSING else f"`{json.dumps(value) if isinstance(value, str) else value}`"


def both(name: str, grpo_values: dict[str, Any], rloo_values: dict[str, Any]) -> str:
    """The default in GRPO, and that in RLOO if it differs."""
    values = [table[name] for table in (grpo_values, rloo_values) if name in table]
    if not values:
        return "–"
    return shown(values[0]) + (f", RLOO {shown(values[1])}" if values[1:] and values[1] != values[0] else "")


def differs(name: str, ours: str, theirs: str, notes: dict[str, str]) -> str:
    if name in ALIASES:
        return f"old name of `{ALIASES[name]}`, with a `FutureWarning`"
    parts = ["new"] if theirs == "–" else ["default"] if ours != theirs else []
    if name in MEANINGLESS:
        parts.append(f"error: {MEANINGLESS[name]}")
    elif name in notes:
        parts = [*parts, notes[name]] if not notes[name].startswith("default ") else [notes[name]]
    return "; ".join(parts)


def peers() -> tuple[dict[str, Any], dict[str, Any]]:
    result = json.loads((ROOT / "benchmarks/results/trl_fields.json").read_text(encoding="utf-8"))
    return result["GRPOConfig"], result["RLOOConfig"]


def own_table(mixin: type, notes: dict[str, str]) -> list[str]:
    """The rows of one concern."""
    ours, theirs = (defaults(GRPOConfig), defaults(RLOOConfig)), peers()
    rows = []
    for name in vars(mixin)["__annotations__"]:
        help_text = next(f for f in fields(mixin) if f.name == name).metadata["help"].replace("|", "\\|")
        cells = both(name, *ours), both(name, *theirs)
        rows.append(f"| `{name}` | {cells[0]} | {cells[1]} | {help_text} | {differs(name, *cells, notes)} |")
    return rows


def inherited_table(notes: dict[str, str]) -> list[str]:
    """The fields of TrainingArguments: a table of those that differ, and the names of all others."""
    ours, theirs = defaults(GRPOConfig), peers()[0]
    parents = defaults(TrainingArguments)
    rows, same = [], []
    for name, value in parents.items():
        theirs_shown = shown(theirs.get(name, value))
        difference = differs(name, shown(ours[name]), theirs_shown, notes)
        if not difference and name == "auto_find_batch_size":
            difference = "error, as in TRL: prompt groups must stay whole"
        if ours[name] == value and not difference:
            same.append(f"`{name}`")
        else:
            rows.append(f"| `{name}` | {shown(value)} | {theirs_shown} | {shown(ours[name])} | {difference} |")
    head = "| field | transformers | TRL 1.16 | here | what differs |\n|---|---|---|---|---|"
    return [head, *rows, "", "All others have transformers' meaning and default: " + ", ".join(sorted(same)) + "."]


def table() -> str:
    """The text between the markers."""
    notes = differences()
    lines = []
    for mixin, title in CONCERNS.items():
        lines += [f"## {title}", "", HEAD, *own_table(mixin, notes), ""]
    return "\n".join([*lines, "## From TrainingArguments", "", *inherited_table(notes)])


def fill(page: str) -> str:
    """The page with its table regenerated."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{table()}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
