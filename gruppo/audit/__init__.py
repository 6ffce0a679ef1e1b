"""Checks for silent failures: runs that finish without an error but trained the wrong thing.

Every generation and every update is checked.

    Finding, Auditor     a violated check; raises, warns or ignores it
    heard                what other processes found
    RunAudits            the checks of generations and updates, with their state
    PromptBooks          counts of prompts seen, skipped and repeated
    BadUpdates           counts skipped updates, and stops the run after too many
    WeightProbe          whether the weights change
    books, nonfinite     token counts that must agree; losses and gradients that must be finite

docs/audits.md describes all checks. Nothing in this package depends on the trainer.
"""

from gruppo.audit.data import PromptBooks
from gruppo.audit.evidence import BadUpdates
from gruppo.audit.findings import Auditor, Finding, heard
from gruppo.audit.run import RunAudits
from gruppo.audit.update import books, nonfinite
from gruppo.audit.weights import WeightProbe

__all__ = [
    "Auditor",
    "BadUpdates",
    "Finding",
    "PromptBooks",
    "RunAudits",
    "WeightProbe",
    "books",
    "heard",
    "nonfinite",
]
