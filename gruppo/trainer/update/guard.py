"""When the parity check runs, what it does if memory is short, and what follows from its result."""

import logging
from collections.abc import Callable
from typing import Any

import rich
import torch
from torch import nn

from gruppo.errors import ParityError
from gruppo.plan.budgets import PARITY_TOKENS
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.sharding import Sharding, WholeWeights
from gruppo.trainer.display.console import printing
from gruppo.trainer.processes.presence import Presence
from gruppo.trainer.processes.sharded import why_no_parity_check
from gruppo.trainer.update.parity import ParityReport, check_parity, enforce
from gruppo.trainer.update.parity_rows import with_short_prompts
from gruppo.trainer.update.planning import UpdatePlanner
from gruppo.types import TrainBatch

logger = logging.getLogger(__name__)

# Mean |difference| up to which the sampling engine's log-probs may be used in place of the trainer's.
_SAME_LOGPS = 1e-3

_SHORT_PROMPTS = (
    f"It is tried again with the last {PARITY_TOKENS} tokens of the prompts. The sampler's log-probs, which belong to "
    "the whole prompts, are then not compared, and old log-probs are recomputed. A smaller max_prompt_length saves "
    "memory."
)
_NO_PARITY = (
    f"There is not enough memory for single rows of {2 * PARITY_TOKENS} tokens either: the run continues with packed "
    "rows that were not compared with the padded reference path. Check a smaller model of the same kind; "
    "gradient_checkpointing=True or an adapter (peft_config) saves memory, and parity_check='off' skips the check."
)


class ParityGuard:
    """Compares packed rows with the padded reference path, before the first update only or at a fixed interval.

    `packed` runs packed rows (None: rows are not packed, and nothing is checked). `whole` returns the full weights, as
    gathered for a rollout if weights are sharded. All processes call `check` together and act on all reports.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Any,
        packed: PackedPolicy | None,
        *,
        planner: UpdatePlanner,
        presence: Presence,
        sharding: Sharding,
        whole: Callable[[], WholeWeights | None],
    ):
        self.args, self.accelerator, self.packed = args, accelerator, packed
        self.planner, self.presence, self.sharding, self.whole = planner, presence, sharding, whole
        self.checked_at: int | None = None  # the update before which it last ran, or turned out to be impossible
        self.reuses_engine_logps = False  # whether they agreed with the trainer's in the last check

    def check(self, policy: nn.Module, batch: TrainBatch, update: int, **options: Any) -> None:
        """Compare the two paths on some of these rows if a check is due; raise if they differ."""
        interval, last = self.args.parity_interval, self.checked_at
        due = last is None or (interval and update - last >= interval)
        if self.packed is None or interval is None or not due:
            return
        if self.sharding.is_sharded:
            whole = self.whole()
            if (why := why_no_parity_check(self.accelerator, whole)) is not None:
                return self._go_without(why, update)
            assert whole is not None
            policy = whole.module  # available during a rollout
        else:
            self.planner.plan(batch)  # turns on gradient checkpointing if the update needs it
        report = self._report(policy, batch, options)
        if self.accelerator.is_main_process and report is not None and report.rows:
            printing(rich.get_console()).print(report.table())
        self.take_verdict(report, update)

    def _report(self, policy: nn.Module, batch: TrainBatch, options: dict[str, Any]) -> ParityReport | None:
        """The report on this process's rows, with short prompts if memory is short; None if that does not help."""
        assert self.packed is not None
        for rows, remark in ((batch, _SHORT_PROMPTS), (with_short_prompts(batch), _NO_PARITY)):
            try:
                with torch.enable_grad(), self.presence.during("checking parity"):
                    return check_parity(policy, self.packed, rows, **options)
            except torch.OutOfMemoryError:
                pass
            self.planner.free()
            logger.warning(f"Out of memory in the parity check. {remark}")
        return None

    def take_verdict(self, report: ParityReport | None, update: int) -> None:
        """Act on the reports of all processes, in the same way on each; a process without memory has no report."""
        local = [1.0, torch.nan, 0.0, 0.0]  # without memory for a check
        if report is not None:
            difference = torch.nan if report.engine_difference is None else report.engine_difference
            local = [float(report.ok), difference, float(report.rows), 1.0]
        gathered = self.accelerator.gather(torch.tensor([local], device=self.accelerator.device))
        all_ok, differences, rows, had_memory = gathered.unbind(1)
        agree = bool((differences <= _SAME_LOGPS).all())  # False if one of them is unknown
        self.reuses_engine_logps = self.args.reuse_sampling_logps and agree
        if report is not None:
            enforce(report)
        if not all_ok.all():
            raise ParityError("The parity check failed on another process; its message says where.")
        # If no row has a loss, as when all are truncated, nothing was compared: the next update is checked instead.
        if rows.any() or not had_memory.all():
            self.checked_at = update

    def _go_without(self, why: str, update: int) -> None:
        if self.checked_at is None and self.accelerator.is_main_process:
            logger.warning(
                f"No parity check under {self.sharding.value}: it needs all weights and their gradients on a process, "
                f"{why}. Check a smaller model of the same kind on one process; parity_check='off' silences this "
                "message."
            )
        self.checked_at = update
