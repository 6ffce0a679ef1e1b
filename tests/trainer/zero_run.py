"""Full runs on two processes under DeepSpeed; run by test_deepspeed.py.

The built-in engine samples, prompts without spread are replaced, a reward model and a function score, there are
evaluations with an incomplete last batch, and runs are saved and resumed.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.errors import ConfigError
from gruppo.policy.weights import named_weights
from gruppo.trainer.callbacks import SyncRefModelCallback
from gruppo.trainer.construct.frozen import InStep
from tests import zero
from tests.helpers import base_args, prompts, tiny_model, tiny_tokenizer
from tests.policy.experts import experts
from tests.rewards.test_models import classifier
from tests.sharded import weights_of
from tests.trainer.scripted import lora
from tests.trainer.sharded_run import seen, settings_of_a_run, some_equal
from tests.trainer.test_bad_updates import events

RANK = int(os.environ.get("RANK", "0"))
STEPS = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}


def trainer_of(folder: Path, processes: int, stage: int | None = None, **kw: Any) -> Any:
    """With a stage, the config requests DeepSpeed; without one, a launcher does, or it is not used."""
    asked = {} if stage is None else {"deepspeed": zero.config(stage)}
    settings = settings_of_a_run(processes) | {"parity_check": "off"} | asked | kw
    unset_hf_deepspeed_config()  # with a config of stage 3, even that of an earlier run, transformers shards models
    parts = {"model": tiny_model(seed=5), "reward_funcs": [some_equal, classifier().float()], "peft_config": None}
    parts |= {name: settings.pop(name) for name in parts if name in settings}
    return GRPOTrainer(
        reward_processing_classes=[None, tiny_tokenizer()],
        args=GRPOConfig(**base_args(folder, **settings)),
        train_dataset=prompts(30),
        eval_dataset=prompts(3),
        processing_class=tiny_tokenizer(),
        **parts,
    )


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    for name, weight in expected.items():
        assert torch.allclose(found[name].float(), weight.float(), rtol=0, atol=atol), name


def saved_and_resumed(folder: Path, expected: int, **how: Any) -> None:
    """Train, save the model, and resume the second half of the run, which must give the same result."""
    straight = trainer_of(folder / "straight", 2, **how)
    straight.train()
    assert zero.stage_of(straight) == expected
    found = seen(straight)
    straight.save_model(str(folder / "final"))
    if RANK == 0:
        torch.save(found, folder / "straight.pt")
    resumed = trainer_of(folder / "straight", 2, **how)
    resumed.train(resume_from_checkpoint=str(folder / "straight" / "checkpoint-2"))
    again = seen(resumed)
    same(again["weights"], found["weights"])
    assert again["completions"] == found["completions"]


def main(folder: Path) -> None:
    zero.prepare()
    with zero.launched():
        saved_and_resumed(folder / "3", 3, stage=3)
    with zero.launched(2):
        saved_and_resumed(folder / "2", 2)
    for check in (by_name, in_step, with_adapter, in_half_precision, blended, broken_updates, refusals):
        with zero.launched():
            check(folder / check.__name__)


def by_name(folder: Path) -> None:
    """Policy, reference and reward model are sharded while they are loaded: no process ever has a full model."""
    if RANK == 0:
        tiny_model(seed=5).save_pretrained(folder / "policy")
        classifier().float().save_pretrained(folder / "rewards")
    torch.distributed.barrier()
    names = {"model": str(folder / "policy"), "reward_funcs": [some_equal, str(folder / "rewards")]}
    named = trainer_of(folder / "named", 2, stage=3, **names, **STEPS)
    assert all(hasattr(weight, "ds_id") for weight in named.model.parameters())
    assert isinstance(named.rewards.runner.functions[1], InStep)
    named.train()
    given = trainer_of(folder / "given", 2, stage=3, **STEPS)
    given.train()
    same(seen(named)["weights"], seen(given)["weights"], atol=1e-6)
    assert seen(named)["completions"] == seen(given)["completions"]


def in_step(folder: Path) -> None:
    """Without gathering, all processes take part in every forward pass of sampling; the completions are the same."""
    kw = {**STEPS, "dynamic_sampling": False, "rollout_backend": "transformers", "max_completion_length": 12}
    spread = trainer_of(folder / "spread", 2, stage=3, ds3_gather_for_generation=False, **kw)
    spread.train()
    assert spread.backend.lockstep
    assert spread.backend.whole is None
    gathered = trainer_of(folder / "gathered", 2, stage=3, **kw)
    gathered.train()
    assert not gathered.backend.lockstep
    assert gathered.backend.whole.is_held
    assert seen(spread)["completions"] == seen(gathered)["completions"]
    same(seen(spread)["weights"], seen(gathered)["weights"], atol=1e-6)


def with_adapter(folder: Path) -> None:
    for stage in (2, 3):
        adapted = trainer_of(folder / f"{stage}", 2, stage=stage, peft_config=lora(), **{**STEPS, "beta": 0.1})
        before = {name: w.clone() for name, w in weights_of(adapted.model).items()}
        adapted.train()
        after = weights_of(adapted.model)
        moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
        assert moved == {name for name in after if "lora_" in name}
        adapted.save_model(str(folder / f"saved{stage}"))
        if RANK == 0:
            from peft import PeftModel

            loaded = PeftModel.from_pretrained(tiny_model(seed=5), folder / f"saved{stage}")
            same(dict(loaded.named_parameters()), after)


def in_half_precision(folder: Path) -> None:
    """The weights for sampling have the dtype of the forward passes, so that sampler and trainer agree."""
    for stage in (2, 3):
        mixed = trainer_of(folder / f"{stage}", 2, stage=stage, bf16=True, **STEPS)
        mixed.train()
        sampled_from = mixed.backend.whole.module if stage == 3 else mixed.model
        kinds = {next(model.parameters()).dtype for model in (sampled_from, mixed.model)}
        assert kinds == {torch.bfloat16}, stage
        first, second = [log for log in mixed.state.log_history if "loss" in log]
        assert first["kl"] == 0 < second["kl"]
        assert second["sampling/sampling_logp_difference/mean"] < 1e-6


def blended(folder: Path) -> None:
    """The reference is synchronized with the policy."""
    run = trainer_of(
        folder / "2", 2, stage=2, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0, **STEPS
    )
    run.train()
    same(weights_of(run.accelerator.unwrap_model(run.ref_model)), weights_of(run.model))
    # The trainer does not support this with sharded weights, but its callback does.
    run = trainer_of(folder / "3", 2, stage=3, **STEPS)
    run.train()
    policy, reference = run.model, run.accelerator.unwrap_model(run.ref_model)
    expected = {name: 0.5 * weight + 0.5 * weights_of(policy)[name] for name, weight in weights_of(reference).items()}
    SyncRefModelCallback.sync_target_model(policy, reference, 0.5)
    same(weights_of(reference), expected, atol=1e-6)
    same(dict(named_weights(policy)), weights_of(policy))  # as for a sampler that keeps its own copy
    # Experts are saved one by one, and so they are sent.
    run = trainer_of(folder / "experts", 2, stage=3, model=experts("mixtral"), rollout_backend="transformers", **STEPS)
    sent = {name: weight.clone() for name, weight in named_weights(run.model)}
    run.train()
    run.save_model(str(folder / "experts" / "final"))
    moved = dict(named_weights(run.model))
    assert any("experts.1." in name for name in sent)
    assert not torch.equal(sent["lm_head.weight"], moved["lm_head.weight"])
    if RANK == 0:
        same(moved, load_file(folder / "experts" / "final" / "model.safetensors"))


class Spoiled(torch.autograd.Function):
    """The identity, with a NaN gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Any) -> Any:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * torch.nan


def no_number(loss: torch.Tensor) -> torch.Tensor:
    return loss * torch.nan


def broken_updates(folder: Path) -> None:
    """DeepSpeed skips such updates by itself; they are counted and recorded as without it."""
    ways = {2: (Spoiled.apply, {"nonfinite_gradient"}), 3: (no_number, {"nonfinite_gradient", "nonfinite_loss"})}
    for stage, (spoil, checks) in ways.items():
        run = trainer_of(folder / str(stage), 2, stage=stage, **{**STEPS, "max_steps": 3})
        whole, calls = run.compute_loss, []

        def broken(*args: Any, _spoil: Any = spoil, _whole: Any = whole, _calls: list = calls, **kwargs: Any) -> Any:
            _calls.append(loss := _whole(*args, **kwargs))
            return _spoil(loss) if len(_calls) == 2 and RANK == 0 else loss

        run.compute_loss = broken
        run.train()
        assert all(weight.isfinite().all() for weight in weights_of(run.model).values())
        assert run.state.log_history[-2]["audit/skipped_updates"] == 1
        if RANK == 0:
            findings = events(folder / str(stage), "audit")
            assert {finding["check"] for finding in findings} == checks
            assert all("The update is skipped" in finding["message"] for finding in findings)
            (skipped,) = events(folder / str(stage), "update_skipped")
            assert "prevented" not in skipped


def refusals(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dynamic_sampling=True cannot work with weights that are sharded"):
        trainer_of(folder / "a", 2, stage=3, ds3_gather_for_generation=False, rollout_backend="transformers")
    with pytest.raises(NotImplementedError, match="sync_ref_model=True is not available"):
        trainer_of(folder / "b", 2, stage=3, sync_ref_model=True)
    with pytest.raises(ConfigError, match="rollout_backend='builtin' cannot sample here: ds3_gather_for_generation"):
        trainer_of(folder / "c", 2, stage=3, ds3_gather_for_generation=False, dynamic_sampling=False)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with pytest.raises(ConfigError, match="DeepSpeed was requested, but accelerate ignores it"):
        trainer_of(folder / "d", 2, stage=3)
