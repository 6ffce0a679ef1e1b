"""Runs of the real trainer on stored rollouts, so that two runs differ only in what a test varies."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.trainer import stepping
from tests.helpers import base_args, in_double, length_reward, prompts, scripted_completion, tiny_model, tiny_tokenizer
from tests.sharded import as_on_gpus, set_weights, weights_of

G = 4

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "kl": {"loss_type": "dapo", "beta": 0.1},
    "truncated": {"loss_type": "dapo", "mask_truncated_completions": True},
    "rloo": {"beta": 0.05},
    "bnpo": {"loss_type": "bnpo"},
    "top_entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.37},
}
# Recipes that are defined per nominal micro-batch: the split of an update into micro-batches matters.
BY_MICRO_BATCH = ("bnpo", "top_entropy")


def two_process_batches(recipe: str, processes: int) -> dict[str, int]:
    """Settings for 12 rows on one process or on two, with the same micro-batches if these matter."""
    if recipe == "top_entropy":  # its threshold is computed over the rows of all processes
        return {"per_device_train_batch_size": 12 // processes, "gradient_accumulation_steps": 1}
    return {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4 // processes}


def scripted_rollout(prompt_list: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions that depend on the prompt and on the position in its group, not on the process."""
    first = trainer.args.process_index * len(prompt_list)
    tokenizer = trainer.processing_class
    return {
        "prompt_ids": tokenizer(prompt_list)["input_ids"],
        "completion_ids": [scripted_completion(p, (first + i) % G) for i, p in enumerate(prompt_list)],
        "logprobs": None,
    }


class ScriptedRLOO(RLOOTrainer):
    """RLOO has no rollout_func, so its rollouts are scripted one level below."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        texts = [self.processing_class.decode(ids) for ids in prompt_ids]
        return scripted_rollout(texts, self)["completion_ids"], None


def lora(**more: Any) -> Any:
    """A LoRA config that initializes both matrices randomly, so that both have a gradient."""
    from peft import LoraConfig

    where = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(r=2, init_lora_weights=False, **where, **more)


def policy(seed: int, dtype: torch.dtype) -> Any:
    model = tiny_model(seed=seed)
    return in_double(model) if dtype == torch.float64 else model.to(dtype)


def make_trainer(
    recipe: str,
    folder: Any,
    *,
    dtype: torch.dtype = torch.float64,
    subclass: Any = None,
    reward: Any = length_reward,
    rollout: Any = None,
    adapter: bool | str = False,
    **kw: Any,
) -> Any:
    """A trainer for one SGD update with learning rate 1 and no clipping."""
    settings = base_args(
        folder,
        **{
            "num_generations": G,
            "optim": "sgd",
            "learning_rate": 1.0,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "max_steps": 1,
            "shuffle_dataset": False,
            "max_completion_length": 8,
            **RECIPES[recipe],
            **kw,
        },
    )
    is_rloo = recipe == "rloo"
    config = (RLOOConfig if is_rloo else GRPOConfig)(**settings)
    if config.fsdp:
        as_on_gpus()
    trainer_class = subclass or (ScriptedRLOO if is_rloo else GRPOTrainer)
    rows = config.generation_batch_size // G
    model = policy(3, dtype)
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=prompts(rows),
        processing_class=tiny_tokenizer(),
        peft_config=lora(use_dora=adapter == "dora") if adapter else None,
        **({} if is_rloo else {"rollout_func": rollout or scripted_rollout}),
    )
    if trainer.ref_model is not None:
        # The reference differs from the policy, so that the KL has a gradient from the first update on.
        set_weights(trainer.accelerator.unwrap_model(trainer.ref_model), policy(4, dtype).state_dict())
    return trainer


def update_of(trainer: Any) -> dict[str, Tensor]:
    """Train, and return the change of each trainable weight."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    before = {name: weight.clone() for name, weight in weights_of(model).items() if name in trained}
    trainer.train()
    after = weights_of(trainer.accelerator.unwrap_model(trainer.model))
    return {name: before[name].to(after[name].device) - after[name] for name in before}


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to its norm."""
    differences = torch.stack([(a[name] - b[name]).norm() / a[name].norm() for name in a])
    assert differences.isfinite().all()
    return differences.max().item()


@contextmanager
def rows_in_order(recipe: str) -> Iterator[None]:
    """Do not shuffle rows for bnpo: it is defined on micro-batches, which must be the same in two runs."""
    shuffle = stepping.shuffle_sequence_dict
    if recipe == "bnpo":
        stepping.shuffle_sequence_dict = lambda tensors: tensors
    try:
        yield
    finally:
        stepping.shuffle_sequence_dict = shuffle


def main(folder: Path) -> None:
    """Run each recipe once on two processes, with groups that span both."""
    for recipe in RECIPES:
        trainer = make_trainer(recipe, folder, **two_process_batches(recipe, 2))
        with rows_in_order(recipe):
            update = update_of(trainer)
        if trainer.args.process_index == 0:
            logs = {k: v for k, v in trainer.state.log_history[0].items() if "time" not in k}
            torch.save({"update": update, "logs": logs}, folder / f"{recipe}.pt")
