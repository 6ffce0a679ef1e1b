"""A full run on two processes with weights sharded by FSDP2; run by test_sharded.py.

The built-in engine samples, prompts without spread are replaced, there are evaluations with an incomplete last batch,
and the run is saved and resumed.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.errors import ConfigError
from gruppo.trainer.processes import sharded
from tests.helpers import base_args, in_double, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.sharded import FSDP2, as_on_gpus, weights_of

RANK = int(os.environ.get("RANK", "0"))


def some_equal(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Every third prompt has equal rewards, and so no learning signal."""
    rewards = length_reward(completions)
    return [
        1.0 if int(prompt[1:-1]) % 3 == 0 else reward + 0.01 * len(text)
        for prompt, text, reward in zip(prompts, completions, rewards, strict=True)
    ]


def settings_of_a_run(processes: int) -> dict[str, Any]:
    """Four updates with replaced groups, a reference, evaluations and checkpoints; the same total on two processes."""
    return {
        "num_generations": 4,
        "per_device_train_batch_size": 12 // processes,
        "per_device_eval_batch_size": 8 // processes,
        "max_completion_length": 6,
        "max_steps": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "dynamic_sampling": True,
        "beta": 0.05,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "rollout_backend": "builtin",
    }


def trainer_of(folder: Path, processes: int, *, double: bool = True, **kw: Any) -> Any:
    spread = FSDP2 if processes > 1 else {}
    settings = settings_of_a_run(processes) | {"parity_check": "first"} | spread | kw
    config = GRPOConfig(**base_args(folder, **settings))
    if config.fsdp:
        as_on_gpus()
    model = tiny_model(seed=5)
    return GRPOTrainer(
        model=in_double(model) if double else model,
        reward_funcs=some_equal,
        args=config,
        train_dataset=prompts(30),
        eval_dataset=prompts(3),
        processing_class=tiny_tokenizer(),
    )


def seen(trainer: Any) -> dict[str, Any]:
    """Completions, rewards and weights, which must not depend on the number of processes."""
    return {
        "logs": trainer.state.log_history,
        "weights": {name: weight.clone() for name, weight in weights_of(trainer.model).items()},
        "completions": list(trainer.completion_logs["train"].columns["completion"]),
    }


def main(folder: Path) -> None:
    straight = trainer_of(folder / "straight", 2)
    straight.train()
    found = seen(straight)
    assert straight.backend.whole.decision == "keep"
    straight.save_model(str(folder / "final"))
    if RANK == 0:
        # The saved model has the dtype of its config, and parameter names without a wrapper's prefix.
        saved = AutoModelForCausalLM.from_pretrained(folder / "final", dtype="auto")
        for name, weight in saved.named_parameters():
            assert torch.allclose(weight.double(), found["weights"][name], atol=1e-7), name
        torch.save(found, folder / "straight.pt")
    resumed = trainer_of(folder / "straight", 2, audit="off")  # audits would also note that weights were written
    resumed.train(resume_from_checkpoint=str(folder / "straight" / "checkpoint-2"))
    for name, weight in weights_of(resumed.model).items():
        assert torch.equal(weight, found["weights"][name]), name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "plan_whole_weights", lambda size, free: "free")
        one_loads = {**FSDP2["fsdp_config"], "cpu_ram_efficient_loading": True}
        freed = trainer_of(folder / "freed", 2, fsdp_config=one_loads)
        freed.train()
        assert not freed.backend.whole.is_held
        assert (freed.backend.engine.graphs, straight.backend.engine.graphs) == (False, True), (
            "graphs are lost as well"
        )
        for name, weight in weights_of(freed.model).items():
            assert torch.equal(weight, found["weights"][name]), name
        patch.setattr(sharded, "plan_whole_weights", lambda size, free: None)
        with pytest.raises(ConfigError, match="vllm_mode='server'"):
            trainer_of(folder / "full", 2).train()

    # Mixed precision: weights are gathered in the dtype of the passes, so that sampler and trainer agree.
    mixed = trainer_of(folder / "mixed", 2, double=False, bf16=True, max_steps=2)
    mixed.train()
    kinds = {next(model.parameters()).dtype for model in (mixed.backend.whole.module, mixed.model)}
    assert kinds == {torch.bfloat16, torch.float32}
    first, second = [log for log in mixed.state.log_history if "loss" in log]
    assert first["kl"] == 0 < second["kl"]
    assert second["sampling/sampling_logp_difference/mean"] < 1e-3

    # Completions have different lengths, yet every process takes part in all passes.
    kw = {"rollout_backend": "transformers", "dynamic_sampling": False, "num_generations_eval": 1, "max_steps": 2}
    in_step = trainer_of(folder / "in step", 2, double=False, **kw)
    in_step.eval_dataset = prompts(2)
    in_step.train()
    assert in_step.backend.lockstep
    assert in_step.state.global_step == 2
    assert sum("eval_reward" in log for log in in_step.state.log_history) == 1
    with pytest.raises(ConfigError, match="dynamic_sampling=True cannot work with weights that are sharded"):
        trainer_of(folder / "refused", 2, rollout_backend="transformers")
