"""A run from start to end: the lock on its folder, the checkpoint it resumes from, and how it ends."""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_model

from gruppo.data.probing import tokenizer_json
from gruppo.errors import AuditError, CheckpointError, RunLockedError
from gruppo.policy.adapters import is_peft_model, reload_trained_adapter, same_dtypes
from gruppo.policy.loading import is_saved_under_other_names, load_converted_weights
from gruppo.policy.sharding import REPLICATED
from gruppo.runs import checkpoints
from gruppo.runs.identity import position_run
from gruppo.runs.lock import RunLock
from gruppo.runs.record import RunRecorder
from gruppo.runs.secrets import without_secrets
from gruppo.trainer.books.machine import environment_of
from gruppo.trainer.checkpointing import REFERENCE, Checkpointing
from gruppo.trainer.processes.collectives import from_main
from gruppo.trainer.processes.stopping import STOPPED, STOPPED_UNSAVED, StopRequested
from gruppo.trainer.resume.settings import changed, common, keeps_the_queue, settings_of
from gruppo.trainer.resume.state import RunState

logger = logging.getLogger(__name__)


class Running(Checkpointing):
    """The part of the trainer that begins and ends runs."""

    _differing_settings: Sequence[str] = ()  # names of settings that differ from the checkpoint's
    _random_state_due: str | None = None  # the checkpoint whose random state is still to be restored

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
                if (stale := lock.acquire()) is not None:
                    logger.warning(f"{folder}: {stale}")
                for sentence in checkpoints.clean_leftovers(folder):
                    logger.warning(f"{folder}: {sentence}")
            except (RunLockedError, OSError) as refused:
                lock.release()
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

    def _choose_checkpoint(self, asked: Any) -> str | None:
        """The checkpoint to resume from, complete and made with these settings; the main process decides."""
        self._resumed_from, self._differing_settings = None, ()
        if asked is None or asked is False:
            return None
        found: tuple[str | None, Any] = (None, None)
        if self.accelerator.is_main_process:
            try:
                path = self._newest_good() if asked is True else self._checked(Path(asked))
                found = (str(path), self._check_settings(path))
            except CheckpointError as error:
                found = (None, str(error))
        self._resumed_from, said = from_main(self.accelerator, found)
        if self._resumed_from is None:
            raise CheckpointError(said)
        self._differing_settings = said
        return self._resumed_from

    def _newest_good(self) -> Path:
        folder = Path(self.args.output_dir)
        choice = checkpoints.newest_of_run(folder)
        for path, wrong in choice.rejected:
            logger.warning(f"{path} is not used: {' '.join(wrong)}")
        if choice.path is None:
            damaged = "".join(f" {path.name}: {' '.join(wrong)}" for path, wrong in choice.rejected)
            raise CheckpointError(
                f"No valid checkpoint found in output directory ({folder}).{damaged} Call train() without "
                "resume_from_checkpoint to start from scratch, or name a checkpoint."
            )
        if choice.rejected:
            logger.warning(f"Resuming from {choice.path}, the newest complete checkpoint.")
        return choice.path

    def _checked(self, path: Path) -> Path:
        if not path.is_dir():
            raise CheckpointError(f"There is no checkpoint at {path}.")
        if wrong := checkpoints.problems(path):
            choice = checkpoints.newest_good(path.parent)
            other = "" if choice.path is None else f" The newest complete one is {choice.path}."
            raise CheckpointError(
                f"The checkpoint {path} is damaged: {' '.join(wrong)}{other} To use it nevertheless, remove its "
                f"{checkpoints.MANIFEST}: it then counts as a plain checkpoint."
            )
        return path

    def _check_settings(self, path: Path) -> list[str]:
        """The names of settings that differ from the checkpoint's; raises if they are not allowed to."""
        manifest = checkpoints.manifest(path)
        if manifest is None:
            return []  # a plain checkpoint does not store settings
        saved, now = common(manifest.about.get("settings") or {}, self._settings_now)
        found = checkpoints.differences(saved, now, ignore=())
        differing = [line.partition(":")[0] for line in found]
        names = changed(differing, self.args.resume_allow_changes)
        if refused := [line for line in found if line.partition(":")[0] in names]:
            listed = "\n".join(f"  {line}" for line in refused)
            raise CheckpointError(
                f"The checkpoint {path} was made with different settings:\n{listed}\nSet them back, or allow them "
                f"with resume_allow_changes={names} (['*'] allows everything)."
            )
        if found:
            logger.warning(f"Resuming with settings that differ from those of {path}: {'; '.join(found)}")
        return differing

    # ---- loading

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if resume_from_checkpoint is not None and self.args.ignore_data_skip:
            self.audits.keep_books(None)  # the run restarts the epoch and sees prompts again on purpose
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._saved_at = self._retry_at = self._state_to_finish = self._boundary = self._random_at_boundary = None
        if resume_from_checkpoint is None:
            self._note_random_state()
        else:
            self._load_states(Path(resume_from_checkpoint))
        self._start_record(None if resume_from_checkpoint is None else Path(resume_from_checkpoint))
        return prepared

    def _load_states(self, folder: Path) -> None:
        """Load the parts of a checkpoint that Trainer does not handle; a plain checkpoint has none."""
        main = RunState.load(folder, 0)  # all processes decide by this state, so that they agree
        same_processes = main is not None and main.values["processes"] == self.accelerator.num_processes
        if main is None:
            self.entropy_control.load(folder)
            self.audits.keep_books(None)  # the prompts that the epoch has seen are unknown
        elif not (same_processes and keeps_the_queue(self._differing_settings)):
            if self.accelerator.is_main_process:
                logger.warning(
                    f"{folder} was written by a different number of processes, or with different settings: update "
                    "plans are made again, and the unfinished generation is sampled again."
                )
            self._restore_part(main)
        else:
            state = RunState.load(folder, self.accelerator.process_index)
            assert state is not None
            self._restore(state)
        if (folder / REFERENCE).exists() and self.ref_model is not None and self.args.sync_ref_model:
            load_model(self.accelerator.unwrap_model(self.ref_model), str(folder / REFERENCE))
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "read_state"):
                callback.read_state(folder)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state once: Trainer does it only after the first rollouts of a resumed epoch."""
        if self._random_state_due is not None:
            self._random_state_due = None
            super()._load_rng_state(checkpoint)

    @property
    def _replicated(self) -> bool:
        return self.accelerator.distributed_type in REPLICATED

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        policy = self.accelerator.unwrap_model(model or self.model)
        if self._replicated and is_saved_under_other_names(policy, resume_from_checkpoint):
            load_converted_weights(policy, resume_from_checkpoint)
            return
        with same_dtypes(policy):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if is_peft_model(policy):
                reload_trained_adapter(policy, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        policy, best = self.accelerator.unwrap_model(self.model), self.state.best_model_checkpoint
        if self._replicated and best is not None and is_saved_under_other_names(policy, best):
            load_converted_weights(policy, best)
        else:
            with same_dtypes(policy):
                super()._load_best_model()

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with this one."""
        policy = self.accelerator.unwrap_model(self.model)
        functions = [] if self.toolset is None else self.toolset.functions
        tools = sorted(getattr(tool, "__name__", str(tool)) for tool in functions)
        return settings_of(
            self.args, policy, self.train_dataset, self.rewards.names, tools, self.accelerator.num_processes
        )

    # ---- the record

    def _start_record(self, checkpoint: Path | None) -> None:
        """Begin the record of a run, or continue the one that the checkpoint belongs to."""
        self.recorder = None
        folder = Path(self._get_output_dir(trial=getattr(self, "_trial", None)))
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        kept = {"keeps": self.args.record != "off", "rollouts": self.args.record == "all"}
        recorder = RunRecorder(folder, rank=rank, world=world, **kept)
        about = {
            "config": without_secrets(self.args.to_dict() | self._settings_now),
            "environment": without_secrets(environment_of(self.args)),
        }
        before = None
        if checkpoint is None:
            recorder.begin(**about)
        else:
            before = self._continue_record(recorder, checkpoint, about)
        self._run_id = from_main(self.accelerator, recorder.run_id)
        if self._run_id != before:
            for batch in self._queue:  # this record does not contain their generation
                batch.pop("generation", None)
                batch.pop("place", None)
        if rank:
            recorder.join(self._run_id)
        elif self.args.record == "all":
            recorder.tokenizer(tokenizer_json(self.processing_class))
        self.recorder = recorder

    def _continue_record(self, recorder: RunRecorder, checkpoint: Path, about: dict[str, Any]) -> str | None:
        """Continue the record from the checkpoint's position; what follows it is archived if it has newer checkpoints.

        Returns the id of the run that the checkpoint belongs to, if known.
        """
        manifest = checkpoints.manifest(checkpoint)
        position = None if manifest is None else manifest.about.get("position")
        newer = self._newer_ones(checkpoint, recorder.folder)
        recorder.resume(position=position, checkpoint=checkpoint, branch=bool(newer), **about)
        if newer and recorder.archive is not None and self.accelerator.is_main_process:
            checkpoints.put_aside(newer, recorder.archive)
        return position_run(position)

    def _newer_ones(self, checkpoint: Path, folder: Path) -> list[Path]:
        """Checkpoints of the same run with more updates, if `checkpoint` is in this folder."""
        own = checkpoints.run_of(checkpoint)
        if own is None or checkpoint.resolve().parent != folder.resolve():
            return []
        found = checkpoints.checkpoints(folder)  # the highest number first
        names = [path.name for path in found]
        return [path for path in found[: names.index(checkpoint.name)] if checkpoints.run_of(path) == own]
