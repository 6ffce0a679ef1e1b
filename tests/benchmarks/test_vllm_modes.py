"""The benchmark of both modes of vLLM: its summary, and a small run of it against stand-ins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import vllm_modes

ROOT = Path(__file__).parents[2]


def test_the_summary_of_updates() -> None:
    drift, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
    updates = [
        {"step_time": 9.0, "reward": 0.1, f"{drift}/mean": 0.01, f"{drift}/max": 0.5, f"{ratio}/min": 0.0},
        {"step_time": 2.0, "reward": 0.3, f"{drift}/mean": 0.03, f"{drift}/max": 0.2, f"{ratio}/min": 0.9},
        {"step_time": 4.0, "reward": 0.5, "audit/drift": 1.0, "audit/seconds": 0.1},
    ]
    found = vllm_modes.summary(updates)
    assert found["step_seconds"] == 3.0, "without the first"
    assert (found["reward_first"], found["reward_last"]) == (0.3, 0.3)
    assert (found["drift_mean"], found["drift_max"], found["ratio_min"]) == (0.02, 0.5, 0.0)
    assert found["sync_seconds"] is None
    assert found["findings"] == ["audit/drift"]


@pytest.mark.slow
def test_a_tiny_run_of_all_modes(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/vllm_modes.py", "--tiny", "--steps", "3", "--out", str(out)]
    subprocess.run([*command, "--modes", ",".join(vllm_modes.MODES)], cwd=ROOT, check=True, timeout=240)
    result = json.loads(out.read_text())
    assert result["failed"] == {}
    assert result["modes"].keys() == set(vllm_modes.MODES)
    colocate, server = result["modes"]["colocate"], result["modes"]["server"]
    assert colocate["reward_last"] == server["reward_last"], "the same run"
    for mode in ("colocate", "sleep", "server"):
        assert result["modes"][mode]["drift_max"] < 1e-4
        assert result["modes"][mode]["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert len(result["modes"][mode]["updates"]) == 3
    ahead = result["modes"]["server-async"]
    assert (ahead["staleness"], len(ahead["updates"]), ahead["findings"]) == (1.0, 3, [])
    assert ahead["wait_seconds"] is not None
    assert result["versions"]["vllm"] == "a stand-in"
