"""The command line: one table from a command's name to a plain function of its arguments.

A new command is one function, whose docstring is its line in `gruppo --help`, and one row in COMMANDS. Functions
import what they need when they run, so that `gruppo --help` stays instant.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

__all__ = ["COMMANDS", "main"]


def demo(argv: list[str]) -> int:
    """Watch a tiny model learn arithmetic word problems (under three minutes, CPU only)."""
    from gruppo.demo.run import main as run_demo

    return run_demo(argv)


def evaluate(argv: list[str]) -> int:
    """Accuracy of a model on GSM8K, MATH, MGSM-zh, CMATH or a benchmark of your own."""
    from gruppo.cli.evaluate import main as run_evaluation

    return run_evaluation(argv)


def replay(argv: list[str]) -> int:
    """Score a recorded run with other rewards, or compute another recipe's loss on it."""
    from gruppo.cli.replay import main as run_replay

    return run_replay(argv)


def train(argv: list[str]) -> int:
    """Train from one YAML file, on one process or on several (--launch ddp, fsdp2, zero2, zero3)."""
    from gruppo.cli.train import main as run_training

    return run_training(argv)


def vllm_serve(argv: list[str]) -> int:
    """Start a vLLM server for trainers with vllm_mode="server"."""
    from gruppo.rollout.vllm.serve import main as start_server

    return start_server(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "eval": evaluate,
    "replay": replay,
    "train": train,
    "vllm-serve": vllm_serve,
}


def _parser() -> argparse.ArgumentParser:
    """The top-level parser; each command parses the rest of the line itself."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {(function.__doc__ or '').strip()}" for name, function in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="gruppo",
        description="Critic-free reinforcement learning for language models: GRPO, RLOO and their family.",
        epilog="\n".join(["commands:", *rows, "", "`gruppo COMMAND --help` shows the options of a command."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="what to do; see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the command")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.version:
        print(f"gruppo {version('gruppo')}")
        return 0
    if options.command is None:
        parser.print_help()
        return 2
    if options.command not in COMMANDS:
        nearest = difflib.get_close_matches(options.command, COMMANDS, n=1, cutoff=0.0)[0]
        parser.error(f"unknown command {options.command!r}; did you mean {nearest!r}?")
    # Read by OpenMP when torch is loaded: threads wait asleep, not spinning. That costs a few per cent on an idle
    # machine; beside other work a step takes a third of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from gruppo.errors import ConfigError, DataError, RunLockedError, SandboxError

    try:
        return COMMANDS[options.command](options.arguments)
    except (ConfigError, DataError, RunLockedError, SandboxError) as error:  # it says what to do
        print(f"gruppo {options.command}: {error}", file=sys.stderr)
        return 2
