"""The command line: a table that maps each command's name to a plain function of its arguments.

To add a command, add a function, whose docstring is its line in `gruppo --help`, and a row in COMMANDS. The functions
import their dependencies when they run, so that `gruppo --help` stays instant.
"""

import difflib
import io
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

__all__ = ["COMMANDS", "main"]


def demo(argv: list[str]) -> int:
    """Watch a tiny model learn sums (under three minutes, CPU only)."""
    from gruppo.demo.run import main as run_demo

    return run_demo(argv)


def plan(argv: list[str]) -> int:
    """Estimate memory and time of a run, and what else would fit."""
    from gruppo.cli.plan import main as make_plan

    return make_plan(argv)


def train(argv: list[str]) -> int:
    """Train from a recipe, on one process or on several."""
    from gruppo.cli.train import main as run_training

    return run_training(argv)


def grpo(argv: list[str]) -> int:
    """Train with GRPO from flags or a file, like `trl grpo`."""
    from gruppo.cli.train import main as run_training

    return run_training(argv, "grpo")


def rloo(argv: list[str]) -> int:
    """Train with RLOO from flags or a file, like `trl rloo`."""
    from gruppo.cli.train import main as run_training

    return run_training(argv, "rloo")


def check(argv: list[str]) -> int:
    """Find what is wrong with a recipe before you pay for a GPU."""
    from gruppo.cli.check import main as run_check

    return run_check(argv)


def evaluate(argv: list[str]) -> int:
    """Accuracy on GSM8K, MATH, MGSM-zh, CMATH or your own benchmark."""
    from gruppo.cli.evaluate import main as run_evaluation

    return run_evaluation(argv)


def view(argv: list[str]) -> int:
    """Look at runs: curves, groups, tokens, prompts, evaluations."""
    from gruppo.cli.view import main as show_runs

    return show_runs(argv)


def replay(argv: list[str]) -> int:
    """Try other rewards or recipes on the rollouts of a run."""
    from gruppo.cli.replay import main as run_replay

    return run_replay(argv)


def vllm_serve(argv: list[str]) -> int:
    """Start a vLLM server for trainers with vllm_mode="server"."""
    from gruppo.rollout.vllm.serve import main as start_server

    return start_server(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "train": train,
    "grpo": grpo,
    "rloo": rloo,
    "check": check,
    "plan": plan,
    "eval": evaluate,
    "view": view,
    "replay": replay,
    "vllm-serve": vllm_serve,
}
HELP = """\
usage: gruppo COMMAND [arguments]

Critic-free reinforcement learning for language models: GRPO, RLOO and family.

{commands}

examples:
  gruppo demo
  gruppo check recipes/grpo.yaml
  gruppo train recipes/grpo.yaml --model ./my-model --learning_rate 2e-6

`gruppo COMMAND --help` shows a command's options, with examples;
`gruppo --version` shows the version."""


def help_text() -> str:
    """The text of `gruppo --help`: one screen, with a line for each command."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {(function.__doc__ or '').strip()}" for name, function in COMMANDS.items()]
    return HELP.format(commands="\n".join(["commands:", *rows]))


# Library loggers, and the message that each logs at every start although nothing is wrong.
NOISY = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "DeepSpeed": "Setting accelerator to CPU",
}


def is_news(record: logging.LogRecord) -> bool:
    """A filter for these loggers: False for their known message."""
    return NOISY[record.name] not in str(record.msg)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    command, *arguments = list(sys.argv[1:] if argv is None else argv) or [""]
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr: a character that the locale lacks is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")
    if command in ("-h", "--help", "help", ""):
        print(help_text())
        return 0 if command else 2
    if command in ("--version", "-V"):
        print(f"gruppo {version('gruppo')}")
        return 0
    if command not in COMMANDS:
        kind = "option" if command.startswith("-") else "command"
        close = difflib.get_close_matches(command.lstrip("-"), COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        print(f"gruppo: unknown {kind} {command!r}{hint} See `gruppo --help`.", file=sys.stderr)
        return 2
    for library in NOISY:
        logging.getLogger(library).addFilter(is_news)
    from gruppo.errors import GruppoError

    try:
        return COMMANDS[command](arguments)
    except GruppoError as error:
        print(f"gruppo {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gruppo {command}: interrupted.", file=sys.stderr)
        return 130
