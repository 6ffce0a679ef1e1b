"""The pinned versions of `make`: writes the files in this folder, and checks them against the index.

    python requirements/pins.py write              what pyproject.toml newly asks for; nothing else moves
    python requirements/pins.py write --upgrade    the newest versions of everything
    python requirements/pins.py check              whether each file holds for each Python; nothing is installed

A file holds for all Pythons that pyproject.toml promises, from their first patch releases on, with the index's torch
(the CUDA build) and with a CPU build. uv, in a temporary environment, resolves them; to install them takes pip alone.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PROJECT = FOLDER.parent / "pyproject.toml"
# The first patch release of each, that of Debian 12, and a late one.
PYTHONS = ("3.11.0", "3.11.2", "3.12.0", "3.12.13")
WHERE = [*((python, "x86_64") for python in PYTHONS), (PYTHONS[0], "aarch64")]
# setuptools builds the checkout itself, and what comes as source.
TORCH = "torch==2.13.0\nsetuptools>=77\n"
OLDEST = "transformers==5.17.0\n"
# Which extras an environment has, and the files that pin it.
ENVIRONMENTS = {
    "make demo": (("demo", "view"), ("torch.txt", "demo.txt")),
    "make test": (("demo", "view", "dev", "deepspeed"), ("torch.txt", "demo.txt", "dev.txt")),
    "make test-compat": (("dev",), ("torch.txt", "tf517.txt")),
}
HEADS = {
    "torch.txt": "torch, and what its CUDA build brings. A CPU build needs the first line only.",
    "demo.txt": "What a user has, torch apart.",
    "dev.txt": "What the tests need beside demo.txt.",
    "tf517.txt": "What `make test-compat` needs, torch apart: the oldest supported transformers.",
}


def of_index() -> dict[str, str]:
    """An environment in which pip and uv read the index alone, as on a machine without any configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Uv:
    """uv, in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "uv", with_pip=True)
        subprocess.run([folder / "uv/bin/pip", "install", "-q", "uv"], check=True, env=of_index())

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def resolve(self, extras: Iterable[str], *arguments: str | Path, kept: str = "") -> list[str]:
        """A line for each package that the project needs with these extras. Exits with uv's message if none fit."""
        asked = [PROJECT, *(f"--extra={extra}" for extra in extras), self.file("torch.in", TORCH), *arguments]
        quiet = ("--quiet", "--no-annotate", "--no-header", "--no-emit-index-url", "--fork-strategy=fewest")
        out = self.file("out.txt", kept)  # uv keeps the versions that its output file has
        command = [self.folder / "uv/bin/uv", "pip", "compile", *quiet, f"--output-file={out}", *asked]
        done = subprocess.run(command, env=of_index(), capture_output=True, text=True, cwd=PROJECT.parent)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
        return out.read_text().splitlines()

    def for_all(self, environment: str, *arguments: str | Path, upgrade: bool = True) -> list[str]:
        """The same with markers, for every Python and every platform but browsers and Windows."""
        extras, files = ENVIRONMENTS[environment]
        every = ("--universal", f"--python-version={PYTHONS[0]}")
        lines = self.resolve(extras, *every, *arguments, kept="" if upgrade else pins(files))
        return [line for line in lines if not re.search("sys_platform == '(emscripten|win32)'$", line)]


def package(line: str) -> str:
    return re.split(r"[=\[; ]", line)[0].lower().replace("_", "-")


def pins(names: Iterable[str]) -> str:
    return "".join((FOLDER / name).read_text() for name in names if (FOLDER / name).exists())


def without(lines: Iterable[str], others: Iterable[str]) -> list[str]:
    left_out = {package(line) for line in others}
    return [line for line in lines if package(line) not in left_out]


def write(uv: Uv, upgrade: bool) -> None:
    everything = uv.for_all("make test", upgrade=upgrade)
    demo = uv.for_all("make demo", "-c", uv.file("everything.txt", "\n".join(everything)))
    compat = uv.for_all("make test-compat", uv.file("oldest.in", OLDEST), upgrade=upgrade)
    torch = [line for line in everything if re.match("torch$|triton$|cuda-|nvidia-", package(line))]
    # Triton runs the tests of kernels on a CPU too, where no torch has brought it.
    triton = [line for line in everything if package(line) == "triton"]
    files = {
        "torch.txt": sorted(torch, key=lambda line: package(line) != "torch"),
        "demo.txt": without(demo, torch),
        "dev.txt": without(everything, [*torch, *demo]) + triton,
        "tf517.txt": without(compat, torch) + triton,
    }
    for name, lines in files.items():
        head = (
            f"# {HEADS[name]}\n# Written by `python requirements/pins.py write`; pip installs it without resolving.\n"
        )
        (FOLDER / name).write_text(head + "".join(f"{line}\n" for line in lines))
        print(f"requirements/{name}: {len(lines)} lines")


def check(uv: Uv) -> None:
    """Exits if one environment does not resolve to its pins alone for one Python on one kind of machine."""
    for name, (extras, files) in ENVIRONMENTS.items():
        constraints = uv.file("constraints.txt", pins(files))
        pinned = {package(line) for line in pins(files).splitlines()}
        for python, machine in WHERE:
            where = (f"--python-version={python}", f"--python-platform={machine}-manylinux_2_28")
            lines = uv.resolve(extras, "-c", constraints, *where)
            missing = [line for line in lines if package(line) not in pinned]
            if missing:
                sys.exit(f"{name}, Python {python}, {machine}: none of {files} pins {', '.join(missing)}")
        print(f"{name}: holds for {', '.join(map(' on '.join, WHERE))}", flush=True)


def check_with_pip(uv: Uv) -> None:
    """What `make test` installs beside torch, as a dry run of this Python's own pip."""
    folder = uv.folder / "pip"
    venv.create(folder, with_pip=True)
    listed = [f"--requirement={FOLDER / name}" for name in ENVIRONMENTS["make test"][1][1:]]
    subprocess.run(
        [folder / "bin/pip", "install", "-q", "--dry-run", "--no-deps", *listed], check=True, env=of_index()
    )
    print(f"pip of Python {sys.version.split()[0]} finds what `make test` installs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("--upgrade", action="store_true", help="with write: the newest versions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        uv = Uv(Path(folder))
        if args.action == "write":
            write(uv, args.upgrade)
        else:
            check(uv)
            check_with_pip(uv)


if __name__ == "__main__":
    main()
