"""Provenance that every result file records, and the command line of benchmarks that run over several seeds."""

import argparse
import importlib.metadata as metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def git_commit() -> str:
    """The commit that was measured, with the suffix `+changes` if there are uncommitted changes in gruppo.

    On a machine that has a copy of the files without the git history, GRUPPO_COMMIT provides the commit.
    """
    if "GRUPPO_COMMIT" in os.environ:
        return os.environ["GRUPPO_COMMIT"]
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "gruppo"], capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changed.strip() else "")


def _portable(argument: str) -> str:
    """A command-line argument with an absolute path reduced to the file name: folders are specific to a machine."""
    option, equals, value = argument.partition("=")
    if equals and Path(value).is_absolute():
        return f"{option}={Path(value).name}"
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return "-m pytest" if path.name == "__main__.py" or path.name == "pytest" else path.name


def provenance(*packages: str) -> dict[str, Any]:
    """The commit, date, device, versions and command of a measurement."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "accelerate", *packages)}
    return {
        "commit": git_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device,
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["python", *map(_portable, sys.argv)]),
    }


def measure_seeds(description: str | None, *cases: Callable[[int], dict[str, Any]]) -> None:
    """The command line of a benchmark that repeats its cases over `--seeds` and writes all runs to `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    runs = []
    for case in cases:
        for seed in options.seeds:
            runs.append(case(seed))
            print(runs[-1], flush=True)
    if options.out:
        options.out.write_text(json.dumps({**provenance("gruppo"), "runs": runs}, indent=1) + "\n")
