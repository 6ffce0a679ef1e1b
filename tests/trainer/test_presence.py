"""Processes that watch each other: what a line says, who counts as lost, and that nobody is left waiting."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import ConfigError
from gruppo.trainer.processes import attendance
from gruppo.trainer.processes.attendance import Line, Register
from gruppo.trainer.processes.presence import LOST, Presence, _Watch
from gruppo.trainer.processes.stopping import STOPPED, STOPPED_UNSAVED
from tests.helpers import base_args
from tests.processes import run_apart
from tests.zero import needs_deepspeed, runs_deepspeed

WORKING = Line(host="far", pid=7, place="elsewhere", beat=1, phase="sampling", seconds=3.0, update=7)
WAITING = replace(WORKING, phase="", pid=6)


def register(*lines: Line, stop_within: float | None = None) -> Register:
    made = Register(silence=20, deadline=100, stop_within=stop_within)
    for process, line in enumerate(lines):
        made.note(process, line, now=0.0)
    return made


def test_a_line_says_what_its_process_is_doing() -> None:
    assert str(WORKING) == "sampling in update 7"
    assert str(WAITING) == "waiting for the others in update 7"


@pytest.mark.parametrize(
    ("line", "now", "said"),
    [
        (WORKING, 19.0, None),
        (WORKING, 21.0, "process 1 (pid 7 on far) or its host died or is frozen: no sign of life for 21 s"),
        (replace(WORKING, state="left"), 99.0, None),
        (
            replace(WORKING, state="failed", said="OSError: no"),
            1.0,
            "process 1 failed: OSError: no, while samp",
        ),
        (replace(Line.here(), phase="saving", update=2), 999.0, None),  # alive here, whatever it does not say
    ],
)
def test_who_is_lost(line: Line, now: float, said: str | None) -> None:
    made = register(replace(Line.here(), seconds=1.0), line)
    found = made.lost(now)
    assert (found or "").startswith(said or "")
    assert (found is None) == (said is None)


def test_a_process_that_is_gone_is_lost_at_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    line = replace(Line.here(), pid=child.pid, phase="updating", update=3)
    child.wait()
    assert register(Line.here(), line).lost(0.0) == (
        f"process 1 (pid {child.pid} on {line.host}) died while updating in update 3"
    )
    assert not Line.here().is_gone


def test_a_failure_is_named_before_those_who_ended_because_of_it() -> None:
    silent = replace(WORKING, place="a third")
    failed = replace(WORKING, state="failed", said="ValueError: x")
    assert "process 1 failed" in (register(silent, failed).lost(50.0) or "")


def test_work_that_the_others_wait_for_has_a_deadline() -> None:
    long = replace(WORKING, seconds=150.0)
    waiting = replace(WAITING, seconds=120.0)
    assert "did not return within 100 s (ddp_timeout) from sampling" in (register(waiting, long).lost(1.0) or "")
    assert register(replace(WAITING, seconds=90.0), long).lost(1.0) is None
    assert register(long, long).lost(1.0) is None, "nobody waits"


def test_whom_the_others_wait_for_is_said() -> None:
    slow = replace(WORKING, seconds=64.0)
    assert register(replace(WAITING, seconds=31.0), slow).late(1.0) == (
        "Waiting for process 1 (sampling in update 7, for 65 s), for 31 s so far."
    )
    assert register(replace(WAITING, seconds=29.0), slow).late(1.0) is None


# On this host, and alive: what a process that is frozen said last stays there.
FROZEN = replace(Line.here(), beat=1, phase="asking the rewards", seconds=3.0, update=7)


def frozen(*others: Line, line: Line = FROZEN, now: float) -> Register:
    """Process 0 is frozen since 0, the others are heard of now."""
    made = register(line)
    for process, other in enumerate(others, start=1):
        made.note(process, other, now)
    return made


@pytest.mark.parametrize("phase", ["asking the rewards", ""])
@pytest.mark.parametrize("others", ["", "updating"])
def test_one_that_is_frozen_here_is_named_and_has_the_same_deadline(phase: str, others: str) -> None:
    """Whatever it was doing, and where the others are in a pass that holds exchanges, too."""
    line, says = replace(FROZEN, phase=phase), str(replace(FROZEN, phase=phase))
    for now, waits in ((90.0, 120.0), (120.0, 90.0)):
        made = frozen(replace(WAITING, phase=others, seconds=waits), line=line, now=now)
        assert made.lost(now) is None, "one of the two has not been long enough"
        assert made.late(now) == (
            f"Waiting for process 0 ({says}, for {now + 3 * bool(phase):.0f} s; it is alive, but has been silent for "
            f"{now:.0f} s), for {waits:.0f} s so far."
        )
    assert frozen(replace(WAITING, phase=others, seconds=120.0), line=line, now=120.0).lost(120.0) == (
        f"process 0 (pid {os.getpid()} on {line.host}) did not return within 100 s (ddp_timeout) from {says}, and "
        "others are waiting; it is alive, but has been silent for 120 s"
    )


def test_nobody_waits_for_one_that_is_frozen_if_all_are() -> None:
    assert register(FROZEN, replace(FROZEN, phase="")).lost(999.0) is None


def test_one_that_was_asked_to_stop_and_froze_is_overdue() -> None:
    made = register(WAITING, replace(FROZEN, stopping=1.0), stop_within=10.0)
    assert made.overdue(8.0) is None
    assert "process 1 (asking the rewards in update 7, for 33 s; it is alive" in (made.overdue(30.0) or "")


def test_while_the_reader_was_away_nobody_was_silent() -> None:
    """A reward that holds the interpreter in all processes at once is not the death of those that end last."""
    made = register(WAITING, WORKING)
    for now in (1.0, 2.0, 62.0, 63.0):
        made.look(now)
    assert made.lost(63.0) is None
    for now in range(64, 90):
        made.look(float(now))
    assert "no sign of life for" in (made.lost(90.0) or "")


def test_phases_are_nested() -> None:
    own = Presence(rank=0, world=1, silence=20.0, deadline=9.0, update=lambda: 3)
    seen = [own.line().phase]
    with own.watching(), own.during("running tools"):
        seen.append(own.line().phase)
        with own.waiting():
            seen.append(own.line().phase)
        seen.append(own.line().phase)
    assert [*seen, own.line().phase] == ["", "running tools", "", "running tools", ""]
    assert own.line().update == 3
    assert own.take_seconds("running tools") > 0
    assert own.take_seconds("running tools") == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("process_timeout", value) for value in (0, 4.9, 1e9, "soon")] + [("stop_timeout", 0), ("stop_timeout", "soon")],
)
def test_a_timeout_that_makes_no_sense_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    from gruppo import GRPOConfig

    with pytest.raises(ConfigError, match=name):
        GRPOConfig(**base_args(tmp_path, **{name: value}))


def run(folder: Path, moment: str, act: str, victim: int, seconds: float = 0.0, **more: Any) -> Any:
    store = more.pop("store", "file")
    facts = {"moment": moment, "act": act, "victim": victim, "seconds": seconds, **more}
    (folder / "scenario.json").write_text(json.dumps(facts))
    return run_apart(2, "tests.trainer.lost_process", folder, store=store)


PHASES = {
    "prompts": "reading prompts",
    "sampling": "sampling",
    "rewards": "asking the rewards",
    "update": "updating",
    "checkpoint": "saving",
    "benchmark": "running benchmarks",
}
KILLS = [("sampling", 1), ("rewards", 0), ("update", 1), ("checkpoint", 0), ("benchmark", 1)]


@pytest.mark.medium
@pytest.mark.parametrize(("moment", "victim"), KILLS)
def test_a_process_that_is_killed_stops_the_other(moment: str, victim: int, tmp_path: Path) -> None:
    codes, said, seconds = run(tmp_path, moment, "kill", victim)
    other = 1 - victim
    assert codes[victim] == -9
    assert codes[other] not in (0, -9), said[other]
    assert seconds < 30
    assert f"process {victim} (pid " in said[other]
    assert f"died while {PHASES[moment]} in update" in said[other]


@needs_deepspeed
@runs_deepspeed
@pytest.mark.parametrize(
    ("stage", "moment", "victim"),
    [
        pytest.param(3, "update", 1, marks=pytest.mark.medium),
        *(
            pytest.param(stage, *kill, marks=pytest.mark.slow)
            for stage in (2, 3)
            for kill in KILLS
            if kill[0] != "benchmark" and (stage, *kill) != (3, "update", 1)
        ),
    ],
)
def test_a_process_that_is_killed_under_deepspeed(stage: int, moment: str, victim: int, tmp_path: Path) -> None:
    codes, said, seconds = run(tmp_path, moment, "kill", victim, zero=stage)
    assert codes[victim] == -9
    assert codes[1 - victim] not in (0, -9), said[1 - victim]
    assert seconds < 30
    assert f"died while {PHASES[moment]} in update" in said[1 - victim]


@pytest.mark.medium
@pytest.mark.parametrize(("moment", "victim"), [("prompts", 1), ("sampling", 0), ("update", 1), ("benchmark", 0)])
def test_an_error_of_one_process_stops_the_other_with_its_reason(moment: str, victim: int, tmp_path: Path) -> None:
    codes, said, seconds = run(tmp_path, moment, "raise", victim)
    assert codes[victim] == 1
    assert codes[1 - victim] in (1, LOST)
    assert seconds < 30
    assert f"process {victim} failed: " in said[1 - victim]
    assert "broken on purpose" in said[1 - victim]
    assert f"while {PHASES[moment]} in update" in said[1 - victim]


@pytest.mark.medium
def test_an_error_of_a_reward_is_raised_by_all(tmp_path: Path) -> None:
    codes, said, seconds = run(tmp_path, "rewards", "raise", 1)
    assert codes == (1, 1)
    assert seconds < 3, "nobody waits to be heard"
    assert "On process 1: " in said[0]
    assert "broken on purpose" in said[0]


@pytest.mark.medium
@pytest.mark.sampled(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_that_cannot_stop_in_time_ends(victim: int, tmp_path: Path) -> None:
    """One process has the signal, and hangs in a reward; the other waits for it."""
    codes, said, seconds = run(tmp_path, "rewards", "signal", victim, seconds=60.0)
    assert codes == (STOPPED_UNSAVED, STOPPED_UNSAVED), said
    assert seconds < 10
    for text in said:
        assert "the run was asked to stop" in text
        assert f"not finished: process {victim} (asking the rewards in update 2" in text


@pytest.mark.parametrize(
    ("changes", "is_overdue"),
    [
        ({"stopping": 11.0}, True),
        ({"stopping": 9.0}, False),
        ({"stopping": 11.0, "phase": "saving"}, False),
        ({"stopping": 11.0, "state": "left"}, False),
    ],
)
def test_when_a_stop_is_overdue(changes: dict[str, Any], is_overdue: bool) -> None:
    made = register(WAITING, replace(WORKING, **changes), stop_within=10.0)
    assert (made.overdue(0.5) is not None) == is_overdue
    assert register(WAITING, replace(WORKING, **changes)).overdue(0.5) is None, "without a limit"


def test_only_the_thread_speaks_to_its_store() -> None:
    """And it is gone when the watch is over: nothing is taken down while it is in the store."""
    users: set[str] = set()

    class Store(dict[str, Any]):
        def set(self, key: str, value: str) -> None:
            users.add(threading.current_thread().name)
            self[key] = value

        def check(self, keys: list[str]) -> bool:
            users.add(threading.current_thread().name)
            return all(key in self for key in keys)

        def add(self, key: str, amount: int) -> int:
            users.add(threading.current_thread().name)
            self[key] = self.get(key, 0) + amount
            return int(self[key])

    own, store = Presence(rank=0, world=2, silence=20.0, deadline=9.0), Store()
    watch = _Watch(own, store)
    watch.start()
    assert json.loads(store["line/0"])["state"] == "here"
    store["heard"] = 1  # by the other process
    watch.end("failed", "ValueError: x")
    assert json.loads(store["line/0"])["said"] == "ValueError: x"
    assert users == {"gruppo-presence"}
    assert "gruppo-presence" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.medium
def test_slow_is_not_dead(tmp_path: Path) -> None:
    """It sleeps longer than the time of silence, on a host where nobody can see its process."""
    codes, said, _ = run(tmp_path, "rewards", "sleep", 1, seconds=9.0, patience=3.0, elsewhere=True)
    assert codes == (0, 0), said
    assert [(tmp_path / f"done{rank}").read_text() for rank in (0, 1)] == ["4", "4"]
    assert "Waiting for process 1 (asking the rewards in update 2" in said[0]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("packed", "quantile"),
    [(True, 1.0), (False, 1.0), (True, 0.5), pytest.param(False, 0.5, marks=pytest.mark.slow)],
)
def test_one_that_is_slow_in_an_update_is_named(packed: bool, quantile: float, tmp_path: Path) -> None:
    """Meanwhile the other one waits inside its backward pass; the report of stragglers names the slow one too.

    With `top_entropy_quantile` it waits before that, where processes agree on a threshold.
    """
    how = {"packed": packed, "quantile": quantile}
    codes, said, _ = run(tmp_path, "update", "sleep", 1, seconds=5.0, patience=1.5, **how)
    assert codes == (0, 0), said
    assert re.search(r"Waiting for process 1 \(updating in update [12], for ", said[0])
    logs = json.loads((tmp_path / "logs0.json").read_text())
    uneven = max(logs, key=lambda log: log["balance/seconds_max_over_mean"])
    assert uneven["balance/slowest_rank"] == 1
    assert uneven["balance/seconds_max_over_mean"] > 1.5


def test_one_that_may_be_waiting_is_not_waited_for() -> None:
    """In an exchange of gradients it counts as waiting for one that is still in its own work."""
    exchanging = replace(WORKING, phase="updating", waits=True, seconds=200.0)
    assert register(exchanging, exchanging).lost(now=1.0) is None
    made = register(exchanging, replace(WORKING, phase="updating", seconds=200.0))
    assert (made.late(now=1.0) or "").startswith("Waiting for process 1 (updating in update 7, for 201 s)")
    assert "process 1 (pid 7 on far) did not return within 100 s" in (made.lost(now=1.0) or "")


@pytest.mark.slow
def test_one_that_holds_the_interpreter_here_is_waited_for(tmp_path: Path) -> None:
    codes, said, _ = run(tmp_path, "rewards", "hold", 1, seconds=8.0, patience=5.5)
    assert codes == (0, 0), said
    assert "Waiting for process 1 (asking the rewards in update 2" in said[0]
    assert "it is alive, but has been silent for" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "act", "victim"),
    [("rewards", "freeze", 1), ("rewards", "freeze", 0), ("rewards", "hold", 1), ("update", "freeze", 1)],
)
def test_one_that_is_frozen_here_ends_the_run(moment: str, act: str, victim: int, tmp_path: Path) -> None:
    """It is stopped, or holds the interpreter; when it comes to itself, the other one has ended."""
    codes, said, _ = run(tmp_path, moment, act, victim, seconds=25.0, ddp_timeout=9, patience=5.5)
    assert 0 not in codes
    assert f"Waiting for process {victim} (" in said[1 - victim]
    assert f"process {victim} (pid " in said[1 - victim]
    assert f"did not return within 9 s (ddp_timeout) from {PHASES[moment]} in update 2" in said[1 - victim]
    assert "it is alive, but has been silent for" in said[1 - victim]


@pytest.mark.slow
def test_one_that_is_stopped_and_holds_the_store_does_not_keep_the_others(tmp_path: Path) -> None:
    codes, said, seconds = run(tmp_path, "rewards", "freeze", 0, seconds=45.0, ddp_timeout=9, store="tcp")
    assert codes[1] == LOST
    assert seconds > 10, "the other one had ended long before"
    assert "process 0, or whichever process holds the store, has not answered for" in said[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            {"act": "kill", "victim": 1, "elsewhere": True},
            "or its host died or is frozen: no sign of life for",
        ),
        ({"act": "hold", "victim": 1, "seconds": 15.0, "elsewhere": True}, "or its host died or is frozen"),
        ({"act": "kill", "victim": 0, "store": "tcp"}, "process 0"),
        ({"act": "raise", "victim": 0, "store": "tcp"}, "On process 0: RewardError: The reward 'reward' failed"),
        ({"act": "sleep", "victim": 1, "seconds": 60.0, "ddp_timeout": 8}, "process 1"),
    ],
)
def test_from_afar(facts: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Another host; a store that ends with its process; a process that never comes back."""
    codes, said, _ = run(tmp_path, "rewards", **facts)
    other = 1 - facts["victim"]
    assert codes[other] not in (0, -9)
    assert expected in said[other]


def test_the_exit_code_is_its_own() -> None:
    assert LOST not in (0, 1, STOPPED, STOPPED_UNSAVED)
    assert attendance._is_alive(os.getpid())
