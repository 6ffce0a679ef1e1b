"""Settings that nothing would read."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig
from gruppo.errors import ConfigError
from gruppo.trainer.construct.unused import TABLE, Parts, check_unused
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer

ALL = Parts(tools=True, workers=True, async_rewards=True)

WARNED: list[tuple[dict[str, Any], str]] = [
    ({"vespo_k_pos": 4.0}, "vespo_k_pos=4.0 has no effect: only loss_type='vespo'"),
    ({"sapo_temperature_pos": 2.0, "loss_type": "vespo"}, "only loss_type='sapo'"),
    ({"epsilon": 0.3, "loss_type": "sapo"}, "epsilon=0.3 has no effect: this loss_type has no lower clip"),
    ({"epsilon": 0.3, "loss_type": "cispo", "epsilon_high": 5.0}, "epsilon=0.3 has no effect"),
    ({"epsilon_high": 0.3, "loss_type": "vespo"}, "epsilon_high=0.3 has no effect: this loss_type has no upper clip"),
    ({"delta": 4.0, "loss_type": "cispo", "epsilon_high": 5.0}, "delta=4.0 has no effect"),
    ({"entropy_coef": 0.1, "entropy_target": 0.5}, "use_adaptive_entropy is off"),
    ({"ref_model_sync_steps": 7, "beta": 0.1}, "sync_ref_model is off"),
    ({"use_bias_correction_kl": False}, "beta is 0"),
    ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}, "scale_rewards='none'"),
    ({"max_tool_calling_iterations": 3}, "there are no tools"),
]
RAISED: list[tuple[dict[str, Any], str]] = [
    ({"tool_timeout": 3.0}, "there are no tools"),
    ({"max_parallel_tools": 3}, "there are no tools"),
    ({"reward_sample_timeout": 1.0}, "set reward_timeout"),
    ({"reward_workers": 2}, "set reward_timeout"),
    ({"worker_env": ["HOME"]}, "set reward_timeout"),
    ({"reward_retries": 5}, "no reward is an async function"),
    ({"reward_concurrency": 5}, "no reward is an async function"),
]
RAISED_BESIDE_OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"stop_timeout": 60.0, "save_on_signal": False}, "save_on_signal is off"),
    ({"stop_timeout": 60.0, "process_timeout": None}, "process_timeout is None"),
]
READ: list[dict[str, Any]] = [
    {},
    {"loss_type": "vespo", "vespo_k_pos": 4.0},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0},
    {"delta": 4.0},
    {"epsilon": 0.3, "epsilon_high": 0.4},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 0.5},
    {"sync_ref_model": True, "ref_model_sync_steps": 7, "beta": 0.1},
    {"use_bias_correction_kl": False, "beta": 0.1},
    {"scale_rewards": "none"},
    *(settings for settings, _ in RAISED),
    {"stop_timeout": 60.0},
]


@pytest.mark.parametrize(("settings", "named"), WARNED, ids=lambda each: str(each))
def test_a_setting_without_effect_is_named(
    settings: dict[str, Any], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gruppo"):
        check_unused(GRPOConfig(**base_args(tmp_path, **settings)), Parts())
    assert [named in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(("settings", "named"), [*RAISED, *RAISED_BESIDE_OTHERS], ids=lambda each: str(each))
def test_one_of_this_library_is_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        check_unused(GRPOConfig(**base_args(tmp_path, **settings)), Parts())


@pytest.mark.parametrize("settings", READ, ids=str)
def test_settings_that_are_read_are_not_mentioned(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gruppo"):
        check_unused(GRPOConfig(**base_args(tmp_path, **settings)), ALL)
    assert not caplog.records


def test_the_loss_of_rloo_is_clipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gruppo"):
        check_unused(RLOOConfig(**base_args(tmp_path, epsilon=0.3, epsilon_high=0.4)), ALL)
    assert not caplog.records


def test_an_async_reward_has_a_time_for_each_sample_too(tmp_path: Path) -> None:
    args = GRPOConfig(**base_args(tmp_path, reward_sample_timeout=1.0))
    check_unused(args, Parts(async_rewards=True))
    with pytest.raises(ConfigError, match="set reward_timeout"):
        check_unused(args, Parts(tools=True))


def test_every_field_of_the_table_exists_and_rloo_is_checked_too(tmp_path: Path) -> None:
    names = {name for needs in TABLE for name in needs.names}
    assert names <= set(GRPOConfig.__dataclass_fields__)
    check_unused(RLOOConfig(**base_args(tmp_path)), Parts())
    with pytest.raises(ConfigError, match="reward_retries=9"):
        check_unused(RLOOConfig(**base_args(tmp_path, reward_retries=9)), Parts())


def test_a_trainer_knows_what_its_run_has(tmp_path: Path) -> None:
    def make(**settings: Any) -> Any:
        return GRPOTrainer(
            model=tiny_model(),
            reward_funcs=length_reward,
            args=GRPOConfig(**base_args(tmp_path, **settings)),
            train_dataset=prompts(8),
            processing_class=tiny_tokenizer(),
        )

    with pytest.raises(ConfigError, match="reward_workers=2 has no effect"):
        make(reward_workers=2)
    assert make(reward_workers=2, reward_timeout=5.0).rewards.runner.has_workers
