"""Where a run runs: versions, device, processes, the code it is made of."""

import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("gruppo", "torch", "transformers", "accelerate", "datasets", "peft", "triton", "numpy")


SOURCE = Path(__file__).parents[2]  # a checkout, or where packages are installed


@cache
def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def commit_of(folder: str) -> str | None:
    """The commit that a folder is checked out at, with + behind it if it was changed; None outside of git."""
    try:
        read = {"cwd": folder, "capture_output": True, "text": True, "timeout": 5}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **read)  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **read)  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout.strip()) if head.returncode == 0 else None


def environment_of(args: Any) -> dict[str, Any]:
    """What the record of a run says about the machine."""
    device = torch.device(args.device)
    return {
        "versions": versions(),
        "commit": commit_of(str(Path.cwd())),
        "gruppo_commit": commit_of(str(SOURCE)) if (SOURCE / ".git").exists() else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": args.world_size,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
