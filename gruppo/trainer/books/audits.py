"""The trainer's interface to the checks of every update. The checks themselves are in `gruppo.audit`."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gruppo.audit.data import PromptBooks
from gruppo.audit.evidence import BadUpdates
from gruppo.audit.findings import Auditor, Finding
from gruppo.audit.run import RunAudits
from gruppo.audit.update import books, nonfinite
from gruppo.audit.weights import WeightProbe
from gruppo.types import Rollout

logger = logging.getLogger(__name__)

Note = Callable[[Finding], None]


class Audits:
    """All checks of a run and their state; with audit='off' none of them reports a finding.

    An update that is not finite is skipped and counted even with audit='off', because that protects the weights.
    """

    def __init__(self, mode: Any, max_bad_updates: int, on_finding: Note):
        self.mode, self.on_finding, self.max_bad_updates = mode, on_finding, max_bad_updates
        self.seconds = 0.0  # spent since the last update
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.auditor = Auditor(self.mode, self.on_finding)
        self.run = RunAudits()
        self.bad_updates = BadUpdates(self.max_bad_updates)
        self.books = PromptBooks(None)  # counts prompts without tracking epochs
        self.probe: WeightProbe | None = None
        self._weights_before: Tensor | None = None  # the last reading of the probe before the checkpoint
        self._books_to_load: Mapping[str, Any] | None = None  # from `load_state_dict` until `load_tensors`
        self.skipped = False  # whether the current update was skipped

    @property
    def on(self) -> bool:
        return self.mode != "off"

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    # ---- prompts

    def keep_books(self, prompts: int | None, left_over: int = 0) -> None:
        """From now on, track which prompts each epoch of a dataset of this size uses; None: only count prompts."""
        self.books = PromptBooks(prompts, left_over)

    def took(self, indices: Sequence[tuple[int, int]]) -> None:
        """Record the prompts that were taken, each as its epoch and its index in the dataset."""
        if self.on and indices:
            with self.timed():
                epochs, places = zip(*indices, strict=True)
                self.auditor.report(self.books.take(places, epochs))

    def epoch_ended_early(self, epoch: int) -> None:
        """Record that this epoch was ended early on purpose, so that the prompts it leaves out are not a finding."""
        self.books.end_early(epoch)

    # ---- a generation

    def sampled(self, rollouts: Sequence[Rollout], **facts: Any) -> None:
        """See `RunAudits.after_sampling`."""
        if self.on:
            with self.timed():
                self.auditor.report(self.run.after_sampling(rollouts, **facts))

    def scored(self, **facts: Any) -> None:
        """See `RunAudits.after_scoring`."""
        if self.on:
            with self.timed():
                self.auditor.report(self.run.after_scoring(**facts))

    def balance(self, expected: Mapping[str, int], found: Mapping[str, int], where: str) -> None:
        """Compare two counts of the same things; a difference is reported as a finding."""
        if self.on and (finding := books(expected, found, where)) is not None:
            self.auditor.report([finding])

    # ---- an update

    def is_finite(self, loss: float, grad_norm: float | None, *, left_out: bool = True) -> bool:
        """Whether an update may be applied to the weights; if not, it counts as a bad update."""
        findings = nonfinite(loss, grad_norm, left_out=left_out)
        self.skipped = bool(findings)
        self.bad_updates.note(self.skipped)
        if self.skipped and not self.on and self.bad_updates.total == 1:
            logger.warning(
                f"{findings[0].message} (audit='off': reported only once; audit/skipped_updates counts them.)"
            )
        self.auditor.report(findings)
        return not findings

    def updated(self, parameters: Collection[nn.Parameter], **facts: Any) -> dict[str, float]:
        """Run `RunAudits.after_update` after the optimizer step; returns metrics to average in the log."""
        if not self.on:
            return {}
        with self.timed():
            changed = self._changed_share(parameters)
            if not self.skipped:
                self.auditor.report(self.run.after_update(changed_share=changed, **facts))
        metrics = {"audit/seconds": self.seconds}
        self.seconds, self.skipped = 0.0, False
        return metrics

    def _changed_share(self, parameters: Collection[nn.Parameter]) -> float | None:
        if self.probe is not None:
            return self.probe.changed()
        # The probe is created after the first update, so the weights before it are only known from a checkpoint.
        self.probe = WeightProbe(parameters)
        return self.probe.changed_since(self._weights_before)

    def found(self) -> dict[str, float]:
        """Counts of findings since the last call, to be summed in the log."""
        return self.auditor.metrics()

    def totals(self) -> dict[str, float]:
        """Counts of the run so far, for the log."""
        skipped = {"audit/skipped_updates": float(self.bad_updates.total)} if self.bad_updates.total else {}
        return skipped | (self.books.metrics() if self.on else {})

    def why_stopped(self, folder: str) -> str:
        return (
            f"The loss or the gradient of {self.bad_updates.in_a_row} updates in a row was not finite. They were "
            f"skipped and their rows are in bad_updates; the run was saved in {folder} and stopped. Check the rewards "
            "and the weights, or raise max_bad_updates."
        )

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"auditor": self.auditor, "run": self.run, "bad_updates": self.bad_updates}
        books = {name: value for name, value in self.books.state_dict().items() if name != "counts"}
        books["kept"] = self.on and self.books.prompts is not None
        return {name: part.state_dict() for name, part in state.items()} | {"books": books}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.auditor.load_state_dict(state["auditor"])
        self.run.load_state_dict(state["run"])
        self.bad_updates.load_state_dict(state["bad_updates"])
        self._books_to_load = state["books"]

    def tensors(self) -> dict[str, Tensor]:
        """The part of the state that JSON cannot hold."""
        known = {} if self.probe is None or self.probe.last is None else {"weights_read": self.probe.last}
        return {"prompt_counts": self.books.state_dict()["counts"], **known}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of a checkpoint; must be called after `load_state_dict`."""
        self._weights_before = tensors.get("weights_read")
        saved, self._books_to_load = self._books_to_load, None
        if saved is None or not saved["kept"]:
            self.keep_books(None)  # the checkpoint does not say which prompts the epoch has used
        if saved is not None and (self.books.prompts is None or not self.on):
            self.books.load_totals(saved)
        elif saved is not None:
            self.books.load_state_dict({**saved, "counts": tensors["prompt_counts"]})
