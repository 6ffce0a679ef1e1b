"""`gruppo view` as it is typed."""

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from gruppo.cli import main
from tests.view.runs import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("view") / "mine")


def test_it_says_where_it_answers_and_ends_when_it_is_told_to(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "gruppo", "view", str(folder)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"1 run and 0 evaluations at (http://127\.0\.0\.1:\d+/) +\(Ctrl-C to stop\)\n", said)
            assert found is not None, said
            with urllib.request.urlopen(found[1], timeout=20) as page:
                assert b"<title>gruppo view</title>" in page.read()
            port = found[1].rpartition(":")[2].strip("/")
            assert main(["view", str(folder), "--port", port]) == 2
            assert f"Port {port} cannot be used" in capsys.readouterr().err
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "Stopped. Nothing in the folders was changed.\n"
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_it_ends_when_it_is_terminated_in_the_background(folder: Path) -> None:
    in_background = [
        "sh",
        "-c",
        'trap "" INT HUP; exec "$@"',
        "-",
        sys.executable,
        "-m",
        "gruppo",
        "view",
        str(folder),
    ]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        in_background, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            assert "1 run and 0 evaluations" in process.stdout.readline()
            process.terminate()
            assert process.wait(30) == -signal.SIGTERM
        finally:
            process.kill()


def test_a_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    assert main(["view", str(folder), "--export", str(path)]) == 0
    assert re.fullmatch(r".*report\.html: \d+\.\d MB\. It opens in any browser .*\n", capsys.readouterr().out)
    assert path.stat().st_size > 50_000
    assert main(["view", str(folder), "--export", str(tmp_path / "nowhere" / "report.html")]) == 2
    assert "name a file in a folder that exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prot", "1"], "unknown option --prot. Did you mean `--port`?"),
        (["--port", "70000"], "a port is a number from 1 to 65535"),
        (["--export", "x.html", "--open"], "--export only writes a file"),
    ],
)
def test_mistakes(folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["view", str(folder), *arguments])
    assert said in capsys.readouterr().err


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path)]) == 2
    assert "holds neither a run (run.json) nor an evaluation" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["view", "--help"])
    assert "gruppo view runs/a runs/b evaluations" in capsys.readouterr().out
