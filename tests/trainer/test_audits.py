"""Failures that say nothing are injected into real runs and seen; healthy runs have nothing to be seen."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import AuditError
from gruppo.runs.read import Run
from tests.trainer.failures import FAILURES, Failure
from tests.trainer.runs import logs

EACH_FAILURE = pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)


def findings(folder: Path) -> Counter[str]:
    """How often each check was violated, by the record of the run."""
    return Counter(event["check"] for event in Run(folder).events() if event["event"] == "audit")


def warned(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The checks that the log speaks of."""
    lines = [record.getMessage() for record in caplog.records if record.name == "gruppo.audit.findings"]
    return {line.removeprefix("Audit, ").partition(":")[0] for line in lines if "by now" not in line}


def counted(trainer: Any) -> Counter[str]:
    """How often each check was violated, by the metrics."""
    apart = {"audit/seconds", "audit/skipped_updates"}
    totals: Counter[str] = Counter()
    for line in logs(trainer):
        totals.update({key[6:]: value for key, value in line.items() if key.startswith("audit/") and key not in apart})
    return totals


@EACH_FAILURE
def test_a_failure_is_in_the_log_the_record_and_the_metrics(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = failure.trainer(tmp_path, monkeypatch)
    if failure.ends_with is None:
        trainer.train()
        assert counted(trainer) == findings(tmp_path)
    else:
        with pytest.raises(failure.ends_with):
            trainer.train()
    assert set(findings(tmp_path)) == warned(caplog) == failure.checks


@EACH_FAILURE
def test_a_failure_ends_the_run_with_audit_error(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = failure.trainer(tmp_path, monkeypatch, audit="error")
    with pytest.raises(AuditError) as error:
        trainer.train()
    named = {line.partition(":")[0] for line in str(error.value).splitlines()}
    assert named
    assert named == set(findings(tmp_path)) <= failure.checks
    assert Run(tmp_path).events()[-1]["error"] == "AuditError"


@EACH_FAILURE
def test_nothing_is_said_with_audit_off(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = failure.trainer(tmp_path, monkeypatch, audit="off")
    if failure.ends_with is None:
        trainer.train()
    else:
        with pytest.raises(failure.ends_with):
            trainer.train()
    assert not warned(caplog)
    assert {event["event"] for event in Run(tmp_path).events()} <= {"started", "finished", "failed"}
    assert not [key for line in logs(trainer) for key in line if key.startswith(("audit/", "prompts/"))]
    assert not (tmp_path / "bad_updates").exists()
