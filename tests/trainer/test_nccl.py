"""Several processes over NCCL: updates are those of one process, runs resume to the same bits, a death is named."""

from pathlib import Path

import pytest
import torch

from gruppo.trainer.processes.presence import LOST
from tests.nccl import run_over_nccl
from tests.trainer.nccl_processes import UPDATES, WAYS, precision, update
from tests.trainer.scripted import relative_difference

pytestmark = pytest.mark.gpu
MODULE = "tests.trainer.nccl_processes"


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_make_the_updates_of_one(way: str, tmp_path: Path) -> None:
    if way.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    ended = run_over_nccl(MODULE, tmp_path, way)
    assert ended.codes == (0, 0), "\n".join(text[-4000:] for text in ended.said)
    assert f"{way}: done, over nccl" in ended.said[0]
    for name, (_, settings) in UPDATES.items():
        expected = update(name, tmp_path / "one", 1, precision(way))
        in_float32 = "adapter" in settings or precision(way) is torch.float32
        limit = 1e-3 if in_float32 else 1e-10
        assert relative_difference(expected, torch.load(tmp_path / f"{name}.pt")) < limit, name


def test_a_process_that_dies_ends_the_other_with_the_reason(tmp_path: Path) -> None:
    ended = run_over_nccl(MODULE, tmp_path, "a death")
    assert ended.codes in ((LOST, -9), (1, -9)), ended.said[0][-4000:]  # in a collective, or out of one with an error
    assert ended.seconds < 30
    assert "died while asking the rewards" in ended.said[0]
