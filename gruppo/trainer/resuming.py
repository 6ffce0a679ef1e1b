"""How a run continues: which checkpoint, what is loaded from it, and the record that goes on.

The parts of it, in the order in which Trainer lets them happen:

    _choose_checkpoint       before anything else; the main process decides
    _prepare_for_training    Trainer loads weights, optimizer and schedule; then states are loaded, a record begins
    _load_rng_state          in the first update, before it draws a random number
    _restore_loss            in the first update, because Trainer sets its sums to 0 before
"""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model

from gruppo.data.course import going_on, left_over
from gruppo.data.probing import tokenizer_json
from gruppo.errors import CheckpointError
from gruppo.policy.adapters import is_peft_model, reload_trained_adapter, same_dtypes
from gruppo.policy.loading import is_saved_under_other_names, load_converted_weights, vocabulary_size
from gruppo.policy.sharding import REPLICATED
from gruppo.policy.unwrap import bare_model
from gruppo.runs.record import RunRecorder
from gruppo.runs.secrets import without_secrets
from gruppo.trainer.books.machine import environment_of
from gruppo.trainer.checkpointing import REFERENCE, Checkpointing
from gruppo.trainer.collect.ahead import unpack_flight
from gruppo.trainer.processes.collectives import from_main
from gruppo.trainer.resume.choosing import choose_checkpoint
from gruppo.trainer.resume.forms import GENERATION
from gruppo.trainer.resume.loaded import (
    bare_optimizer,
    check_flight,
    check_optimizer,
    check_queue,
    check_schedule,
    fits,
    reading,
)
from gruppo.trainer.resume.record import continue_record
from gruppo.trainer.resume.settings import keeps_the_queue, settings_of
from gruppo.trainer.resume.state import RunState, checked_state, give_states, unpack_queue

logger = logging.getLogger(__name__)


class Resuming(Checkpointing):
    """The part of the trainer that restores what was saved."""

    def _choose_checkpoint(self, asked: Any) -> str | None:
        """The checkpoint to resume from, complete and made with these settings; the main process decides."""
        self._resumed_from, self._differing_settings = None, ()
        if asked is None or asked is False:
            return None
        found: tuple[str | None, Any] = (None, None)
        if self.accelerator.is_main_process:
            args = self.args
            try:
                path, differing = choose_checkpoint(
                    asked, Path(args.output_dir), self._settings_now, args.resume_allow_changes
                )
                found = (str(path), differing)
            except CheckpointError as error:
                found = (None, str(error))
        self._resumed_from, said = from_main(self.accelerator, found)
        if self._resumed_from is None:
            raise CheckpointError(said)
        self._differing_settings = said
        return self._resumed_from

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with this one."""
        policy = bare_model(self.accelerator, self.model)
        functions = [] if self.toolset is None else self.toolset.functions
        tools = sorted(getattr(tool, "__name__", str(tool)) for tool in functions)
        return settings_of(
            self.args, policy, self.train_dataset, self.rewards.names, tools, self.accelerator.num_processes
        )

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if resume_from_checkpoint is not None and self.args.ignore_data_skip:
            self.audits.keep_books(None)  # the run restarts the epoch and sees prompts again on purpose
        self._warn_of_left_over(max_steps)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._saved_at = self._retry_at = self._state_to_finish = self._boundary = self._random_at_boundary = None
        self._retry_after = 1
        if resume_from_checkpoint is None:
            self._note_random_state()
        else:
            with reading("state of the run", Path(resume_from_checkpoint)):
                self._load_states(Path(resume_from_checkpoint))
        self._start_record(None if resume_from_checkpoint is None else Path(resume_from_checkpoint))
        return prepared

    def _warn_of_left_over(self, updates: int) -> None:
        """Say once which prompts no epoch trains on, if the run gets to the end of one."""
        course = self._course
        if course is None or course.available is None or course.whole is None or not self.accelerator.is_main_process:
            return
        said = left_over(course.available, course.batches.prompts, shuffled=bool(self.args.shuffle_dataset))
        if said is not None and updates * self.args.gradient_accumulation_steps >= course.whole:
            logger.warning(said)

    # ---- the state of a process

    def _load_states(self, folder: Path) -> None:
        """Load the parts of a checkpoint that Trainer does not handle; a plain checkpoint has none."""
        most = None if self._course is None else self._most_taken(folder)
        main = checked_state(folder, 0, most)  # all processes decide by this state, so that they agree
        same_processes = main is not None and main.values["processes"] == self.accelerator.num_processes
        if main is None:
            self.entropy_control.load(folder)
            self.audits.keep_books(None)  # the prompts that the epoch has seen are unknown
        elif not (same_processes and keeps_the_queue(self._differing_settings)):
            if self.accelerator.is_main_process:
                logger.warning(
                    f"{folder} was written by a different number of processes, or with different settings: update "
                    "plans are made again, and the unfinished generation is sampled again. " + self._going_on()
                )
            self._restore_part(main)
        else:
            state = checked_state(folder, self.accelerator.process_index, most)
            assert state is not None
            self._restore(state)
        if (folder / REFERENCE).exists() and self.ref_model is not None and self.args.sync_ref_model:
            load_model(bare_model(self.accelerator, self.ref_model), str(folder / REFERENCE))
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "read_state"):
                callback.read_state(folder)

    def _restore(self, state: RunState) -> None:
        """Restore the complete state."""
        loop = state.values["loop"]
        give_states(self._parts(), state.values["parts"])
        self.audits.load_tensors(state.tensors)
        for name, value in loop["changed"].items():  # only what a callback may change, see `resume/forms.py`
            setattr(self, name, value)
        config = self.backend.config
        for name, value in loop["generation"].items():
            if name == "max_new_tokens" and value is not None and value > self.args.max_completion_length:
                continue  # plans and buffers are made for completions of this run's length
            if name in GENERATION and getattr(config, name, None) != value:
                setattr(config, name, value)
        weights = self.rewards.weights
        self.rewards.weights = fits("reward_weights", state.tensors["reward_weights"], weights).to(weights)
        self.parity.checked_at = loop["parity_checked_at"]
        self.parity.reuses_engine_logps = loop["reuses_engine_logps"]
        vocabulary = vocabulary_size(bare_model(self.accelerator, self.model))
        if state.values["queue"] is not None:
            self._queue = unpack_queue(state, self.accelerator.device)
            check_queue(self._queue, vocabulary)
        self._ahead.flight = unpack_flight(state)
        if self._ahead.flight is not None:
            check_flight(self._ahead.flight, vocabulary)
        self._restore_counts(state)

    def _restore_part(self, state: RunState) -> None:
        """Restore what stays valid with other settings or processes; the current generation is sampled again."""
        common = ("entropy", "metrics", "reward_counts", "reward_breaker", "prompts")
        give_states({name: part for name, part in self._parts().items() if name in common}, state.values["parts"])
        saved, course = self._saved_course, self._course
        if self._cursor is not None and saved is not None and course is not None and saved.starts_over(course.batches):
            self._cursor.begin_again()
        self.audits.keep_books(None)  # the prompts seen in the epoch may be counted differently now
        self._restore_counts(state)

    def _going_on(self) -> str:
        return "" if self._course is None else going_on(self._saved_course, self._course, self._differing_settings)

    def _restore_counts(self, state: RunState) -> None:
        """Restore the counters of the run; `_restore_loss` restores the loss once Trainer has reset it to 0."""
        loop = state.values["loop"]
        self._earlier_runs, self._asked_elsewhere = loop["earlier_runs"], loop["asked_elsewhere"]
        fits("loss", state.tensors["loss"], torch.zeros(()))
        self._state_to_finish = state

    def _restore_loss(self) -> None:
        """Restore the loss; called before the first update, when Trainer has already reset its sums to 0."""
        if (state := self._state_to_finish) is not None:
            self._state_to_finish = None
            self._tr_loss.copy_(state.tensors["loss"])
            self._total_loss_scalar -= float(self._tr_loss)  # the final loss is the mean over this call's updates
            self._globalstep_last_logged = state.values["loop"]["last_logged"]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state once: Trainer does it only after the first rollouts of a resumed epoch."""
        if self._random_state_due is not None:
            self._random_state_due = None
            with reading("state of the random generators", Path(checkpoint or "")):
                super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with reading("state of the optimizer or of the schedule", Path(checkpoint)):
            if not self._replicated:  # each process has a share of them, which FSDP and DeepSpeed check
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            groups = [dict(group) for group in self.optimizer.param_groups]
            schedule = dict(vars(self.lr_scheduler))
            super()._load_optimizer_and_scheduler(checkpoint)
            check_schedule(self.lr_scheduler, schedule)
            check_optimizer(bare_optimizer(self.optimizer), groups)

    # ---- weights

    @property
    def _replicated(self) -> bool:
        return self.accelerator.distributed_type in REPLICATED

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        policy = bare_model(self.accelerator, model or self.model)
        if self._replicated and is_saved_under_other_names(policy, resume_from_checkpoint):
            load_converted_weights(policy, resume_from_checkpoint)
            return
        with same_dtypes(policy):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            if is_peft_model(policy):
                reload_trained_adapter(policy, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        policy, best = bare_model(self.accelerator, self.model), self.state.best_model_checkpoint
        if self._replicated and best is not None and is_saved_under_other_names(policy, best):
            load_converted_weights(policy, best)
        else:
            with same_dtypes(policy):
                super()._load_best_model()

    # ---- the record

    def _start_record(self, checkpoint: Path | None) -> None:
        """Begin the record of a run, or continue the one that the checkpoint belongs to."""
        self.recorder, self._plan_recorded, self._record_seconds = None, False, 0.0
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
            before = continue_record(recorder, checkpoint, about, is_main=self.accelerator.is_main_process)
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
