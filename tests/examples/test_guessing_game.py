"""The guessing game: the rules, the players of the warm-up, and that GRPO learns to play."""

import random
import re
from pathlib import Path

import guessing_game
import pytest
from guessing_game import MOST_GUESSES, NUMBERS, GuessingGame, played

from tests.examples.scripted import follow


def test_the_rules() -> None:
    game = GuessingGame()
    assert game.reset(number=6, prompt=[]) == "1 to 9."
    assert game.get_reward() == 0
    assert [game.guess(5), game.guess(7), game.get_reward(), game.guess(6)] == ["more", "less", 0.0, "right"]
    assert game.get_reward() == 0.5
    game.reset(number=3)
    assert (game.guesses, game.found) == (0, False)
    game.guess(3)
    assert game.get_reward() == 1


def test_the_players() -> None:
    halving = [played(random.Random(seed), halving=True) for seed in range(50)]
    assert all(game[-1]["content"].startswith("A: ") for game in halving), "halving always finds it in time"
    counting = [played(random.Random(seed), halving=False) for seed in range(50)]
    guesses = [
        [m["tool_calls"][0]["function"]["arguments"]["n"] for m in game if "tool_calls" in m] for game in counting
    ]
    assert all(made == list(NUMBERS[: len(made)]) for made in guesses)
    assert max(map(len, guesses)) == MOST_GUESSES


def counts_or_halves(text: str, sample: int) -> str:
    """Sample 0 counts from 1 up, the others halve what is left."""
    heard = re.findall(r"n=(\d)\]<eos>\n= (\w+)", text)
    if heard and heard[-1][1] == "right":
        return f"A: {heard[-1][0]}"
    low = max([int(n) + 1 for n, answer in heard if answer == "more"], default=NUMBERS[0])
    high = min([int(n) - 1 for n, answer in heard if answer == "less"], default=NUMBERS[-1])
    return f"[guess n={low if sample == 0 else (low + high) // 2}]"


@pytest.mark.medium
def test_what_is_measured_and_rewarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = follow(counts_or_halves, guessing_game, monkeypatch)
    before, after = guessing_game.main(steps=1, output_dir=str(tmp_path))
    (trainer,) = made
    # Counting finds 1, 2, 3 and 4 with as many guesses; five numbers are not found with four.
    by_hand = {"reward": (1 + 0.75 + 0.5 + 0.25) / 9, "guesses": (1 + 2 + 3 + 4 + 5 * 4) / 9, "found": 4 / 9}
    assert before == after == pytest.approx(by_hand)
    first = next(line for line in trainer.state.log_history if "loss" in line)
    assert first["rewards/found/mean"] >= 14 / 16, "two games of sixteen counted, and halving finds every number"
    assert first["reward"] == first["rewards/GuessingGame/mean"], "finding is not rewarded by itself"
    assert first["grad_norm"] > 0


@pytest.mark.slow
def test_grpo_learns_to_play(tmp_path: Path) -> None:
    before, after = guessing_game.main(steps=15, output_dir=str(tmp_path))
    assert before["found"] < 0.65
    assert after["reward"] > before["reward"] + 0.08
    assert after["guesses"] < before["guesses"] - 0.2
    assert after["found"] > before["found"] + 0.15


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_whole_example(tmp_path: Path, seed: int) -> None:
    before, after = guessing_game.main(seed=seed, output_dir=str(tmp_path))
    assert after["reward"] > before["reward"] + 0.15
    assert after["guesses"] < before["guesses"] - 0.3
    assert after["found"] > 0.85
