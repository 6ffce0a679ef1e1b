"""The shape of the source: which part may import which, and how long things may get."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1] / "gruppo"
FILES = sorted(path for path in ROOT.rglob("*.py"))

# Each part and the parts it may import, itself aside. What is not listed may not be imported.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "plan": set(),
    "kernels": set(),
    "sandbox": {"errors"},
    "grading": {"types", "errors"},
    "algo": {"types", "errors"},
    "config": {"types", "errors", "algo", "runs.secrets"},
    "data": {"types", "errors"},
    "policy": {"types", "errors", "plan", "kernels", "algo", "config", "data"},
    "engine": {"types", "errors", "plan", "kernels", "config.validate", "policy"},
    "rollout": {"types", "errors", "plan", "algo", "config", "data", "policy", "engine", "runs.lock"},
    "rewards": {"types", "errors", "grading", "sandbox"},
    "tools": {"types", "errors", "sandbox", "data"},
    "runs": {"types", "errors"},
    "evaluation": {
        *("types", "errors", "grading", "sandbox", "data", "policy", "engine", "rollout", "runs", "tools.python_tool"),
    },
    "replay": {"types", "errors", "algo", "config", "runs", "rewards", "data", "policy"},
    "audit": {"types", "errors"},
    "view": {"types", "errors", "runs", "evaluation.compare", "evaluation.store", "evaluation.types"},
    "trainer": {
        *("types", "errors", "plan", "algo", "config", "data", "policy", "rollout", "rewards", "tools"),
        *("runs", "audit", "evaluation.training"),  # the latter for `eval_benchmarks`
    },
}
ON_TOP = {"cli", "demo", "__init__", "__main__"}  # these see everything

# Annotations only: nothing is imported when the program runs.
ALLOWED_FOR_TYPES = {"data": {"config"}}

# The trainer itself is a chain; each link knows those before it.
CHAIN = (
    *("state", "reporting", "feeding", "logprobs", "sampling", "accounting", "collecting", "losses", "updating"),
    *("auditing", "checkpointing", "resuming", "running", "evaluating", "stepping", "names", "core", "grpo", "rloo"),
)

NETWORK = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "urllib", "urllib3", "websockets"}
TELEMETRY = {"analytics", "opentelemetry", "posthog", "segment", "sentry_sdk"}
# The doors to the network: opened by log_completions_hub_repo and push_to_hub, and by vllm_mode="server".
HUB = {"trainer/display/hub.py": {"huggingface_hub"}, "rollout/vllm/client.py": {"http", "urllib"}}

LINES_PER_FILE = 400
LINES_PER_FUNCTION = 60
LONGER: dict[str, int] = {}  # "file:function" and its length, where splitting would not help the reader


class Import(NamedTuple):
    module: str
    line: int
    for_types: bool


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part(path: Path) -> str:
    """The top-level folder or module of a file."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path: Path) -> list[Import]:
    """Everything a file imports, inside functions too, with full names."""
    try:
        return imports_in(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AssertionError(f"{name(path)}:{error}") from error


@functools.cache  # several tests walk the whole library
def imports_in(source: str) -> list[Import]:
    tree, found = ast.parse(source), []
    guarded = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(Import(alias.name, node.lineno, node in guarded))
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{node.lineno}: relative import")
            for alias in node.names:
                found.append(Import(f"{node.module}.{alias.name}", node.lineno, node in guarded))
    return found


def ours(path: Path) -> Iterator[tuple[Import, str]]:
    """The imports of gruppo's own parts: the import, and its name without `gruppo.`."""
    for item in imports(path):
        if item.module.split(".")[0] == "gruppo":
            yield item, item.module.partition(".")[2]


def within(target: str, allowed: set[str]) -> bool:
    return any(target == prefix or target.startswith(f"{prefix}.") for prefix in allowed)


def test_every_part_has_its_place() -> None:
    assert {part(path) for path in FILES} == set(ALLOWED) | ON_TOP


def test_imports_point_one_way() -> None:
    wrong = []
    for path in FILES:
        own = part(path)
        for item, target in ours(path):
            allowed = (
                ALLOWED.get(own, set()) | {own} | (ALLOWED_FOR_TYPES.get(own, set()) if item.for_types else set())
            )
            if own not in ON_TOP and not within(target, allowed):
                wrong.append(f"{name(path)}:{item.line} imports gruppo.{target}")
    assert not wrong


def test_only_the_top_knows_the_trainer() -> None:
    users = {part(path) for path in FILES for _, target in ours(path) if within(target, {"trainer"})}
    assert users <= {"trainer", *ON_TOP}


def test_the_links_of_the_trainer_know_those_before_them() -> None:
    for position, link in enumerate(CHAIN):
        path = ROOT / "trainer" / f"{link}.py"
        later = {f"trainer.{other}" for other in CHAIN[position:]}
        found = [target for _, target in ours(path) if within(target, later)]
        assert not found, f"{link} imports {found}"
    links = {ROOT / "trainer" / f"{link}.py" for link in CHAIN}
    helpers = [path for path in (ROOT / "trainer").rglob("*.py") if path not in links]
    assert len(helpers) > 30, "the folders are looked into"
    for path in helpers:
        found = [target for _, target in ours(path) if within(target, {f"trainer.{link}" for link in CHAIN})]
        assert not found, f"{name(path)} imports {found}"


class Layer(NamedTuple):
    """What the class of a file of the trainer defines, which attributes it sets, and what it uses of itself."""

    methods: set[str]
    declared: set[str]
    stored: dict[str, int]  # with a line, like the next
    used: dict[str, int]


def layer_of(link: str) -> Layer:
    tree = ast.parse((ROOT / "trainer" / f"{link}.py").read_text(encoding="utf-8"))
    body = next(node for node in reversed(tree.body) if isinstance(node, ast.ClassDef)).body
    layer = Layer(set(), set(), {}, {})
    for node in body:
        if isinstance(node, ast.FunctionDef):
            layer.methods.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            layer.declared.update(target.id for target in targets if isinstance(target, ast.Name))
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            layer.used.setdefault(node.attr, node.lineno)
            if isinstance(node.ctx, ast.Store):
                layer.stored.setdefault(node.attr, node.lineno)
    return layer


def names_of_transformers() -> set[str]:
    """The methods and attributes of transformers.Trainer."""
    from transformers import Trainer

    return {*dir(Trainer), *re.findall(r"self\.(\w+)\b[^=\n]*=[^=]", inspect.getsource(Trainer))}


def test_a_link_uses_nothing_that_only_later_ones_have() -> None:
    """What a layer uses is declared in state.py, or a method of its own, of an earlier layer or of transformers."""
    known, wrong = names_of_transformers(), []
    for link in CHAIN:
        layer = layer_of(link)
        if link == "state":
            known |= layer.declared
        known |= layer.methods | (layer.declared if link in ("core", "grpo", "rloo") else set())
        wrong += [f"{link}.py:{line} uses self.{name}" for name, line in layer.used.items() if name not in known]
    assert wrong == []
    assert {"loss_settings", "_queue", "collect", "accelerator"} <= known, "the links are looked into"


def test_the_state_of_the_trainer_stands_in_one_file() -> None:
    declared = layer_of("state").declared | names_of_transformers()
    wrong = []
    for link in CHAIN[1:]:
        layer = layer_of(link)
        settable = {name for other in CHAIN for name in layer_of(other).methods}  # properties
        wrong += [
            f"{link}.py:{line} sets self.{n}" for n, line in layer.stored.items() if n not in declared | settable
        ]
        if link not in ("core", "grpo", "rloo"):
            wrong += [f"{link}.py declares {name}" for name in layer.declared]
    assert wrong == []
    assert len(layer_of("state").declared) > 50


def test_the_lazy_table_points_at_modules_that_exist() -> None:
    from gruppo import _HOME

    for public, module in _HOME.items():
        path = ROOT.parent / (module.replace(".", "/") + ".py")
        assert path.exists(), f"{public}: {module}"


def test_nothing_talks_to_the_network() -> None:
    wrong = []
    for path in FILES:
        watched = (NETWORK | TELEMETRY | {"huggingface_hub"}) - HUB.get(name(path), set())
        wrong += [
            f"{name(path)}:{i.line} imports {i.module}" for i in imports(path) if i.module.split(".")[0] in watched
        ]
    assert not wrong


def in_the_encoding_of_the_locale(path: Path) -> list[str]:
    """Calls that open text and do not say as what, by line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        mode = " ".join([*map(ast.unparse, node.args[:2]), keywords.get("mode", "")])
        opens = ast.unparse(node.func) in ("open", "io.open", "os.fdopen") and not re.search("""['"][rwax+]*b""", mode)
        reads = ast.unparse(node.func).endswith((".read_text", ".write_text")) or keywords.get("text") == "True"
        if (opens or reads) and "encoding" not in keywords:
            found.append(f"{path.name}:{node.lineno}")
    return found


def test_no_text_depends_on_the_locale() -> None:
    """In the C locale, or a national one of old, `open` without an encoding cannot read or write what others can."""
    recipes = (ROOT.parent / "recipes").rglob("*.py")
    assert [place for path in [*FILES, *recipes] for place in in_the_encoding_of_the_locale(path)] == []


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Every function of a file and its number of lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_files_and_functions_stay_short() -> None:
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {file: length for file, length in lengths.items() if length > LINES_PER_FILE} == {}
    measured = {f"{name(path)}:{function}": length for path in FILES for function, length in functions(path)}
    too_long = {key: length for key, length in measured.items() if length > LONGER.get(key, LINES_PER_FUNCTION)}
    assert too_long == {}
    assert set(LONGER) <= set(measured)


def test_these_tests_see_the_whole_library() -> None:
    assert len(FILES) > 60
    everything = [item.module for path in FILES for item in imports(path)]
    assert "gruppo.rollout.vllm.colocate.EngineSettings" in everything, "imported inside a function"
