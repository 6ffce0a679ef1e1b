"""The code of a run's process. The fork server has already imported everything that this file imports."""

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
import gruppo.trainer.rloo  # noqa: F401  # imported here once, so that runs do not have to
from tests.processes import join, leave, write_to
from tests.resume import evidence, tricks
from tests.resume.cases import CASES
from tests.resume.harness import Job, has_checkpoint
from tests.resume.moments import MOMENT, watch

torch.set_num_threads(1)  # a fixed order of additions; and no threads that would be lost when the server forks
tqdm.set_lock(threading.RLock())  # tqdm's default is a system semaphore, which a killed process leaves behind
gc.collect()
gc.freeze()  # objects created by imports are not traversed by garbage collection in every run


def work(job: Job) -> None:
    """Train, and write a report of the results."""
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
    """The argument of train(): a run that was killed before its first checkpoint can only start from scratch."""
    if not job.resume or not has_checkpoint(Path(job.folder)):
        return None
    return True if job.checkpoint is None else str(job.checkpoint)


def _hear_signals() -> None:
    """Restore the default signal handlers of a terminal program: background processes may ignore these signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
