"""What is installed: the wheel holds the package and its data, works in an environment of its own, and is typed."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

from gruppo.errors import install_line, packages_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SECONDS = 0.3  # of `import gruppo`, as benchmarks/import_time.py measures it; here five times as many are granted
# Imported where a setting asks for them, and in no extra.
BROUGHT = {
    "triton": "comes with the builds of torch for CUDA, and only a CUDA device runs what imports it",
    "comet-ml": "a tracker that `report_to` names is its user's to install",
    "mlflow": "as comet-ml",
    "trackio": "as comet-ml",
    "wandb": "as comet-ml",
    "weave": "as comet-ml; WeaveCallback says so",
}
# Extras whose absence somebody else reports before an import of ours is reached.
REPORTED = {"deepspeed": "accelerate refuses to make the plugin without it"}
HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow", "pandas", "rich", "yaml", "jinja2")

EVERY_MODULE = """
import importlib, pkgutil, gruppo
names = [module.name for module in pkgutil.walk_packages(gruppo.__path__, "gruppo.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names), gruppo.__file__, gruppo.__version__)
"""

ONE_UPDATE = """
from gruppo import GRPOConfig, GRPOTrainer
from gruppo.demo import exact_match, load_task, model_path
args = GRPOConfig("run", max_steps=1, num_generations=4, per_device_train_batch_size=8, max_completion_length=8,
                  use_cpu=True, bf16=False, report_to="none", disable_tqdm=True)
trainer = GRPOTrainer(model=model_path(), reward_funcs=exact_match, args=args, train_dataset=load_task()[0])
trainer.train()
assert trainer.state.global_step == 1
"""

TYPED = """
from gruppo import Benchmark, GRPOConfig, check_reward, evaluate
from gruppo.grading import Ladder
from gruppo.rewards import get_length_reward
from gruppo.runs import Run

def right(completions: list[str], answer: list[str], **kwargs: object) -> list[float]:
    return [float(a == b) for a, b in zip(completions, answer)]

bench = Benchmark("sums", "Sums", file="sums.jsonl", ladder=Ladder(literal=True))
score: float = evaluate("model", bench).accuracy("sums")
lines: list[dict[str, object]] = [dict(line) for line in Run("run").metrics()]
config = GRPOConfig("run", beta=0.1)
"""
MISTYPED = {
    "from gruppo import GPROConfig": "has no attribute",
    "from gruppo import Benchmark\nBenchmark(name=3)": "incompatible type",
    "from gruppo import evaluate\nx: int = evaluate('model')": "Incompatible types",
    "from gruppo.rewards import get_length_rewards": "has no attribute",
}


def run(*command: str | Path, folder: Path) -> str:
    """The output of a command that must succeed, started where the sources are not."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what is needed for it."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "gruppo", folder / "gruppo", ignore=shutil.ignore_patterns("__pycache__"))
    offline = ("-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", "dist", ".", folder=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it, and around it the packages that these tests run with."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    interpreter = folder / "venv/bin/python"
    offline = ("-q", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", "--python", interpreter, "install", *offline, wheel, folder=folder)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    # Paths that a .pth file names have no .pth files of their own read: the checkout stays out.
    (packages / "around.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


@pytest.mark.medium
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    found = set(zipfile.ZipFile(wheel).namelist())
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gruppo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "gruppo/py.typed" in source
    assert any(name.startswith("gruppo/demo/assets/") for name in source)
    assert source - found == set(), "not in the wheel: see package-data in pyproject.toml"
    assert {name for name in found if not name.startswith("gruppo")} == set()
    metadata = zipfile.ZipFile(wheel).read(f"gruppo-{PROJECT['version']}.dist-info/METADATA").decode()
    assert "Classifier: Typing :: Typed" in metadata
    _, _, shown = metadata.partition("\n\n")
    assert "drop-in" in shown
    assert re.findall(r"\]\((?!https?://)[^)]*\)", shown) == [], "a package page does not have these files"


@pytest.mark.slow
def test_the_wheel_works_where_the_sources_are_not(python: Path, tmp_path: Path) -> None:
    count, file, shown = run(python, "-c", ONE_UPDATE + EVERY_MODULE, folder=tmp_path).split()[-3:]
    assert int(count) > 100
    assert Path(file).is_relative_to(python.parents[1])
    assert shown == PROJECT["version"]
    command = python.parent / "gruppo"
    assert run(command, "--version", folder=tmp_path).strip() == f"gruppo {PROJECT['version']}"
    assert "commands:" in run(command, "--help", folder=tmp_path)
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


@pytest.mark.medium
def test_scripts_are_checked_against_the_types_of_the_package(python: Path, tmp_path: Path) -> None:
    """A right script passes mypy, and each wrong one fails with the complaint that it deserves."""
    # Partly annotated libraries are left out, as in pyproject.toml.
    partly = ("torch", "transformers", "accelerate", "datasets", "peft", "huggingface_hub", "triton", "pyarrow")
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in partly)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n{skipped}")
    for name, code in {"right": TYPED, **{f"wrong_{n}": code for n, code in enumerate(MISTYPED)}}.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--cache-dir", "cache"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    scripts = sorted(path.name for path in tmp_path.glob("*.py"))
    said = subprocess.run([*command, *scripts], cwd=tmp_path, capture_output=True, text=True, env=environment).stdout
    assert "right.py" not in said, said
    assert f"errors in {len(MISTYPED)} files (checked {len(scripts)} source files)" in said
    for number, complaint in enumerate(MISTYPED.values()):
        assert re.search(rf"^wrong_{number}\.py:.*{complaint}", said, re.MULTILINE), said


@pytest.mark.parametrize("package", ["gruppo", "gruppo/rewards"])
def test_checkers_see_the_names_that_are_loaded_lazily(package: str) -> None:
    """The imports for checkers and the table for running programs say the same."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    (table,) = (ast.literal_eval(value) for value in values if isinstance(value, ast.Dict))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        node.names[0].name: node.module.removeprefix("gruppo.rewards." if "rewards" in package else "")
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert imported == table


def best_seconds(*command: str, times: int = 3) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        found.append(time.perf_counter() - start)
    return min(found)


def test_importing_is_quick() -> None:
    nothing = best_seconds(sys.executable, "-c", "pass")
    assert best_seconds(sys.executable, "-c", "import gruppo") - nothing < 5 * SECONDS
    assert best_seconds(sys.executable, "-m", "gruppo", "--help") - nothing < 5 * SECONDS


@pytest.mark.parametrize(
    "code", ["import gruppo", "import gruppo.cli", "from gruppo.cli import main; main(['--help'])"]
)
def test_importing_and_helping_load_nothing_heavy(code: str) -> None:
    shown = f"""
import sys
try:
    {code}
except SystemExit:
    pass
print([name for name in {HEAVY} if name in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"math", "vllm", "peft", "deepspeed", "view", "demo", "docs", "dev"} <= set(extras)
    from gruppo.rollout.vllm.versions import FIRST, FIRST_UNKNOWN

    low, high = (".".join(map(str, bound)) for bound in (FIRST, FIRST_UNKNOWN))
    assert extras["vllm"] == [f"vllm>={low},<{high}"]


def test_the_quick_start_has_every_extra() -> None:
    page = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| extra \| for \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert rows is not None
    shown = {name for row in rows[1].splitlines() for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert shown == set(PROJECT["optional-dependencies"])


def test_what_newcomers_install_can_be_looked_at() -> None:
    for page in ("README.md", "docs/quickstart.md"):
        (extras,) = re.findall(r'pip install "\.\[([\w,]+)\]"', (ROOT / page).read_text(encoding="utf-8"))
        assert "view" in extras.split(","), f"{page} goes on with `gruppo view`"


def test_extras_are_quoted() -> None:
    """Some shells take the brackets for a pattern."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "gruppo").rglob("*.py")]
    bare = r"pip install [^`\n'\"]*(?:gruppo|\.)\[\w"
    found = [page.name for page in pages if re.search(bare, page.read_text(encoding="utf-8"))]
    assert found == []
    assert re.search(bare, "pip install gruppo[view]")
    assert not re.search(bare, 'pip install "gruppo[view]"')


INSTALLS_OURS = re.compile(r"pip install[^`\n]*\bgruppo\b(?!-)")  # by its name: an index may have a stranger's


def test_no_command_installs_a_package_by_our_name() -> None:
    """The name belongs to nobody on any index; `.[view]` in a checkout and the packages themselves always work."""
    folders = ("docs", "examples", "recipes", "benchmarks", "gruppo", "tests")
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    pages += [page for folder in folders for kind in ("md", "yaml") for page in (ROOT / folder).rglob(f"*.{kind}")]
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        if path != Path(__file__):
            tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            constants = [ast.unparse(node) for node in tree if isinstance(node, ast.Constant | ast.JoinedStr)]
            texts[path.relative_to(ROOT).as_posix()] = "\n".join(constants)
    assert [name for name, text in texts.items() if INSTALLS_OURS.search(text)] == []
    assert len(texts) > 300
    for found in ("pip install 'gruppo[view]'", 'pip install -U "gruppo"', "pip install gruppo"):
        assert INSTALLS_OURS.search(found)


def test_what_an_extra_needs_is_told_by_the_names_of_its_packages() -> None:
    for extra, wanted in PROJECT["optional-dependencies"].items():
        told = [Requirement(each) for each in shlex.split(packages_of(extra))]
        assert {each.name for each in told} == {Requirement(each).name for each in wanted}
        assert {str(each.specifier) for each in told} == {str(Requirement(each).specifier) for each in wanted}
    assert install_line("view") == 'pip install "starlette>=1.0" "uvicorn>=0.40"'


def test_source_that_was_never_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert install_line("view") == 'pip install ".[view]" in the folder of pyproject.toml'


class Imported(NamedTuple):
    """An import of a package that is not ours nor Python's; `late`: importing its module does not need the package."""

    module: str
    where: str
    late: bool
    guarded: bool


def third_party(tree: ast.AST, where: str, late: bool = False, guarded: bool = False) -> Iterator[Imported]:
    """Every import in a piece of source, those inside functions too."""
    for node in ast.iter_child_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in {name.partition(".")[0] for name in names} - {"gruppo"} - sys.stdlib_module_names:
            yield Imported(name, f"{where}:{node.lineno}", late, guarded)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        inside |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        caught = isinstance(node, ast.Try) and any(
            handler.type is not None and "ImportError" in ast.unparse(handler.type) for handler in node.handlers
        )
        yield from third_party(node, where, late or inside, guarded or caught)


@cache
def imports() -> list[Imported]:
    """Those of the whole package."""
    paths = sorted((ROOT / "gruppo").rglob("*.py"))
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    return [found for where, tree in trees.items() for found in third_party(tree, where)]


@cache
def homes() -> Mapping[str, list[str]]:
    return packages_distributions()


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it, without what may follow it in a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def undeclared(project: dict[str, Any]) -> list[str]:
    """What is wrong with the imports of the package, given what the project says that it needs."""
    core = {normal(name) for name in project["dependencies"]}
    extras = {
        extra: {normal(name) for name in names}
        for extra, names in project["optional-dependencies"].items()
        if extra not in ("dev", "docs")  # what users do not install
    }
    wrong, guarded = [], set()
    for found in imports():
        names = {normal(name) for name in homes().get(found.module, [found.module])}
        holders = {extra for extra, packages in extras.items() if packages & names}
        guarded |= holders if found.guarded else set()
        if names & core or found.module == "triton":  # its modules are themselves imported late
            continue
        if not holders and not names & set(BROUGHT):
            wrong.append(f"{found.where}: {found.module} is neither in `dependencies` nor in an extra")
        elif not found.late:
            wrong.append(f"{found.where}: {found.module} is optional, but imported with the module")
    missing = set(extras) - guarded - set(REPORTED)
    return wrong + [f"nothing says what to do without the extra {extra}" for extra in sorted(missing)]


def test_every_import_is_declared() -> None:
    """The tests above run among all packages of this environment; this one sees a dependency that nobody asked for."""
    assert undeclared(PROJECT) == []


@pytest.mark.parametrize("name", sorted(normal(name) for name in PROJECT["dependencies"]))
def test_a_dependency_that_is_not_declared_is_noticed(name: str) -> None:
    """Which also means that each of them is imported."""
    fewer = [each for each in PROJECT["dependencies"] if normal(each) != name]
    modules = {module for module, packages in homes().items() if name in map(normal, packages)}
    found = undeclared({**PROJECT, "dependencies": fewer})
    assert found
    assert {line.split()[1] for line in found} <= modules


def test_an_extra_that_is_not_declared_is_noticed() -> None:
    extras = PROJECT["optional-dependencies"]
    found = undeclared({**PROJECT, "optional-dependencies": {**extras, "view": ["starlette>=1.0"]}})
    assert any("uvicorn is neither in `dependencies` nor in an extra" in line for line in found)
    found = undeclared({**PROJECT, "optional-dependencies": {**extras, "new": ["nothing-imports-this"]}})
    assert found == ["nothing says what to do without the extra new"]


def test_an_optional_package_may_not_be_needed_by_importing_a_module() -> None:
    source = (
        "import peft\ntry:\n    import peft\nexcept ImportError:\n    pass\ndef f():\n    from peft.utils import x\n"
    )
    found = [(each.where, each.late, each.guarded) for each in third_party(ast.parse(source), "m")]
    assert found == [("m:1", False, False), ("m:3", False, True), ("m:7", True, False)]
    kept = [name for name in PROJECT["dependencies"] if normal(name) != "cloudpickle"]
    extras = {**PROJECT["optional-dependencies"], "math": [*PROJECT["optional-dependencies"]["math"], "cloudpickle"]}
    (line,) = undeclared({"dependencies": kept, "optional-dependencies": extras})
    assert line.endswith("cloudpickle is optional, but imported with the module")


def test_every_extra_that_an_error_names_exists() -> None:
    named = {
        extra
        for path in (ROOT / "gruppo").rglob("*.py")
        for extra in re.findall(r"(?:install_line|packages_of)\([\"'](\w+)[\"']\)", path.read_text(encoding="utf-8"))
    }
    assert named
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## \[?(\d+\.\d+\.\d+)\]?", text, re.MULTILINE)
    assert first is not None
    assert first[1] == PROJECT["version"] == version("gruppo")
