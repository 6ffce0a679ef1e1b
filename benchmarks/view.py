"""How long `gruppo view` takes with a hundred thousand completions, in a real browser.

    python benchmarks/view.py                    (CPU only; needs chromium and playwright)

The recorder writes a run folder of 196 generations × 64 prompts × 8 completions of about 190 tokens, and the viewer is
started on it from the command line. Measured in milliseconds:

    index         reading all files, which precedes the first filter; it happens while the page is shown
    first_paint   from the request of the page, on a viewer that was just started, until the first content is painted
    curves        … until all curves are drawn
    groups        opening the page of groups, until its table is shown
    <filter>      from a click on a filter over all updates, or input in the search field, until the new table is shown
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pyarrow.parquet as pq

from gruppo.runs import RolloutRow, RunRecorder, prompt_id
from gruppo.runs.rollouts import encode
from gruppo.view.folders import find_folders
from gruppo.view.queries import Desk, Question

RESULTS = Path(__file__).parent / "results" / "view.json"
BOUNDS = {"first_paint": 1500, "filter": 300}  # milliseconds
FILTERS = ("zero_spread", "truncated", "tool_failures", "disagreement")
TEXT = "we know that the sum of two and three is five so add them carry one then check again answer"
WORDS = TEXT.split()


def make_run(
    folder: Path, generations: int = 196, prompts: int = 64, group: int = 8, distinct: int | None = None
) -> int:
    """Write a run folder as training does; return the number of completions.

    The other generations repeat the texts and numbers of the first `distinct` generations (default: all are distinct).
    Such a folder is faster to write and takes as long to read.
    """
    rng = np.random.default_rng(0)
    recorder = RunRecorder(folder)
    recorder.begin(config={"learning_rate": 1e-6, "num_generations": group}, environment={})
    questions = [f"Question {i}: what is {i} plus {i % 97}?" for i in range(prompts * 40)]
    for update in range(generations):
        progress = update / max(generations - 1, 1)
        values = {"reward": 0.1 + 0.7 * progress, "loss": float(rng.normal()), "entropy": 1 - progress}
        recorder.metrics(update + 1, values)
        if distinct is None or update < distinct:
            asked = [questions[(update * prompts + place) % len(questions)] for place in range(prompts)]
            recorder.rollouts(_rows(rng, update, progress, asked, group))
    recorder.event("finished", update=generations)
    recorder.close()
    for update in range(generations if distinct is None else distinct, generations):
        table = pq.read_table(folder / "rollouts" / f"{update % (distinct or 1):08d}-0000.parquet")
        for name in ("update", "generation"):
            table = table.set_column(table.column_names.index(name), name, [np.full(len(table), update)])
        (folder / "rollouts" / f"{update:08d}-0000.parquet").write_bytes(encode(table))
    return generations * prompts * group


def _rows(
    rng: np.random.Generator, update: int, progress: float, questions: list[str], group: int
) -> list[RolloutRow]:
    """The rows of one generation: random words, with a share of correct completions that grows with `progress`."""
    rows = []
    for place, question in enumerate(questions):
        for sample in range(group):
            right = float(rng.random() < 0.1 + 0.7 * progress)
            length = int(rng.integers(60, 320))
            words = rng.integers(0, len(WORDS), length)
            rows.append(
                RolloutRow(
                    update=update,
                    split="train",
                    row=place * group + sample,
                    group=place,
                    prompt_id=prompt_id(question),
                    prompt=question,
                    prompt_tokens=np.arange(20),  # type: ignore[arg-type]
                    completion=" ".join([WORDS[word] for word in words]),
                    completion_tokens=words,  # type: ignore[arg-type]
                    logps=-rng.random(length, dtype=np.float32),  # type: ignore[arg-type]
                    entropies=rng.random(length, dtype=np.float32),  # type: ignore[arg-type]
                    rewards={"right": right, "short": 1 - length / 320},
                    reward_kinds={"right": "score", "short": "score"},
                    reward=right,
                    advantage=right - 0.5,
                    stop="eos" if length < 310 else "length",
                    truncated=length >= 310,
                )
            )
    return rows


def question_times(folder: Path) -> dict[str, float]:
    """Milliseconds without a browser: of reading all files, then of each query over all updates."""
    desk = Desk(find_folders([folder]))
    times = {"index": _timed(desk.refresh)}
    for name in FILTERS:
        asked = Question({"order": ["spread"], "descending": ["1"], "filter": [name]})
        times[name] = _timed(lambda asked=asked: desk.answer("groups", asked))  # type: ignore[misc]
    times["preload"] = _timed(desk.warm_up)
    times["search"] = _timed(lambda: desk.answer("groups", Question({"search": ["Check AGAIN answer"]})))
    return times


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return round(1000 * (time.perf_counter() - start), 1)


# Runs in the page: records the time from a user's input until the new list is painted.
WATCH = """
window.times = []; window.begun = 0;
const begin = () => { window.begun = performance.now(); };
for (const kind of ["input", "click"]) document.addEventListener(kind, begin, true);
new MutationObserver((changes) => {
  const done = changes.some(({ target }) => target.getAttribute("aria-busy") === "false" || target.dataset.ready);
  if (done) requestAnimationFrame(() => setTimeout(() => window.times.push(performance.now() - window.begun)));
}).observe(document, { subtree: true, attributes: true, attributeFilter: ["aria-busy", "data-ready"] });
"""
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@contextmanager
def viewer(folder: Path) -> Iterator[str]:
    """Run `gruppo view` in a separate process; yields the address as soon as it is printed."""
    command = [sys.executable, "-m", "gruppo", "view", str(folder)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split(" at ")[1].split()[0]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)


def page_times(browser: Any, folder: Path, repeats: int = 5) -> dict[str, Any]:
    """The waiting times of a user, in milliseconds, on a viewer that was just started."""
    with viewer(folder) as address:
        page = browser.new_page()
        page.add_init_script(WATCH)
        page.goto(address)
        found: dict[str, Any] = {"curves": _next(page), "first_paint": page.evaluate(FIRST_PAINT)}
        page.get_by_role("link", name="Groups").click()
        found["groups"] = _next(page)
        page.locator("main[data-ready=groups]").wait_for()
        page.evaluate("window.times.length = 0")
        page.get_by_label("Sampled after update").select_option("all of them")
        found["all_updates"] = _next(page)
        for name in FILTERS:
            found[name] = []
            for _ in range(repeats):
                page.locator(f"input[name={name}]").check()
                found[name].append(_next(page))
                page.locator(f"input[name={name}]").uncheck()
                _next(page)
        found["search"] = []
        for word in ("carry one", "THE ANSWER", "five so", "then check", "know that the"):
            page.locator("#search").fill(word)
            found["search"].append(_next(page))
        page.close()
    return found


def _next(page: Any) -> float:
    """Wait until the requested view is painted; return how long that took."""
    while not page.evaluate("window.times.length"):
        page.wait_for_timeout(5)
    found = float(page.evaluate("window.times.at(-1)"))
    page.evaluate("window.times.length = 0")
    return found


def main() -> None:
    from playwright.sync_api import sync_playwright

    from benchmarks.common import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="viewers that are started anew")
    starts = parser.parse_args().starts
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place) / "run"
        completions = make_run(folder)
        questions = question_times(folder)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = [page_times(browser, folder) for _ in range(starts)]
        version = browser.version
        browser.close()
    once = ("first_paint", "curves", "groups", "all_updates")
    worst = {name: max(each[name] for each in found) for name in once}
    lists = {name: [value for each in found for value in each[name]] for name in (*FILTERS, "search")}
    filters = {name: {"median": statistics.median(values), "worst": max(values)} for name, values in lists.items()}
    result = {
        **provenance("pyarrow", "starlette", "uvicorn", "playwright"),
        "chromium": version,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],  # includes other work; should be below the number of cores
        "completions": completions,
        "starts": starts,
        "bounds_ms": BOUNDS,
        "worst_ms": _rounded(worst),
        "filters_ms": {name: _rounded(values) for name, values in filters.items()},
        "without_a_browser_ms": questions,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    slow = [name for name, values in filters.items() if values["worst"] > BOUNDS["filter"]]
    if worst["first_paint"] > BOUNDS["first_paint"] or slow:
        raise SystemExit(f"Too slow: first paint {worst['first_paint']:.0f} ms, filters {slow}")


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


if __name__ == "__main__":
    main()
