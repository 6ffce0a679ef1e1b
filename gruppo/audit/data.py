"""Checks that an epoch sees every prompt exactly once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gruppo.audit.findings import Finding
from gruppo.errors import CheckpointError

MOST_NAMED = 5


class PromptBooks:
    """Counts how often each prompt of a dataset is taken in each epoch.

    `prompts` is the size of the dataset; None for an endless stream, whose prompts are only counted. Every epoch
    leaves out `left_over` prompts on purpose: the remainder that does not fill a generation.

    Prompts are taken in stream order, so an epoch is over, and its books are closed, as soon as a prompt of a later
    epoch is taken. When a run ends, the books of the current epoch stay open. Prompts of epochs before `first_epoch`
    are only counted: a run that resumes in the middle of epoch 2 without the earlier books sets it to 3. Prompts left
    out because an epoch was ended on purpose (`end_early`) are only counted, too.

    Example, five prompts in generations of two:
        books = PromptBooks(5, left_over=1)
        books.take([3, 0], epoch=0)    # []
        books.take([4, 3], epoch=0)    # [Finding("prompt_repeated", …)]
        books.take([1, 2], epoch=1)    # [Finding("prompt_skipped", …)]: epoch 0 has seen three of four
        books.metrics() == {"prompts/seen": 6, "prompts/skipped": 2, "prompts/repeated": 1}
    """

    def __init__(self, prompts: int | None, left_over: int = 0, first_epoch: int = 0):
        self.prompts = prompts
        self.left_over = left_over
        self.first_epoch = first_epoch
        self.seen = self.skipped = self.repeated = 0  # over all epochs; skipped: over closed epochs
        self._closed = first_epoch  # all epochs before this one are closed
        self._open: dict[int, NDArray[np.uint8]] = {}  # how often each prompt was taken, by epoch
        self._ended_early: set[int] = set()  # epochs ended early that are not closed yet

    def take(self, indices: Sequence[int], epoch: int | Sequence[int]) -> list[Finding]:
        """Count prompts, with one index per prompt, not per completion, and one epoch for all or one for each."""
        self.seen += len(indices)
        if self.prompts is None or not len(indices):
            return []
        index_P = np.asarray(indices, np.int64)
        epoch_P = np.broadcast_to(np.asarray(epoch, np.int64), index_P.shape)
        known_P = (index_P >= 0) & (index_P < self.prompts)
        findings = [] if known_P.all() else [self._unknown(index_P[~known_P])]
        for number in np.unique(epoch_P).tolist():
            findings += self._enter(number, index_P[known_P & (epoch_P == number)])
        return findings + self.close(before=int(epoch_P.max()))

    def end_early(self, epoch: int) -> None:
        """Mark this epoch as ended on purpose, so that its remaining prompts are not reported as skipped."""
        if epoch >= self._closed:
            self._ended_early.add(epoch)

    def close(self, before: int) -> list[Finding]:
        """Close the books of every epoch before `before`; at the end of epoch 2, call `close(before=3)`."""
        findings = []
        for epoch in range(self._closed, before if self.prompts is not None else 0):
            findings += self._balance(epoch, self._open.pop(epoch, self._nothing_taken()))
        self._closed = max(self._closed, before)
        self._ended_early = {epoch for epoch in self._ended_early if epoch >= self._closed}
        return findings

    def _nothing_taken(self) -> NDArray[np.uint8]:
        return np.zeros(self.prompts or 0, np.uint8)

    def _enter(self, epoch: int, index_P: NDArray[np.int64]) -> list[Finding]:
        if epoch < self.first_epoch:
            return []
        if epoch < self._closed:
            self.repeated += len(index_P)
            return [self._repeated(index_P, f"epoch {epoch}, which was over")]
        counts = self._open.setdefault(epoch, self._nothing_taken())
        unique, times = np.unique(index_P, return_counts=True)
        again = np.minimum(counts[unique] + times - 1, times)  # all but the first time
        counts[unique] = np.minimum(counts[unique] + times, 255)  # avoid uint8 overflow
        self.repeated += int(again.sum())
        return [self._repeated(unique[again > 0], f"epoch {epoch}")] if again.any() else []

    def _balance(self, epoch: int, counts: NDArray[np.uint8]) -> list[Finding]:
        missing = np.flatnonzero(counts == 0)
        self.skipped += len(missing)
        if len(missing) == self.left_over or epoch in self._ended_early:
            return []
        return [
            Finding(
                "prompt_skipped",
                f"Epoch {epoch} left out {len(missing)} of {self.prompts} prompts ({_some(missing)}); it should be "
                f"{self.left_over}, those that do not fill a generation. Look at the sampler, and at where the run "
                "was resumed.",
                {"epoch": float(epoch), "skipped": float(len(missing)), "expected": float(self.left_over)},
            )
        ]

    def _repeated(self, index_P: NDArray[np.int64], where: str) -> Finding:
        return Finding(
            "prompt_repeated",
            f"{len(index_P)} prompts ({_some(index_P)}) were taken again in {where}: the run trains on them twice and "
            "on others not at all. Look at your own sampler, if there is one, and at where the run was resumed.",
            {"prompts": float(len(index_P))},
        )

    def _unknown(self, index_P: NDArray[np.int64]) -> Finding:
        return Finding(
            "prompt_unknown",
            f"{len(index_P)} prompts ({_some(index_P)}) are not among the dataset's, which are 0 to "
            f"{(self.prompts or 0) - 1}. Look at the sampler, and whether the dataset became smaller since the "
            "checkpoint.",
            {"prompts": float(len(index_P))},
        )

    def metrics(self) -> dict[str, float]:
        """Totals of the run."""
        return {
            "prompts/seen": float(self.seen),
            "prompts/skipped": float(self.skipped),
            "prompts/repeated": float(self.repeated),
        }

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and one uint8 tensor `counts` (open epochs, prompts)."""
        counts = np.stack(list(self._open.values())) if self._open else np.zeros((0, self.prompts or 0), np.uint8)
        totals = {"seen": self.seen, "skipped": self.skipped, "repeated": self.repeated}
        places = {"first_epoch": self.first_epoch, "closed": self._closed, "ended_early": sorted(self._ended_early)}
        return {**totals, **places, "epochs": list(self._open), "counts": torch.from_numpy(counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = state["counts"].numpy()
        if counts.shape[1] != (self.prompts or 0):
            raise CheckpointError(
                f"The checkpoint's run had {counts.shape[1]} prompts and this one has {self.prompts or 0}: which of "
                "them an epoch has seen is unknown. Resume with the same dataset."
            )
        self.load_totals(state)
        self.first_epoch, self._closed = int(state["first_epoch"]), int(state["closed"])
        self._ended_early = set(state["ended_early"])
        self._open = {epoch: row.copy() for epoch, row in zip(state["epochs"], counts, strict=True)}

    def load_totals(self, state: Mapping[str, Any]) -> None:
        """Load the totals only, where the prompts that the epochs have seen are unknown or of no use."""
        self.seen, self.skipped, self.repeated = (int(state[name]) for name in ("seen", "skipped", "repeated"))


def _some(indices: NDArray[np.int64]) -> str:
    named = ", ".join(map(str, indices[:MOST_NAMED].tolist()))
    return f"{named}, …" if len(indices) > MOST_NAMED else named
