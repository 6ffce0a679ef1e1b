"""Commands in the docs: each is parsed by the parser of its program; none is run."""

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

from tests.docs.blocks import ROOT
from tests.docs.runs import check_command

# Programs whose flags are not checked here.
FOREIGN = {"srun", "export", "cd", "kill", "git", "VLLM_SERVER_DEV_MODE=1", "nvidia-smi"}


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as words, without comments and continuations."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        # Shell substitutions are replaced by a number, because they are all numbers in these pages.
        line = re.sub(r"\$\(\(.*?\)\)|\$\([^()]*\)|\$\w+", "8", line)
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]) and words[0] not in FOREIGN:
            words = words[1:]
        if words:
            yield words


def is_known(words: list[str]) -> bool:
    return words[0] in CHECKS


def check(words: list[str]) -> None:
    """Raise if a command could not be started as written."""
    if words[0] in CHECKS:
        CHECKS[words[0]](words[1:])
    else:
        assert words[0] in FOREIGN, f"nothing checks `{words[0]}`"


class Parsed(Exception):  # noqa: N818  (it is no error)
    """Raised when the arguments of a command have been parsed."""


def _gruppo(words: list[str]) -> None:
    """Parse the words with the command's own parser, and stop before anything else happens."""
    from gruppo.cli import COMMANDS, main

    if words[0].startswith("-"):
        assert main(words) == 0
        return
    assert words[0] in COMMANDS, f"there is no command `gruppo {words[0]}`"
    if words[0] in ("train", "grpo", "rloo", "check"):
        check_command(words[0], words[1:])
        return
    original = argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        options, unknown = original(self, *args, **kwargs)
        if unknown and sys._getframe(1).f_code.co_name == "parse_args":
            return options, unknown  # parse_args rejects them
        raise Parsed

    setattr(argparse.ArgumentParser, "parse_known_args", parse)  # noqa: B010
    try:
        COMMANDS[words[0]](words[1:])
    except Parsed:
        return
    finally:
        setattr(argparse.ArgumentParser, "parse_known_args", original)  # noqa: B010
    raise AssertionError(f"gruppo {shlex.join(words)} parsed nothing")


def _make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"make has no target {target}"


def _pip(words: list[str]) -> None:
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"(?:gruppo|\.)\[([\w,-]+)\]", " ".join(words)):
        unknown = set(extras.split(",")) - set(project["optional-dependencies"])
        assert not unknown, f"there is no extra {unknown}"


def _python(words: list[str]) -> None:
    if words[0] == "-c":
        compile(words[1], "docs", "exec")
    elif words[0] == "-m":
        if words[1].startswith(("recipes.", "benchmarks.")):
            assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file(), f"there is no module {words[1]}"
        CHECKS.get(words[1], lambda rest: None)(words[2:])
    else:
        assert words[0] == "train.py" or (ROOT / words[0]).is_file(), f"there is no file {words[0]}"


def _accelerate(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    options = launch_command_parser().parse_args(words[1:])
    assert options.config_file is None or (ROOT / options.config_file).is_file()


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    get_args_parser().parse_args(words)


CHECKS = {
    "gruppo": _gruppo,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
}
