"""What tests of the page look at."""

from typing import Any

INJECTED = "document.querySelectorAll('main :is(script, img, b, iframe, object, style, svg, form, link)').length"


def rows(page: Any, table: str) -> list[list[str]]:
    """The cells of a table, as they are read."""
    found: list[list[str]] = page.locator(f"#{table} tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    return found


def settled(page: Any) -> None:
    """Wait until a list that was asked for is there."""
    page.locator("[aria-busy=false]").wait_for(state="attached")


def ready(page: Any, name: str) -> None:
    """Wait until a part of the page is shown with all that it asked for."""
    page.locator(f"main[data-ready={name}]").wait_for()
