"""The site: it builds without a warning, needs no other host, and shows what the source says."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from docs.make import fields, pictures
from docs.make.drawing import DARK, LIGHT
from gruppo import GRPOConfig, RLOOConfig
from tests.docs.blocks import ROOT

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: links and anchors that lead nowhere are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file(), page.name
    for page in ("contributing", "security", "changelog"):
        assert (site / f"{page}.html").is_file(), page


def test_what_is_written_for_the_tests_is_not_shown(site: Path) -> None:
    for page in site.glob("*.html"):
        assert "run:\n" not in page.read_text(encoding="utf-8"), page.name
    assert "assert " not in (site / "faq.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    """Links may lead anywhere; what a browser fetches by itself may not."""
    fetched = r"<(?:script|img|iframe)[^>]*\ssrc=\"([^\"]+)\"|<link[^>]*\shref=\"([^\"]+)\""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        found = ["".join(pair) for pair in re.findall(fetched, page.read_text(encoding="utf-8"))]
        assert found
        assert [url for url in found if url.startswith(("http:", "https:", "//"))] == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_formulas_are_drawn_without_a_script(site: Path) -> None:
    page = (site / "algorithm.html").read_text(encoding="utf-8")
    assert page.count("<math") > 50
    assert "arithmatex" not in page
    assert not re.search(r"\\(frac|sum|text|ell)\b", re.sub(r"<annotation.*?</annotation>", "", page))


def test_pictures_are_part_of_the_page_and_described(site: Path) -> None:
    page = (site / "concepts.html").read_text(encoding="utf-8")
    described = re.findall(r'<svg class="picture" role="img" aria-label="([^"]{40,})"', page)
    assert len(described) == len(pictures.PICTURES)
    assert "<style>" not in page.partition('class="picture"')[2].partition("</svg>")[0]


def test_the_readme_is_on_the_first_page(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "held-out accuracy" in page
    assert "README:" not in page
    assert page.count("Post-train language models with critic-free") == 1, "the repository's own words are left out"
    assert '<h2 id="measured">' in page
    for command in ("gruppo train recipes/grpo.yaml", "gruppo view RUN", "gruppo replay RUN"):
        assert f"<td><code>{command}</code></td>" in page, "a row of the table of commands"
    assert 'href="repository/benchmarks/results/demo.json"' in page
    assert (site / "repository/benchmarks/results/demo.json").read_bytes() == (
        ROOT / "benchmarks/results/demo.json"
    ).read_bytes()


def test_of_programs_there_are_those_that_pages_link_to(site: Path) -> None:
    assert (site / "repository/examples/calculator.py").is_file()
    assert {path.relative_to(site).parts[0] for path in site.rglob("*.py")} == {"repository"}


def test_the_table_of_fields_is_current() -> None:
    page = fields.PAGE.read_text(encoding="utf-8")
    assert fields.fill(page) == page, "run `python docs/make/fields.py`"


def test_the_table_has_every_field() -> None:
    page = fields.PAGE.read_text(encoding="utf-8").partition(fields.MARKS[0])[2]
    for config in (GRPOConfig, RLOOConfig):
        missing = [name for name in fields.defaults(config) if f"`{name}`" not in page]
        assert missing == []
    theirs = [name for table in fields.peers() for name in table if f"| `{name}` |" not in page]
    assert theirs == [], "fields of TRL that the table does not compare"


def test_the_pictures_are_current() -> None:
    for name, svg in pictures.draw().items():
        assert (pictures.FOLDER / name).read_text(encoding="utf-8") == svg, "run `python docs/make/pictures.py`"
    assert {path.name for path in pictures.FOLDER.iterdir()} == set(pictures.draw())


def test_the_page_colours_pictures_as_they_colour_themselves() -> None:
    css = re.sub(r"\s", "", (ROOT / "docs/assets/site.css").read_text(encoding="utf-8"))
    assert f"{LIGHT};" in css
    assert f"{DARK};" in css


def test_the_docs_can_be_built_with_their_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"mkdocs-material", "latex2mathml"} <= {re.split(r"[<>=]", name)[0] for name in extras["docs"]}
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["theme"]["font"] is False
    assert config["validation"]["links"]["anchors"] == "warn"


@pytest.mark.medium
def test_search_works_from_a_folder(site: Path) -> None:
    """Opened as a file, without a server, in a real browser: results are found and no other host is asked."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        assert os.environ.get("GRUPPO_CHROMIUM") != "required", "there is no chromium: apt-get install chromium"
        pytest.skip("there is no chromium; apt-get install chromium to try the search")
    asked: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "algorithm.html").as_uri())
        page.click("input[name=query]")
        page.keyboard.type("frac_reward_zero_std", delay=5)
        page.wait_for_selector(".md-search-result__item", timeout=20_000)
        assert page.locator(".md-search-result__item", has_text="Metrics").count() >= 1
        browser.close()
    assert [url for url in asked if not url.startswith("file:")] == []
