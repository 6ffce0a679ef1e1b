"""Load balancing by tokens: rows of an update move from processes with many tokens to run to those with few.

Processes wait for each other at the end of every update, so an update takes as long as the process with the most work.
Completions differ in length, and rows that cannot change the weights are not run, so with the rows that each process
happened to sample some have twice as much work as others. Which process runs a row affects results only by rounding:
the loss is a sum over all rows of all processes, divided by a size that all of them know. Metrics are computed on a
row's home process, to which its scores are returned.

    plan_moves          which units of work move from which process to which
    exchange_rows       moves the rows; `RowExchange` is what a process then runs
    report_stragglers   logs how uneven the processes were
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from gruppo.data.collate import trim
from gruppo.policy.packing import prompts_of
from gruppo.trainer.update.rows import PackedUpdate
from gruppo.types import TrainBatch

OWN_WORK = (  # besides the update
    *("sampling", "waiting for rollouts", "sending weights"),
    *("running tools", "asking the rewards", "computing log-probs"),
)
SLOWEST = "balance/slowest_rank"
WORTHWHILE = 1.05  # up to this ratio of the largest load to the mean load, no rows are moved


class Move(NamedTuple):
    """A unit of work that moves from one process to another."""

    source: int
    unit: int  # index among the units of the source
    target: int


def plan_moves(costs: Sequence[Sequence[int]]) -> list[Move]:
    """The moves that make the loads of processes about equal, given the costs of each process's units of work.

    Repeatedly, the process with the largest load gives the one with the smallest load the unit that makes their loads
    most equal. Every process computes the same plan. A process never passes on units that it received, nor gives away
    its last unit.

    Example, 15 tokens and 3 become 9 and 9:
        plan_moves([[5, 6, 4], [3]]) == [Move(source=0, unit=1, target=1)]
    """
    loads = [sum(own) for own in costs]
    left = [dict(enumerate(own)) for own in costs]
    moves: list[Move] = []
    if not sum(loads) or max(loads) * len(loads) <= WORTHWHILE * sum(loads):
        return moves
    while True:
        source, target = loads.index(max(loads)), loads.index(min(loads))
        gap, own = loads[source] - loads[target], left[source]
        fitting = [unit for unit, cost in own.items() if 0 < cost < gap]
        if len(own) < 2 or not fitting:
            return moves
        unit = min(fitting, key=lambda unit: (abs(gap - 2 * own[unit]), unit))
        cost = own.pop(unit)
        loads[source], loads[target] = loads[source] - cost, loads[target] + cost
        moves.append(Move(source, unit, target))


def max_over_mean(values: Sequence[float]) -> float:
    """The largest value divided by the mean: 1 if all are equal, 2 if the largest is twice the mean."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def units_of(batch: TrainBatch, rows: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Units of rows that share a prompt and stay together, and the number of tokens of each unit.

    A prompt is run once for all rows of a unit, so a group is only split into parts whose completions have at least
    twice as many tokens as the prompt.
    """
    prompts, completions = batch.prompt_mask.sum(1).tolist(), batch.completion_mask.sum(1).tolist()
    keys = [prompt.tobytes() for prompt in prompts_of(batch)]
    groups: dict[bytes, list[list[int]]] = {}
    for row in rows:
        parts = groups.setdefault(keys[row], [[]])
        if sum(completions[other] for other in parts[-1]) >= 2 * prompts[row] and parts[-1]:
            parts.append([])
        parts[-1].append(row)
    units = [part for parts in groups.values() for part in parts]
    return units, [prompts[unit[0]] + sum(completions[row] for row in unit) for unit in units]


@dataclass
class RowExchange:
    """The rows that this process runs in an update."""

    home: PackedUpdate
    run: PackedUpdate  # the rows that are run: first own rows, then guests
    kept: list[int]  # own rows that are run here, in order
    guests: list[tuple[int, list[int], int]]  # rows of other processes, in order: home process, rows there, width

    @classmethod
    def of(
        cls, process: int, update: PackedUpdate, units: Sequence[list[int]], moves: Sequence[Move]
    ) -> "RowExchange":
        """Send the units that `process`, this one, gives away, and receive those that it gets."""
        given = {move.unit: move.target for move in moves if move.source == process}
        rows_for: dict[int, list[int]] = {}
        for unit, target in given.items():
            rows_for.setdefault(target, []).extend(units[unit])
        parcels = [_parcel(update, process, members, target) for target, members in rows_for.items()]
        arrived = [p for sent in gather_object([parcels]) for p in sent if p["target"] == process]
        kept = [row for unit, members in enumerate(units) if unit not in given for row in members]
        device = update.batch.completion_ids.device
        batches = [update.batch.rows(torch.tensor(kept, device=device))]
        batches += [TrainBatch.from_dict({k: v.to(device) for k, v in p["rows"].items()}) for p in arrived]
        run = PackedUpdate.of(batches, update.size)
        run.tokens_B1 = torch.cat([update.tokens_B1[kept], *(p["tokens"].to(update.tokens_B1) for p in arrived)])
        guests = [(p["source"], p["places"], p["rows"]["completion_ids"].shape[1]) for p in arrived]
        return cls(update, run, kept, guests)

    def bring_home(self, accelerator: Any) -> None:
        """Send the scores of guest rows back, and receive those of own rows that were run elsewhere."""
        home, run = self.home, self.run
        self._enter(self.kept, run.logps_BT[: len(self.kept)], run.entropy_BT[: len(self.kept)])
        first, parcels = len(self.kept), []
        for source, places, width in self.guests:
            part = slice(first, first + len(places))
            # Clone: sending a view would transfer its whole underlying storage.
            scores = (run.logps_BT[part, :width].cpu().clone(), run.entropy_BT[part, :width].cpu().clone())
            parcels.append((source, places, *scores))
            first += len(places)
        for sent in gather_object([parcels]):
            for target, places, logps, entropies in sent:
                if target == accelerator.process_index:
                    self._enter(places, logps.to(home.logps_BT.device), entropies.to(home.logps_BT.device))

    def _enter(self, rows: list[int], logps_bT: Tensor, entropy_bT: Tensor) -> None:
        home = self.home
        width = min(home.logps_BT.shape[1], logps_bT.shape[1])  # everything beyond is padding
        home.entropy_BT = home.entropy_BT.to(torch.promote_types(home.entropy_BT.dtype, entropy_bT.dtype))
        home.logps_BT[rows, :width] = logps_bT[:, :width].to(home.logps_BT.dtype)
        home.entropy_BT[rows, :width] = entropy_bT[:, :width].to(home.entropy_BT.dtype)
        home.ran_B[rows] = True


def _parcel(update: PackedUpdate, source: int, rows: list[int], target: int) -> dict[str, Any]:
    index = torch.tensor(rows, device=update.batch.completion_ids.device)
    tensors = trim({k: v for k, v in update.batch.rows(index).to_dict().items() if v.dim()})
    return {
        "source": source,
        "target": target,
        "places": rows,
        "rows": {name: value.cpu().contiguous() for name, value in tensors.items()},
        "tokens": update.tokens_B1[index].cpu(),
    }


def exchange_rows(trainer: Any, update: PackedUpdate, rows: Sequence[int]) -> RowExchange | None:
    """Balance the tokens that processes run; None if all rows stay on their home process."""
    alone = trainer.accelerator.num_processes == 1 or not trainer.args.balance_processes
    # The entropy threshold and the router loss are computed over a micro-batch as a whole.
    if alone or trainer.entropy_share < 1 or trainer.aux_loss_enabled:
        return None
    units, costs = units_of(update.batch, rows)
    with trainer.presence.waiting():
        every: list[list[int]] = gather_object([costs])
        trainer._this_update.costs = [sum(own) for own in every]
        moves = plan_moves(every)
        return RowExchange.of(trainer.accelerator.process_index, update, units, moves) if moves else None


def report_stragglers(trainer: Any, passes: float, costs: Sequence[int]) -> None:
    """Log how uneven the work of the processes was; to be called after the device was synchronised.

    `passes` is the seconds of this process's own passes, before it waited for the others. `costs` is the number of
    tokens of each process without any exchange.
    """
    phases = OWN_WORK if trainer.packed is not None else (*OWN_WORK, "updating")
    busy = sum(trainer.presence.take_seconds(phase) for phase in phases) + passes
    mine = torch.tensor([[trainer.ledger.update_tokens, busy]], dtype=torch.double, device=trainer.accelerator.device)
    tokens, seconds = trainer.accelerator.gather(mine).T.tolist()
    found = imbalance_of(tokens, costs or tokens, seconds)
    trainer.metrics.add("train", found)
    # Averaging ranks over updates would name a wrong rank, so the rank of the last update before a log is logged.
    trainer.metrics.set("train", {SLOWEST: found[SLOWEST]})


def imbalance_of(tokens: Sequence[float], before: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """How uneven the processes were, from the tokens that each ran and the time that each worked.

    Example, two processes:
        imbalance_of([60, 40], [80, 20], [3.0, 1.0])
        -> {"balance/tokens_max_over_mean": 1.2, "balance/tokens_before": 1.6, "balance/seconds_max_over_mean": 1.5,
            "balance/slowest_rank": 0}
    """
    return {
        "balance/tokens_max_over_mean": max_over_mean(tokens),
        "balance/tokens_before": max_over_mean(before),
        "balance/seconds_max_over_mean": max_over_mean(seconds),
        SLOWEST: float(max(range(len(seconds)), key=seconds.__getitem__)),
    }
