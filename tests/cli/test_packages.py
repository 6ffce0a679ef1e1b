"""Packages that a run needs, and what `gruppo check` says of those that are not there."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from gruppo.cli.packages import WITHOUT_PACKAGE, Need, needs


def run(**config: Any) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(**{"samples_with_vllm": False, "vllm_mode": "server", "report_to": []} | config),
        launching=SimpleNamespace(launch=None, accelerate_config=None),
        model_args=SimpleNamespace(load_in_4bit=False, load_in_8bit=False),
    )


@pytest.mark.parametrize("tracker", [name for name in INTEGRATION_TO_CALLBACK if name not in WITHOUT_PACKAGE])
def test_what_is_missing_is_what_transformers_misses(tracker: str) -> None:
    missing = [need for need in needs(run(report_to=[tracker])) if not need.is_met]
    if not missing:
        pytest.skip(f"{tracker} is installed here")
    with pytest.raises((RuntimeError, ImportError, ValueError), match="install") as error:
        INTEGRATION_TO_CALLBACK[tracker]()
    assert any(need.install in str(error.value) for need in missing)


def test_several_trackers_one_word_and_none() -> None:
    assert [need.install for need in needs(run(report_to=["wandb", "none", "comet_ml"]))] == ["wandb", "comet-ml"]
    assert [need.install for need in needs(run(report_to="dagshub"))] == ["dagshub", "mlflow"]
    assert list(needs(run())) == list(needs(run(report_to=None))) == []


def test_a_need_is_met_by_one_of_its_modules() -> None:
    assert Need("this", ("no_such_module", "json"), "x").is_met
    unmet = Need("this", ("no_such_module", "nor_this"), "both")
    assert not unmet.is_met
    assert str(unmet) == "this needs no_such_module or nor_this, which is not installed here: pip install both"
