"""Silent failures: runs that end well and trained the wrong thing. Every generation and every update is looked at.

    Finding, Auditor     what a check found; raise, warn or look away
    heard                what other processes found
    RunAudits            the checks of generations and updates, and what they remember
    PromptBooks          prompts seen, skipped and repeated
    BadUpdates           updates that are left out, and when that is too many
    WeightProbe          whether the weights move
    books, nonfinite     token counts that must agree; losses and gradients that must be finite

All of it is described in docs/audits.md. Nothing in here knows the trainer.
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
