"""`gruppo check`: reports what is wrong with a run, before a GPU is paid for.

Each part is checked separately, with the functions that the trainer uses. A part that fails becomes a line of the
report, and the parts that do not depend on it are still checked.
"""

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gruppo.cli import check_parts
from gruppo.cli.check_parts import Parts
from gruppo.cli.findings import Findings, raised_at
from gruppo.cli.recipe import RunFile, take_help
from gruppo.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check", "main"]

# The label of a step in the report, if it is not the step's own name.
WHAT = {"rewards": "reward", "reward_calls": "reward", "reward_scores": "reward", "prompts": "model"}

HELP = """\
usage: gruppo check RECIPE.yaml [--key value …]

Find what is wrong with a run before you pay for a GPU. It takes the arguments
of `gruppo train` and checks the fields, the rewards on real rows, the tools,
the dataset and its columns, the chat template, the lengths of prompts, the
model (is the fast path right on four rows?) and the plan. Each finding is a
line: ok, warning or error. The exit status is 0 only if there is no error.

  --answer_template TEXT   the answer format of the rewards; {} is the answer

examples:
  gruppo check recipes/grpo.yaml
  gruppo check recipes/grpo.yaml --model ./my-model --dataset prompts.jsonl
  gruppo check run.yaml --max_completion_length 4096 && gruppo train run.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns 1 if there are errors."""
    asks_for_help, argv = take_help(sys.argv[1:] if argv is None else argv, "check")
    if not argv or asks_for_help:
        print(HELP, end="")
        return 0 if argv else 2
    from rich.console import Console

    from gruppo.cli.train import quiet_bars

    quiet_bars()
    findings = check(argv, Console())
    argv, _ = _take_template(argv)  # `gruppo train` has no such option
    if findings.errors:
        print(f"{findings.summary}: this run would not work. Fix it and check again.")
        return 1
    print(f"{findings.summary}. Start it with: gruppo train {shlex.join(argv)}")
    return 0


def check(argv: Sequence[str], console: "Console | None" = None) -> Findings:
    """Check all parts, and print each finding as it comes.

    Example:
        check(["recipes/grpo.yaml", "--model", "./model"]).errors == []
    """
    findings = Findings(console=console)
    argv, template = _take_template(argv)
    run, built = _read(argv, findings)
    if run is None:
        return findings
    parts = Parts(run, built=built, template=template)
    steps = [check_parts.rewards, check_parts.tools, check_parts.dataset]
    steps += [check_parts.reward_calls, check_parts.reward_scores]
    if built:
        steps += [check_parts.prompts, check_parts.lengths, check_parts.parity, check_parts.plan, check_parts.folder]
    for step in steps:
        try:
            step(parts, findings)
        except Exception as error:  # by policy no failure, expected or not, may hide the next one
            findings.error(
                WHAT.get(step.__name__, step.__name__), f"{type(error).__name__}: {error}{raised_at(error)}"
            )
    if not built:
        findings.warning("model", "not checked: correct the fields first.")
    if parts.toolset is not None:
        parts.toolset.close()
    return findings


def _take_template(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Split off --answer_template, the only option that is not part of the run."""
    rest, template, strings = [], None, iter(argv)
    for string in strings:
        flag, sign, value = string.partition("=")
        if flag.replace("-", "_") == "__answer_template":
            template = value if sign else next(strings, "")
            if not template or template.startswith("--"):
                raise ConfigError("--answer_template needs the form of an answer, such as 'A: {}'.")
        else:
            rest.append(string)
    return rest, template


def _read(argv: Sequence[str], findings: Findings) -> tuple[RunFile | None, bool]:
    """The run and whether its config could be built; if not, the rest of the arguments without it."""
    with findings.about("fields", Exception):
        run = RunFile.of_another_machine(argv)
        check_parts.fields(run, findings)
        return run, True
    with findings.about("fields", Exception):
        return RunFile.read(argv, build=False, strict=False), False
    return None, False
