"""The command table."""

import subprocess
import sys

import pytest

from gruppo import cli


def test_help_lists_every_command_on_one_screen(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"  {name}" in text for name in cli.COMMANDS)
    assert len(text.splitlines()) <= 40


def test_every_command_says_what_it_does_in_one_line():
    for function in cli.COMMANDS.values():
        assert function.__doc__
        assert "\n" not in function.__doc__.strip()


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gruppo ")


def test_no_command_shows_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["dmeo"])
    assert stop.value.code == 2
    assert "unknown command 'dmeo'; did you mean 'demo'?" in capsys.readouterr().err


def test_the_rest_of_the_line_goes_to_the_command(monkeypatch):
    seen = []
    monkeypatch.setitem(cli.COMMANDS, "demo", lambda argv: seen.append(argv) or 5)
    assert cli.main(["demo", "--steps", "3", "--help"]) == 5
    assert seen == [["--steps", "3", "--help"]]


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "many"], ["--stepz", "3"]])
def test_demo_refuses_bad_options(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *arguments])
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_command_line_starts_without_torch():
    code = "import sys; from gruppo.cli import main; main(['--version']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
