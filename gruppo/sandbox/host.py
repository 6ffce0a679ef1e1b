"""Starts a jail, reads its output, and cleans up after it."""

import fcntl
import io
import marshal
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppo.errors import SandboxError
from gruppo.sandbox.jail.kernel import MechanismError
from gruppo.sandbox.places import code_path, readable_paths, unreachable
from gruppo.sandbox.spec import Execution, Limits, Reason, Spec

# The parent packages of the jail are stubs: it needs nothing from them, and importing them doubles its start time.
BOOT = """\
import sys
for name, folder in (("gruppo", sys.argv[1]), ("gruppo.sandbox", sys.argv[1] + "/sandbox")):
    package = sys.modules[name] = type(sys)(name)
    package.__path__ = [folder]
from gruppo.sandbox.jail.main import main
main(*map(int, sys.argv[2:]))
"""

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a program prints sets in the same order every time
    # One thread per library: threads count as processes, and each one reserves address space.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

GRACE = 30.0  # seconds past its time limit after which the host kills a jail that has not ended
CHUNK = 1 << 16
WORK_IN_OWN_ROOT = "/sandbox"  # constant, so that printed paths do not depend on the run


def execute(code: str, stdin: str, show_last: bool, limits: Limits, mechanisms: tuple[str, ...]) -> Execution:
    """Run code in a new jail; safe to call from many threads."""
    with _folders() as (work, root):
        if "mount namespace" in mechanisms:
            work = WORK_IN_OWN_ROOT
        spec = _spec(code, show_last, limits, mechanisms, work, root)
        with _launched(spec, stdin, limits) as jail:
            jail.listen()
            return _execution(jail, limits)


def _spec(code: str, show_last: bool, limits: Limits, mechanisms: tuple[str, ...], work: str, root: str) -> Spec:
    readable = readable_paths()
    walks_in_the_open = "own uid" in mechanisms and "mount namespace" not in mechanisms
    return Spec(
        code=code,
        show_last=show_last,
        path=code_path(),
        readable=readable,
        work=work,
        root=root,
        mechanisms=list(mechanisms),
        search=walks_in_the_open and bool(unreachable([work, *readable])),
        seconds=float(limits.seconds),
        cpu_seconds=limits.cpu_seconds,
        memory=limits.memory,
        processes=limits.processes,
        file_size=limits.file_size,
        disk=limits.disk,
    )


@dataclass
class _Jail:
    process: subprocess.Popen[bytes]
    status_fd: int
    lifeline_fd: int
    limits: Limits
    streams: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    status: bytearray = field(default_factory=bytearray)
    overflowed: bool = False

    def listen(self) -> None:
        """Read until all processes of the jail have closed their pipes; stop a jail that overruns a limit."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        deadline = time.monotonic() + self.limits.seconds + GRACE
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout.fileno(), selectors.EVENT_READ, self.streams["stdout"])
            selector.register(self.process.stderr.fileno(), selectors.EVENT_READ, self.streams["stderr"])
            selector.register(self.status_fd, selectors.EVENT_READ, self.status)
            while selector.get_map():
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    self.process.kill()
                    return
                for key, _ in ready:
                    content = os.read(key.fd, CHUNK)
                    if not content:
                        selector.unregister(key.fd)
                    self._keep(key.data, content)
        self.process.wait()

    def _keep(self, stream: bytearray, content: bytes) -> None:
        room = self.limits.output - len(stream)
        stream += content[:room]
        if len(content) > room and not self.overflowed:
            self.overflowed = True
            self.stop()

    def stop(self) -> None:
        """Ask the guard to end all processes of the jail."""
        with suppress(BrokenPipeError):  # the guard has already ended
            os.write(self.lifeline_fd, b"x")

    def end(self) -> None:
        """End all processes and close the pipes, however `listen` ended."""
        self.stop()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def report(self) -> dict[str, Any]:
        """The report of the jail: how the code ended, or which mechanism was refused."""
        stream = io.BytesIO(bytes(self.status))
        found: dict[str, Any] = {}
        while stream.tell() < len(self.status):
            found |= marshal.load(stream)
        return found


@contextmanager
def _launched(spec: Spec, stdin: str, limits: Limits) -> Iterator[_Jail]:
    """A running jail with its pipes; all its processes have ended when the block exits."""
    with ExitStack() as stack:

        def own(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        spec_fd = own(_memory_file(marshal.dumps(dict(spec))))
        stdin_fd = own(_memory_file(stdin.encode(errors="replace")))
        status_fd, jail_status_fd = os.pipe()
        own(status_fd)
        jail_lifeline_fd, lifeline_fd = os.pipe()
        own(lifeline_fd)
        with _closing(jail_status_fd, jail_lifeline_fd):
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-X", "utf8", "-c", BOOT, str(Path(__file__).parents[1])]
                + [str(fd) for fd in (spec_fd, jail_status_fd, jail_lifeline_fd)],
                stdin=stdin_fd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, "HOME": spec["work"], "TMPDIR": spec["work"]},
                pass_fds=(spec_fd, jail_status_fd, jail_lifeline_fd),
                start_new_session=True,
                cwd="/",
            )
        jail = _Jail(process, status_fd, lifeline_fd, limits)
        try:
            yield jail
        finally:
            jail.end()


@contextmanager
def _closing(*fds: int) -> Iterator[None]:
    try:
        yield
    finally:
        for fd in fds:
            os.close(fd)


def _memory_file(content: bytes) -> int:
    """An anonymous in-memory file with this content, sealed against changes and positioned at its start."""
    fd = os.memfd_create("gruppo", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@contextmanager
def _folders() -> Iterator[tuple[str, str]]:
    """The working directory of a run and an empty directory beside it; both are removed with all contents."""
    base = tempfile.mkdtemp(prefix="gruppo-sandbox-")
    try:
        os.chmod(base, 0o711)  # the uid of the code can traverse it, but not list or change it
        for name in ("work", "root"):
            os.mkdir(f"{base}/{name}", 0o700)
        yield f"{base}/work", f"{base}/root"
    finally:
        with suppress(RecursionError):
            shutil.rmtree(base, ignore_errors=True)
        if os.path.exists(base):  # directories without permissions, or nested too deeply for Python
            subprocess.run(["chmod", "-R", "u+rwX", base], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["rm", "-rf", base], check=False)


def _execution(jail: _Jail, limits: Limits) -> Execution:
    stdout, stderr = (bytes(content).decode(errors="replace") for content in jail.streams.values())
    report = jail.report()
    if "failed" in report:
        raise MechanismError(report["failed"], report["error"])
    if "exit_code" not in report:  # the guard itself died
        why = stderr.strip() or "it gave no reason"
        raise SandboxError(f"The sandbox failed with exit code {jail.process.returncode}: {why}")
    reason = _reason(report, jail.overflowed, stderr, limits)
    return Execution(stdout, stderr, report["exit_code"], reason, report["seconds"])


def _reason(report: dict[str, Any], overflowed: bool, stderr: str, limits: Limits) -> Reason:
    code = report["exit_code"]
    if overflowed or report["stopped"] == "disk":
        return "output"
    if report["stopped"] == "timeout":
        return "timeout"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and report["cpu"] >= limits.cpu_seconds):
        return "cpu"
    if code < 0:
        return "killed"
    last_line = stderr.rstrip().rpartition("\n")[2]
    if code == 1 and last_line.partition(":")[0].endswith("MemoryError"):
        return "memory"
    return "error" if code else "ok"
