"""The code that is running: versions of packages, and commits of git checkouts."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["SOURCE", "commit_of", "source_commit", "versions"]

PACKAGES = ("gruppo", "torch", "transformers", "accelerate", "datasets", "peft", "triton", "numpy")
SOURCE = Path(__file__).parents[2]  # a checkout, or where packages are installed


@cache
def versions() -> dict[str, str]:
    """The versions of the installed packages among those that a run depends on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def commit_of(folder: str) -> str | None:
    """The commit that a folder is checked out at, followed by + if it has local changes; None outside of git."""
    try:
        read = {"cwd": folder, "capture_output": True, "text": True, "timeout": 5}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **read)  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **read)  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout.strip()) if head.returncode == 0 else None


def source_commit() -> str | None:
    """The commit of the library itself, if it is a git checkout."""
    return commit_of(str(SOURCE)) if (SOURCE / ".git").exists() else None
