"""Names, settings, events and texts that want to hide or reorder what stands beside them, on every page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gruppo.config.folder import why_no_path
from gruppo.view.export import export
from gruppo.view.queries import Desk
from tests.view import runs
from tests.view.browsing import INJECTED, ready

ODD = quote(runs.ODD_NAME)
PLACES = [
    *(f"curves?metric=reward&metric={ODD}", "groups?update=", "group?group=0", "tokens?row=1", "prompts"),
    *(f"prompt?prompt_id={ODD}", "run"),
]

# What is hidden or reordered in texts and in what is read out; and marked texts that have no box of their own.
WRONG = r"""() => {
  const unseen = /(?![\n\t])[\p{Cc}\p{Cf}\p{Default_Ignorable_Code_Point}\u2028\u2029\u2800]/u, wrong = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const parent = walk.currentNode.parentElement, text = walk.currentNode.data;
    if (parent.closest("script")) continue;
    if (unseen.test(text)) wrong.push(["unseen", parent.outerHTML]);
    if (text.includes("⟦U+202E⟧") && !parent.closest("bdi, option, .token")) wrong.push(["no box", parent.outerHTML]);
  }
  for (const each of document.querySelectorAll("[aria-label], [title]")) {
    if (unseen.test(each.ariaLabel ?? "") || unseen.test(each.title)) wrong.push(["label", each.outerHTML]);
  }
  return wrong;
}"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    if (why := why_no_path(runs.ODD_NAME)) is not None:
        pytest.skip(f"there can be no run of such a name: {why}")
    parent = tmp_path_factory.mktemp("odd")
    runs.make_odd_run(parent)
    return runs.desk(parent, runs.make_run(parent / "plain"))


@pytest.mark.parametrize("how", ["served", "exported"])
def test_nothing_is_hidden_or_reordered(
    page: Any, odd: Desk, how: str, served: Callable[[Desk], str], tmp_path: Path
) -> None:
    where = served(odd) if how == "served" else (tmp_path / "report.html").as_uri()
    if how == "exported":
        export(odd, tmp_path / "report.html")
    for place in PLACES:
        page.goto(f"{where}#{place}")
        ready(page, place.split("?")[0])
        for details in page.locator("main details:not(.turn) > summary").all():
            details.click()
        assert "⟦U+202E⟧" in page.locator("body").inner_text(), place
        assert page.evaluate(WRONG) == [], place
        assert page.evaluate(INJECTED) == 0, place


def test_every_unseen_character_has_its_code_point(page: Any, odd: Desk, served: Callable[[Desk], str]) -> None:
    page.goto(served(odd))
    visible = "async text => (await import('/static/dom.js')).visible(text)"
    controls = "".join(map(chr, [*range(9), *range(11, 32), *range(127, 160)]))
    for text in (runs.UNSEEN, runs.BIDI, controls):
        marked = "".join(c if 0x20 <= ord(c) < 0x7F else f"⟦U+{ord(c):04X}⟧" for c in text)
        assert page.evaluate(visible, text) == marked
    for text in (runs.EMOJI, "a\n\tb", runs.RIGHT_TO_LEFT):
        assert page.evaluate(visible, text) == text


def test_a_long_completion_in_parts(page: Any, odd: Desk, served: Callable[[Desk], str]) -> None:
    page.goto(f"{served(odd)}#tokens?row=0")
    ready(page, "tokens")
    caption, body = page.locator("#token-table caption"), page.locator("#token-table tbody tr")
    page.get_by_text("As a table").click()
    assert caption.inner_text() == "Positions 0 to 499 of 4,600 tokens"
    page.get_by_role("navigation", name="Pages of the list").get_by_role("button", name="Next").click()
    assert caption.inner_text() == "Positions 500 to 999 of 4,600 tokens"
    page.get_by_role("navigation", name="Parts of the completion").get_by_role("button", name="Next").click()
    page.get_by_text("Tokens 4,097 to 4,600 of 4,600").wait_for()
    page.get_by_text("As a table").click()
    assert caption.inner_text() == "Positions 4,096 to 4,595 of 4,600 tokens"
    page.get_by_role("navigation", name="Pages of the list").get_by_role("button", name="Next").click()
    assert (caption.inner_text(), body.count()) == ("Positions 4,596 to 4,599 of 4,600 tokens", 4)


def test_updates_on_the_axis_are_whole(page: Any, odd: Desk, served: Callable[[Desk], str]) -> None:
    page.add_init_script("""window.written = []; const own = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        if (this.textAlign === "center") window.written.push(text);
        return own.call(this, text, ...at); };""")
    page.goto(f"{served(odd)}#curves?metric=reward")
    ready(page, "curves")
    written = page.evaluate("window.written")
    assert {"1", "2", "3", "4"} <= set(written)
    assert all(float(text).is_integer() for text in written)
