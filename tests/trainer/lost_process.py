"""Two processes, one of which dies, fails, sleeps or freezes at a given moment of a run; run by test_presence.py."""

import ctypes
import json
import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from gruppo.trainer.processes import attendance
from tests import zero
from tests.helpers import length_reward
from tests.trainer.scripted import make_trainer, scripted_rollout

RANK = int(os.environ.get("RANK", "0"))


class Mishap:
    """Happens to one process the second time that it reaches the moment; an error is raised each time from then on."""

    def __init__(self, moment: str, act: str, victim: int, seconds: float):
        self.moment, self.act, self.victim, self.seconds = moment, act, victim, seconds
        self.times = 0

    def __call__(self, moment: str) -> None:
        if moment != self.moment or self.victim != RANK:
            return
        self.times += 1
        if self.times < 2 or (self.times > 2 and self.act in ("sleep", "signal", "freeze", "hold")):
            return
        time.sleep(0.3)  # gives the process time to write its presence line
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.act == "raise":
            raise ValueError("broken on purpose")
        if self.act == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.act == "freeze":
            subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.act == "hold":  # holds the GIL, like an endless regular expression: no other Python thread runs
            ctypes.PyDLL(None).usleep(int(self.seconds * 1e6))
        else:
            time.sleep(self.seconds)


class Benchmarks:
    """Replaces `TrainingBenchmarks`: each process grades its share, and all gather the results."""

    def __init__(self, mishap: Mishap):
        self.mishap = mishap

    def run(self, backend: Any, process: int, processes: int, gather: Any) -> dict[str, float]:
        self.mishap("benchmark")
        return {"share": float(len(gather([process])))}


def main(folder: Path) -> None:
    facts = json.loads((folder / "scenario.json").read_text())
    attendance.PATIENCE = facts.pop("patience", attendance.PATIENCE)
    if facts.pop("elsewhere", False):  # as if each process were on a different host
        attendance._place = lambda: f"host {RANK}"
    deadline = facts.pop("ddp_timeout", 1800)
    packed, quantile = facts.pop("packed", True), facts.pop("quantile", 1.0)
    if (stage := facts.pop("zero", None)) is not None:
        zero.prepare()
        os.environ.pop("ACCELERATE_USE_CPU")
    _set_pg_timeout(timedelta(seconds=deadline))  # as for the process group of a real run
    mishap = Mishap(**facts)

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        mishap("rewards")
        return length_reward(completions)

    def rollout(prompts: list[Any], trainer: Any) -> Any:
        mishap("sampling")
        return scripted_rollout(prompts, trainer)

    trainer = make_trainer(
        "grpo",
        folder / "run",
        reward=reward,
        dtype=torch.float32,
        rollout=rollout,
        parity_check="off",
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        reward_on_error="raise" if mishap.act == "raise" else "abstain",
        process_timeout=5.0,
        stop_timeout=3.0,
        ddp_timeout=deadline,
        per_device_train_batch_size=4,
        logging_steps=1,
        packed_update=packed,
        top_entropy_quantile=quantile,
        **({} if stage is None else {"deepspeed": zero.config(stage)}),
    )
    trainer.model.model.layers[0].register_forward_pre_hook(lambda *_: mishap("update"))
    rows_of = trainer.rows_of
    trainer.rows_of = lambda *args, **kw: (mishap("prompts"), rows_of(*args, **kw))[1]
    write_parts = trainer._write_parts
    trainer._write_parts = lambda *args: (mishap("checkpoint"), write_parts(*args))[1]
    if mishap.moment == "benchmark":
        trainer.benchmarks = Benchmarks(mishap)
        trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
        trainer.state.eval_steps = 1
    trainer.train()
    (folder / f"done{RANK}").write_text(str(trainer.state.global_step))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    (folder / f"logs{RANK}.json").write_text(json.dumps(logs))
