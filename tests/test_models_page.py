"""docs/models.md: the tests that its table names are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", page))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_line_of_the_table_that_promises_something_names_a_test() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ") and "| engine |" not in line]
    assert len(lines) > 12
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 6, line
        assert "tests/" in cells[5] or cells[5] == "–", line
