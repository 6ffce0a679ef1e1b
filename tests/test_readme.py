"""What the README shows is true: its numbers are those of the result files. `tests/docs` runs its code."""

import re
from pathlib import Path

import pytest

from benchmarks.readme import (
    fill,
    fill_cells,
    fill_engine_page,
    fill_measured_page,
    fill_performance_page,
    fill_view_page,
    fill_vllm_page,
)
from gruppo.demo import EXAMPLE

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_table_holds_the_committed_results() -> None:
    assert fill(README) == README, "run `python benchmarks/readme.py`"
    assert len(fill_cells(README)[1]) >= 5


def test_the_page_of_measurements_has_a_row_for_every_file() -> None:
    page = (Path(__file__).parents[1] / "docs" / "measured.md").read_text(encoding="utf-8")
    assert fill_measured_page(page) == page, "run `python benchmarks/readme.py`"
    with pytest.raises(SystemExit, match=r"no row for soak"):
        fill_measured_page(page.replace("[soak.json]", "[gone.json]"))


def test_the_engine_page_shows_the_committed_profile() -> None:
    page = (Path(__file__).parents[1] / "docs" / "engine.md").read_text(encoding="utf-8")
    assert "| attention | 1." in page
    assert fill_engine_page(page) == page, "run `python benchmarks/readme.py`"


def test_the_performance_page_shows_the_committed_measurements() -> None:
    page = (Path(__file__).parents[1] / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "| `fused_head=False` | " in page
    assert "The arithmetic of this update is " in page
    assert fill_performance_page(page) == page, "run `python benchmarks/readme.py`"


def test_the_page_of_the_viewer_shows_the_committed_measurement() -> None:
    page = (Path(__file__).parents[1] / "docs" / "view.md").read_text(encoding="utf-8")
    assert "first paint after at most " in page
    assert fill_view_page(page) == page, "run `python benchmarks/readme.py`"


def test_the_page_of_vllm_shows_the_committed_measurement() -> None:
    page = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert "| a server, weights by IPC | " in page
    assert fill_vllm_page(page) == page, "run `python benchmarks/readme.py`"


def test_the_snippet_is_the_demo_example() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert snippet.strip() == EXAMPLE.strip()
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https:)([^)]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (Path(__file__).parents[1] / target.partition("#")[0]).exists()


def test_every_test_that_a_document_names_exists() -> None:
    root = Path(__file__).parents[1]
    for document in (root / "docs").glob("*.md"):
        for path, name in re.findall(r"`((?:tests|benchmarks)/[\w/.]+)(?:::(\w+))?`", document.read_text("utf-8")):
            assert (root / path).exists(), f"{document.name} names {path}"
            if name:
                assert f"def {name}(" in (root / path).read_text("utf-8"), f"{document.name} names {path}::{name}"
