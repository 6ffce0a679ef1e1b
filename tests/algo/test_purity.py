"""`gruppo.algo` is mathematics: torch and the standard library, no state, no logging."""

import ast
import sys
from pathlib import Path

import pytest

import gruppo.algo

FILES = sorted(Path(gruppo.algo.__file__).parent.glob("*.py"))
ALLOWED = {*sys.stdlib_module_names, "torch"} - {"logging", "warnings", "print"}


def imported_modules(tree: ast.AST) -> list[str]:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    froms = [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return names + froms


def test_there_are_files_to_check():
    assert {"advantages.py", "loss.py", "objectives.py"} <= {f.name for f in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_imports_torch_and_the_standard_library_only(path):
    for module in imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
        own = module == "gruppo.errors" or module.startswith("gruppo.algo.")
        assert own or module.split(".")[0] in ALLOWED, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_self_no_global_no_print(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.arg) and node.arg == "self")
        assert not isinstance(node, ast.Global | ast.Nonlocal)
        assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
