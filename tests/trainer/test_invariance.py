"""The same update, however it is cut: the gradient must not depend on it.

SGD with learning rate 1 and no clipping makes the change of the weights the gradient itself.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import GRPOTrainer
from tests.helpers import timeless
from tests.processes import run_together
from tests.trainer import scripted
from tests.trainer.scripted import (
    BY_MICRO_BATCH,
    RECIPES,
    make_trainer,
    relative_difference,
    rows_in_order,
    two_process_batches,
    update_of,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
FAST = ("grpo", "dapo", "rloo")


def tiered(recipes: Iterable[str]) -> list[Any]:
    """Three recipes in the fast tests, the others in `make test`."""
    return [r if r in FAST else pytest.param(r, marks=pytest.mark.medium) for r in recipes]


SPLITTABLE = tiered(recipe for recipe in RECIPES if recipe not in BY_MICRO_BATCH)
WHOLE = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}


def update(recipe: str, folder: Path, dtype: torch.dtype = torch.float64, **kw: Any) -> dict[str, torch.Tensor]:
    return update_of(make_trainer(recipe, folder, dtype=dtype, **(WHOLE | kw)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", SPLITTABLE)
def test_the_split_over_accumulation_does_not_matter(recipe: str, tmp_path: Path) -> None:
    whole = update(recipe, tmp_path)
    assert min(change.norm().item() for change in whole.values()) > 1e-6, "the update must be far above the tolerance"
    for rows, steps in ((4, 4), (2, 8)):
        split = update(recipe, tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=steps)
        assert relative_difference(whole, split) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "gspo", "rloo"])
def test_the_split_does_not_matter_in_float32(recipe: str, tmp_path: Path) -> None:
    # Without the KL in RLOO's reward: rounding there moves the advantages themselves.
    settings = {"dtype": torch.float32, "beta": 0.0}
    whole = update(recipe, tmp_path, **settings)
    split = update(recipe, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, **settings)
    assert relative_difference(whole, split) < TOLERANCE[torch.float32]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", tiered(["grpo", "cispo", "vespo", "kl", "rloo", "luspo"]))
def test_the_split_does_not_matter_off_policy(recipe: str, tmp_path: Path) -> None:
    """Two passes over one generation: in the second the ratios are no longer 1."""
    settings = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}
    whole = update(recipe, tmp_path, **settings)
    split = update(recipe, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, **settings)
    assert relative_difference(whole, split) < TOLERANCE[torch.float64]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", tiered(RECIPES))
def test_wider_padding_does_not_matter(recipe: str, tmp_path: Path) -> None:
    assert relative_difference(update(recipe, tmp_path), update(recipe, tmp_path, pad_to_multiple_of=24)) < 1e-9


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", tiered(RECIPES))
def test_the_order_of_rows_does_not_matter(recipe: str, tmp_path: Path) -> None:
    assert relative_difference(update(recipe, tmp_path, seed=1), update(recipe, tmp_path, seed=2)) < 1e-9


def equal_rewards_in_the_first_group(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0 if prompt == "p0:" else len(text) / 8 for prompt, text in zip(prompts, completions, strict=True)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recipe", tiered(recipe for recipe in RECIPES if recipe != "rloo"))
@pytest.mark.parametrize("all_equal", [False, True])
def test_rows_without_advantage_need_no_backward_pass(recipe: str, all_equal: bool, tmp_path: Path) -> None:
    reward = (
        (lambda completions, **kwargs: [1.0] * len(completions)) if all_equal else equal_rewards_in_the_first_group
    )
    runs = []
    for skip in (True, False):
        settings = {"skip_zero_advantage": skip, "parity_check": "off"}
        trainer = make_trainer(recipe, tmp_path, reward=reward, **settings, **WHOLE)
        tokens: list[int] = []
        trainer.model.model.embed_tokens.register_forward_hook(
            lambda m, a, o, seen=tokens: seen.append(a[0].numel() if torch.is_grad_enabled() else 0)
        )
        runs.append((update_of(trainer), sum(tokens), trainer.state.log_history[0]))
    (fast, few, fast_logs), (slow, many, slow_logs) = runs
    moves_everything = recipe in ("kl", "top_entropy")
    assert few == many if moves_everything else 0 < few < (0.15 if all_equal else 0.85) * many
    for name in slow:
        assert torch.allclose(fast[name], slow[name], rtol=1e-9, atol=1e-15), name
    for key in ("entropy", "loss", "completions/mean_length", "reward"):
        assert fast_logs[key] == pytest.approx(slow_logs[key], rel=1e-6, abs=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", tiered(RECIPES))
def test_packed_rows_change_the_work_but_not_the_update(recipe: str, tmp_path: Path) -> None:
    """Each prompt once for its rows and no padding; two passes, so that old log-probs count too."""
    runs = []
    for packed in (True, False):
        settings = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1, "packed_update": packed}
        settings["parity_check"] = "off"  # its passes would be counted
        trainer = make_trainer(recipe, tmp_path, **settings, **WHOLE)
        assert (trainer.packed is not None) == packed
        tokens: list[int] = []
        trainer.model.model.embed_tokens.register_forward_hook(lambda m, a, o, seen=tokens: seen.append(a[0].numel()))
        runs.append((update_of(trainer), sum(tokens), trainer.state.log_history))
    (shared, few, shared_logs), (full, many, full_logs) = runs
    assert relative_difference(full, shared) < TOLERANCE[torch.float64]
    assert few < 0.75 * many
    for a, b in zip(shared_logs, full_logs, strict=True):
        kept = [{k: v for k, v in timeless(log).items() if not k.startswith("ledger/")} for log in (a, b)]
        assert kept[0] == pytest.approx(kept[1], rel=1e-6, abs=1e-7)


def test_a_row_without_loss_tokens_counts_in_the_loss_that_is_logged(tmp_path: Path) -> None:
    """In RLOO its share is a constant: it has no gradient, so that it is not run, but it is part of the mean."""
    settings = {"mask_truncated_completions": True, "beta": 0.0, **WHOLE}
    trainers = [make_trainer("rloo", tmp_path, packed_update=packed, **settings) for packed in (True, False)]
    updates = [update_of(trainer) for trainer in trainers]
    packed, padded = (trainer.state.log_history[0] for trainer in trainers)
    assert packed["completions/clipped_ratio"] > 0
    assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-7)  # with every row it is 0, without one it is not
    assert relative_difference(*updates) < TOLERANCE[torch.float64]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("budget", [10, 25, 60])
@pytest.mark.parametrize("recipe", tiered(RECIPES))
def test_the_token_budget_does_not_matter(recipe: str, budget: int, tmp_path: Path) -> None:
    """Packs of a row or two, or the whole update in one; nominal micro-batches of four rows either way."""
    cut = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    whole = update(recipe, tmp_path, **cut)
    split = update(recipe, tmp_path, max_tokens_per_micro_batch=budget, **cut)
    assert relative_difference(whole, split) < TOLERANCE[torch.float64]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("split", [(8, 2), (4, 4), (2, 8), (1, 16)])
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in BY_MICRO_BATCH])
def test_every_split_of_every_recipe(
    recipe: str, split: tuple[int, int], iterations: int, seed: int, tmp_path: Path
) -> None:
    settings = {"num_iterations": iterations, "max_steps": iterations, "learning_rate": 0.1, "seed": seed}
    rows, steps = split
    whole = update(recipe, tmp_path, **settings)
    cut = update(recipe, tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=steps, **settings)
    assert relative_difference(whole, cut) < TOLERANCE[torch.float64]


class OneRowLess(GRPOTrainer):
    """A trainer with a fault: the first row of a generation is lost."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        tensors = super()._generate_and_score_completions(inputs)
        tensors["completion_mask"][0] = 0
        return tensors


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "bnpo"])
def test_these_tests_notice_a_lost_row(recipe: str, tmp_path: Path) -> None:
    faulty = update_of(make_trainer(recipe, tmp_path, subclass=OneRowLess, **WHOLE))
    assert relative_difference(update(recipe, tmp_path), faulty) > 1e-3


@pytest.mark.medium
def test_two_processes_make_the_same_update_as_one(tmp_path: Path) -> None:
    """12 rows in groups of 4 on two processes: the second group lies on both."""
    run_together(2, scripted.__name__, tmp_path)
    for recipe in RECIPES:
        two = torch.load(tmp_path / f"{recipe}.pt")
        trainer = make_trainer(recipe, tmp_path, **two_process_batches(recipe, 1))
        with rows_in_order(recipe):
            one = update_of(trainer)
        assert relative_difference(one, two["update"]) < TOLERANCE[torch.float64], recipe
        logs = trainer.state.log_history[0]
        # kl, entropy and clip shares are means over micro-batches, whose rows differ between the two runs.
        keys = [key for key in two["logs"] if key.startswith(("reward", "completions", "num_tokens", "loss", "grad"))]
        assert len(keys) > 10
        for key in keys:
            value = two["logs"][key]
            assert logs[key] == pytest.approx(value, rel=1e-6, abs=1e-6), f"{recipe}: {key}"
