"""The benchmark of both modes of vLLM: its summary, and a small run of it against stand-ins."""

import argparse
import json
import os
import subprocess
import sys
import time
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import vllm_modes, vllm_processes
from benchmarks.vllm_processes import Runner
from gruppo.rollout.vllm.client import VLLMClient

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


def options_of(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    return vllm_modes.parser().parse_args([*arguments, "--out", str(tmp_path / "result.json")])


def test_a_mode_that_fails_loses_no_other_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options = options_of(tmp_path, "--modes", "builtin,colocate,sleep")
    on_disk: list[Any] = []

    def run(self: Runner, mode: str) -> dict[str, Any]:
        if on_disk or mode != "builtin":
            on_disk.append(json.loads(options.out.read_text()))
        if mode == "colocate":
            routine = 'INFO: "GET /health HTTP/1.1" 200 OK\n' * 300
            self.log_of(mode).write_text("long before" + "x" * 9000 + "\nCUDA error\n" + routine)
            raise KeyError("what nobody thought of")
        return {"step_seconds": 1.0, "updates": []}

    monkeypatch.setattr(Runner, "run", run)
    vllm_modes.measure(options, {"modes": {}, "failed": {}}, tmp_path)
    assert [list(found["modes"]) for found in on_disk] == [["builtin"], ["builtin"]], "after each mode"
    result = json.loads(options.out.read_text())
    assert (list(result["modes"]), list(result["failed"])) == (["builtin", "sleep"], ["colocate"])
    printed = capsys.readouterr().out
    for said in (result["failed"]["colocate"], printed):
        assert "KeyError: 'what nobody thought of'" in said
        assert "CUDA error" in said
        assert "long before" not in said


def test_a_mode_has_a_limit_and_all_modes_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import sys, time\nprint(sys.argv, flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(vllm_processes, "SCRIPT", script)
    start = time.monotonic()
    with Runner(options_of(tmp_path, "--limit", "2"), tmp_path) as runner:
        with pytest.raises(subprocess.TimeoutExpired):
            runner.run("builtin")
        assert "'--limit', '2.0'" in runner.log_of("builtin").read_text(), "so that it can say where it is in time"
    assert time.monotonic() - start < 20
    with pytest.raises(TimeoutError, match="not begun"):
        Runner(options_of(tmp_path, "--total", "19"), tmp_path).run("builtin")


def test_a_process_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    with vllm_processes.started([sys.executable, "-c", child], dict(os.environ), tmp_path / "log") as process:
        while not (children := psutil.Process(process.pid).children()):
            time.sleep(0.05)
    assert process.returncode is not None
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


def test_servers_that_follow_each_other_are_one_unless_a_mode_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextmanager
    def started(command: list[str], variables: dict[str, str], log: Path) -> Any:
        what = "server" if "vllm-serve" in log.name else "trainer"
        events.append(what)
        if what == "trainer":
            Path(command[command.index("--record") + 1]).write_text("{}")
        assert ("VLLM_SERVER_DEV_MODE" in variables) == (what == "server")
        yield types.SimpleNamespace(wait=lambda seconds: 0, poll=lambda: None)
        if what == "server":
            events.append("end")

    monkeypatch.setattr(vllm_processes, "started", started)
    monkeypatch.setattr(VLLMClient, "wait_until_up", lambda self, seconds, check: check())
    with Runner(options_of(tmp_path, "--model", "org/model"), tmp_path) as runner:
        assert runner.run("server").keys() == {"server_start_seconds"}
        runner.run("server-async")
        runner.run("builtin")
        runner.run("server")
        runner.report("server", RuntimeError("it hangs"))
        runner.run("server")
    first = ["server", "trainer", "trainer", "end", "trainer"]
    assert events == [*first, "server", "trainer", "end", "server", "trainer", "end"]


@pytest.mark.slow
def test_a_tiny_run_of_all_modes(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    without = ("server-nccl", "colocate-regex", "server-regex")  # the stand-ins have neither
    modes = [mode for mode in vllm_modes.MODES if mode not in without]
    command = [sys.executable, "benchmarks/vllm_modes.py", "--tiny", "--steps", "3", "--groups", "4"]
    command += ["--modes", ",".join(modes), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    result = json.loads(out.read_text())
    assert result["failed"] == {}
    assert result["modes"].keys() == set(modes)
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


def test_modes_are_added_to_a_result_of_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"commit": "a", "device": "b", "versions": {}, "command": "first"}
    monkeypatch.setattr(vllm_modes, "provenance", lambda: {**facts, "versions": {}})
    options = options_of(tmp_path, "--tiny", "--modes", "server", "--add")
    before = {**facts, "versions": {"vllm": "a stand-in"}, "steps": 8, "groups": 16}
    before |= {"modes": {"builtin": {"step_seconds": 1.0}}, "failed": {"server": "too slow", "sleep": "no time"}}
    options.out.write_text(json.dumps(before))
    facts["command"] = "second"
    result = vllm_modes.begun(options)
    assert (result["command"], result["modes"]) == ("first; second", before["modes"])
    assert result["failed"] == {"sleep": "no time"}, "the other one is run again"
    facts["commit"] = "c"
    with pytest.raises(SystemExit, match="measured with another commit"):
        vllm_modes.begun(options)


def test_what_makes_a_mode_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name for a host in NCCL, on both sides, and its own way for weights; seeds but in one mode."""
    options = options_of(tmp_path, "--modes", "server-nccl", "--model", "m")
    started: list[tuple[Any, Any]] = []

    @contextmanager
    def noted(command: Any, variables: Any, log: Path) -> Any:
        started.append((command, variables))
        yield types.SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(vllm_processes, "started", noted)
    monkeypatch.setattr(VLLMClient, "wait_until_up", lambda *args: None)
    with Runner(options, tmp_path) as runner:
        for mode in ("server", "server-async", "server-nccl"):
            runner._need_server(mode)
    (ipc, _), (nccl, variables) = started
    assert '"ipc"' in str(ipc)
    assert '"nccl"' in str(nccl), "another server, since it takes weights another way"
    trainer = vllm_processes.environment("server-nccl", options)
    assert {variables["NCCL_HOSTID"], trainer["NCCL_HOSTID"]} == {"server", "trainer"}
    assert "NCCL_HOSTID" not in vllm_processes.environment("colocate", options)
    seeded = {mode: vllm_modes.config_fields(mode, options).get("vllm_seed_requests") for mode in vllm_modes.MODES}
    assert [mode for mode, seeds in seeded.items() if seeds is False] == ["server-unseeded"]
