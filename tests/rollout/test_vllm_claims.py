"""A server belongs to one trainer."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from gruppo.errors import ConfigError
from gruppo.rollout.vllm.claims import claim

URL = "http://127.0.0.1:8000"
HOLD = f"""
import sys
from gruppo.rollout.vllm.claims import claim
held = claim({URL!r}, sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    instance = tmp_path.as_posix()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, instance], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"Another trainer on this machine.*vllm_server_port"):
            claim(URL, instance)
        assert claim(URL, f"{instance} started again").is_locked
    finally:
        holder.kill()
        holder.wait()
    assert claim(URL, instance).is_locked


def test_runs_of_one_process_follow_each_other(tmp_path: Path) -> None:
    first = claim(URL, tmp_path.as_posix())
    assert claim(URL, tmp_path.as_posix()) is first
    path = Path(first.lock_file)
    assert path.exists()
    del first
    gc.collect()
    assert claim(URL, tmp_path.as_posix()).is_locked
