"""A run from its first call to its end: who may write into the folder, where it goes on, and how it ends."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gruppo.errors import AuditError, CheckpointError, RunLockedError
from gruppo.runs import checkpoints
from gruppo.runs.lock import RunLock
from gruppo.runs.record import recorded_run
from gruppo.trainer.checkpointing import Checkpointing
from gruppo.trainer.metrics import from_main
from gruppo.trainer.settings import changed, common
from gruppo.trainer.stopping import STOPPED, StopRequested

logger = logging.getLogger(__name__)


class Resuming(Checkpointing):
    """The part of the trainer that begins and ends runs."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`, alone in its folder, from a checkpoint that was checked, with an orderly end on signals.

        `resume_from_checkpoint`: a folder, or True for the newest good checkpoint in output_dir.
        """
        with self._alone_in_folder(), self.stopper.listening():
            checkpoint = self._choose(resume_from_checkpoint)
            try:
                output = super().train(checkpoint, *args, **kwargs)
            except StopRequested:
                self._save_boundary()
            except BaseException as error:
                self.record_event("failed", error=type(error).__name__, message=str(error)[:2000])
                raise
            finally:
                self._boundary = None
            self._raise_reason_to_stop()
            self.record_event("finished")
        return output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's, which would make one more update in a run that is resumed after its last."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._load_rng_state(self._random_state_due)  # of a run that was over: no update has done it
        return super()._finalize_training(*args, **kwargs)

    def _raise_reason_to_stop(self) -> None:
        """The end of a run that did not come to its own."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.stopper.requested is not None and self.state.global_step < self.state.max_steps:
            name = self.stopper.requested.name
            self.record_event("stopped", signal=name)
            saved = f"saved in {folder}" if folder.exists() else "as the checkpoint that it was resumed from has it"
            logger.warning(f"Stopped by {name} after update {self.state.global_step}, {saved}.")
            raise SystemExit(STOPPED)
        if self.audits.bad_updates.should_stop:
            self.record_event("stopped", bad_updates=self.audits.bad_updates.in_a_row)
            raise AuditError(self.audits.why_stopped(str(folder)))
        self._raise_if_rewards_failed()

    @contextmanager
    def _alone_in_folder(self) -> Iterator[None]:
        """Hold the lock of the output folder; what a killed run left half done there is put in order."""
        folder, lock, error = Path(self.args.output_dir), None, None
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            lock = RunLock(folder)
            try:
                if (stale := lock.acquire()) is not None:
                    logger.warning(f"{folder}: {stale}")
                for sentence in checkpoints.clean_leftovers(folder):
                    logger.warning(f"{folder}: {sentence}")
            except RunLockedError as refused:
                error = str(refused)
        if (error := from_main(self.accelerator, error)) is not None:
            raise RunLockedError(error)
        try:
            yield
        finally:
            if self.recorder is not None:
                self.recorder.close()
                self.recorder = None
            if lock is not None:
                lock.release()

    # ---- which checkpoint

    def _choose(self, asked: Any) -> str | None:
        """The checkpoint to go on from, which is whole and was made with these settings; one process decides."""
        if asked is None or asked is False:
            return None
        found: tuple[str | None, str | None] = (None, None)
        if self.accelerator.is_main_process:
            try:
                path = self._newest_good() if asked is True else self._checked(Path(asked))
                self._check_settings(path)
                found = (str(path), None)
            except (CheckpointError, ValueError) as error:
                found = (None, str(error))
        path_or_none, message = from_main(self.accelerator, found)
        if message is not None:
            raise CheckpointError(message)
        return path_or_none

    def _newest_good(self) -> Path:
        folder = Path(self.args.output_dir)
        choice = checkpoints.newest_good(folder, run_id=recorded_run(folder))
        for path, wrong in choice.rejected:
            logger.warning(f"{path} is not used: {' '.join(wrong)}")
        if choice.path is None:
            damaged = "".join(f" {path.name}: {' '.join(wrong)}" for path, wrong in choice.rejected)
            raise CheckpointError(
                f"No valid checkpoint found in output directory ({folder}).{damaged} Call train() without "
                "resume_from_checkpoint to begin, or name a checkpoint."
            )
        if choice.rejected:
            logger.warning(f"Going on from {choice.path}, the newest checkpoint that is whole.")
        return choice.path

    def _checked(self, path: Path) -> Path:
        if not path.is_dir():
            raise CheckpointError(f"There is no checkpoint at {path}.")
        if wrong := checkpoints.problems(path):
            choice = checkpoints.newest_good(path.parent)
            other = "" if choice.path is None else f" The newest one that is whole is {choice.path}."
            raise CheckpointError(f"The checkpoint {path} is damaged: {' '.join(wrong)}{other}")
        return path

    def _check_settings(self, path: Path) -> None:
        """Refuse a checkpoint of another run, with the name of everything that differs."""
        manifest = checkpoints.manifest(path)
        if manifest is None:
            return  # a plain checkpoint says nothing about them
        saved, now = common(manifest.about.get("settings") or {}, self._settings())
        found = checkpoints.differences(saved, now, ignore=())
        names = changed([line.partition(":")[0] for line in found], self.args.resume_allow_changes)
        if refused := [line for line in found if line.partition(":")[0] in names]:
            listed = "\n".join(f"  {line}" for line in refused)
            raise CheckpointError(
                f"The checkpoint {path} was made with other settings:\n{listed}\nSet them back, or allow them with "
                f"resume_allow_changes={names} (['*'] allows everything)."
            )
        if found:
            logger.warning(f"Resuming with other settings than {path} was made with: {'; '.join(found)}")
