"""A server belongs to one process, whose trainers know of each other's transfers."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gruppo.errors import ConfigError
from gruppo.rollout.vllm.claims import Claim, claim, hold
from gruppo.rollout.vllm.transfer import Sender
from tests.runs.test_lock import child

URL = "http://127.0.0.1:8000"
HOLD = """
import sys
from gruppo.rollout.vllm.claims import claim
held = claim("http://localhost:8000", sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""
REFUSED = r"Another trainer on this machine samples from the vLLM server at .*vllm_server_port"


def test_another_process_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    """Whatever it calls the server, and wherever its temporary files are."""
    instance = tmp_path.as_posix()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, instance],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": tmp_path.as_posix()},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=REFUSED):
            claim(URL, instance)
        assert claim(URL, f"{instance} started again")
        assert claim(URL, instance, exclusive=False), "the other processes of a run need no lock"
    finally:
        holder.kill()
        holder.wait()
    gc.collect()
    assert claim(URL, instance)


def test_trainers_of_one_process_share_a_claim_in_all_threads(tmp_path: Path) -> None:
    found = [claim(URL, tmp_path.as_posix())]
    thread = threading.Thread(target=lambda: found.append(claim(URL, tmp_path.as_posix())))
    thread.start()
    thread.join()
    assert found[0] is found[1]


def test_it_is_given_back_with_the_last_trainer(tmp_path: Path) -> None:
    instance = tmp_path.as_posix()
    first, second = claim(URL, instance), claim(URL, instance)
    del first
    with pytest.raises(ConfigError, match=REFUSED):
        hold(URL, instance)
    del second
    hold(URL, instance).release()


def test_a_forked_process_does_not_hold_what_its_parent_holds(tmp_path: Path) -> None:
    instance, kept = tmp_path.as_posix(), []

    def refused() -> None:
        with pytest.raises(ConfigError, match=REFUSED):
            claim(URL, instance)

    held = claim(URL, instance)
    with child(refused):
        pass
    del held
    with child(lambda: kept.append(claim(URL, instance))), pytest.raises(ConfigError, match=REFUSED):
        claim(URL, instance)


class Forgetful(Sender):
    """Counts how often it was told that another one has taken over."""

    forgot = 0

    def forget(self) -> None:
        self.forgot += 1


def test_each_transfer_makes_another_copy_and_whoever_sent_before_is_told() -> None:
    held, one, two = Claim("1", None), Forgetful(), Forgetful()
    copies = [held.copy]
    for sender in (one, one, two, two, one):
        with held.sending(sender) as copy:
            assert copy is held.copy
        copies.append(held.copy)
    assert len(set(map(id, copies))) == 6
    assert (one.forgot, two.forgot) == (1, 1)
