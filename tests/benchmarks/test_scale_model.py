"""The prediction of steps on many GPUs, by hand."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.scale_model import Assumptions, Links, Measured, predict, read_measured, ring, table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LINKS = Links(inside_gb_s=100.0, between_gb_s=10.0, latency_us=0.0)
ONE = Measured(generation=3.0, rewards=0.5, update=5.0, other=0.5, packs=10, weights=4_000_000_000, bytes_per_weight=2)
FAIR = Assumptions(straggler=1.0, imbalance=1.0, hidden=0.5, small_collectives=0, exchanged_mb=0.0)


def test_a_ring() -> None:
    assert ring(8e9, 8, LINKS) == pytest.approx(0.07)
    assert ring(8e9, 16, LINKS) == pytest.approx(0.75), "the link between two nodes is the slowest"
    assert ring(8e9, 1, LINKS) == 0.0
    assert ring(0, 8, Links(latency_us=10.0)) == pytest.approx(3e-5)


def test_gradients_travel_once_with_ddp() -> None:
    found = predict("ddp", 8, ONE, LINKS, FAIR)
    assert found["weights_and_gradients"] == pytest.approx(2 * 0.07)
    assert found["step"] == pytest.approx(9.14)
    assert found["efficiency"] == pytest.approx(9 / 9.14)


def test_weights_travel_with_every_pack_of_fsdp2() -> None:
    found = predict("fsdp2", 8, ONE, LINKS, FAIR)
    assert found["weights_and_gradients"] == pytest.approx(10 * (2 * 0.07 + 0.14) * 0.5), "gradients have 4 bytes"
    assert found["gathered_for_sampling"] == pytest.approx(0.07)
    assert found["step"] == pytest.approx(9 + 1.4 + 0.07)


def test_one_gpu_is_what_was_measured() -> None:
    assert predict("fsdp2", 1, ONE, Links(), Assumptions())["step"] == pytest.approx(ONE.step)


def test_the_slowest_is_waited_for() -> None:
    found = predict(
        "ddp", 8, ONE, LINKS, Assumptions(straggler=1.2, imbalance=1.1, small_collectives=0, exchanged_mb=0)
    )
    assert found["sampling"] == pytest.approx(3.6)
    assert found["passes"] == pytest.approx(5.5)


def test_the_committed_prediction_is_that_of_this_code() -> None:
    result = json.loads((RESULTS / "scale_model.json").read_text(encoding="utf-8"))
    given = Assumptions(**result["assumed"])
    measured = read_measured(RESULTS / result["measured_in"], given.pack_tokens)
    assert measured.weights == pytest.approx(1.54e9, rel=0.01)
    # Not to the last digit: since Python 3.12 `sum` compensates for rounding.
    assert asdict(measured) == pytest.approx(result["measured"], rel=1e-12)
    for found, written in zip(table(measured, Links(**result["links"]), given), result["rows"], strict=True):
        assert found.pop("way") == written.pop("way")
        assert found == pytest.approx(written, rel=1e-9, abs=1e-4)
