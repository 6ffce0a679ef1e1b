"""A run from start to end: the lock on its folder, the checkpoint it resumes from, and how it ends."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gruppo.errors import AuditError, CheckpointError, DataError, RunLockedError
from gruppo.runs import checkpoints
from gruppo.runs.links import names_written, refuse_links
from gruppo.runs.lock import RunLock
from gruppo.trainer.processes.collectives import from_main
from gruppo.trainer.processes.stopping import STOPPED, STOPPED_UNSAVED, StopRequested
from gruppo.trainer.resuming import Resuming

logger = logging.getLogger(__name__)


class Running(Resuming):
    """The part of the trainer that begins and ends runs."""

    @property
    def has_checkpoint(self) -> bool:
        """Whether this run, or the one that it continues, has saved a checkpoint."""
        return self._saved_at is not None or self._resumed_from is not None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`, with a lock on the output folder, a verified checkpoint and a clean stop on signals.

        `resume_from_checkpoint`: a folder, or True for the newest good checkpoint in output_dir.
        """
        with self._alone_in_folder(), self.stopper.listening():
            self._settings_now = self._settings()
            checkpoint = self._choose_checkpoint(resume_from_checkpoint)
            try:
                with self.presence.watching():
                    output = super().train(checkpoint, *args, **kwargs)
            except StopRequested:
                self._save_boundary()
            except BaseException as error:
                if isinstance(error, Exception):
                    self._save_despite(error, self._save_boundary)
                self.record_event("failed", error=type(error).__name__, message=str(error)[:2000])
                raise
            finally:
                self.close_displays()
                self._boundary = None
                self._ahead.drop()
            self._raise_reason_to_stop()
            self.record_event("finished")
        return output

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loop, after clearing the state of an earlier run."""
        self._queue.clear()
        self.metrics.discard()
        self.ledger.forget()
        self.parity.checked_at = None
        self._epoch_iterator = None
        self.rewards.breaker.reset()
        self.audits.reset()
        self._random_state_due = kwargs.get("resume_from_checkpoint")
        if self._random_state_due is not None:
            self._earlier_runs = 0  # unless the checkpoint has a number, the resumed run counts as the first
        try:
            output = super()._inner_training_loop(*args, **kwargs)
        finally:
            self._earlier_runs += 1
            if self.toolset is not None:
                self.toolset.close()
        return output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's method, except in a run resumed after its last update, where it would make one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's method, without its removal of checkpoints: they are rotated when one is written."""
        self._load_rng_state(self._random_state_due)  # if the resumed run was complete, no update has restored it
        if self._retry_at is not None:
            self._save_checkpoint(self.model_wrapped, None)
        own = self.args
        if own.save_total_limit == 1:  # Trainer would keep only the best one; a copy, as the config is the user's
            self.args = copy.copy(own)
            self.args.save_total_limit = None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args = own

    def _raise_reason_to_stop(self) -> None:
        """Raise the reason for which the run ended early, if it did."""
        step, ended = self.state.global_step, self.state.global_step >= self.state.max_steps
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        if self.stopper.requested is not None and ended:
            logger.warning(
                f"{self.stopper.requested.name} arrived during the last update: the run has already finished."
            )
        elif self.stopper.requested is not None:
            self._raise_stopped(self.stopper.requested.name, folder)
        if self._retry_at is not None:
            raise CheckpointError(
                f"The disk of {self.args.output_dir} is full: the checkpoint of update {step}, the last one, could "
                "not be written. Free some disk space and resume from the previous checkpoint."
            )
        if self.audits.bad_updates.should_stop:
            self.record_event("stopped", bad_updates=self.audits.bad_updates.in_a_row)
            raise AuditError(self.audits.why_stopped(str(folder)))
        self.rewards.raise_if_failed(Path(self._get_output_dir(trial=None)))

    def _raise_stopped(self, name: str, folder: Path) -> None:
        """Exit with a code that says whether the run is saved."""
        step, began = self.state.global_step, Path(self._resumed_from or "").name
        self.record_event("stopped", signal=name)
        if self._saved_at == step:
            logger.warning(f"Stopped by {name} after update {step}, saved in {folder}.")
        elif began == folder.name:
            logger.warning(f"Stopped by {name} before another update was made: resume from {self._resumed_from}.")
        else:
            logger.error(f"Stopped by {name} after update {step}, which could NOT be saved.")
            raise SystemExit(STOPPED_UNSAVED)
        raise SystemExit(STOPPED)

    @contextmanager
    def _alone_in_folder(self) -> Iterator[None]:
        """Hold the lock of the output folder, and clean up what a killed run left unfinished there."""
        folder, lock, error = Path(self.args.output_dir), None, None
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            lock = RunLock(folder)
            try:
                refuse_links(folder, names_written(self.args.record, completions=self.args.log_completions))
                if (stale := lock.acquire()) is not None:
                    logger.warning(f"{folder}: {stale}")
                for sentence in checkpoints.clean_leftovers(folder):
                    logger.warning(f"{folder}: {sentence}")
            except (RunLockedError, DataError, OSError) as refused:
                lock.release()
                error = DataError if isinstance(refused, DataError) else RunLockedError, str(refused)
        if (error := from_main(self.accelerator, error)) is not None:
            raise error[0](error[1])
        try:
            yield
        finally:
            if self.recorder is not None:
                self.recorder.close()
                self.recorder = None
            if lock is not None:
                lock.release()
