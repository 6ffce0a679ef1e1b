"""The code in the docs, and how each kind is checked.

Python is run, all blocks of a page in one namespace and an empty folder, unless a comment above it gives a reason:

    <!-- not run: needs a GPU -->

In that case it is compiled, its imports are executed, the keywords of calls are compared with the real signatures, and
configs are created from their literal arguments. Code that the page does not show can be put into a comment; it
creates what a block needs, or checks what it did:

    <!-- run:
    assert score == [1.0]
    -->

A page that reads `runs/demo` finds a short run of the demo there.

Commands in shell blocks are parsed by the parsers of their programs but not run; YAML is read as the kind of file that
it shows.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
PAGES += [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
LANGUAGES = ("python", "bash", "yaml", "text", "")

_PIECE = re.compile(
    r"^<!-- run:\n(?P<hidden>.*?)^-->$"
    r"|(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>[^\n`]*)\n(?P<shown>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One piece of code in a page, with its first line number; `reason` says why it is not run."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _PIECE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2 + (match["reason"] is not None)
        if match["hidden"] is not None:
            yield Block(page, line, "python", match["hidden"])
        else:
            yield Block(page, line, match["language"].strip(), match["shown"], match["reason"])


def python_code(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def run(block: Block, namespace: dict[str, Any]) -> None:
    """Execute a block; an error names the page and its line."""
    lines = "\n" * (block.line - 1) + block.text
    exec(compile(lines, str(block.page), "exec"), namespace)


def check_names(block: Block, namespace: dict[str, Any]) -> None:
    """Check everything in a block that can be checked without running it."""
    tree = ast.parse("\n" * (block.line - 1) + block.text, str(block.page))
    compile(tree, str(block.page), "exec")
    known = {**public_names(), **namespace}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # Imports from TRL are checked against gruppo, which must have the same names.
            module = importlib.import_module(re.sub(r"^trl\b", "gruppo", node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{block.where}: {node.module} has no {alias.name}"
                known[alias.asname or alias.name] = getattr(module, alias.name)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        target = resolve(call.func, known)
        if target is not None:
            check_call(call, target, block)


def public_names() -> dict[str, Any]:
    """The names that a block may use without importing them: those of the library, and classes passed to it."""
    import datasets
    import peft
    import transformers

    import gruppo

    found: dict[str, Any] = {name: getattr(gruppo, name) for name in gruppo.__all__}
    found |= {"gruppo": gruppo, "Dataset": datasets.Dataset, "LoraConfig": peft.LoraConfig}
    return found | {"BitsAndBytesConfig": transformers.BitsAndBytesConfig}


def resolve(node: ast.expr, known: dict[str, Any]) -> Any:
    """The object that a name or dotted name refers to, or None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, known)
        return getattr(owner, node.attr, None) if owner is not None else None
    return None


def check_call(call: ast.Call, target: Any, block: Block) -> None:
    """Check that the keywords of a call exist, and that a config with its literal arguments can be created."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = set(signature.parameters)
    if target is importlib.import_module("gruppo").evaluate:  # its **kwargs are fields of Settings
        names |= {field.name for field in fields(importlib.import_module("gruppo.evaluation.settings").Settings)}
        takes_any = False
    for keyword in call.keywords:
        known = keyword.arg is None or takes_any or keyword.arg in names
        assert known, f"{block.where}: {ast.unparse(call.func)} has no argument `{keyword.arg}`"
    if getattr(target, "__name__", "") in ("GRPOConfig", "RLOOConfig"):
        arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg and is_literal(k.value)}
        target(**{"output_dir": "run", "report_to": "none", **arguments})


def is_literal(node: ast.expr) -> bool:
    try:
        return ast.literal_eval(node) is not ...
    except ValueError:
        return False
