"""What `make` installs: requirements/ pins all that pyproject.toml asks for, and a wrong Python is refused."""

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


def test_the_environment_of_another_python_is_removed_and_ones_own_is_kept(tmp_path):
    for version, stays in (("3.1.7", False), (".".join(map(str, sys.version_info[:3])), True)):
        folder = tmp_path / version
        folder.mkdir()
        (folder / "pyvenv.cfg").write_text(f"home = /somewhere\nversion = {version}\n")
        script = ROOT / "requirements" / "python.py"
        subprocess.run([sys.executable, script, folder], check=True, timeout=60)
        assert folder.exists() == stays
    assert subprocess.run([sys.executable, script, tmp_path / "none"], timeout=60).returncode == 0
