"""The check of vLLM's releases: its verdicts, and what replaces handles to a GPU's memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import vllm_releases, vllm_without_cuda
from benchmarks.vllm_releases import numbers_of, verdict

GOOD: dict[str, Any] = {"updates": [{}] * 4, "findings": [], "kl_last": 0.1, "drift_max": 1e-6}


@pytest.mark.parametrize(
    ("mode", "found", "said"),
    [
        ("server", {}, "passed"),
        ("server", {"drift_max": 0.2}, "has not the weights"),
        ("server-async", {"drift_max": 0.2}, "passed"),
        ("server-async", {}, "has not the weights"),
        ("colocate", {"kl_last": 0.001}, "hardly moved"),
        ("colocate", {"findings": ["audit/drift"]}, "audits: audit/drift"),
        ("colocate", {"updates": [{}] * 3}, "3 updates of 4"),
    ],
)
def test_verdicts(mode: str, found: dict[str, Any], said: str) -> None:
    assert said in verdict(mode, GOOD | found, steps=4)


def test_releases_are_in_order() -> None:
    assert sorted(["0.31.0", "0.4.2", "0.31.0.post1"], key=numbers_of) == ["0.4.2", "0.31.0", "0.31.0.post1"]


def test_the_committed_result_has_every_release_that_is_said_to_have_been_run() -> None:
    from gruppo.rollout.vllm.versions import FIRST, LAST_RUN

    path = Path(vllm_releases.__file__).parent / "results" / "vllm_releases.json"
    releases = json.loads(path.read_text())["releases"]
    assert {tuple(numbers_of(name)[:2]) for name in releases} == {
        (FIRST[0], minor) for minor in range(FIRST[1], LAST_RUN[1] + 1)
    }
    for name, found in releases.items():
        assert {mode: one["verdict"] for mode, one in found["modes"].items()} == dict.fromkeys(
            vllm_releases.MODES, "passed"
        ), name


READER = """
import importlib.metadata, json, sys
import torch
from torch.multiprocessing import reductions

(entry,) = importlib.metadata.entry_points(group="vllm.general_plugins")
entry.load()()
uuid = str(torch.cuda.get_device_properties(torch.accelerator.current_device_index()).uuid)
arguments = [bytes(json.loads(sys.argv[1])), 0, 0, 0, 0, 0, 0]
print(json.dumps([uuid, importlib.metadata.version("vllm"), reductions.rebuild_cuda_tensor(*arguments).tolist()]))
"""


def test_a_server_reads_bytes_in_place_of_a_handle(tmp_path: Path) -> None:
    folder = vllm_without_cuda.make_plugin(tmp_path / "plugin", "0.32.0")
    ((uuid, (content, *rest)),) = vllm_without_cuda.share_bytes(torch.tensor([1, 2, 250], dtype=torch.uint8)).items()
    assert len(rest) == 6, "vLLM replaces the seventh argument"
    program = [sys.executable, "-c", READER, json.dumps(list(content))]
    ended = subprocess.run(program, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == [uuid, "0.32.0+cpu", [1, 2, 250]]
