"""Helpers for tests of the page."""

from typing import Any

INJECTED = "document.querySelectorAll('main :is(script, img, b, iframe, object, style, svg, form, link)').length"


def rows(page: Any, table: str) -> list[list[str]]:
    """The texts of the cells of a table, as displayed."""
    found: list[list[str]] = page.locator(f"#{table} tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    return found


def settled(page: Any) -> None:
    """Wait until a requested list is shown."""
    page.locator("[aria-busy=false]").wait_for(state="attached")


def ready(page: Any, name: str) -> None:
    """Wait until a part of the page is shown with all its data."""
    page.locator(f"main[data-ready={name}]").wait_for()
