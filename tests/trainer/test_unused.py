"""Settings that nothing would read."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig
from gruppo.config.validate import MEANINGLESS
from gruppo.errors import ConfigError
from gruppo.trainer.construct.unused import TABLE, Parts, check_unused
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.trainer.runs import run

ALL = Parts(tools=True, workers=True, async_rewards=True)

# Fields of TrainingArguments that nothing reads in any run.
NEVER_READ: dict[str, Any] = {
    "label_names": ["labels"],
    "length_column_name": "tokens",
    "include_for_metrics": ["inputs", "loss"],
    "prediction_loss_only": True,
    "eval_accumulation_steps": 1,
    "eval_do_concat_batches": False,
    "eval_use_gather_object": True,
    "average_tokens_across_devices": False,
    "dataloader_num_workers": 2,
    "dataloader_drop_last": True,
    "dataloader_persistent_workers": True,
    "dataloader_multiprocessing_context": "fork",
    "dataloader_in_order": False,
}
NEVER_READ = {name: value for name, value in NEVER_READ.items() if name in TrainingArguments.__dataclass_fields__}
# The others: read by transformers' trainer, callbacks, optimizers and launchers in what is kept of them, or by gruppo.
OF_A_RUN = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
gradient_accumulation_steps max_grad_norm bf16 fp16 tf32 bf16_full_eval fp16_full_eval
activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
neftune_noise_alpha torch_empty_cache_steps logging_strategy logging_steps logging_first_step log_on_each_node
logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name
project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start
per_device_eval_batch_size save_only_model save_strategy save_steps save_on_each_node save_total_limit
enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint
full_determinism seed data_seed use_cpu accelerator_config remove_unused_columns ddp_find_unused_parameters
ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug
skip_memory_metrics
"""
OF_SCRIPTS = {"do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank"}  # as transformers says
REFUSED = {*MEANINGLESS, "auto_find_batch_size", "parallelism_config"}
# Named too, but transformers refuses the first without dataloader_num_workers and sets the second itself on a CPU; the
# third is read by some optimizers.
NEEDS_ANOTHER = {"dataloader_prefetch_factor", "dataloader_pin_memory", "optim_target_modules"}

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
    ({"optim_target_modules": ["q_proj"]}, "only the optimizers galore_* and apollo_*"),
    *(({name: value}, f"{name}={value!r} has no effect") for name, value in NEVER_READ.items()),
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


def test_every_field_of_transformers_is_read_refused_or_named() -> None:
    """A new field of a new release fails here: find out what it does in these trainers."""
    fields = set(TrainingArguments.__dataclass_fields__)
    groups = [set(OF_A_RUN.split()), OF_SCRIPTS, REFUSED, set(NEVER_READ) | NEEDS_ANOTHER]
    assert fields - set().union(*groups) == set()
    assert sum(map(len, groups)) == len(set().union(*groups)), "each is in one group"
    named = {name for needs in TABLE for name in needs.names}
    assert groups[3] <= named
    assert not named & set(OF_A_RUN.split())


def test_an_evaluation_is_the_same_whatever_its_unread_settings_are(tmp_path: Path) -> None:
    """transformers' loop would read the rows as a dict of tensors to include them."""
    settings = {"eval_dataset": prompts(4), "max_steps": 1}
    plain = run(tmp_path / "plain", **settings).evaluate()
    unread = run(tmp_path / "unread", **settings, **NEVER_READ).evaluate()
    assert {k: v for k, v in unread.items() if "reward" in k or "loss" in k} == {
        k: v for k, v in plain.items() if "reward" in k or "loss" in k
    }
    assert unread["eval_reward"] > 0


def test_every_field_of_the_table_exists_and_rloo_is_checked_too(tmp_path: Path) -> None:
    newer = {"dataloader_in_order", "dataloader_multiprocessing_context"}  # than the oldest supported transformers
    names = {name for needs in TABLE for name in needs.names} - newer
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
