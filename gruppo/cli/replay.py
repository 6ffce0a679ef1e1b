"""`gruppo replay`: recompute a recorded run with other rewards or another recipe."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gruppo.cli.options import CommandParser
from gruppo.errors import ConfigError

__all__ = ["main"]

DESCRIPTION = """\
Score recorded rollouts with other rewards, and compute advantages, loss and gradients of any recipe on them, without
sampling; a model is needed only for gradients of weights.

  gruppo replay runs/demo                                           does the record reproduce the run's losses?
  gruppo replay runs/demo --reward rewards.py:brevity --dataset prompts.jsonl
  gruppo replay runs/demo --set loss_type=dr_grpo scale_rewards=none --updates 3:10
  gruppo replay runs/demo --set recipe=dapo --against recipe=gspo --json report.json --parquet rows.parquet
  gruppo replay runs/demo --set beta=0 --model runs/demo/checkpoint-4 --updates 5
"""


def parser() -> CommandParser:
    """The options."""
    found = CommandParser(prog="gruppo replay", description=DESCRIPTION)
    found.add_argument("run", metavar="RUN", help="the folder of a run (its output_dir), trained with record: all")
    found.add_argument(
        "--updates", metavar="A:B", help="only these updates, both ends included; also A:, :B or A (default: all)"
    )
    changed = found.add_argument_group("changes")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    changed.add_argument(
        "--reward",
        metavar="[NAME=]FILE.py:NAME",
        help="replaces the recorded reward of that name; also module:NAME",
        **several,
    )
    changed.add_argument(
        "--dataset",
        help="the run's dataset, for rewards that need its columns: JSONL, parquet or CSV file, or name on the hub",
    )
    changed.add_argument(
        "--set", metavar="FIELD=VALUE", help="settings other than the run's; recipe=NAME sets several", **several
    )
    changed.add_argument(
        "--against", metavar="FIELD=VALUE", help="a second recipe, to compare with (default: the run's own)", **several
    )
    weights = found.add_argument_group("gradients of weights")
    weights.add_argument("--model", metavar="CHECKPOINT", help="also compare gradients at these weights")
    weights.add_argument("--groups", type=int, default=4, help="number of groups to use (default: %(default)s)")
    out = found.add_argument_group("output files")
    out.add_argument("--json", type=Path, metavar="FILE", help="all numbers except those of single rows")
    out.add_argument("--parquet", type=Path, metavar="FILE", help="advantage and d loss / d log-prob of every row")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; returns 0 on success."""
    options = parser().parse_args(argv)
    chosen = _range(options.updates)
    changes, against = _changes(options.set, "--set"), _changes(options.against, "--against")
    for file in (options.json, options.parquet):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"There is no folder {file.parent} to write {file.name} into.")
        if file is not None and file.is_dir():
            raise ConfigError(f"{file} is a folder: name a file in it to write into.")
    if options.groups < 1:
        raise ConfigError(f"--groups {options.groups} must be at least 1.")
    if options.dataset and not options.reward:
        raise ConfigError("--dataset is only for rewards: name one with --reward.")
    rewards, dataset = _loaded(options.reward, options.dataset)

    from rich.console import Console

    from gruppo.replay import replay
    from gruppo.replay.tables import tables

    found = replay(
        options.run,
        updates=chosen,
        rewards=rewards,
        dataset=dataset,
        changes=changes,
        against=against or None,
        model=options.model,
        groups=options.groups,
        keep_rows=options.parquet is not None,
    )
    Console().print(tables(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.parquet is not None:
        import pyarrow.parquet as pq

        pq.write_table(found.rows.table(), options.parquet)
    return 0


def _range(text: str | None) -> range | None:
    """The range of updates from A:B, both inclusive."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or not text.strip(": "):
        raise ConfigError(f"--updates {text!r} is not of the form 3:10, 3:, :10 or 3.")
    first, colon, last = match.groups()
    if not colon:
        return range(int(first), int(first) + 1)
    return range(int(first or 0), int(last) + 1 if last else 1 << 62)


def _changes(given: Sequence[str], option: str) -> dict[str, Any]:
    """Settings from field=value. Values are parsed as YAML; numbers such as 1e-5, a string in YAML, become floats."""
    changes = {}
    for change in given:
        name, sign, value = change.partition("=")
        if not sign or not name.strip():
            raise ConfigError(f"{option} {change!r} is not of the form field=value.")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{option} {change!r} is not valid YAML: {error}") from error
        number = isinstance(read, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+|[-+]?inf", read)
        changes[name.strip().replace("-", "_")] = float(read) if number else read
    return changes


def _loaded(rewards: Sequence[str], dataset: str | None) -> tuple[Mapping[str, Any] | list[Any] | None, Any]:
    """The reward functions, keyed by the recorded rewards they replace if any is named, and the dataset."""
    if not rewards:
        return None, None
    from gruppo.cli.loading import load_reward, load_rows

    here = Path.cwd()
    rows = None if dataset is None else load_rows(dataset, here)
    parts = [re.match(r"(?:([^=:/\\]+)=)?(.+)", entry, re.DOTALL) for entry in rewards]
    named = [(part[1], load_reward(part[2], here)) for part in parts if part is not None]
    if not any(name for name, _ in named):
        return [function for _, function in named], rows
    from gruppo.rewards.resolve import function_name

    return {name or function_name(function): function for name, function in named}, rows
