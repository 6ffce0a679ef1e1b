"""The environment of a run: versions, device, processes, and the commits of its code."""

import platform
import sys
from pathlib import Path
from typing import Any

import torch

from gruppo.runs.machine import commit_of, source_commit, versions


def environment_of(args: Any) -> dict[str, Any]:
    """The environment as the record of a run describes it."""
    device = torch.device(args.device)
    return {
        "versions": versions(),
        "commit": commit_of(str(Path.cwd())),
        "gruppo_commit": source_commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": args.world_size,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
