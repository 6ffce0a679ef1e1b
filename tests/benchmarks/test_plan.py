"""The benchmarks behind `gruppo plan`: what they run and what they compare it with."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_constants, plan_cpu, plan_gpu, plan_runs
from gruppo import GRPOConfig
from gruppo.plan import DEVICES
from gruppo.plan.measured import MEASURED

CASES = {**plan_cpu.CASES, **plan_gpu.CASES}


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_config_and_a_prediction(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    args = GRPOConfig(**case.settings(str(tmp_path), on_cpu=True))
    assert args.generation_batch_size == case.prompts * case.completions
    found = plan_gpu.predicted(case, DEVICES["H200"])
    assert found["peak_bytes"]["update"] > found["peak_bytes"]["loading"] > 0
    assert found["step_seconds"] > 0
    assert ("scoring" in found["peak_bytes"]) is (case.fields.get("beta", 0) > 0)


def test_phases_keep_their_own_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5, 30, 7, 9])
    probe = plan_runs.Probe(on_cpu=True)
    monkeypatch.setattr(probe, "reset", lambda: None)
    monkeypatch.setattr(probe, "read", lambda: next(readings))
    with probe.phase("sampling", "update", lambda: 100):
        pass
    with probe.phase("parity", "update"):
        pass
    assert probe.peaks == {"update": 7, "sampling": 130, "parity": 9}


def test_the_constants_are_those_of_the_committed_results() -> None:
    cuda = MEASURED["cuda"]
    assert {key: cuda[key] for key in ("program_bytes", "gap")} == plan_constants.memory_of_cuda()
    reached = plan_constants.update_constants()
    assert {key: cuda[key] for key in reached} == reached
    assert cuda["host_seconds_per_completion"] == plan_constants.seconds_per_completion()
    assert plan_constants.worst(plan_constants.decode_pairs(cuda)) < 0.15
    runs: dict[str, Any] = plan_constants.load("plan_cpu.json")["runs"]
    assert MEASURED["cpu"]["program_bytes"] == runs["tiny"]["peak_bytes"]["loading"]


def test_a_fit_finds_the_best_point_of_its_grid() -> None:
    constants = {"a": 0.0, "b": 5.0}
    error = plan_constants.fit(constants, {"a": [1.0, 2.0, 3.0]}, lambda point: abs(point["a"] - 2.2) + point["b"] * 0)
    assert constants == {"a": 2.0, "b": 5.0}
    assert error == pytest.approx(0.2)


@pytest.mark.slow
def test_a_tiny_run_is_measured_phase_by_phase() -> None:
    case = plan_gpu.tiny(plan_gpu.CASES["0.5B bf16, reference"])
    found = plan_runs.apart(case, on_cpu=True, limit=500, script=plan_gpu.__file__)
    assert "failed" not in found, json.dumps(found)
    assert set(found["peak_bytes"]) == {"loading", "update", "sampling", "parity", "scoring"}
    assert len(found["steps"]) == 2
    assert found["trained"] == found["weights"]
