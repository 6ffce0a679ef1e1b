"""What a program meets, and how its end is told."""

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import ConfigError
from gruppo.sandbox import Limits, Sandbox
from tests.sandbox.conftest import MakeSandbox

ENDS = [
    ("pass", 0, "ok"),
    ("", 0, "ok"),
    ("import sys; sys.exit()", 0, "ok"),
    ("import sys; sys.exit(3)", 3, "error"),
    ("import sys; sys.exit('words')", 1, "error"),
    ("exit(4)", 4, "error"),
    ("import os; os._exit(5)", 5, "error"),
    ("raise ValueError", 1, "error"),
    ("raise KeyboardInterrupt", 1, "error"),
    ("this is no Python", 1, "error"),
    ("a = '\0'", 1, "error"),
    ("a = '\ud800'", 1, "error"),
    ("(" * 10_000, 1, "error"),
    ("import os; os.abort()", -signal.SIGABRT, "killed"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "killed"),
    ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "killed"),
    ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, "killed"),
]


@pytest.mark.parametrize(("code", "exit_code", "reason"), ENDS)
def test_how_a_program_ends(code: str, exit_code: int, reason: str) -> None:
    execution = Sandbox(allow_unconfined=Sandbox.capabilities().missing).run(code)
    assert (execution.exit_code, execution.reason) == (exit_code, reason)
    assert 0 < execution.seconds < 10


def test_text_goes_in_and_out(sandbox: Sandbox) -> None:
    code = "import sys\nname = input()\nprint(f'grüß {name}', len(sys.stdin.read()))\nprint('日本', file=sys.stderr)"
    execution = sandbox.run(code, stdin="Zoë 🐍\n" + "x" * 200_000)
    assert execution.stdout == "grüß Zoë 🐍 200000\n"
    assert execution.stderr == "日本\n"


def test_output_that_is_no_text_is_replaced(sandbox: Sandbox) -> None:
    assert sandbox.run(r"import sys; sys.stdout.buffer.write(b'a\xffb')").stdout == "a\ufffdb"


def test_a_traceback_shows_the_code_and_not_the_sandbox(sandbox: Sandbox) -> None:
    stderr = sandbox.run("def f():\n    return 1 / 0  # here\n\nf()").stderr
    assert "return 1 / 0  # here" in stderr
    assert 'File "<code>", line 4, in <module>' in stderr
    assert stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "runner" not in stderr


def test_the_last_expression_is_shown_on_request(sandbox: Sandbox) -> None:
    assert sandbox.run("x = 6\nx * 7", show_last=True).stdout == "42\n"
    assert sandbox.run("x = 6\nx * 7").stdout == ""
    assert sandbox.run("'text'", show_last=True).stdout == "'text'\n"
    assert sandbox.run("None", show_last=True).stdout == ""
    assert sandbox.run("print(1); print(2)", show_last=True).stdout == "1\n2\n"


def test_it_is_a_program_like_any_other(sandbox: Sandbox) -> None:
    code = """
import atexit, dataclasses, pickle, sys
@dataclasses.dataclass
class Point:
    x: int
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(3))), sys.argv, [name for name in sys.modules if "gruppo" in name])
atexit.register(print, "at the end")
"""
    assert sandbox.run(code).stdout == "Point(x=3) ['<code>'] []\nat the end\n"


def test_installed_packages_can_be_imported(sandbox: Sandbox) -> None:
    execution = sandbox.run("import numpy\nprint(numpy.ones((3, 3)).sum())")
    assert execution.stdout == "9.0\n", execution.stderr


def test_subprocesses_and_event_loops_work(sandbox: Sandbox) -> None:
    code = """
import asyncio, subprocess
async def main():
    await asyncio.sleep(0.01)
    return subprocess.run(["echo", "from echo"], capture_output=True, text=True, check=True).stdout
print(asyncio.run(main()))
"""
    execution = sandbox.run(code)
    assert execution.stdout == "from echo\n\n", execution.stderr


def test_each_run_starts_in_an_empty_folder_of_its_own(sandbox: Sandbox) -> None:
    code = "import os\nprint(os.listdir())\nopen('left', 'w').write('x')\nos.mkdir('d')\nprint(sorted(os.listdir()))"
    for _ in range(2):
        assert sandbox.run(code).stdout == "[]\n['d', 'left']\n"


def folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("gruppo-sandbox-*")}


def test_the_folder_is_removed_whatever_it_holds(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = """
import os
os.makedirs("locked/inner")
open("locked/inner/file", "w").close()
try: os.chmod("locked", 0)
except OSError: pass
os.symlink("/", "link")
for _ in range(1200):
    os.mkdir("d")
    os.chdir("d")
print("made")
"""
    assert sandbox.run(code).stdout == "made\n"
    assert folders() == set()
    assert os.path.isdir("/usr"), "the link was not followed"


def test_many_runs_at_once_stay_apart_and_leave_nothing(
    make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    box = make_sandbox(seconds=60, processes=500)  # where runs have one uid, they share this
    fds = len(os.listdir("/proc/self/fd"))
    children = sorted(found for parent, found in processes() if parent == os.getpid())  # of other tests
    name = f"box{os.getpid()}"  # what `ps` will show
    code = f"""
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
open("f", "w").write(input())
if os.fork() == 0:
    time.sleep(300)
print(open("f").read())
"""
    with ThreadPoolExecutor(100) as pool:
        results = list(pool.map(lambda i: box.run(code, stdin=f"{i}"), range(100)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(100)]
    assert folders() == set()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert name not in [found for _, found in processes()]
    assert sorted(found for parent, found in processes() if parent == os.getpid()) == children, "no child is left"


def processes() -> list[tuple[int, str]]:
    """Parent and name of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        found.append((int(after.split()[1]), before.partition("(")[2]))
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        dict(seconds=0),
        dict(seconds=float("inf")),
        dict(seconds=float("nan")),
        dict(seconds="1"),
        dict(memory=-1),
        dict(memory=1000),
        dict(processes=2.5),
        dict(output=True),
    ],
)
def test_limits_must_make_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


def test_sets_are_printed_in_the_same_order_every_time() -> None:
    sandbox = Sandbox(allow_unconfined=Sandbox.capabilities().missing)
    printed = {sandbox.run("print({f'name {i}' for i in range(20)})").stdout for _ in range(3)}
    assert len(printed) == 1
