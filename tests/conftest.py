"""The environment of every test: no network, one thread by default, and a summary file on request."""

import atexit
import functools
import gc
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path

# Before anything imports the hub client: a missing file must fail at once, not after a timeout.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import pytest
import torch

# What a shell, a CI, a scheduler or a launcher may have set, and what is tested would follow.
FOLLOWED = re.compile(
    r"COLUMNS|LINES|NO_COLOR|FORCE_COLOR|TTY_\w+|JUPYTER_\w+|TQDM_\w+|PYTHONOPTIMIZE|PYTHONSAFEPATH"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(ACCELERATE|FSDP|TORCHELASTIC|PMI|OMPI|SLURM)_\w+"
    r"|TRANSFORMERS_\w+|DATASETS_\w+|(WANDB|COMET|MLFLOW|TRACKIO|CLEARML|NEPTUNE|SWANLAB|DVCLIVE)_\w+"
    r"|HF_HOME|HF_\w+_CACHE|XDG_\w+"
)


def _leave_the_surroundings() -> None:
    """Give tests, and the processes that they start, the same terminal, signals and settings wherever they run."""
    for name in filter(FOLLOWED.fullmatch, list(os.environ)):
        del os.environ[name]
    if not os.access(os.environ.get("HOME", ""), os.W_OK):  # caches are written there
        home = tempfile.TemporaryDirectory(prefix="gruppo-home-")
        atexit.register(home.cleanup)
        os.environ["HOME"] = home.name
    os.environ["TERM"] = "xterm"  # in a dumb one nothing is live
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1,::1"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


_leave_the_surroundings()

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels run on the CPU

torch.set_num_threads(int(os.environ.get("GRUPPO_TEST_THREADS", "1")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", type=Path, help="write counts, versions and the command to this JSON file")
    parser.addoption("--thin", type=int, metavar="N", help="of tests with many cases, run one case of N")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Set TCP_NODELAY on the socket that counts reruns: its two messages per test would else wait 40 ms for an ACK."""
    connection = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None or config.getoption("--thin"):
            functions.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for cases in functions.values():
        mark = cases[0].get_closest_marker("sampled")
        _thin_out(cases, max(mark.args[0] if mark else 1, config.getoption("--thin") or 1))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _thin_out(cases: list[pytest.Item], every: int) -> None:
    """Mark all but one in `every` cases as slow; if only some cases are marked medium, only those are thinned out.

    In each block of `every` cases a hash decides which one is kept. A fixed stride would always skip the same values
    of inner parameters.
    """
    medium = [case for case in cases if "medium" in case.keywords]
    thinned = medium if 0 < len(medium) < len(cases) else cases
    for start in range(0, len(thinned), every):
        part = thinned[start : start + every]
        kept = part[zlib.crc32(part[0].nodeid.encode()) % len(part)]
        for case in part:
            if case is not kept:
                case.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--summary")
    if path is None:
        return
    from benchmarks.common import provenance

    counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
    slowest = sorted(
        ((report.duration, report.nodeid) for report in terminalreporter.stats.get("passed", [])), reverse=True
    )
    failures = sorted(report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, []))
    result = {**provenance("gruppo"), **counts, "failures": failures}
    result["slowest"] = [[round(t, 1), name] for t, name in slowest[:5]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    from accelerate.utils import imports

    # Each unwrapping of a model checks whether deepspeed is installed, which reads package metadata from disk.
    imports._is_package_available = functools.cache(imports._is_package_available)
    _set_aside()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the random number generators, so that tests do not depend on those that ran before in their process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _forget_temporary_modules(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """After each test file, unload modules that it wrote itself: the next file may use the same names."""
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(written):
            del sys.modules[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After each test file, freeze what it imported and what pytest keeps of it, because both stay until the end."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _set_aside()


def _set_aside() -> None:
    """Exclude all current objects from garbage collection, which every trainer run triggers."""
    gc.collect()
    gc.freeze()
