"""The findings of `gruppo check`: one line for each thing that was checked."""

import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gruppo.errors import GruppoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["Finding", "Findings", "raised_at"]

OK, WARNING, ERROR = "ok", "warning", "error"
STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red"}
# Their messages say what is wrong and what to do. NotImplementedError names the field that is not implemented yet.
TOLD: tuple[type[Exception], ...] = (GruppoError, NotImplementedError, ImportError)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Example:
        str(Finding("error", "dataset", "There is no file rows.jsonl.")) == "error    dataset    There is no file …"
    """

    level: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8} {self.what:<10} {self.text}"

    def coloured(self) -> "Text":
        from rich.text import Text

        line = Text(str(self))
        line.stylize(STYLES[self.level], 0, len(self.level))
        return line


@dataclass
class Findings:
    """All findings, in the order in which they were added.

    Example:
        findings = Findings()
        with findings.about("dataset"):
            rows = load_rows()             # a DataError becomes a line, and so does a warning of the library
            findings.ok("dataset", f"{len(rows)} rows")
    """

    found: list[Finding] = field(default_factory=list)
    console: "Console | None" = None  # prints each finding as it is added

    def ok(self, what: str, text: str) -> None:
        self._add(Finding(OK, what, text))

    def warning(self, what: str, text: str) -> None:
        self._add(Finding(WARNING, what, text))

    def error(self, what: str, text: str) -> None:
        self._add(Finding(ERROR, what, text))

    def _add(self, finding: Finding) -> None:
        if finding in self.found:
            return
        self.found.append(finding)
        if self.console is not None:
            self.console.print(finding.coloured(), soft_wrap=True)

    @contextmanager
    def about(self, what: str, *others: type[Exception]) -> Iterator[None]:
        """Turn exceptions in TOLD and `others` into errors, and the library's logged warnings into warnings."""
        expected: tuple[type[Exception], ...] = (*TOLD, *others)
        with _listening() as said:
            try:
                yield
            except expected as error:
                self.error(what, _worded(error))
        for text in dict.fromkeys(said):
            self.warning(what, text)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.found if finding.level == ERROR]

    @property
    def summary(self) -> str:
        count = Counter(finding.level for finding in self.found)
        parts = [
            f"{count[level]} {level}{'s' if count[level] > 1 else ''}" for level in (ERROR, WARNING) if count[level]
        ]
        return " and ".join(parts) or "Nothing to complain about"


def _worded(error: Exception) -> str:
    words = str(error).strip() or type(error).__name__
    return words if isinstance(error, (*TOLD, OSError, ValueError)) else f"{type(error).__name__}: {words}"


def raised_at(error: BaseException) -> str:
    """Where an unexpected error was raised, as ' (file:line)'."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect the warnings that the library logs in this block; they are not shown elsewhere."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    logger, ear = logging.getLogger("gruppo"), Ear()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)
        logger.propagate = propagates
