"""Settings that work but rarely mean what they seem to: a warning says so."""

import logging
from typing import Any

import pytest

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.config.grpo import GRPOConfig
from gruppo.trainer.construct.checks import warn_combinations
from tests.helpers import base_args
from tests.trainer.runs import make

SEQUENCE = {"importance_sampling_level": "sequence"}

WARNED: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "luspo"}, "'luspo' is meant for importance_sampling_level='sequence'"),
    ({"loss_type": "dr_grpo"}, "with scale_rewards='group' is not Dr. GRPO"),
    ({"loss_type": "dr_grpo", "scale_rewards": "batch"}, "by a standard deviation: set scale_rewards='none'"),
    ({"loss_type": "vespo", **SEQUENCE}, "'vespo' is meant for importance_sampling_level='token'"),
    ({"loss_type": "dapo", **SEQUENCE}, "loss_type='dapo' weights sequences by their length"),
    ({"loss_type": "bnpo", **SEQUENCE}, "loss_type='bnpo' weights sequences by their length"),
    ({"loss_type": "cispo"}, "caps ratios at epsilon_high=0.2 itself"),
    ({"loss_type": "cispo", "epsilon_high": 1.0}, "caps ratios at epsilon_high=1.0 itself"),
    ({"top_p": 0.9, "top_k": 5}, "top_k=5, top_p=0.9: this changes what is sampled"),
    ({"min_p": 0.1}, "min_p=0.1: this changes what is sampled"),
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2: this changes what is sampled"),
    ({"generation_kwargs": {"temperature": 0.5}}, "temperature=0.5: this changes what is sampled"),
    ({"generation_kwargs": {"top_k": 7}}, "top_k=7: this changes what is sampled"),
]
QUIET: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"loss_type": "grpo", **SEQUENCE},
    {"loss_type": "luspo", **SEQUENCE},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "dr_grpo", "scale_rewards": False},
    {"loss_type": "vespo"},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"min_p": 0.0},
    {"top_p": 0.9, "generation_kwargs": {"top_p": 1.0}},
    {"temperature": 0.5, "generation_kwargs": {"temperature": 0.5}},
]


@pytest.mark.parametrize(("settings", "message"), WARNED, ids=repr)
def test_a_combination_that_misleads_is_pointed_out(settings, message, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "gruppo.trainer.construct.checks"):
        make(tmp_path, GRPOTrainer, **settings)
    said = [record.message for record in caplog.records if record.name == "gruppo.trainer.construct.checks"]
    assert [message in line for line in said] == [True]


@pytest.mark.parametrize("settings", QUIET, ids=repr)
def test_everything_else_is_silent(settings, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "gruppo.trainer.construct.checks"):
        make(tmp_path / "grpo", GRPOTrainer, **settings)
        make(tmp_path / "rloo", RLOOTrainer)
    assert not [record for record in caplog.records if record.name == "gruppo.trainer.construct.checks"]


def test_liger_kernels_are_deprecated():
    with pytest.warns(FutureWarning, match="`use_liger_kernel` is deprecated") as caught:
        warn_combinations(GRPOConfig(**base_args("unused", use_liger_kernel=True)))
    assert [warning.filename for warning in caught] == [__file__]
