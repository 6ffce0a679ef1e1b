import json
import logging
import re
from pathlib import Path

import pytest

from gruppo.audit import Auditor, Finding, heard
from gruppo.errors import AuditError


def test_error_raises_with_every_message():
    seen = []
    auditor = Auditor("error", seen.append)
    with pytest.raises(AuditError, match=r"empty: nothing.*\n.*drift: far off"):
        auditor.report([Finding("empty", "nothing"), Finding("drift", "far off")])
    assert [finding.check for finding in seen] == ["empty", "drift"]
    auditor.report([])


def test_warnings_become_rarer_and_nothing_else_is_lost(caplog):
    seen = []
    auditor = Auditor("warn", seen.append)
    with caplog.at_level(logging.WARNING, "gruppo.audit"):
        for _ in range(9):
            auditor.report([Finding("empty", "nothing was written")])
        auditor.report([Finding("drift", "far off")])
    lines = [record.getMessage() for record in caplog.records]
    assert len(seen) == 10
    assert len(lines) == 5  # 1, 2, 4 and 8 of the one, 1 of the other
    assert "nothing was written" in lines[0]
    assert [f"{count} times" in line for count, line in zip((2, 4, 8), lines[1:4], strict=True)] == [True] * 3


def test_off_does_nothing(caplog):
    seen = []
    auditor = Auditor("off", seen.append)
    auditor.report([Finding("empty", "nothing"), Finding("token_books", "lost")])
    assert (seen, auditor.counts, auditor.metrics(), caplog.records) == ([], {}, {}, [])


def test_books_raise_in_spite_of_warn(caplog):
    auditor = Auditor("warn")
    with pytest.raises(AuditError) as raised:
        auditor.report([Finding("empty", "nothing"), Finding("token_books", "3 tokens lost")])
    assert str(raised.value) == "token_books: 3 tokens lost"
    assert "nothing" in caplog.text, "what came with it is still said"


def test_every_check_is_documented():
    root = Path(__file__).parents[2]
    source = "".join(path.read_text(encoding="utf-8") for path in (root / "gruppo" / "audit").glob("*.py"))
    checks = {*re.findall(r'Finding\(\s*"(\w+)"', source), "nonfinite_loss", "nonfinite_gradient"}
    docs = (root / "docs" / "audits.md").read_text(encoding="utf-8")
    assert len(checks) == 23
    assert [check for check in sorted(checks) if f"`{check}`" not in docs] == []


def test_metrics_count_since_the_last_call_and_survive_a_checkpoint():
    auditor = Auditor("warn")
    assert auditor.metrics() == {}
    auditor.report([Finding("empty", ""), Finding("empty", ""), Finding("drift", "")])
    assert auditor.metrics() == {"audit/empty": 2.0, "audit/drift": 1.0}
    auditor.report([Finding("empty", "")])
    resumed = Auditor("warn")
    resumed.load_state_dict(json.loads(json.dumps(auditor.state_dict())))
    for each in (auditor, resumed):
        assert each.metrics() == {"audit/empty": 1.0, "audit/drift": 0.0}
        assert each.counts == {"empty": 3, "drift": 1}


EMPTY, DRIFT, OTHER_DRIFT = Finding("empty", "nothing"), Finding("drift", "far off"), Finding("drift", "farther off")


@pytest.mark.parametrize(
    ("by_process", "of_process_0", "of_process_1"),
    [
        ([[], []], [], []),
        ([[], [EMPTY]], [(1, EMPTY)], []),
        ([[DRIFT], [DRIFT]], [], []),  # a number that both have
        ([[DRIFT], [EMPTY, DRIFT]], [(1, EMPTY)], []),
        ([[DRIFT], [OTHER_DRIFT]], [(1, OTHER_DRIFT)], [(0, DRIFT)]),
        ([[EMPTY], [EMPTY, EMPTY]], [(1, EMPTY)], []),  # two rounds of sampling
        ([[], [EMPTY], [EMPTY, DRIFT]], [(1, EMPTY), (2, DRIFT)], [(2, DRIFT)]),
    ],
)
def test_what_other_processes_found(by_process, of_process_0, of_process_1):
    assert heard(by_process, 0) == of_process_0
    assert heard(by_process, 1) == of_process_1


def test_nan_is_nan_in_every_process():
    """Objects that come from another process are no longer the same, and NaN equals only the same."""
    by_process = [[Finding("nonfinite_loss", "is nan", {"loss": float("nan")})] for _ in range(2)]
    assert heard(by_process, 0) == []


def test_all_processes_have_the_same_counts(caplog):
    found = [[DRIFT], [EMPTY, DRIFT], [OTHER_DRIFT]]
    auditors = [Auditor("warn") for _ in found]
    for auditor, findings in zip(auditors, found, strict=True):
        auditor.report(findings)
    caplog.clear()
    shared = [auditor.take_unshared() for auditor in auditors]
    assert shared == found
    for rank, auditor in enumerate(auditors):
        for _, finding in heard(shared, rank):
            auditor.hear(finding)
        assert auditor.take_unshared() == [], "what was heard is not passed on"
        assert auditor.metrics() == {"audit/drift": 2.0, "audit/empty": 1.0}
    assert not caplog.records, "the process that found it has said so"
