"""The trainer on a CUDA device: the same update as on the CPU, and the default precision."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.trainer.scripted import RECIPES, make_trainer, relative_difference, update_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_makes_the_same_update_as_the_cpu(recipe: str, tmp_path: Path) -> None:
    whole = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    on_cpu = update_of(make_trainer(recipe, tmp_path, **whole))
    on_cuda = update_of(make_trainer(recipe, tmp_path, use_cpu=False, **whole))
    assert next(iter(on_cuda.values())).is_cuda
    # Rewards, advantages and rotary angles are float32 whatever the weights are, and round differently there.
    assert relative_difference(on_cpu, {name: change.cpu() for name, change in on_cuda.items()}) < 2e-6


@pytest.mark.parametrize(("trainer", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_default_precision_trains(trainer: Any, config: Any, tmp_path: Path) -> None:
    """float32 weights under bfloat16 autocast, checkpointing on, as a user who sets nothing gets them."""
    settings = base_args(tmp_path, use_cpu=False, bf16=None, gradient_checkpointing=True, max_steps=3, beta=0.04)
    args = config(**settings)
    assert args.bf16
    run = trainer(
        model=tiny_model(),
        reward_funcs=length_reward,
        args=args,
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    before = run.model.lm_head.weight.detach().cpu().clone()
    run.train()
    assert run.model.lm_head.weight.dtype == torch.float32
    assert (run.model.lm_head.weight.cpu() - before).abs().max() > 0
    assert all(torch.isfinite(weight).all() for weight in run.model.parameters())


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"top_entropy"}))  # which has to know its threshold
def test_packs_do_not_wait_for_the_device(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gives the device the next pack while it works on the last one."""
    trainer = make_trainer(recipe, tmp_path, use_cpu=False, max_tokens_per_micro_batch=16, parity_check="off")
    packs = []

    def loss_without_waiting(*args: Any, **kwargs: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        packs.append(args)
        return pack_loss(*args, **kwargs)

    def run_packs(*args: Any) -> None:
        try:
            run(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    pack_loss, run = trainer._pack_loss, trainer._run_packs
    monkeypatch.setattr(trainer, "_pack_loss", loss_without_waiting)
    monkeypatch.setattr(trainer, "_run_packs", run_packs)
    trainer.train()
    assert len(packs) > 1


@pytest.mark.parametrize("settings", [{}, {"bf16": None}, {"num_iterations": 2, "beta": 0.04}], ids=str)
@pytest.mark.parametrize(("trainer", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_a_resumed_run_has_the_bits_of_a_straight_one(
    trainer: Any, config: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torch's deterministic algorithms, in the middle of a generation."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def run(folder: Path, resume: Any = None) -> dict[str, torch.Tensor]:
        args = base_args(folder, use_cpu=False, max_steps=6, steps_per_generation=2, save_strategy="steps")
        made = trainer(
            model=tiny_model(),
            reward_funcs=length_reward,
            args=config(**(args | {"save_steps": 3, "learning_rate": 1e-3} | settings)),
            train_dataset=prompts(16),
            processing_class=tiny_tokenizer(),
        )
        made.train(resume_from_checkpoint=resume)
        assert made.backend.name == "builtin"
        return {name: weight.detach().cpu() for name, weight in made.model.state_dict().items()}

    torch.use_deterministic_algorithms(True)
    try:
        straight = run(tmp_path)
        resumed = run(tmp_path, resume=str(tmp_path / "checkpoint-3"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert straight["lm_head.weight"].ne(tiny_model().lm_head.weight).any()
    for name, weight in straight.items():
        assert torch.equal(weight, resumed[name]), name
