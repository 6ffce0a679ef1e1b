"""Where rollouts enter Trainer's loop.

The calls of one update, in order:

    get_batch_samples   takes micro-batches from a queue, and collects a new generation when the queue is empty
                        (_next_micro_batch → _collect_slices → _generate_and_score_completions, a hook of TRL's)
    collect             prompts → rollouts → rewards → log-probs → advantages            (collecting.py, logprobs.py)
                        its rows are shuffled and cut into micro-batches for the queue, as in TRL
    training_step       called for each micro-batch; the last one runs the whole update
    run_update          packs of rows: forward, loss, backward                           (updating.py)
    _end_of_update      metrics of the update and its record                             (updating.py, auditing.py)
    _get_grad_norm      drops gradients that are not finite; then the optimizer's step   (auditing.py)
    _maybe_log_save_evaluate
                        audits, whether to stop; Trainer logs, evaluates, saves  (auditing.py, checkpointing.py)

With padded rows (`packed` is None) each training_step runs its own micro-batch, with `compute_loss` (losses.py).
"""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.algo.reduce import UpdateSize
from gruppo.data.collate import shuffle_sequence_dict, split_tensor_dict, trim
from gruppo.errors import AuditError
from gruppo.trainer.collect.under_way import Place
from gruppo.trainer.evaluating import Evaluating
from gruppo.trainer.update.under_way import UpdateUnderWay
from gruppo.types import TrainBatch


class Stepping(Evaluating):
    """The part of the trainer that makes updates."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], UpdateSize | None]:
        """The micro-batches of one update and their size, the denominator of every reduction."""
        start = time.perf_counter()
        self._begin_update(epoch_iterator)
        update = self._this_update
        steps = list(islice(epoch_iterator, num_batches))
        self._load_rng_state(self._random_state_due)  # here, as a loader may draw a number when it skips
        with self.stopper.abandonable():
            batches = [self._next_micro_batch(step, i) for i, step in enumerate(steps)]
        update.batches = batches
        self._update_buffer.forget()
        size = None
        if batches:
            rows = [TrainBatch.from_dict(batch) for batch in batches]
            self._size = size = self.update_size(rows)
            self._balance_update(batches, size)
            batches = batches if self.packed is None else self.as_update(rows, size)
        update.seconds += time.perf_counter() - start
        return batches, size

    def _begin_update(self, epoch_iterator: Iterator[Any]) -> None:
        self._count_epoch(epoch_iterator)
        self._restore_loss()
        self.model.train()  # as in the update itself; an evaluation may have changed it
        if callable(getattr(self.optimizer, "train", None)):  # some optimizers use other weights for evaluation
            self.optimizer.train()
        self._mark_boundary()
        self._this_update = UpdateUnderWay()

    def _next_micro_batch(self, step: Any, position: int) -> dict[str, Any]:
        """Micro-step `step` of the epoch, the `position`-th of its update, from the queue.

        `step` is a number, or rows if a subclass provides its own loader.
        """
        course = self._course if isinstance(step, int) else None
        generation, phase = (0, 0) if course is None else course.locate(self._epoch, step)
        if course is not None and phase == 0:
            self._queue.clear()  # left over from an epoch that was stopped early
        if not self._queue:
            self._sampling_anew = phase > 0
            with self.presence.during("reading prompts"):
                rows = step if course is None else self.rows_of(generation, anew=phase > 0)
            place = (self.state.global_step, position) if course is None else (self._epoch, generation)
            with self._drawing_at(Place(self._earlier_runs, *place)):
                slices = self._collect_slices(rows)
            # A run resumed inside a generation collects it again and continues with the slice it had reached.
            self._queue.extend((slices * self.args.num_iterations)[phase:])
        if course is not None:
            course.took(self._epoch, step)
        return self._queue.popleft()

    def _collect_slices(self, rows: Sequence[Any]) -> list[dict[str, Any]]:
        """Collect a generation, shuffle its rows and cut it into micro-batches, each no wider than it needs to be."""
        with self.timer("_prepare_inputs"):  # the name under which dashboards know this phase
            whole = self._generate_and_score_completions(list(rows))
            slices = split_tensor_dict(shuffle_sequence_dict(whole), self.args.steps_per_generation)
            slices = [trim(part, self.args.pad_to_multiple_of) for part in slices]
        self._count_slices(whole, slices)
        return slices

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        start, update = time.perf_counter(), self._this_update
        with self.stopper.abandonable():
            loss = self._run_micro_step(model, inputs, num_items_in_batch)
        update.loss = update.loss + loss
        self._step += 1
        seconds = time.perf_counter() - start
        update.seconds, update.pass_seconds = update.seconds + seconds, update.pass_seconds + seconds
        if self.accelerator.sync_gradients:
            self._end_of_update()
        return loss

    def _run_micro_step(self, model: nn.Module, inputs: Any, size: Any) -> Tensor:
        if self.packed is None:
            if "completion_mask" in inputs:
                self.planner.plan(TrainBatch.from_dict(inputs))  # may turn gradient checkpointing on
            # `compute_loss` is a phase of its own inside this one, which leaves the backward pass.
            waits = self.accelerator.sync_gradients or not self._replicated
            with self.presence.during("updating", waits=waits):
                loss: Tensor = super().training_step(model, inputs, size)
            return loss
        if "update" in inputs:
            return self.run_update(model, inputs["update"])
        return torch.zeros((), device=self.accelerator.device)  # the update's work is done in its last micro-step

    # ---- the end of an update

    def _end_of_update(self) -> None:
        """After the last backward pass."""
        sums = self._close_books()
        self._control_entropy(sums)
        self._this_update.means = self._audited_means(sums)
        self._record_update()
        self._this_update.ended = True

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Trainer's method, called right before the optimizer's step: the last chance to prevent that step."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._audit_gradient(model, grad_norm)
        self._boundary = None  # the step changes the weights, so the state before the update cannot be saved any more
        return grad_norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's method, called after the optimizer's step of an update, and again at the end of an epoch."""
        update_ended, self._this_update.ended = self._this_update.ended, False
        self._decide_to_stop(update_ended)
        self._record_plan()
        self._boundary = None
        try:
            if update_ended:
                self._audit_update()
            if self.control.should_epoch_stop:
                self.audits.epoch_ended_early(self._epoch)
                if self._course is not None:
                    self._course.end_early()
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except AuditError:
            raise  # without saving: the update that failed the audit is not worth resuming from
        except Exception as failed:
            self._save_despite(failed, lambda: self._save_checkpoint(self.model_wrapped, None))
            raise
        self._note_random_state()
