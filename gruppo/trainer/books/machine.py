"""Where a run runs: versions, device, processes, the code it is made of."""

import platform
import sys
from pathlib import Path
from typing import Any

import torch

from gruppo.runs.machine import commit_of, source_commit, versions


def environment_of(args: Any) -> dict[str, Any]:
    """What the record of a run says about the machine."""
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
