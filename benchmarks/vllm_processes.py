"""The processes of benchmarks/vllm_modes.py: a trainer for each mode, and a server for the modes that need one.

Each has a time limit, and is terminated together with all processes that it started.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from benchmarks import rollout_vllm, vllm_without_cuda

# Modes with vLLM in the trainer's process; server-nccl needs only vLLM's NCCL code there.
WITH_VLLM = ("colocate", "colocate-regex", "colocate-ddp", "colocate-tp", "sleep", "server-nccl")
TOGETHER = ("colocate-ddp", "colocate-tp", "server-ddp")  # modes of two trainer processes
# NCCL refuses two ranks on one GPU of a host. With different host ids they count as two hosts and use sockets.
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
LEAST = 20.0  # seconds; a mode is not started with less time left
TAIL = 4000  # characters shown of a log
# Routine lines of a server's log; the last is about layers for which a weight update contains nothing.
USUAL = ("Route: /", '" 200 OK', ": Failed to load weights")
SCRIPT = Path(__file__).with_name("vllm_modes.py")


class Runner:
    """Runs modes one after another; a server is reused by the next mode unless that cannot use it or a mode failed.

    Example:
        with Runner(options, folder) as runner:
            runner.run("server") -> {"step_seconds": …, …}
    """

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.deadline = time.monotonic() + options.total
        self._servers = ExitStack()
        self._server_log: Path | None = None
        self._transfer: str | None = None  # how the server receives weights: "ipc" or "nccl"
        self._start_seconds: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_server()

    def left(self, most: float) -> float:
        """The remaining seconds, but at most `most`."""
        return min(most, self.deadline - time.monotonic())

    def run(self, mode: str) -> dict[str, Any]:
        """Train one mode in a separate process and return its record."""
        if self.left(LEAST) < LEAST:
            raise TimeoutError(f"not begun: less than {LEAST:g} s of {self.options.total:g} are left")
        if mode.startswith("server"):
            self._need_server(mode)
        else:
            self._stop_server()
        record = self.folder / f"{mode}.json"
        seconds = self.left(self.options.limit)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if mode in TOGETHER else []
        command = [sys.executable, *launcher, str(SCRIPT), *sys.argv[1:], "--modes", mode, "--record", str(record)]
        command += ["--port", str(self.options.port), "--model", str(self.options.model), "--limit", str(seconds)]
        with started(command, environment(mode, self.options), self.log_of(mode)) as process:
            code = process.wait(seconds)
        if code:
            raise RuntimeError(f"ended with {code}")
        found: dict[str, Any] = json.loads(record.read_text())
        return found | ({"server_start_seconds": self._start_seconds} if mode.startswith("server") else {})

    def log_of(self, mode: str) -> Path:
        path: Path = self.options.out.with_suffix(f".{mode}.log")
        return path

    def report(self, mode: str, error: Exception) -> str:
        """The error message with the ends of the logs; stops the server, which may be the cause."""
        logs = [self.log_of(mode), *([self._server_log] if mode.startswith("server") and self._server_log else [])]
        ends = [f"---- the end of {log.name}\n{tail(log)}" for log in logs if log.exists()]
        self._stop_server()
        what = f"{type(error).__name__}: {str(error)[:TAIL]}"
        if isinstance(error, subprocess.TimeoutExpired):
            what = f"not done within {error.timeout:.0f} s"
        return "\n".join([what, *ends])

    # ---- the server

    def _need_server(self, mode: str) -> None:
        transfer = "nccl" if mode == "server-nccl" else "ipc"
        if self._server_log is not None and self._transfer == transfer:
            return
        self._stop_server()
        begun = time.monotonic()
        self._transfer = transfer
        self._server_log = self.options.out.with_suffix(f".{mode}.vllm-serve.log")
        if self.options.tiny and self.options.vllm_site is None:
            from tests.rollout.vllm_doubles import serving

            self.options.port = self._servers.enter_context(serving(self.options.model)).port
        else:
            self._start_server(self._server_log)
        self._start_seconds = round(time.monotonic() - begun, 2)

    def _start_server(self, log: Path) -> None:
        from gruppo.rollout.vllm.client import VLLMClient
        from gruppo.rollout.vllm.serve import parser, server_command

        port = str(self.options.port)
        asked = [str(self.options.model), "--port", port, "--weight-transfer", str(self._transfer)]
        asked += ["--enforce-eager", "--dtype", "float32"] if self.options.tiny else []
        command = server_command(parser().parse_args(asked))
        variables = environment("colocate", self.options) | command.environment
        # The server runs its engine in a separate process; this variable would put it into the API process.
        variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        variables |= {**NCCL, "NCCL_HOSTID": "server"}
        variables.setdefault("VLLM_HOST_IP", "127.0.0.1")  # the only address of a machine without a network
        paths = [variables["PYTHONPATH"], str(self._place_of_ray(variables))]
        if self.options.tiny:
            release = vllm_version(self.options)
            paths.append(str(vllm_without_cuda.make_plugin(self.folder / "plugin", release)))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        process = self._servers.enter_context(started(command.arguments, variables, log))

        def check() -> None:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")

        client = VLLMClient(f"http://127.0.0.1:{port}", request_timeout=60)
        client.wait_until_up(self.left(self.options.server_start), check)

    def _place_of_ray(self, variables: dict[str, str]) -> Path:
        """A folder with an empty module `ray` if Ray is missing: vLLM's IPC transfer imports it without using it."""
        place = self.folder / "ray"
        place.mkdir(exist_ok=True)
        found = subprocess.run([sys.executable, "-c", "import ray"], env=variables, capture_output=True, check=False)
        if found.returncode:
            (place / "ray.py").touch()
        return place

    def _stop_server(self) -> None:
        self._servers.close()
        self._server_log = self._transfer = self._start_seconds = None


@contextmanager
def started(command: list[str], variables: dict[str, str], log: Path) -> Any:
    """Start a process with a log file; on exit, terminate it and all processes that it started."""
    with log.open("w") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with suppress(ProcessLookupError):  # an engine may outlive its parent process and hold its memory
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path) -> str:
    """The end of a log, without the routine lines that a healthy server writes by the hundred."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not any(usual in line for usual in USUAL))[-TAIL:]


def environment(mode: str, options: argparse.Namespace) -> dict[str, str]:
    """The environment variables of a mode's process; only modes in WITH_VLLM see vLLM's packages."""
    if mode not in WITH_VLLM:
        return dict(os.environ)
    paths = [str(options.vllm_site or ""), os.environ.get("PYTHONPATH", "")]
    own = {**NCCL, "NCCL_HOSTID": "trainer"} if mode == "server-nccl" else {}
    own |= vllm_without_cuda.ENVIRONMENT if options.tiny else {}
    return {**rollout_vllm.ENVIRONMENT, **os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def vllm_version(options: argparse.Namespace) -> str:
    """The version of the vLLM package that the modes use; looked up in a separate process that can see it."""
    code = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
    variables = environment("colocate", options)
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "none"
