"""What a check found, and what is done about it."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gruppo.errors import AuditError

logger = logging.getLogger(__name__)

Mode = Literal["error", "warn", "off"]

# Sums of integers that do not add up have no healthy explanation: there is nothing to go on for.
ALWAYS_RAISED = frozenset({"token_books"})


@dataclass(frozen=True)
class Finding:
    """A violated check: its name, words for a person, and the numbers that it saw.

    Example:
        Finding("nan_logits", "3 of 64 completions ended because …", {"completions": 3.0})
    """

    check: str
    message: str
    values: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


def heard(by_process: Sequence[Sequence[Finding]], own: int) -> list[tuple[int, Finding]]:
    """What other processes found and this one did not, each with the first process that did.

    Findings in the same words come from numbers that processes share (rewards, gradients, prompts), and are one.

    Example, of process 0, where both have found the same gradient and process 1 an empty generation:
        heard([[gradient], [empty, gradient]], own=0) == [(1, empty)]
    """
    known = Counter(map(str, by_process[own]))
    fresh = []
    for process, findings in enumerate(by_process):
        times: Counter[str] = Counter()
        for finding in findings:
            times[str(finding)] += 1
            if times[str(finding)] > known[str(finding)]:
                known[str(finding)] += 1
                fresh.append((process, finding))
    return fresh


class Auditor:
    """Raises, warns or looks away, by the config's `audit`; counts what it saw.

    Every finding goes to `on_finding`. The log is spared: a check is logged when it is violated for the first time,
    and again whenever its count has doubled. Where there are several processes, what each of them has found since
    `take_unshared` was last called is for the others to `hear`; all of them then have the same counts.

    Example:
        auditor = Auditor("warn")
        auditor.report([Finding("empty", "…"), Finding("empty", "…")])
        auditor.metrics() == {"audit/empty": 2.0}
        auditor.metrics() == {"audit/empty": 0.0}
    """

    def __init__(self, mode: Mode, on_finding: Callable[[Finding], None] | None = None):
        self.mode = mode
        self.on_finding = on_finding
        self.counts: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()  # what the counts were when metrics were last taken
        self._unshared: list[Finding] = []

    def report(self, findings: Iterable[Finding]) -> None:
        """Act on findings; with "error", and for books that do not balance, raise an AuditError with all of them."""
        if self.mode == "off":
            return
        raised = []
        for finding in findings:
            self.counts[finding.check] += 1
            self._unshared.append(finding)
            if self.on_finding is not None:
                self.on_finding(finding)
            if self.mode == "error" or finding.check in ALWAYS_RAISED:
                raised.append(finding)
            else:
                self._warn(finding)
        if raised:
            raise AuditError("\n".join(map(str, raised)))

    def _warn(self, finding: Finding) -> None:
        count = self.counts[finding.check]
        if count == 1:
            logger.warning(f"Audit, {finding} (audit='off' silences all checks, audit='error' stops the run.)")
        elif count & (count - 1) == 0:
            logger.warning(f"Audit, {count} times by now, {finding}")

    def take_unshared(self) -> list[Finding]:
        """Findings of this process since the last call."""
        taken, self._unshared = self._unshared, []
        return taken

    def hear(self, finding: Finding) -> None:
        """Count what another process found and has already spoken of."""
        self.counts[finding.check] += 1

    def metrics(self) -> dict[str, float]:
        """Findings since the last call, of every check that ever had one."""
        fresh = {f"audit/{check}": float(count - self._logged[check]) for check, count in self.counts.items()}
        self._logged = self.counts.copy()
        return fresh

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "logged": dict(self._logged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self._logged = Counter(state["counts"]), Counter(state["logged"])
