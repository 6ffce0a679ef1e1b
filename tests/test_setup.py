"""What `make` installs: requirements/ pins all that pyproject.toml asks for, and a wrong Python is refused."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [f"3.{minor}.{patch}" for minor in (11, 12) for patch in (0, 2, 13)]


python, pins = (
    SimpleNamespace(**runpy.run_path(str(ROOT / f"requirements/{name}.py"))) for name in ("python", "pins")
)


def pinned(names: tuple[str, ...], python: str, machine: str = "x86_64") -> dict[str, str]:
    """The version of each package that pip would take from these files, in the environment of a Python."""
    where = {"python_full_version": python, "python_version": python[:4], "platform_machine": machine}
    lines = [line for line in pins.pins(names).splitlines() if line and not line.startswith("#")]
    found: dict[str, str] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate(where):
            (version,) = [specifier.version for specifier in requirement.specifier]
            name = canonicalize_name(requirement.name)
            assert found.get(name, version) == version, f"{name} is pinned twice for Python {python}"
            found[name] = version
    return found


def asked_for(extras: tuple[str, ...]) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != "gruppo"]


@pytest.mark.parametrize("environment", pins.ENVIRONMENTS)
def test_each_environment_pins_what_the_project_asks_for_in_every_python(environment):
    extras, files = pins.ENVIRONMENTS[environment]
    for version in PYTHONS:
        found = pinned(files, version)
        wrong = [
            str(requirement)
            for requirement in asked_for(extras)
            if not requirement.specifier.contains(found.get(canonicalize_name(requirement.name), "0"))
        ]
        assert not wrong, f"Python {version}"


def test_pins_name_no_index_and_no_hashes():
    text = pins.pins(tuple(pins.HEADS))
    assert not re.search(r"https?:|--|\bfile:|@", text)
    assert {path.name for path in (ROOT / "requirements").glob("*.txt")} == set(pins.HEADS)


def test_the_pythons_that_are_let_in_are_those_of_the_package():
    promised = SpecifierSet(PROJECT["requires-python"])
    minors = [(3, minor) for minor in range(30) if promised.contains(f"3.{minor}.0")]
    assert list(python.SUPPORTED) == minors
    assert {tuple(map(int, version.split(".")[:2])) for version in pins.PYTHONS} == set(minors)


@pytest.mark.parametrize(
    ("version", "venv_works"), [((2, 7), True), ((3, 10), True), ((3, 99), True), ((3, 12), False)]
)
def test_another_python_or_one_without_venv_is_refused_in_a_line(version, venv_works):
    assert len(python.complaint(version, venv_works).splitlines()) == 1


def set_up(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "requirements" / "python.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("version", "names", "stays"),
    [
        ("3.1.7", [".demo"], False),
        ("3.1.7", ["mine"], True),
        (".".join(map(str, sys.version_info[:3])), [".demo"], True),
    ],
    ids=["of another python", "a user's own", "of this python"],
)
def test_the_environment_of_another_python_is_removed_if_make_made_it(tmp_path, version, names, stays):
    for name in ["pyvenv.cfg", *names]:
        (tmp_path / name).write_text(f"home = /somewhere\nversion = {version}\n")
    another = set_up("--is-another", tmp_path).returncode == 0
    assert another == version.startswith("3.1.")
    done = set_up(tmp_path)
    assert tmp_path.exists() == stays
    assert done.returncode == (stays and another)
    assert (done.stdout + done.stderr).count("\n") == another  # it says so


def test_an_environment_that_is_a_link_is_left_alone_with_a_sentence(tmp_path):
    (tmp_path / "real").mkdir()
    for name in ("pyvenv.cfg", ".demo"):
        (tmp_path / "real" / name).write_text("version = 3.1.7\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    done = set_up(tmp_path / "link")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert (tmp_path / "real" / ".demo").exists()


@pytest.mark.skipif(" " in sys.executable, reason="a Python in a path with a space cannot be named to make")
def test_a_named_python_has_effect_on_an_environment_that_is_ready(tmp_path):
    for name in ("Makefile", "requirements", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".demo").write_text("")
    plan = ["make", "-n", "demo"]
    for version, named, anew in (
        ("3.1.7", [f"PYTHON={sys.executable}"], True),
        ("3.1.7", [], False),
        (".".join(map(str, sys.version_info[:3])), [f"PYTHON={sys.executable}"], False),
    ):
        (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"version = {version}\n")
        surroundings = {name: value for name, value in os.environ.items() if name != "PYTHON" and "MAKE" not in name}
        said = subprocess.run(
            [*plan, *named], cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=True
        )
        assert ("-m venv" in said.stdout) == anew, (version, named)
