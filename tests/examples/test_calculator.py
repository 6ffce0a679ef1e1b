"""The calculator example: the tool, the reward, and that GRPO learns to call."""

from pathlib import Path

import calculator
import pytest

from tests.examples.scripted import follow


def test_the_tool() -> None:
    assert calculator.calc("347*86") == 29842
    with pytest.raises(ValueError, match="12 is not a product"):
        calculator.calc("12")


def test_the_reward_looks_at_the_answer_only() -> None:
    question = calculator.Product(347, 86)
    completions = [conversation[1:] for conversation in (question.called, question.guessed, question.called[:2])]
    assert calculator.exact_match(completions, ["29842"] * 3) == [1.0, 1.0, 0.0]
    assert calculator.exact_match(completions, ["29843"] * 3) == [0.0, 0.0, 0.0]


def first_factor(text: str) -> int:
    return int(text.partition("How many are ")[2].split()[0])


def calls_every_other_time(text: str, sample: int) -> str:
    """Sample 0 of a question calls if its first factor is even, sample 1 if it is odd; otherwise a wrong guess."""
    if "\n= " in text:
        return "A: " + text.rpartition("= ")[2].strip()
    a, b = first_factor(text), int(text.partition(" times ")[2].partition("?")[0])
    return f"[calc term={a}*{b}]" if (a + sample) % 2 == 0 else "A: 1"


@pytest.mark.medium
def test_what_is_measured_and_rewarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = follow(calls_every_other_time, calculator, monkeypatch)
    before, after = calculator.main(steps=1, output_dir=str(tmp_path))
    (trainer,) = made
    asked = [row["prompt"][0]["content"] for row in trainer.eval_dataset]
    share = sum(first_factor(text) % 2 == 0 for text in asked) / len(asked)
    assert 0.3 < share < 0.7
    assert before == after == pytest.approx({"accuracy": share, "call_rate": share}), "who calls is right"
    first = next(line for line in trainer.state.log_history if "loss" in line)
    assert (first["reward"], first["tools/call_frequency"]) == (0.5, 0.5), "half of each group"
    assert first["grad_norm"] > 0


@pytest.mark.slow
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
