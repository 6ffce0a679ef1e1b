"""Settings that work but rarely mean what they seem to: a warning says so. Options that do not exist: an error."""

import logging
import sys
from typing import Any

import pytest
import torch
from transformers.trainer_utils import SchedulerType

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.config.grpo import GRPOConfig
from gruppo.demo import model_path
from gruppo.errors import ConfigError
from gruppo.trainer.construct.checks import warn_combinations
from gruppo.trainer.construct.optimization import try_optimizer, try_schedule
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer
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


# ---- options that only an optimizer, a schedule or a model knows

MIN_LR = {"lr_scheduler_type": "cosine_with_min_lr"}
REFUSED_AT_CONSTRUCTION: list[tuple[dict[str, Any], str]] = [
    (
        {"lr_scheduler_kwargs": {"x": 1}},
        r"lr_scheduler_kwargs=\{'x': 1\} cannot work with .*'linear', which takes no",
    ),
    ({"lr_scheduler_kwargs": '{"x": 1}'}, "lr_scheduler_kwargs=.* cannot work"),
    ({"lr_scheduler_kwargs": [1]}, r"lr_scheduler_kwargs=\[1\] must be a dict"),
    (
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "a"}, "warmup_steps": 3},
        "takes num_cycles",
    ),
    (MIN_LR, "lr_scheduler_kwargs=None cannot work with lr_scheduler_type='cosine_with_min_lr', .*min_lr_rate"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
    ({"optim_args": "betas"}, "optim_args='betas'.* cannot work with optim="),
    ({"optim_args": {"momentum": 0.9}, "optim": "sgd"}, "optim_args=.*cannot work with optim='sgd'"),
    ({"optim_args": "momentum=much", "optim": "sgd"}, "optim_args='momentum=much'.*'sgd'.*much"),
    ({"adam_beta1": 1.0}, "adam_beta1=1.0 cannot work with optim='adamw_torch.*beta"),
    ({"adam_beta1": 1.0, "weight_decay": 0.1}, "^adam_beta1=1.0 cannot work with"),
    ({"optim": "sgd", "optim_args": "momentum=-1", "weight_decay": 0.1}, "^optim_args='momentum=-1' cannot work with"),
    ({"adam_beta2": -0.5}, "adam_beta2=-0.5 cannot work"),
    ({"adam_epsilon": -1.0}, "adam_epsilon=-1.0 cannot work"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0 cannot work"),
    ({"adam_beta1": "0.9"}, "adam_beta1='0.9' must be a number"),
    ({"learning_rate": "1e-5"}, "learning_rate='1e-5' must be a number"),
    ({"weight_decay": -1.0}, "weight_decay=-1.0 must be at least 0"),
    ({"weight_decay": "much"}, "weight_decay='much' must be a number"),
    ({"max_grad_norm": "a"}, "max_grad_norm='a' must be a number"),
    ({"warmup_steps": "a"}, "warmup_steps='a' must be a number"),
    ({"max_steps": 2.5}, "max_steps=2.5 must be a whole number"),
    ({"num_train_epochs": "1"}, "num_train_epochs='1' must be a number"),
    ({"eval_on_start": "false"}, "eval_on_start='false' must be True or False"),
    ({"seed": -1}, "seed=-1 must be at least 0"),
    ({"seed": "a"}, "seed='a' must be a whole number"),
    ({"data_seed": "a"}, "data_seed='a' must be a whole number"),
    ({"neftune_noise_alpha": -1.0}, "neftune_noise_alpha=-1.0 must be at least 0"),
    ({"log_level": "loud"}, "log_level='loud' is not one of"),
    ({"gradient_checkpointing_kwargs": [1]}, "gradient_checkpointing_kwargs=.* must be a dict"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": "no"}}, "use_reentrant must be True or False"),
    ({"accelerator_config": {"split": True}}, "accelerator_config has 'split', which is not one of"),
    ({"accelerator_config": '{"split": true}'}, "accelerator_config has 'split', which is not one of"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"x": 1}}}, "accelerator_config has 'x'"),
    ({"parallelism_config": {"tp_size": 1}}, "must be an accelerate.ParallelismConfig"),
]


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize(("settings", "message"), REFUSED_AT_CONSTRUCTION, ids=repr)
def test_options_that_end_in_an_error_of_python_later_are_refused(settings, message, trainer_class, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, trainer_class, **settings)


def test_options_of_a_model_that_it_does_not_have_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model_init_kwargs=\{'attention': 1\} does not suit"):
        make(tmp_path, GRPOTrainer, model=model_path(), model_init_kwargs={"attention": 1})


BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
KINDS = [kind.value for kind in SchedulerType if kind.value not in BY_EVALUATION]
NEEDED = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 1}}
NEEDED["cosine_warmup_with_min_lr"] = NEEDED["cosine_with_min_lr"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_passes_its_trial(kind, tmp_path):
    args = GRPOConfig(
        **base_args(tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs=NEEDED.get(kind), warmup_steps=2)
    )
    try_schedule(args)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop"])
def test_usual_optimizers_pass_their_trial(optim, tmp_path):
    try_optimizer(GRPOConfig(**base_args(tmp_path, optim=optim)))


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"optim_args": "x=1"}])
@pytest.mark.parametrize("optim", ["grokadamw", "adamw_anyprecision", "schedule_free_adamw"])
def test_an_optimizer_that_is_not_installed_is_not_blamed_on_its_options(optim, options, tmp_path, monkeypatch):
    for name in ("grokadamw", "torchdistx", "schedulefree"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises((ConfigError, ImportError), match="nstall") as caught:
        try_optimizer(GRPOConfig(**base_args(tmp_path, optim=optim, **options)))
    assert not [name for name in ("cannot work", "learning_rate", *options) if name in str(caught.value)]


def test_an_optimizer_that_is_passed_needs_no_settings_that_work(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    settings = base_args(tmp_path, adam_beta1=2.0, lr_scheduler_kwargs={"x": 1}, max_steps=1)
    trainer = GRPOTrainer(
        model, length_reward, GRPOConfig(**settings), prompts(8), processing_class=tiny_tokenizer(),
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()


def test_options_that_an_optimizer_does_not_read_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "gruppo"):
        try_optimizer(GRPOConfig(**base_args(tmp_path, optim="adamw_torch", optim_args="momentum=0.9")))
        try_optimizer(GRPOConfig(**base_args(tmp_path, optim="sgd", optim_args="momentum=0.9")))
    assert ["has no effect: optim='adamw_torch'" in record.message for record in caplog.records] == [True]
