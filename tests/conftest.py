"""What every test runs under: no network, two threads, and a summary file on request."""

import gc
import json
import os
from pathlib import Path

# Before anything imports the hub client: a missing file must fail at once, not after a timeout.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels run on the CPU

torch.set_num_threads(int(os.environ.get("GRUPPO_TEST_THREADS", "1")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", type=Path, help="write counts, versions and the command to this JSON file")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--summary")
    if path is None:
        return
    from benchmarks.common import provenance

    counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
    slowest = sorted(
        ((report.duration, report.nodeid) for report in terminalreporter.stats.get("passed", [])), reverse=True
    )
    result = {**provenance("gruppo"), **counts, "slowest": [[round(t, 1), name] for t, name in slowest[:5]]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Every run collects garbage; what the imports left behind need not be walked each time."""
    gc.collect()
    gc.freeze()
