"""One update over two generations of which only one has a tool mask, sampler log-probs, or rewards of steps."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gruppo import GRPOConfig, GRPOTrainer
from tests.helpers import base_args, prompts, scripted_completion, tiny_model, tiny_tokenizer
from tests.trainer.scripted import relative_difference, update_of

SGD = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}


def rollouts(named: str, generation: int) -> Any:
    """A rollout function that returns `named` in one of the two generations only."""
    calls = count()

    def roll(texts: Sequence[str], trainer: Any) -> dict[str, Any]:
        ids = [scripted_completion(text, i % trainer.num_generations) for i, text in enumerate(texts)]
        output = {"prompt_ids": trainer.processing_class(list(texts))["input_ids"], "completion_ids": ids}
        further = {
            "env_mask": [[0] * (len(row) - 1) + [1] for row in ids],
            "logprobs": [[-0.5] * len(row) for row in ids],
        }
        if next(calls) == generation and named in further:
            output[named] = further[named]
        return {"logprobs": None, **output}

    return roll


def reward(named: str, generation: int) -> Any:
    """A reward that judges steps in one of the two generations only, if those are asked for."""
    calls = count()

    def score(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[Any]:
        values = [float(i % 3) for i in range(len(completions))]
        if next(calls) == generation and named == "steps":
            return [[(0, value), (len(ids) - 1, 1.0)] for value, ids in zip(values, completion_ids, strict=True)]
        return list(values)

    return score


def run(folder: Path, named: str, generation: int, *, packed: bool) -> Any:
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=reward(named, generation),
        args=GRPOConfig(
            **base_args(
                folder,
                max_steps=1,
                gradient_accumulation_steps=2,
                steps_per_generation=1,
                packed_update=packed,
                parity_check="off",
                off_policy_mask_threshold=0.1 if named == "logprobs" else None,
                **SGD,
            )
        ),
        train_dataset=prompts(8),
        processing_class=tiny_tokenizer(),
        rollout_func=rollouts(named, generation),
    )
    assert (trainer.packed is not None) == packed
    return trainer


@pytest.mark.parametrize("generation", [0, 1])
@pytest.mark.parametrize("named", ["env_mask", "logprobs", "steps"])
def test_packed_rows_are_those_of_the_padded_update(tmp_path: Path, named: str, generation: int) -> None:
    fast, slow = (run(tmp_path / str(packed), named, generation, packed=packed) for packed in (True, False))
    assert relative_difference(update_of(slow), update_of(fast)) < 1e-4
    theirs, ours = (trainer.state.log_history[0] for trainer in (slow, fast))
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)
