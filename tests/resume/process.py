"""What happens in the process of a run. The server that forks it has imported everything that this file imports."""

import gc
import json
import os
import signal
import threading
import traceback
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tqdm import tqdm

import gruppo.trainer.grpo
import gruppo.trainer.rloo  # noqa: F401  # imported here, so that no run has to
from tests.processes import join, leave, write_to
from tests.resume import evidence, tricks
from tests.resume.cases import CASES
from tests.resume.harness import Job, has_checkpoint
from tests.resume.moments import MOMENT, watch

torch.set_num_threads(1)  # sums in one order; and no thread is lost when the server forks
tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a process that is killed leaves behind
gc.collect()
gc.freeze()  # what the imports left need not be walked in every run


def work(job: Job) -> None:
    """Train, and write down what came of it."""
    write_to(job.log)
    _hear_signals()
    if job.world > 1:
        join(job.rank, job.world, job.meeting)
    try:
        trainer = CASES[job.case].trainer(**{"folder": Path(job.folder) / "run", **job.changes})
        for name in job.tricks:
            getattr(tricks, name)(trainer)
        watch(trainer, job.stop if job.stop is not None and job.stop.rank == job.rank else None)
        trainer.train(resume_from_checkpoint=_checkpoint(job))
    except Exception:
        traceback.print_exc()
        leave(1)
    except SystemExit as end:
        leave(end.code)
    report = {"evidence": evidence.of_trainer(trainer), "reached": MOMENT.reached}
    job.report.write_text(json.dumps(report))
    leave(0)


def _checkpoint(job: Job) -> Any:
    """What train() is told: killed before its first checkpoint, a run can only begin anew."""
    if not job.resume or not has_checkpoint(Path(job.folder)):
        return None
    return True if job.checkpoint is None else str(job.checkpoint)


def _hear_signals() -> None:
    """As in a program that a terminal started: one in the background may have been told to ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
