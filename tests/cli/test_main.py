"""The command table."""

import contextlib
import io
import logging
import subprocess
import sys

import pytest

from gruppo import cli


def test_help_lists_every_command_on_one_screen(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in cli.COMMANDS)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_examples(command, capsys):
    try:
        code = cli.main([command, "--help"])
    except SystemExit as stop:  # argparse's way
        code = stop.code
    assert code == 0
    assert f"\n  gruppo {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in cli.COMMANDS)])
def test_help_in_a_locale_that_lacks_some_of_its_characters(arguments, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    with contextlib.suppress(SystemExit):  # argparse's way
        assert cli.main(arguments) == 0
    output.flush()
    assert b"gruppo" in output.buffer.getvalue()


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
    assert cli.main(["dmeo"]) == 2
    assert "unknown command 'dmeo'; did you mean 'demo'?" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert capsys.readouterr().err == "gruppo: unknown command 'xyzzy'. See `gruppo --help`.\n"


def test_libraries_do_not_talk_about_what_is_not_used(monkeypatch, caplog):
    monkeypatch.setitem(cli.COMMANDS, "demo", lambda argv: 0)
    assert cli.main(["demo"]) == 0
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no kernels")
    logger.warning("Something else.")
    assert [record.getMessage() for record in caplog.records] == ["Something else."]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--versoin"], "unknown option '--versoin'"),
        (["demo", "--stepz", "3"], "unknown option --stepz. Did you mean `--steps`?"),
        (["demo", "more"], "unexpected argument 'more'"),
        (["eval", "m", "--sample", "3"], "unknown option --sample. Did you mean `--samples`?"),
        (["train", "--learning_rat", "3"], "Did you mean `learning_rate`?"),
        (["check", "--learning_rat", "3"], "Did you mean `learning_rate`?"),
    ],
)
def test_unknown_flags_name_the_nearest(argv, said, capsys):
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = stop.code
    assert code != 0
    captured = capsys.readouterr()
    assert said in captured.err + captured.out


def test_an_interrupt_is_said_in_a_line(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "demo", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "gruppo demo: interrupted.\n"


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
