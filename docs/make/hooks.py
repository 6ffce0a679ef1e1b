"""MkDocs hooks for what the site needs beyond Markdown: repository pages, links out of docs/, formulas and pictures.

The pages in docs/ can also be read as plain files. These hooks turn their links to the rest of the repository into
links to copies inside the site, formulas into MathML, which browsers render without a script, and inline the pictures,
so that they follow the colours of the page.
"""

import html
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
# Pages of the site that are in the root folder of the repository.
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
COPIES = "repository"  # the folder of the site with copies of repository files

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")
_FOR_TESTS = re.compile(r"^<!-- (?:not )?run:.*?-->\n", re.DOTALL | re.MULTILINE)  # see tests/docs/blocks.py
_README = re.compile(r"<!-- README: (.+?) -->")
_REPOSITORY_ONLY = re.compile(r"^<!-- in the repository only -->\n.*?^<!-- end -->\n", re.DOTALL | re.MULTILINE)
_MATH = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
_PICTURE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)?pictures/([\w-]+)\.svg" ?/?>')


def on_files(files: Files, config: Any) -> Files:
    """Add the pages in the root folder of the repository, and every file outside of docs/ that a page links to."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for path in sorted(_copied()):
        name = f"{COPIES}/{path.relative_to(ROOT).as_posix()}"
        copy = File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Insert the requested sections of the README; turn links to the repository into links within the site."""
    name = PurePosixPath(page.file.src_uri)
    home = ROOT if str(name) in ROOT_PAGES.values() else ROOT / "docs"
    if name.is_relative_to(COPIES):
        home = ROOT / name.relative_to(COPIES).parent
    markdown = _REPOSITORY_ONLY.sub("", _FOR_TESTS.sub("", markdown))
    markdown = site_links(markdown, home, to_top="../" * (len(name.parts) - 1))
    return _README.sub(lambda match: site_links(readme_section(match[1]), ROOT), markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Convert formulas to MathML and inline the pictures."""
    return _PICTURE.sub(lambda match: inline_picture(match[2], match[1]), _MATH.sub(_formula, content))


def readme_section(title: str) -> str:
    """A section of the README with its heading; `top` is the text between the title and the first section."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if title == "top":
        return readme.partition("\n")[2].partition("\n## ")[0].strip()
    return f"## {title}\n" + readme.partition(f"\n## {title}\n")[2].partition("\n## ")[0].rstrip()


def site_links(markdown: str, home: Path, to_top: str = "") -> str:
    """The text of a file in `home` with its links turned into links of the site; links to folders become plain text.

    `to_top` leads from the page to the top of the site.

    Example:
        site_links("[a](../examples/calculator.py)", ROOT / "docs") == "[a](repository/examples/calculator.py)"
    """

    def site_link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (home / target).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]  # mkdocs reports the broken link
        name = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            return text
        pages = {**ROOT_PAGES, "README.md": "index.md"}
        inside = name.removeprefix("docs/") if name.startswith("docs/") else f"{COPIES}/{name}"
        return f"[{text}]({to_top}{pages.get(name, inside)}{anchor})"

    return "".join(
        part if part.startswith("```") else _LINK.sub(site_link, part)
        for part in re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    )


def inline_picture(name: str, description: str) -> str:
    """The SVG of a picture for inclusion in a page, with a description for screen readers."""
    svg = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)  # the page defines the colours
    return svg.replace("<svg ", f'<svg class="picture" role="img" aria-label="{description}" ', 1)


def _formula(match: re.Match[str]) -> str:
    """One formula as MathML; arithmatex encloses it in \\( and \\) or \\[ and \\]."""
    latex = html.unescape(match[2]).strip()[2:-2].strip()
    latex = re.sub(r"\\text\{[^}]*\}", lambda text: text[0].replace("\\_", "_").replace("\n", " "), latex)
    return convert(latex, display="block" if match[1] == "div" else "inline")


def _copied() -> set[Path]:
    """Every file outside of docs/ that a page links to, including files that copied pages link to."""
    found: set[Path] = set()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ROOT_PAGES)]
    while pages:
        linked = {ROOT / name for page in pages for name in _outside(page)} - found
        found |= linked
        pages = [path for path in linked if path.suffix == ".md"]
    return found


def _outside(page: Path) -> list[str]:
    """The repository files that a page links to, except those in docs/ and in the root folder."""
    found = []
    for match in _LINK.finditer(page.read_text(encoding="utf-8")):
        path = (page.parent / match[2]).resolve()
        if path.is_file() and path.is_relative_to(ROOT) and path.parent != ROOT and ROOT / "docs" not in path.parents:
            found.append(path.relative_to(ROOT).as_posix())
    return found


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Replace a helper script of the theme's offline search, which it would load from another host, by a local one."""
    own = "../" * page.url.count("/") + "assets/offline-search.js"
    return output.replace("https://unpkg.com/iframe-worker/shim", own)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The same for pages that are not made from Markdown, such as 404.html."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "/assets/offline-search.js")
