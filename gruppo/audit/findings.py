"""What a check found, and what is done about it."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gruppo.errors import AuditError

logger = logging.getLogger(__name__)

Mode = Literal["error", "warn", "off"]

# Integer counts that do not agree have no harmless explanation, so these checks raise even with audit="warn".
ALWAYS_RAISED = frozenset({"token_books"})


@dataclass(frozen=True)
class Finding:
    """A violated check: its name, a message for the user, and the numbers that it saw.

    Example:
        Finding("nan_logits", "3 of 64 completions ended because …", {"completions": 3.0})
    """

    check: str
    message: str
    values: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


def heard(by_process: Sequence[Sequence[Finding]], own: int) -> list[tuple[int, Finding]]:
    """Findings of other processes that this process does not have, each with the first process that has it.

    Findings with the same text come from numbers that all processes share (rewards, gradients, prompts) and count as
    one.

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
    """Raises on findings, warns about them or ignores them, depending on the config's `audit`; counts them.

    Every finding is passed to `on_finding`. To keep the log short, a check is logged when it is first violated, and
    again whenever its count has doubled. With several processes, each passes its findings since the last
    `take_unshared` to the `hear` of the others, so that all of them have the same counts.

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
        self._logged: Counter[str] = Counter()  # the counts at the last call of metrics()
        self._unshared: list[Finding] = []

    def report(self, findings: Iterable[Finding]) -> None:
        """Act on findings; with "error", and always for `ALWAYS_RAISED`, raise one AuditError with all of them."""
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
            logger.warning(f"Audit, {count} times so far, {finding}")

    def take_unshared(self) -> list[Finding]:
        """Findings of this process since the last call."""
        taken, self._unshared = self._unshared, []
        return taken

    def hear(self, finding: Finding) -> None:
        """Count a finding of another process, which has already reported it."""
        self.counts[finding.check] += 1

    def metrics(self) -> dict[str, float]:
        """Number of findings since the last call, for every check that has ever had one."""
        fresh = {f"audit/{check}": float(count - self._logged[check]) for check, count in self.counts.items()}
        self._logged = self.counts.copy()
        return fresh

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "logged": dict(self._logged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self._logged = Counter(state["counts"]), Counter(state["logged"])
