"""Every piece of code in the README and the docs is run, or held against what it calls."""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gruppo.algo.objectives import OBJECTIVES
from gruppo.algo.recipes import LOSS_TYPES
from gruppo.cli import COMMANDS
from gruppo.errors import ConfigError
from tests.docs import commands
from tests.docs.blocks import LANGUAGES, PAGES, Block, blocks, check_names, python_code, run
from tests.docs.runs import check_run

PYTHON = [page for page in PAGES if python_code(page)]
SHELL = [block for page in PAGES for block in blocks(page) if block.language in ("bash", "")]
YAML = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
LONG = ("README.md",)  # pages that train for more than an update or two


def name(page: Path) -> str:
    return page.name


@pytest.mark.medium
@pytest.mark.parametrize("page", [page for page in PYTHON if page.name not in LONG], ids=name)
def test_python_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if any("runs/demo" in block.text for block in python_code(page)):
        shutil.copytree(request.getfixturevalue("demo_run"), tmp_path, dirs_exist_ok=True)
    namespace: dict[str, Any] = {"__name__": "docs", "__file__": str(tmp_path / "page.py")}
    with patch.dict(OBJECTIVES), patch.dict(LOSS_TYPES):  # a page adds a loss, which other tests must not see
        for block in python_code(page):
            if block.reason is None:
                run(block, namespace)
            else:
                check_names(block, namespace)


@pytest.mark.medium
def test_the_readme_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = PAGES[0]
    for block in python_code(readme):
        assert block.reason is None
        run(block, {})
    pattern = r"held-out accuracy: ([\d.]+) -> ([\d.]+)"
    printed, shown = re.search(pattern, capsys.readouterr().out), re.search(pattern, readme.read_text("utf-8"))
    assert printed is not None
    assert shown is not None
    assert float(printed[1]) == pytest.approx(float(shown[1]), abs=0.005)
    assert float(printed[2]) == pytest.approx(float(shown[2]), abs=0.05)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_commands_could_be_started(block: Block) -> None:
    for words in commands.commands(block.text) if block.language or _has_commands(block.text) else ():
        if block.language or commands.is_known(words):
            commands.check(words)


SENTENCES = sorted({code for page in PAGES for code in re.findall(r"`(gruppo [a-z][^`…]*)`", page.read_text("utf-8"))})


@pytest.mark.parametrize("command", SENTENCES)
def test_commands_in_sentences_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They may be cut short, so only the names of their flags are looked for."""
    words = command.split()[1:]
    assert words[0] in COMMANDS
    with suppress(SystemExit):
        COMMANDS[words[0]](["--help"])
    known = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in known] == []


def _has_commands(text: str) -> bool:
    """Whether a block without a language holds commands; drawings and outputs may not be readable as words."""
    return any(line.split(" ")[0] in commands.CHECKS for line in text.splitlines())


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.where)
def test_yaml_is_a_run(block: Block) -> None:
    check_run(block.text)


def test_every_block_says_what_it_is() -> None:
    unknown = [block.where for page in PAGES for block in blocks(page) if block.language not in LANGUAGES]
    assert unknown == []


# ---- the checks themselves can fail


def block_of(text: str, reason: str | None = "needs a GPU") -> Block:
    return Block(PAGES[0], 1, "python", text, reason)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("from gruppo import GPROConfig", AssertionError),
        ("GRPOConfig('run', use_vlm=True)", AssertionError),
        ("GRPOConfig('run', loss_type='grop')", ConfigError),
        ("GRPOTrainer(model='m', reward_functions=f)", AssertionError),
        ("gruppo.evaluate('m', ['gsm8k'], sample=8)", AssertionError),
        ("GRPOConfig('run',", SyntaxError),
    ],
)
def test_a_wrong_block_that_is_not_run_is_found(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_names(block_of(text), {})


@pytest.mark.parametrize(
    "command",
    [
        "gruppo trian --config run.yaml",
        "gruppo train --config run.yaml --lanch ddp",
        "gruppo eval MODEL --benchmark-names gsm8k --no-such-flag",
        "make tset",
        "pip install '.[maths]'",
        "python benchmarks/no_such.py",
        "python -m recipes.gsm8k_smollm2.no_such",
        "accelerate launch --config_file recipes/accelerate/fsdp3.yaml train.py",
        "torchrun --nprocs 8 train.py",
        "no-such-program",
    ],
)
def test_a_wrong_command_is_found(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands.commands(command)
    with pytest.raises((AssertionError, SystemExit, ConfigError)):
        commands.check(words)


def test_a_wrong_run_file_is_found() -> None:
    with pytest.raises(ConfigError, match="loss_type"):
        check_run("{model: m, dataset: d.jsonl, rewards: [gruppo.rewards:accuracy_reward], loss_tpye: grpo}")


def test_hidden_code_and_reasons_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- run:\nx = 1\n-->\n\n```python\ny = x\n```\n<!-- not run: a GPU -->\n```python\nz\n```\n")
    found = [(block.line, block.text, block.reason) for block in blocks(page)]
    assert found == [(3, "x = 1\n", None), (7, "y = x\n", None), (11, "z\n", "a GPU")]
