"""The calculator example: the tool, the reward, and that GRPO learns to call."""

from pathlib import Path

import calculator
import pytest


def test_the_tool() -> None:
    assert calculator.calc("347*86") == 29842
    with pytest.raises(ValueError, match="12 is not a product"):
        calculator.calc("12")


def test_the_reward_looks_at_the_answer_only() -> None:
    question = calculator.Product(347, 86)
    completions = [conversation[1:] for conversation in (question.called, question.guessed, question.called[:2])]
    assert calculator.exact_match(completions, ["29842"] * 3) == [1.0, 1.0, 0.0]
    assert calculator.exact_match(completions, ["29843"] * 3) == [0.0, 0.0, 0.0]


@pytest.mark.medium
def test_grpo_learns_to_call(tmp_path: Path) -> None:
    before, after = calculator.main(steps=15, output_dir=str(tmp_path))
    assert before["call_rate"] < 0.4
    assert before["accuracy"] < 0.3
    assert after["call_rate"] > before["call_rate"] + 0.4
    assert after["accuracy"] > before["accuracy"] + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_whole_example(tmp_path: Path, seed: int) -> None:
    before, after = calculator.main(seed=seed, output_dir=str(tmp_path))
    assert before["accuracy"] < 0.3
    assert after["call_rate"] > 0.9
    assert after["accuracy"] > 0.6
