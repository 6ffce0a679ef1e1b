"""What is saved of a run, and when.

A checkpoint folder is either complete or absent (see `gruppo.runs.checkpoints`). Besides what Trainer writes, it holds
what a resumed run needs to do, bit for bit, what an uninterrupted run would have done: the state of every process (see
`resume/state.py`) with its queued micro-batches, plans, counters behind the random numbers and metrics not yet logged;
and a blended reference.

    run_state               the state of one process; taken for a checkpoint, and before updates that may be abandoned
    _save_checkpoint        write to a staging folder, add a manifest, rename, remove old checkpoints
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gruppo.data.course import SavedCourse
from gruppo.policy.unwrap import bare_model
from gruppo.runs import checkpoints
from gruppo.trainer.auditing import Auditing
from gruppo.trainer.books.machine import environment_of
from gruppo.trainer.collect.ahead import with_flight
from gruppo.trainer.processes.collectives import any_process
from gruppo.trainer.resume.state import (
    Boundary,
    RandomState,
    RunState,
    gather_states,
    pack_queue,
)

logger = logging.getLogger(__name__)

REFERENCE = "reference.safetensors"
LONGEST_PAUSE = 64  # updates between two attempts to save on a full disk


class Checkpointing(Auditing):
    """The part of the trainer that saves its state."""

    # ---- the state of a process

    def _parts(self) -> dict[str, Any]:
        """The objects that have a `state_dict`, by name."""
        parts = {
            "rollout": self.backend,
            "padding": self.padding,
            "update_plan": self.planner,
            "entropy": self.entropy_control,
            "metrics": self.metrics,
            "reward_counts": self.rewards.counts,
            "reward_breaker": self.rewards.breaker,
            "audits": self.audits,
        }
        return parts if self._cursor is None else parts | {"prompts": self._cursor}

    def run_state(self) -> RunState:
        """The state of this process between two updates."""
        queue = pack_queue(self._queue)
        values = {
            "processes": self.accelerator.num_processes,
            "parts": gather_states(self._parts()),
            "loop": {
                "last_logged": self._globalstep_last_logged,
                "earlier_runs": self._earlier_runs,
                "asked_elsewhere": self._asked_elsewhere,
                "changed": dict(self._overrides),
                "generation": _simple(self.backend.config.to_dict()),
                "parity_checked_at": self.parity.checked_at,
                "reuses_engine_logps": self.parity.reuses_engine_logps,
            },
            "queue": None if queue is None else queue.values["queue"],
            "course": self._saved_place(),
        }
        tensors = {"loss": self._tr_loss.detach().clone(), "reward_weights": self.rewards.weights}
        tensors |= self.audits.tensors()  # without waiting for the device
        return RunState(values, tensors if queue is None else tensors | queue.tensors)

    def _saved_place(self) -> dict[str, Any] | None:
        """Where the run is in its prompts; None if they come from a loader that is not the trainer's."""
        if self._course is None or self._stream is None:
            return None
        return SavedCourse(
            self._course.next,
            self._course.batches,
            updates=self.state.global_step,
            accumulation=self.args.gradient_accumulation_steps,
            available=self._stream.available,
            per_epoch=self._stream.per_epoch,
            cursor=None if self._cursor is None else self._cursor.state_dict(),
        ).to_json()

    def _mark_boundary(self) -> None:
        """Keep the state before an update, if the update may be abandoned."""
        if self._random_at_boundary is not None:
            position = None if self.recorder is None else self.recorder.position()
            counts = self.state.num_input_tokens_seen, self.current_flos, self._ahead.flight
            self._boundary = Boundary(self.run_state(), self._random_at_boundary, position, *counts)

    def _note_random_state(self) -> None:
        """Keep the random state after an update and its logs, before the loader of a new epoch draws a number."""
        self._random_at_boundary = RandomState.now() if self._saves_when_interrupted else None

    @property
    def _saves_when_interrupted(self) -> bool:
        """Whether a signal or an exception may abandon an update; other processes would not know of it."""
        return self.stopper.enabled and self.stopper.alone

    def _save_boundary(self) -> None:
        """Save the run as it was before the abandoned update."""
        boundary = self._boundary
        if boundary is None or self._saved_at == self.state.global_step:
            return
        boundary.random.restore()
        self.state.num_input_tokens_seen, self.current_flos = boundary.tokens_seen, boundary.flops
        # Not as an argument: this goes through Trainer's method, which subclasses override.
        self._abandoned = boundary
        try:
            self._save_checkpoint(self.model_wrapped, None)
        finally:
            self._abandoned = None

    def _save_despite(self, error: Exception, save: Callable[[], None]) -> None:
        """Save the last finished update before an exception ends the run, and note in the exception how to resume."""
        step = self.state.global_step
        if not self._saves_when_interrupted or not step:
            return
        try:
            save()
        except Exception as another:  # of any kind: it must not hide the first one, which ends the run
            logger.error(f"Update {step} could not be saved: {type(another).__name__}: {another}")
        run = Path(self._get_output_dir(trial=getattr(self, "_trial", None)))
        folder = str(run / f"{PREFIX_CHECKPOINT_DIR}-{step}") if self._saved_at == step else self._resumed_from
        if folder is not None and Path(folder).name == f"{PREFIX_CHECKPOINT_DIR}-{step}":
            said = f"Update {step}, the last finished one, is saved in {folder}. Resume with train({folder!r})."
            if said not in getattr(error, "__notes__", ()):
                logger.warning(f"{type(error).__name__} ends the run. {said}")
                error.add_note(said)

    # ---- saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint; if the disk is full, put it off and let the run continue."""
        start = time.perf_counter()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run, step = Path(self._get_output_dir(trial=trial)), self.state.global_step
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        staged = run / f"{checkpoints.SAVING}{name}"
        steps: tuple[Callable[[], Any], ...] = (
            lambda: self.args.should_save and checkpoints.stage(run, name),
            lambda: self._write_parts(run, staged),
            lambda: self.args.should_save and checkpoints.publish(staged, self._about()),
        )
        for part in steps:
            if any_process(self.accelerator, self._disk_is_full(part, run)):
                return self._put_off(staged)
        self._saved_at, self._retry_at, self._retry_after = step, None, 1
        self.record_event("checkpoint", name=name, seconds=round(time.perf_counter() - start, 3))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run / name))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            spare = [] if best is None else [Path(best)]
            checkpoints.rotate(run, self.args.save_total_limit, spare, run_id=self._run_id)

    def _write_parts(self, run: Path, folder: Path) -> None:
        """Write this process's share of a checkpoint."""
        self._note_best(run)
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
            at = self._abandoned
            state, ahead = (self.run_state(), self._ahead.flight) if at is None else (at.state, at.ahead)
            with_flight(state, ahead, self.backend.pause).save(folder, self.accelerator.process_index)
        if self.recorder is not None:
            self.recorder.sync()
        if not self.args.should_save:
            return
        self._write_reference(folder)
        self.entropy_control.save(folder)
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "write_state"):
                callback.write_state(folder)
        self.create_model_card(output_dir=folder)
        self._collect_callback_states()
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def _about(self) -> dict[str, Any]:
        """The description of the run in the manifest."""
        now = None if self.recorder is None else self.recorder.position()
        return {
            "run_id": self._run_id,
            "step": self.state.global_step,
            "position": now if self._abandoned is None else self._abandoned.position,
            "settings": self._settings_now,
            "versions": environment_of(self.args)["versions"],
        }

    def _note_best(self, run: Path) -> None:
        """Note the best checkpoint so far, if it exists or is the one being written."""
        step = self.state.best_global_step
        folder = run / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if step and (step == self.state.global_step or folder.exists()):
            self.state.best_model_checkpoint = str(folder)

    def _collect_callback_states(self) -> None:
        """Put the state of callbacks into Trainer's state, as Trainer does when it saves."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, kept = type(callback).__name__, self.state.stateful_callbacks
                if isinstance(kept.get(name), list):
                    kept[name].append(callback.state())
                else:
                    kept[name] = callback.state()

    def _write_reference(self, folder: Path) -> None:
        """Write a reference that is blended with the policy; any other is made again when a run starts."""
        if self.ref_model is not None and self.args.sync_ref_model and not self.args.save_only_model:
            save_model(bare_model(self.accelerator, self.ref_model), str(folder / REFERENCE))

    def _disk_is_full(self, part: Callable[[], Any], folder: Path) -> bool:
        """Run one part of saving; returns whether it failed because the disk is full."""
        try:
            with self.presence.during("saving"):
                part()
        except (OSError, RuntimeError, SafetensorError) as error:
            if not checkpoints.is_disk_full(error, folder):
                raise
            logger.warning(f"No disk space for a checkpoint: {error}")
            return True
        return False

    def _put_off(self, staged: Path) -> None:
        """Drop the unfinished checkpoint and continue training; saving is tried again after a while."""
        if self.args.should_save:
            checkpoints.discard(staged)
        self._retry_at = self.state.global_step + self._retry_after
        self._retry_after = min(2 * self._retry_after, LONGEST_PAUSE)
        if self.accelerator.is_main_process:
            logger.warning(
                f"The disk of {self.args.output_dir} is full: the checkpoint of update {self.state.global_step} was "
                "not written, earlier ones are untouched. Training continues; saving is retried after update "
                f"{self._retry_at}. Free some disk space."
            )
        self.record_event("checkpoint_put_off", retry_at=self._retry_at)

    def _decide_to_stop(self, update_ended: bool) -> None:
        """Set what is due: after an update, or else at the end of an epoch, with more reasons to save and to stop."""
        control, epoch_is_over = self.control, self._epoch_is_over
        if self._retry_at is not None and self.state.global_step >= self._retry_at:
            control.should_save = True
        if not self._should_stop():
            return
        control.should_training_stop = True
        if update_ended != epoch_is_over:  # the last update of an epoch is saved after what is due at its end
            news = control.should_log or control.should_evaluate
            control.should_save = news or self._saved_at != self.state.global_step
        elif not update_ended:  # the epoch was cut short: what belongs to its end is not due
            control.should_log = control.should_evaluate = control.should_save = False

    @property
    def _epoch_is_over(self) -> bool:
        return self._course is not None and self._course.epoch_is_over

    def _should_stop(self) -> bool:
        """Whether a signal reached any process, too many updates in a row were skipped, or rewards failed."""
        if self.stopper.enabled and any_process(self.accelerator, self.stopper.requested is not None):
            self.stopper.request()  # all processes stop together, whichever of them got the signal
        failed = self.rewards.breaker.stopped_at is not None
        return self.stopper.requested is not None or self.audits.bad_updates.should_stop or failed

    def _record_plan(self) -> None:
        """Record the plan once; it exists after the first generation."""
        if self.recorder is not None and not self._plan_recorded:
            self._plan_recorded = True
            self.recorder.plan({"rollout": self.backend.state_dict(), "update": self.planner.state_dict()})


def _simple(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a generation config that a JSON round trip leaves unchanged."""
    return {name: value for name, value in config.items() if value is None or type(value) in (bool, int, float, str)}
