"""A model learns to play: GRPO in an environment of several turns, on two CPU cores, without network.

    python examples/guessing_game.py

A number from 1 to 9 is to be found. Each guess is a call of the environment's tool, which answers "more", "less" or
"right". A short warm-up shows the tiny model of the demo two players: one halves what is left, the other counts from 1
up, which is the model's habit afterwards. The environment gives more for fewer guesses; which player to follow is for
the model to find out.
"""

import argparse
import random
from typing import Any

from datasets import Dataset
from tiny_chat import CPU_SETTINGS, Progress, Scores, answers, calls, imitate, load, report, says, show, user
from transformers import PrinterCallback

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.types import Message

STEPS = 40
NUMBERS = range(1, 10)
MOST_GUESSES = 4
HALVING_SHOWN = 0.15  # the share of demonstrated games that halve what is left


class GuessingGame:
    """The environment: one instance for each game that is played at the same time, reset for every new one."""

    def reset(self, number: int, **row: Any) -> str:
        """Begin a game. The columns of a row come by name; what is returned is added to the prompt."""
        self.number, self.guesses, self.found = number, 0, False
        return f"{NUMBERS[0]} to {NUMBERS[-1]}."

    def guess(self, n: int) -> str:
        """Guess the number.

        Args:
            n: what it may be
        """
        self.guesses += 1
        self.found = self.found or n == self.number
        return "right" if n == self.number else "more" if n < self.number else "less"

    def get_reward(self) -> float:
        """1 for the first guess, less for each further one, nothing for a number that was not found."""
        return 1 - (self.guesses - 1) / MOST_GUESSES if self.found else 0.0


def found(environments: list[GuessingGame], **kwargs: Any) -> list[float]:
    """Whether the number was found. Of weight 0: logged, not rewarded."""
    return [float(game.found) for game in environments]


def row(number: int) -> dict[str, Any]:
    """What the trainer gets: the beginning of a question, and the number for `reset`."""
    return {"prompt": [user("How many? ")], "number": number}


def played(rng: random.Random, halving: bool) -> list[Message]:
    """A game to imitate."""
    game, number = GuessingGame(), rng.choice(NUMBERS)
    conversation = [user("How many? " + game.reset(number))]
    low, high = NUMBERS[0], NUMBERS[-1]
    while not game.found and game.guesses < MOST_GUESSES:
        n = (low + high) // 2 if halving else low
        answer = game.guess(n)
        conversation += [calls("guess", n=n), answers(answer)]
        low, high = (n + 1, high) if answer == "more" else (low, n - 1)
    return [*conversation, says(f"A: {number}")] if game.found else conversation


def measure(trainer: GRPOTrainer) -> Scores:
    """The mean reward, guesses in a game, and the share of games in which the number was found."""
    seen = trainer.evaluate()
    names = {"reward": "rewards/GuessingGame/mean", "guesses": "tools/call_frequency", "found": "rewards/found/mean"}
    return {name: seen[f"eval_{key}"] for name, key in names.items()}


def main(steps: int = STEPS, seed: int = 0, output_dir: str = "runs/guessing_game") -> tuple[Scores, Scores]:
    """Warm up, train, and return the measurements before and after."""
    rng = random.Random(seed)
    model, tokenizer = load()
    # First how the game is played well, then the habit not to.
    tools = [GuessingGame().guess]
    imitate(model, tokenizer, [played(rng, halving=True) for _ in range(1024)], tools, steps=200)
    habits = [played(rng, halving=rng.random() < HALVING_SHOWN) for _ in range(2048)]
    imitate(model, tokenizer, habits, tools, steps=50)

    games = Dataset.from_list([row(number) for number in NUMBERS] * 28)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=found,
        environment_factory=GuessingGame,  # its get_reward is a reward of weight 1
        args=GRPOConfig(
            output_dir,
            seed=seed,
            max_steps=steps,
            learning_rate=2e-4,
            max_completion_length=96,
            max_tool_calling_iterations=MOST_GUESSES,
            reward_weights=[0.0],
            **CPU_SETTINGS,
        ),
        train_dataset=games,
        eval_dataset=games,  # there are no other numbers; what is measured is how they are found
        callbacks=[Progress("reward", "tools/call_frequency")],
    )
    trainer.remove_callback(PrinterCallback)
    before = report("before", measure(trainer))
    trainer.train()
    after = report("after", measure(trainer))
    print("\nA game:")
    show(trainer.rollout([row(number=6)])[0])
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="updates (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the games and of sampling (default: %(default)s)")
    main(**vars(parser.parse_args()))
