"""What code may not reach. Each test holds a target out, and would see it hit if the sandbox let it through."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.conftest import MakeSandbox


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that everyone may write to, with a file that everyone may change."""
    with tempfile.TemporaryDirectory(prefix="gruppo-outside-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "file").write_text("kept")
        (folder / "file").chmod(0o666)
        yield folder


def unchanged(folder: Path) -> bool:
    """Whether the folder is as it was made."""
    return os.listdir(folder) == ["file"] and (folder / "file").read_text() == "kept"


WRITES = [
    "open('{outside}/new', 'w').write('x')",
    "open('{outside}/file', 'a').write('x')",
    "import os; os.truncate('{outside}/file', 0)",
    "import os; os.unlink('{outside}/file')",
    "import os; os.rename('{outside}/file', '{outside}/moved')",
    "import os; os.mkdir('{outside}/folder')",
    "import os; os.symlink('x', '{outside}/link')",
    "import os; os.mkfifo('{outside}/fifo')",
    "import os; os.symlink('{outside}', 'way'); open('way/new', 'w').write('x')",
    "import os; os.link('{outside}/file', 'own'); open('own', 'a').write('x')",
    "import os; os.chdir('{outside}'); open('new', 'w').write('x')",
    "open('x', 'w').close(); import os; os.rename('x', '{outside}/x')",
    "import subprocess; subprocess.run(['touch', '{outside}/new'], check=True)",
    "import os; d = os.open('{outside}', os.O_PATH); os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=d)",
    "open('/proc/self/root{outside}/new', 'w').write('x')",
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("code", WRITES)
def test_nothing_is_written_outside_the_folder(make_sandbox: MakeSandbox, outside: Path, code: str) -> None:
    execution = make_sandbox("writes").run(code.format(outside=outside))
    assert unchanged(outside)
    assert execution.reason == "error", "and the code was told"


def test_modes_outside_are_not_changed(make_sandbox: MakeSandbox, outside: Path) -> None:
    make_sandbox("writes").run(f"import os; os.chmod('{outside}/file', 0)")
    assert (outside / "file").stat().st_mode & 0o777 == 0o666


def test_system_folders_are_not_writable(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox("writes")
    for folder in ("/", "/tmp", "/usr/lib", "/dev/shm/..", "/var/tmp", sys.prefix):
        name = f"{folder}/gruppo-sandbox-test-file"
        try:
            assert box.run(f"open('{name}', 'w')").reason == "error"
            assert not os.path.exists(name)
        finally:
            Path(name).unlink(missing_ok=True)


def test_the_folder_itself_stays(make_sandbox: MakeSandbox) -> None:
    code = "import os\nopen('f', 'w').close()\nos.unlink('f')\nwork = os.getcwd()\nos.chdir('/')\nos.rmdir(work)"
    execution = make_sandbox("writes").run(code)
    assert execution.reason == "error"
    assert "rmdir" in execution.stderr


def test_files_outside_are_not_read(make_sandbox: MakeSandbox, outside: Path) -> None:
    box = make_sandbox("reads")
    for code in (
        f"print(open('{outside}/file').read())",
        f"import os; os.symlink('{outside}/file', 'way'); print(open('way').read())",
        f"print(open('/proc/self/root{outside}/file').read())",
        f"import os; print(os.listdir('{outside}'))",
        f"print(open({__file__!r}).read())",
        "print(open('/etc/passwd').read())",
    ):
        execution = box.run(code)
        assert (execution.stdout, execution.reason) == ("", "error")


def test_our_environment_is_not_inherited(make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRUPPO_TEST_TOKEN", "my-secret")
    code = "import os\nprint(dict(os.environ))\nprint(open('/proc/self/environ').read())"
    execution = make_sandbox().run(code)
    assert "PATH" in execution.stdout
    assert "my-secret" not in execution.stdout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry", ["environ", "mem", "maps", "fd", "root/etc/passwd", "cwd"])
def test_processes_outside_are_not_looked_into(make_sandbox: MakeSandbox, entry: str) -> None:
    box = make_sandbox("parent")
    environment = {**os.environ, "GRUPPO_TEST_TOKEN": "my-secret"}
    with subprocess.Popen(["sleep", "60"], env=environment) as decoy:
        try:
            code = """
import os
for pid in ({pids}):
    path = f"/proc/{{pid}}/{entry}"
    try:
        print(os.listdir(path) if os.path.isdir(path) else open(path, "rb"))
    except OSError:
        pass
""".format(pids=f"{decoy.pid}, {os.getpid()}", entry=entry)
            assert box.run(code).stdout == ""
        finally:
            decoy.kill()


def test_no_open_file_of_ours_is_inherited(make_sandbox: MakeSandbox, outside: Path) -> None:
    code = """
import os
def name(fd):
    try: return os.readlink(f"/proc/self/fd/{fd}")
    except OSError: return "?"
open_ones = []
for fd in range(1024):
    try: os.fstat(fd)
    except OSError: continue
    open_ones.append(fd)
print(open_ones)
"""
    with open(outside / "file") as file:
        os.set_inheritable(file.fileno(), True)
        assert make_sandbox().run(code).stdout == "[0, 1, 2]\n"


def test_tcp_and_udp_do_not_get_out(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox("network")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.settimeout(0.3)
        tcp.settimeout(0.3)
        for kind, server in (("STREAM", tcp), ("DGRAM", udp)):
            target = server.getsockname()
            code = f"import socket\ns = socket.socket(type=socket.SOCK_{kind})\ns.connect({target})\ns.send(b'out')"
            assert box.run(code).reason == "error"
        with pytest.raises(TimeoutError):
            tcp.accept()
        with pytest.raises(TimeoutError):
            udp.recv(10)


@pytest.mark.parametrize("kind", ["STREAM", "DGRAM"])
def test_sockets_of_other_programs_are_not_reached(make_sandbox: MakeSandbox, outside: Path, kind: str) -> None:
    box = make_sandbox("network")
    for address in (f"{outside}/socket", f"\0gruppo-test-{os.getpid()}-{kind}"):
        with socket.socket(socket.AF_UNIX, getattr(socket, f"SOCK_{kind}")) as server:
            server.bind(address)
            if kind == "STREAM":
                server.listen()
            else:  # a pair of datagram sockets can be turned to another address
                pair = f"import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.connect({address!r})"
                assert box.run(pair).reason == "error"
            if not address.startswith("\0"):
                os.chmod(address, 0o777)
            code = f"import socket\ns = socket.socket(socket.AF_UNIX, socket.SOCK_{kind})\ns.connect({address!r})"
            assert box.run(code).reason == "error"


ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {before}
        while True:
            time.sleep(0.05)
    os._exit(0)
os.wait()
{after}
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("before", ["pass", "os.closerange(0, 3)", "import signal; signal.signal(15, signal.SIG_IGN)"])
@pytest.mark.parametrize(("after", "reason"), [("print('done')", "ok"), ("while True: pass", "timeout")])
def test_a_daemon_does_not_outlive_the_run(make_sandbox: MakeSandbox, before: str, after: str, reason: str) -> None:
    box = make_sandbox("orphans", seconds=1)
    mark = f"gruppo-daemon-{os.getpid()}-{time.monotonic_ns()}"
    rename = f"import ctypes; ctypes.CDLL(None).prctl(15, b{mark[-15:]!r}, 0, 0, 0)"  # what `ps` shows of it
    execution = box.run(ORPHAN.format(before=f"{rename}; {before}", after=after))
    assert execution.reason == reason
    names = [path.read_text().strip() for path in Path("/proc").glob("[0-9]*/comm") if path.exists()]
    assert mark[-15:] not in names


def test_signals_do_not_reach_us(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox("parent")
    received = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: received.append("USR1"))
    try:
        with subprocess.Popen(["sleep", "60"]) as decoy:
            for target in (os.getpid(), os.getppid(), decoy.pid, -os.getpgrp()):
                box.run(f"import os, signal\nos.kill({target}, signal.SIGUSR1)")
            time.sleep(0.2)
            assert decoy.poll() is None
            decoy.kill()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert received == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", ["os.getppid()", "1", "0", "-1"])
@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT", "SIGSTOP"])
def test_the_guard_cannot_be_killed(make_sandbox: MakeSandbox, target: str, number: str) -> None:
    box = make_sandbox("parent", seconds=2)
    code = f"import os, signal\ntry: os.kill({target}, signal.{number})\nexcept OSError: pass\nprint('alive')"
    execution = box.run(code)  # raises if the guard cannot report
    if target not in ("0", "-1"):  # these hit the sender
        assert execution.stdout == "alive\n"
    assert execution.seconds < 10


def test_we_cannot_be_traced(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox("parent")
    attach = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
print(*(libc.ptrace(0x4206, pid, None, None) for pid in ({pids})))
"""
    with subprocess.Popen(["sleep", "60"]) as decoy:
        try:
            assert box.run(attach.format(pids=f"{decoy.pid}, {os.getpid()}, os.getppid()")).stdout == "-1 -1 -1\n"
        finally:
            decoy.kill()


def test_no_privilege_is_left(make_sandbox: MakeSandbox) -> None:
    box = make_sandbox("parent")
    code = """
import os
for call in (lambda: os.setuid(0), lambda: os.chroot("."), lambda: os.mknod("device", 0o20666, os.makedev(1, 1))):
    try:
        call()
        print("granted")
    except OSError:
        pass
print("tried")
"""
    assert box.run(code).stdout == "tried\n"
    if os.geteuid() == 0:
        assert int(box.run("import os; print(os.getuid())").stdout) > 0
