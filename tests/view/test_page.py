"""The page in a real browser: what a person sees and does, with texts that want to break it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from gruppo.runs import RunRecorder
from gruppo.runs.lock import RunLock
from gruppo.view.export import export
from gruppo.view.folders import Folders
from gruppo.view.queries import Desk
from tests.view import runs
from tests.view.browsing import INJECTED, ready, rows, settled


@pytest.fixture(scope="module")
def address(desk: Desk, served: Callable[[Desk], str]) -> str:
    return served(desk)


# ---- curves


def test_curves_of_two_runs_that_go_on(
    page: Any, served: Callable[[Desk], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders = []
    for name, start in (("calm", 0.25), ("brisk", 0.5)):
        recorders.append(RunRecorder(tmp_path / name))
        recorders[-1].begin(config={"learning_rate": start}, environment={})
        for update in range(1, 9):
            recorders[-1].metrics(update, {"reward": start, "loss": start + update / 8, "<b>odd</b>": 1.0})
    monkeypatch.setattr("gruppo.view.queries.SEARCH_EVERY", 0)
    page.goto(served(runs.desk(tmp_path)))
    figures = page.locator("figure")
    figures.nth(1).locator("canvas").wait_for()
    assert figures.locator("figcaption").all_inner_texts() == ["reward", "loss"]
    assert "brisk: 0.500 at 8" in figures.nth(0).inner_text()
    assert "calm: 0.250 at 8" in figures.nth(0).inner_text(), "both runs in one chart"

    # Linked hover: pointing at one chart reads the other at the same update.
    figures.nth(0).locator(".u-over").hover(position={"x": 2, "y": 40})
    page.get_by_text("calm: 0.375 at 1").wait_for()
    assert "calm: 0.250 at 1" in figures.nth(0).inner_text()

    # Any metric, by the keyboard; what it is called is text.
    page.get_by_text("Metrics", exact=True).press("Enter")
    page.get_by_label("Find a metric").fill("odd")
    page.get_by_label("<b>odd</b>").press("Space")
    figures.nth(2).locator("canvas").wait_for()
    assert figures.nth(2).locator("figcaption").inner_text() == "<b>odd</b>"
    page.get_by_label("Smoothing").fill("0.9")
    expect(page).to_have_url(re.compile("smooth=0.9"))
    page.get_by_role("checkbox", name="calm").uncheck()
    assert "calm" not in figures.nth(0).inner_text()

    # And on it goes. Only one of them is at work, and what somebody has zoomed into stays.
    over = figures.nth(0).locator(".u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] / 2, over["y"] + 20)
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] - 5, over["y"] + 20)
    page.mouse.up()
    page.mouse.move(1, 1)
    figures.nth(0).locator("canvas").evaluate("canvas => { canvas.own = true; }")
    with RunLock(tmp_path / "brisk"):
        recorders[1].metrics(9, {"reward": 0.875, "loss": 0.0})
        page.get_by_text("brisk: 0.875 (smoothed 0.561) at 9").wait_for()
        expect(page.get_by_role("status").first).to_contain_text(re.compile("brisk: running, update 9"))
        assert re.search("calm: not finished since .*, update 8", page.get_by_role("status").first.inner_text())
    page.get_by_label("Smoothing").fill("0.8")
    assert figures.nth(0).locator("canvas").evaluate("canvas => canvas.own"), "the chart is not made anew"
    figures.nth(0).locator(".u-over").hover(position={"x": 2, "y": 40})
    expect(figures.nth(0).locator(".readout")).to_contain_text(re.compile("at [567]"))
    figures.nth(0).locator(".u-over").dblclick()
    figures.nth(0).locator(".u-over").hover(position={"x": 2, "y": 40})
    expect(figures.nth(0).locator(".readout")).to_contain_text("at 1")
    page.get_by_label("Smoothing").fill("0.9")
    expect(page).to_have_url(re.compile("smooth=0.9"))

    # A run that begins now is seen as well.
    late = RunRecorder(tmp_path / "late")
    late.begin(config={}, environment={})
    late.metrics(1, {"reward": 0.125})
    page.get_by_text("late: 0.125 (smoothed 0.125) at 1").wait_for()
    page.reload()
    page.get_by_text("brisk: 0.875 (smoothed 0.561) at 9").wait_for()
    assert page.get_by_label("Smoothing").input_value() == "0.9", "the address remembers"

    # Groups follow the newest update; at first there is none.
    page.get_by_role("link", name="Groups").click()
    page.get_by_text("No group matches.").wait_for()
    for update in (0, 3):
        recorders[1].rollouts(runs.rows_of(update))
        page.get_by_text(f"newest ({update})").wait_for(state="attached")
        expect(page.locator("#groups td:nth-child(2)")).to_have_text([str(update)] * 3)


def test_lists_follow_runs_and_rows_that_come_in(
    page: Any, served: Callable[[Desk], str], evaluations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gruppo.view.queries.SEARCH_EVERY", 0)
    page.goto(served(Desk(Folders([], [evaluations / "before"], [tmp_path]))) + "#groups")
    page.get_by_text("There is no run among these folders.").wait_for()

    def begin(name: str) -> RunRecorder:
        recorder = RunRecorder(tmp_path / name)
        recorder.begin(config={}, environment={})
        return recorder

    # The first run, and rows of an update that was chosen.
    first = begin("first")
    first.rollouts(runs.rows_of(0))
    page.get_by_text("newest (0)").wait_for(state="attached")
    expect(page.locator("#groups tbody tr")).to_have_count(3)
    page.get_by_label("Sampled after update").select_option("0")
    settled(page)
    page.locator("#groups").evaluate("table => { table.own = true; }")
    first.rollouts(runs.rows_of(3))
    page.get_by_role("status").get_by_text("24 completions").wait_for()
    assert page.locator("#groups").evaluate("table => table.own"), "nothing new in update 0: the list is left alone"
    first.rollouts(runs.rows_of(0))
    expect(page.locator("#groups tbody tr")).to_have_count(6)

    # A list that somebody has in his hands stays; what is around it does not, and when he leaves it, it follows.
    chosen = page.get_by_label("Sampled after update")
    chosen.focus()
    chosen.evaluate("list => { list.own = true; }")
    begin("second").rollouts(runs.rows_of(1))
    which = page.get_by_role("combobox", name=re.compile("^Run"))
    which.wait_for()
    assert chosen.evaluate("list => list.own && list === document.activeElement")
    page.get_by_label("Sort by").focus()
    expect(chosen).to_contain_text("newest (3)")
    assert not chosen.evaluate("list => list.own === true")
    which.select_option("second")
    expect(page.locator("#groups td:nth-child(2)")).to_have_text(["1"] * 3)

    # Prompts over training.
    page.get_by_role("link", name="Prompts").click()
    expect(page.locator("#prompts tbody tr td:nth-child(2)")).to_have_text(["3"] * 3)
    first.rollouts(runs.rows_of(4))
    expect(page.locator("#prompts tbody tr td:nth-child(2)")).to_have_text(["4"] * 3)


# ---- groups, completions, tokens


def test_from_an_update_to_a_token(page: Any, address: str) -> None:
    page.goto(address)
    page.get_by_role("link", name="Groups").click()
    settled(page)
    assert len(rows(page, "groups")) == 3, "the newest update"
    assert rows(page, "groups")[0][:4] == ["Question 2: how many?", "3", "75.0 %", "0.750"]
    page.get_by_label("Sampled after update").select_option("all of them")
    page.get_by_text("13 groups").first.wait_for()
    page.get_by_role("checkbox", name="failed tool calls").check()
    page.get_by_text("1 groups, 4 completions").first.wait_for()
    page.get_by_role("checkbox", name="failed tool calls").uncheck()
    page.get_by_text("13 groups").first.wait_for()
    page.get_by_label("Search in prompts and completions").fill("b is missing")
    page.get_by_text("1 groups, 4 completions").first.wait_for()
    listed = page.url
    page.get_by_role("link", name="Question 1: how many?").click()

    ready(page, "group")
    assert page.get_by_role("heading", level=2).inner_text() == "Group 1 of generation 1"
    cards = page.get_by_role("listitem").filter(has_text="advantage")
    assert cards.count() == 4
    boxes = [cards.nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"], "side by side"
    tool = cards.filter(has_text="2 turns")
    assert tool.get_by_text("'error'").is_hidden(), "what a tool wrote is folded"
    tool.locator("summary").press("Enter")
    assert tool.get_by_text("{'error': 'b is missing'}").is_visible()
    assert "right\n– (timeout)" in cards.nth(3).inner_text()
    tool.get_by_role("link", name="tokens").click()

    ready(page, "tokens")
    assert page.get_by_role("radio", name="log-prob", exact=True).is_checked()
    assert page.get_by_role("radio", name="ratio").is_disabled()
    assert "The run recorded no log-probabilities of an update" in page.locator("fieldset").inner_text()
    assert page.locator(".tokens details").locator("summary").inner_text().startswith("Tool or environment:")
    assert page.locator(".tokens details .token").first.is_hidden()
    first = page.locator(".token").first
    assert "hot" in first.get_attribute("class")
    page.get_by_role("radio", name="advantage contribution").check()
    assert "cold" in first.get_attribute("class"), "its advantage is negative"
    page.locator(".tokens").press("ArrowRight")
    page.get_by_text(re.compile(r"Token 0, .*log-prob -1")).wait_for()
    page.locator(".tokens").press("ArrowDown")
    expect(page.locator(".token.current")).to_be_visible()
    assert page.locator(".token.current").get_attribute("data-i") == str(page.locator(".token").count() - 1), (
        "ten on, what is folded passed over: the last one"
    )
    page.locator(".tokens").press("ArrowUp")
    expect(page.locator(".token.current")).to_have_attribute("data-i", "0")

    # From a completion to the next one, to its group, and back to the list as it was.
    page.get_by_role("link", name="Next completion").click()
    page.get_by_role("heading", name="Completion 6 of generation 1").wait_for()
    page.get_by_text("3 of 4").wait_for()
    page.get_by_role("link", name="Previous completion").click()
    page.get_by_role("heading", name="Completion 5 of generation 1").wait_for()
    page.get_by_role("link", name="Group 1", exact=True).click()
    page.get_by_role("heading", name="Group 1 of generation 1").wait_for()
    page.get_by_role("link", name="Back to the list of groups").click()
    page.get_by_text("1 groups, 4 completions").first.wait_for()
    assert page.url == listed


# ---- prompts and evaluations


def test_a_prompt_over_training(page: Any, address: str) -> None:
    page.goto(f"{address}#prompts")
    ready(page, "prompts")
    assert "1 prompts are solved" in page.locator("main").inner_text()
    assert [row[0] for row in rows(page, "prompts")] == [f"Question {i}: how many?" for i in (1, 2, 0)]
    page.get_by_label("Sort by").select_option("improved most")
    page.locator("#prompts tbody tr:first-child").get_by_text("Question 2").wait_for()
    page.get_by_role("link", name="Question 2: how many?").click()
    ready(page, "prompt")
    assert [row[2] for row in rows(page, "history")] == ["0.0 %", "25.0 %", "50.0 %", "75.0 %"]
    page.get_by_label("is at least").fill("-1")
    page.get_by_label("is at least").press("Enter")
    page.locator("#history tbody tr:first-child").get_by_text("100.0 %").wait_for()


def test_two_checkpoints_compared(page: Any, address: str) -> None:
    page.goto(f"{address}#evaluations?first=1&second=0")
    ready(page, "evaluations")
    assert "The difference is significant at 95 %." in page.locator("#verdict").inner_text()
    assert rows(page, "results")[0][:4] == ["after", "demo", "greedy, top-1", "83.3 %"]
    assert len(rows(page, "problems")) == 8, "those that differ"
    page.get_by_role("combobox", name="Problems").select_option("worse in the second")
    page.get_by_text("0 of 12 problems").first.wait_for()
    page.get_by_role("combobox", name="Problems").select_option("that differ")
    page.get_by_role("link", name="demo/3").click()
    ready(page, "problem")
    assert page.locator("article strong").all_inner_texts() == ["before", "after"]
    assert runs.SCRIPT in page.locator("article").first.inner_text()


def test_evaluations_alone(page: Any, served: Callable[[Desk], str], evaluations: Path) -> None:
    page.goto(served(runs.desk(evaluations)))
    page.locator("#results").wait_for()
    page.get_by_role("link", name="Curves").click()
    page.get_by_text("There is no run among these folders.").wait_for()


# ---- texts that want to break it


def test_no_text_runs_hides_or_reorders_anything(page: Any, address: str) -> None:
    page.goto(f"{address}#groups?split=eval")
    settled(page)
    assert runs.SCRIPT in rows(page, "groups")[0][0]
    page.locator("#groups a").click()
    ready(page, "group")
    shown = page.locator("main").inner_text()
    assert runs.SCRIPT in shown
    assert "⟦U+0000⟧b⟦U+001B⟧[31mred⟦U+0007⟧⟦U+0008⟧⟦U+007F⟧⟦U+009B⟧⟦U+2028⟧end" in shown
    assert "⟦U+202E⟧gnp.exe⟦U+202C⟧" in shown
    assert runs.RIGHT_TO_LEFT in shown
    assert not re.search(r"[\u202a-\u202e\u2066-\u2069]", shown)
    assert page.locator("bdi.words", has_text="مرحبا").evaluate("e => [e.dir, getComputedStyle(e).unicodeBidi]") == [
        *("auto", "isolate"),
    ]
    page.get_by_role("button", name="Show all of it").click()
    expect(page.get_by_role("button", name="Show all of it")).to_have_count(0)
    assert page.evaluate("document.querySelector('main').textContent.length") > len(runs.HUGE_LINE)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a long line stays in its card"
    assert page.evaluate(INJECTED) == 0
    assert page.evaluate("window.stolen") is None


def test_an_address_is_text_too(page: Any, address: str, complaints: list[str]) -> None:
    page.goto(f"{address}#groups?search=<img src=x onerror=alert(1)>&order=<b>")
    page.get_by_role("alert").wait_for()
    assert "cannot be sorted by '<b>'" in page.get_by_role("alert").inner_text()
    assert page.evaluate(INJECTED) == 0
    assert len(complaints) == 1
    assert "400 (Bad Request)" in complaints.pop()


# ---- for everybody

UNNAMED = """() => [...document.querySelectorAll('button, input, select, a, summary')]
  .filter(e => !(e.labels?.length || e.getAttribute('aria-label') || e.innerText.trim())).map(e => e.outerHTML)"""
UNTITLED = """() => [...document.querySelectorAll('table')]
  .filter(t => !t.caption || t.querySelector('th:not([scope])')).length"""
CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
  const light = hex => { const c = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16) / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
  const ratio = (a, b) => {
    const [high, low] = [light(of(a)), light(of(b))].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05); };
  const inks = ['--ink', '--quiet', '--accent', '--good', '--bad'];
  return inks.flatMap(ink => ['--ground', '--raised'].map(on => ratio(ink, on)));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_name_and_can_be_read(page: Any, address: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    for place in (
        "curves",
        "groups",
        "group?generation=1&group=1",
        "tokens?generation=1&row=5",
        "prompts",
        "evaluations",
        "run",
    ):
        page.goto(f"{address}#{place}")
        ready(page, place.split("?")[0])
        assert page.evaluate(UNNAMED) == [], place
        assert page.evaluate(UNTITLED) == 0, place
    assert min(page.evaluate(CONTRASTS)) >= 4.5
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    assert (before == "rgb(20, 23, 27)") is (scheme == "dark")
    page.get_by_role("button", name="Light theme" if scheme == "dark" else "Dark theme").click()
    assert page.evaluate(ground) != before
    assert min(page.evaluate(CONTRASTS)) >= 4.5
    page.reload()
    assert page.evaluate(ground) != before, "the choice is remembered"


def test_the_keyboard_is_enough(page: Any, address: str) -> None:
    page.goto(f"{address}#groups")
    settled(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", (
        "what has the focus is seen"
    )
    before = page.url
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url == before, "the address of the view stays"
    page.reload()
    settled(page)
    for _ in range(5):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Evaluations"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Evaluations").wait_for()
    expect(page.get_by_role("heading", name="Evaluations")).to_be_focused()
    assert page.locator("nav [aria-current=page]").inner_text() == "Evaluations"


# ---- a report


def test_a_report_needs_no_server(page: Any, desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    export(desk, path)
    assert str(desk.runs[0].path) not in path.read_text(encoding="utf-8"), "where folders are is nobody's business"
    page.context.set_offline(True)
    page.goto(path.as_uri())
    page.locator("figure canvas").first.wait_for()
    page.goto(f"{path.as_uri()}#groups?update=")
    page.get_by_text("13 groups").first.wait_for()
    page.get_by_role("checkbox", name="truncated completions").check()
    page.get_by_text("1 groups, 4 completions").first.wait_for()
    page.get_by_role("checkbox", name="truncated completions").uncheck()
    page.get_by_label("Search in prompts and completions").fill("B IS MISSING")
    page.get_by_text("1 groups, 4 completions").first.wait_for()
    page.get_by_role("link", name="Question 1: how many?").click()
    page.get_by_role("link", name="tokens").first.click()
    page.locator(".token").first.wait_for()
    page.goto(f"{path.as_uri()}#groups?split=eval&update=")
    page.locator("#groups a").click()
    page.locator("article").nth(5).wait_for()
    assert runs.SCRIPT in page.locator("main").inner_text()
    assert page.evaluate("window.stolen") is None
    page.goto(f"{path.as_uri()}#evaluations?first=1&second=0")
    page.get_by_text("The difference is significant at 95 %.").wait_for()
    page.get_by_role("link", name="demo/3").click()
    page.get_by_role("heading", name="Problem demo/3").wait_for()
    page.goto(f"{path.as_uri()}#prompts")
    page.get_by_role("link", name="Question 2: how many?").click()
    page.locator("figure canvas").wait_for()
