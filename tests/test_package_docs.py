"""What docstrings say about files: those that they name are there, and tables of a package's files leave none out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "gruppo").rglob("*.py"))
PACKAGES = [path.parent for path in FILES if path.name == "__init__.py"]

FILE = re.compile(r"([\w/]+\.py)\b(?!:\w)")  # `my_bench.py:BENCH` is a name in a file of the reader
ROW = re.compile(r"^ *(\w+)  +\S", re.MULTILINE)


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def is_there(named: str, folder: Path) -> bool:
    """A file is named as from its own folder, from the library or from the repository."""
    return any((start / named).exists() for start in (folder, ROOT / "gruppo", ROOT))


def left_out(text: str, files: set[str]) -> set[str]:
    """Those of a package's modules that its docstring does not list, if it lists any: as `name.py`, or in rows."""
    by_file = {name.removesuffix(".py") for name in FILE.findall(text)} & files
    if len(by_file) > 1:
        return files - by_file
    tables = [part for part in text.split("\n\n") if len(files.intersection(ROW.findall(part))) > 1]
    return files - {word for part in tables for word in re.findall(r"\w+", part)} if tables else set()


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("Of a.py and b.py.", {"c"}),
        ("One table:\n\na.py   first     c.py   third\nb.py   second", set()),
        ("One table:\n\n    a   first\n    b   second", {"c"}),
        ("One table:\n\n    a   first\n    b   second, and the third: c", set()),
        ("Like c.\n\n    a   first\n    b   second", {"c"}),
        ("No table: a is first.", set()),
        ("Names in files:\n\n    some_function   of a\n    a   itself", set()),
    ],
)
def test_what_a_docstring_leaves_out(text: str, missing: set[str]) -> None:
    assert left_out(text, {"a", "b", "c"}) == missing


def test_files_that_docstrings_name_are_there() -> None:
    named = [(path, name) for path in FILES for name in FILE.findall(docstring(path))]
    assert len(named) > 50, "tables are read"
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in named if not is_there(name, path.parent)]
    assert not wrong


def test_tables_of_files_leave_none_out() -> None:
    wrong = {}
    for package in PACKAGES:
        files = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
        if missing := left_out(docstring(package / "__init__.py"), files):
            wrong[package.relative_to(ROOT).as_posix()] = sorted(missing)
    assert wrong == {}
