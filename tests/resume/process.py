"""What happens in the process of a run. The server that forks it has imported everything that this file imports."""

import gc
import json
import os
import signal
import sys
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
    _write_to(job.log)
    _hear_signals()
    if job.world > 1:
        _join(job)
    try:
        trainer = CASES[job.case].trainer(**{"folder": Path(job.folder) / "run", **job.changes})
        for name in job.tricks:
            getattr(tricks, name)(trainer)
        watch(trainer, job.stop if job.stop is not None and job.stop.rank == job.rank else None)
        trainer.train(resume_from_checkpoint=_checkpoint(job))
    except Exception:
        traceback.print_exc()
        _leave(1)
    except SystemExit as end:
        _leave(end.code)
    report = {"evidence": evidence.of_trainer(trainer), "reached": MOMENT.reached}
    job.report.write_text(json.dumps(report))
    _leave(0)


def _checkpoint(job: Job) -> Any:
    """What train() is told: killed before its first checkpoint, a run can only begin anew."""
    if not job.resume or not has_checkpoint(Path(job.folder)):
        return None
    return True if job.checkpoint is None else str(job.checkpoint)


def _leave(code: Any) -> None:
    """Without waiting for threads of gloo, which now and then abort a process that ends in the ordinary way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _write_to(path: Path) -> None:
    """What this process says, its C libraries included, goes to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _hear_signals() -> None:
    """As in a program that a terminal started: one in the background may have been told to ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _join(job: Job) -> None:
    """Become one of several processes that meet at a file, which no other program can take as it could a port."""
    places = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"})
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.world
    )
