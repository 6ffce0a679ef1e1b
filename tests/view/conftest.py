"""Fixtures of the viewer's tests: folders that are created once, a server, a browser."""

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gruppo.view.queries import Desk
from gruppo.view.server import serve
from tests.view import runs


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_run(tmp_path_factory.mktemp("view") / "first")


@pytest.fixture(scope="session")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two evaluations: `before` solves two of twelve problems, `after` ten."""
    from tests.view.evaluations import make_evaluation

    folder = tmp_path_factory.mktemp("evaluations")
    make_evaluation(folder / "before", right=2)
    make_evaluation(folder / "after", right=10)
    return folder


@pytest.fixture(scope="session")
def desk(run_folder: Path, evaluations: Path) -> Desk:
    return runs.desk(run_folder, evaluations)


@pytest.fixture(scope="session")
def served() -> Callable[[Desk], str]:
    """A function that serves a desk in a thread until the session ends and returns the address."""

    def start(own: Desk) -> str:
        found, address = threading.Event(), []

        def ready(where: str) -> None:
            address.append(where)
            found.set()

        threading.Thread(target=serve, args=(own,), kwargs={"ready": ready}, daemon=True).start()
        assert found.wait(30), "the viewer did not start"
        return str(address[0])

    return start


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, started once per test module.

    Playwright leaves an event loop running in this thread until it is closed, and other tests could not run their own
    meanwhile. Therefore it does not stay open for the whole session.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        if os.environ.get("GRUPPO_CHROMIUM") == "required":
            pytest.fail("GRUPPO_CHROMIUM=required, and there is no chromium. apt-get install chromium")
        pytest.skip("there is no chromium; apt-get install chromium to run the tests of the page")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox of chromium needs privileges that containers lack; only pages of these tests are opened.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def complaints() -> list[str]:
    """The errors and warnings of a page; a test removes those that it provoked."""
    return []


@pytest.fixture
def page(browser: Any, complaints: list[str]) -> Iterator[Any]:
    """A page that must not cause errors, blocked scripts or styles, dialogs, or requests to other hosts."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(15_000)
    own, wrong = context.new_page(), complaints
    own.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    own.on("pageerror", lambda error: wrong.append(str(error)))
    own.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    own.on("request", lambda r: None if re.match(r"http://127\.0\.0\.1:|file://", r.url) else wrong.append(r.url))
    yield own
    context.close()
    assert wrong == []
