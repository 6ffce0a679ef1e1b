"""From log-probs and advantages to gradients: the second half of a training step, on packed rows.

All of it happens in the update's last micro-step:

    run_update      starts over with smaller packs if memory runs out
    _run_packs      which rows are run, in which packs: forward, `_pack_loss`, backward
    _pack_loss      log-probs of one pack → ratio × objective × masks + KL → its share of the loss
    _loss_of_update metrics and loss of the update, by its nominal micro-batches

Padded rows, the slower path, which hooks of subclasses work with, run one micro-batch at a time: `compute_loss`, in
losses.py.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gruppo.algo.masks import top_entropy_mask
from gruppo.algo.reduce import UpdateSize
from gruppo.plan import UpdatePlan
from gruppo.policy.inplace import without_collection
from gruppo.policy.packing import PackedRows, Packer
from gruppo.policy.unwrap import bare_model, inner_model, is_noisy
from gruppo.trainer.losses import Losses
from gruppo.trainer.processes.balancing import RowExchange, exchange_rows, report_stragglers
from gruppo.trainer.update.drift import Sums, mean_of
from gruppo.trainer.update.routing import share_of_pack
from gruppo.trainer.update.rows import PackedUpdate, enter_padded
from gruppo.types import TrainBatch, required


class Updating(Losses):
    """The part of the trainer that runs packed updates."""

    def as_update(self, batches: Sequence[TrainBatch], size: UpdateSize) -> list[dict[str, Any]]:
        """The same number of micro-steps, with all the work in the last one, where gradients are synchronized.

        This undoes the split into micro-batches, which hooks of subclasses see: packs do not depend on it.
        """
        return [{} for _ in batches[1:]] + [{"update": PackedUpdate.of(batches, size)}]

    def run_update(self, model: nn.Module, update: PackedUpdate) -> Tensor:
        """Run forward and backward of every pack; returns the loss (0-d).

        If memory runs out, the gradients so far are dropped and all rows are run again in smaller packs.
        """
        assert self.packed is not None
        model.train()
        if isinstance(model, DistributedDataParallel):
            # A decoder's buffers are constants, and a process that repeats a forward pass would broadcast them alone.
            model.broadcast_buffers = False
        moving = self._rows_to_run(update)
        work = exchange_rows(self, update, moving)
        while True:
            self._sending_gradients = False
            try:
                update.passes.clear()
                update.routing.clear()
                busy = self.presence.during("updating")
                with self.packed.active(model), without_collection(), self.timer("compute_loss"), busy:
                    self._run_packs(model, update, moving, work)
                self._maybe_empty_cache()
                if work is not None:
                    work.bring_home(self.accelerator)
                return self._loss_of_update(update, work)
            except torch.OutOfMemoryError:
                if self.accelerator.num_processes > 1 and (self._sending_gradients or self.sharding.is_sharded):
                    raise  # the other processes wait for this one
            self.planner.shrink()  # not in the handler: the traceback keeps tensors that must be freed
            model.zero_grad()

    def _run_packs(
        self, model: nn.Module, update: PackedUpdate, moving: list[int], work: RowExchange | None = None
    ) -> None:
        share = not is_noisy(model, inner_model(model))
        packer = update.packer(share=share, whole=self.aux_loss_enabled)
        plan = self.planner.plan(update.batch)
        self._run_skipped_rows(model, update, packer, plan)
        if work is None:
            self._run_units(model, update, self._units(update, moving), packer, plan)
        else:  # rows were exchanged with other processes
            work.run.passes.clear()
            everything = (None, list(range(len(work.run.batch))))
            self._run_units(model, work.run, [everything], work.run.packer(share=share), plan)

    def _run_units(
        self,
        model: nn.Module,
        update: PackedUpdate,
        units: Sequence[tuple[int | None, list[int]]],
        packer: Packer,
        plan: UpdatePlan,
    ) -> None:
        """Forward and backward passes of rows, of all at once or of one micro-batch after another."""
        self._stopwatch.start()
        for micro_batch, rows in units:
            packs = packer.packs(rows, plan.tokens, plan.group_tokens)
            most = self._passes_in_step(len(packs))
            if micro_batch is not None and most > 1:
                # The entropy threshold is that of the whole micro-batch, so all its entropies must be known before its
                # loss. The processes agree on it in the first pack's loss, whatever their numbers of packs. Routers
                # need their counts of the whole micro-batch in the same way.
                self._run_without_gradient(model, update, packs, micro_batch)
            for pack in packs:
                self.stopper.check()
                last = pack is packs[-1] and rows is units[-1][1]
                # Processes synchronize gradients once, with the last pack. Sharded gradients are reduced after every
                # pack, because no process has room for all of them.
                with nullcontext() if last or self.sharding.is_sharded else self.accelerator.no_sync(model):
                    with self.compute_loss_context_manager():
                        loss = self._pack_loss(model, pack, update, micro_batch)
                    self._sending_gradients = last
                    if last:
                        self._stopwatch.stop()  # from here on this process waits for the others
                    with self.presence.during("updating", waits=last or self.sharding.is_sharded):
                        self.accelerator.backward(loss)
            self._idle(model, most - len(packs))

    def _maybe_empty_cache(self) -> None:
        steps = self.args.torch_empty_cache_steps
        if steps is not None and self.state.global_step % steps == 0:
            clear_device_cache()

    def _units(self, update: PackedUpdate, moving: list[int]) -> list[tuple[int | None, list[int]]]:
        """Rows that may share packs: all rows to run, or each micro-batch's if the loss is defined per micro-batch."""
        if self.entropy_share >= 1 and not self.aux_loss_enabled:
            return [(None, moving)]
        return [(i, list(range(part.start, part.stop))) for i, part in enumerate(update.micro_batches)]

    def _pack_loss(self, model: nn.Module, pack: PackedRows, update: PackedUpdate, micro_batch: int | None) -> Tensor:
        """One pack's share of the update's loss."""
        scores, routing = self._logps_of_pack(model, pack, entropy=True, entropy_gradient=self.entropy_control.enabled)
        logps_bT, entropy_bT = pack.padded(scores.logps), pack.padded(required(scores.entropies))
        update.keep(pack, logps_bT, entropy_bT)
        if micro_batch is not None and update.thresholds[micro_batch] is None:
            self._set_threshold(update, micro_batch)
        rows = pack.row_index
        threshold = None if micro_batch is None else update.thresholds[micro_batch]
        size = replace(
            update.size,
            micro_batch_tokens=update.tokens_B1[rows],
            micro_batch_chosen=self._chosen_tokens(update, micro_batch, rows),
        )
        output = self._policy_loss(update.batch.rows(rows), logps_bT, entropy_bT, threshold, size)
        loss = output.loss
        if routing is not None and micro_batch is not None:
            loss = loss + share_of_pack(routing, update, micro_batch, self.router_aux_loss_coef)
        # The size is that of all processes, but DDP averages their gradients.
        return loss * self.accelerator.num_processes

    def _set_threshold(self, update: PackedUpdate, micro_batch: int) -> None:
        part = update.micro_batches[micro_batch]
        mask_bT = update.batch.loss_mask_BT[part]
        update.thresholds[micro_batch] = self._entropy_threshold(update.entropy_BT[part], mask_bT)

    def _chosen_tokens(self, update: PackedUpdate, micro_batch: int | None, rows: Tensor) -> Tensor:
        """(b, 1): the number of tokens in each row's micro-batch over which an entropy bonus is averaged."""
        if micro_batch is None or self.entropy_share >= 1:
            return update.tokens_B1[rows]
        part, threshold = update.micro_batches[micro_batch], required(update.thresholds[micro_batch])
        chosen = top_entropy_mask(update.entropy_BT[part], update.batch.loss_mask_BT[part], threshold)
        return chosen.sum().to(update.tokens_B1).expand(len(rows), 1)

    def _rows_to_run(self, update: PackedUpdate) -> list[int]:
        """The rows to run, at least one, so that every process has a backward pass."""
        moving_B = self._can_move(update.batch)
        rows = moving_B.nonzero()[:, 0].tolist()
        return rows or [int((update.batch.prompt_mask.sum(1) + update.batch.completion_mask.sum(1)).argmin())]

    def _run_skipped_rows(self, model: nn.Module, update: PackedUpdate, packer: Packer, plan: UpdatePlan) -> None:
        """Compute the entropies of skipped rows, for the metrics, if the sampler did not return them."""
        known = update.batch.engine_entropies is not None
        # With sharded weights another process may have such rows, and all must make the same number of passes.
        if known and not self.sharding.is_sharded:
            return
        skipped_B = ~self._can_move(update.batch) & update.batch.loss_mask_BT.any(1)
        rows = [] if known else skipped_B.nonzero()[:, 0].tolist()
        self._run_without_gradient(model, update, packer.packs(rows, plan.tokens, plan.group_tokens))

    @torch.no_grad()
    def _run_without_gradient(
        self, model: nn.Module, update: PackedUpdate, packs: Sequence[PackedRows], micro_batch: int | None = None
    ) -> None:
        # Not through the wrapper: its forward may communicate, and not every process has such rows.
        bare, idle = bare_model(self.accelerator, model), self._passes_in_step(len(packs)) - len(packs)
        for pack in packs:
            scores, routing = self._logps_of_pack(bare, pack, entropy=True)
            update.add_routing(micro_batch, routing)
            update.keep(pack, pack.padded(scores.logps), pack.padded(required(scores.entropies)))
        self._idle(bare, idle)

    def _loss_of_update(self, update: PackedUpdate, work: RowExchange | None) -> Tensor:
        """The metrics and the loss (0-d) of the update's nominal micro-batches, from the scores of the packs.

        This is not the sum of the packs' losses: a skipped row may contribute to the loss, without a gradient.
        """
        loss = torch.zeros((), device=self.accelerator.device)
        for i, (part, threshold) in enumerate(zip(update.micro_batches, update.thresholds, strict=True)):
            batch, entropy_bT = update.batch.rows(part), update.entropy_BT[part]
            with torch.no_grad():
                output = self._policy_loss(batch, update.logps_BT[part], entropy_bT, threshold, update.size)
            router_loss = update.routing[i].loss() if i in update.routing else None
            loss += self._with_router_loss(output.loss, router_loss) * self.accelerator.num_processes
            self._defer_stats(batch, update.logps_BT[part], output, update.ran_B[part])
            self._remember(output.loss, update.logps_BT[part], entropy_bT, threshold, update.ran_B[part])
        for rows in (update,) if work is None else (update, work.run):
            rows.enter(self.ledger, self.state.global_step)
        return loss

    # ---- metrics of the update

    def _close_books(self) -> Sums:
        """Reduce the metrics of the update over all processes, and count what it ran.

        Returns numerator and denominator of each micro-batch's means.
        """
        start = time.perf_counter()
        means = self.metrics.flush("train")  # waits for the device
        waited = time.perf_counter() - start
        update = self._this_update
        for batch in update.padded:  # only now, as reading their lengths waits for the device too
            enter_padded(batch, self.ledger, self.state.global_step)
        self.ledger.took(update.pass_seconds + waited)
        if self.accelerator.num_processes > 1:
            report_stragglers(self, self._stopwatch.take(), update.costs)
        self.metrics.add("train", self.ledger.metrics() | {"step_time": update.seconds + waited})
        return means

    def _control_entropy(self, sums: Sums) -> None:
        """Let the entropy of the update set the weight of the bonus in the next one."""
        if self.entropy_control.enabled:
            self.entropy_control.update(mean_of(sums, "_chosen_entropy"))
            self.metrics.add("train", {"entropy_coef": self.entropy_control.coef})
