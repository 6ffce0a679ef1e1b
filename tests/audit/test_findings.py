import json
import logging
import re
from pathlib import Path

import pytest

from gruppo.audit import Auditor, Finding
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
