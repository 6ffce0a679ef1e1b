"""A model learns to call a calculator: GRPO with a tool, on two CPU cores, without network.

    python examples/calculator.py

The tiny model of the demo cannot multiply large numbers. A short warm-up shows it two ways to answer: with a guess,
which is its habit afterwards and nearly always wrong, and with a call of the calculator, which it makes now and then.
The reward looks at the final answer only; that calling pays is for the model to find out.
"""

import argparse
import random
import re
from dataclasses import dataclass
from itertools import product
from typing import Any

from datasets import Dataset
from tiny_chat import CPU_SETTINGS, Progress, Scores, answers, calls, imitate, load, report, says, show, user
from transformers import PrinterCallback

from gruppo import GRPOConfig, GRPOTrainer
from gruppo.demo.task import extract_answer
from gruppo.types import Message

STEPS = 40
CALLS_SHOWN = 0.2  # the share of demonstrations that call the tool


def calc(term: str) -> int:
    """Multiply two whole numbers.

    Args:
        term: what to calculate, such as 12*34
    """
    found = re.fullmatch(r"(\d+)\*(\d+)", term)
    if found is None:
        raise ValueError(f"{term} is not a product of two numbers")  # the model reads this; training goes on
    return int(found[1]) * int(found[2])


@dataclass(frozen=True)
class Product:
    """One question, such as "How many are 347 times 86?"."""

    a: int
    b: int

    @property
    def row(self) -> dict[str, Any]:
        """What the trainer gets: a conversation, and a column for the reward."""
        return {"prompt": [user(f"How many are {self.a} times {self.b}?")], "answer": str(self.a * self.b)}

    @property
    def guessed(self) -> list[Message]:
        """A conversation that answers at once."""
        return [*self.row["prompt"], says(f"A: {self.a * self.b}")]

    @property
    def called(self) -> list[Message]:
        """A conversation that asks the calculator first."""
        question, answer = self.guessed
        return [question, calls("calc", term=f"{self.a}*{self.b}"), answers(self.a * self.b), answer]


def exact_match(completions: list[list[Message]], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward 1.0 where the last message ends with the right answer, however the model came by it."""
    return [float(extract_answer(c[-1]["content"]) == right) for c, right in zip(completions, answer, strict=True)]


def measure(trainer: GRPOTrainer) -> Scores:
    """Held-out accuracy, and how often the calculator is called."""
    found = trainer.evaluate()
    return {"accuracy": found["eval_rewards/exact_match/mean"], "call_rate": found["eval_tools/call_frequency"]}


def main(steps: int = STEPS, seed: int = 0, output_dir: str = "runs/calculator") -> tuple[Scores, Scores]:
    """Warm up, train, and return the measurements before and after."""
    rng = random.Random(seed)
    products = [Product(a, b) for a, b in product(range(100, 1000), range(11, 100))]
    rng.shuffle(products)
    held_out, train, shown = products[:256], products[256:2304], products[2304:6400]

    model, tokenizer = load()
    # First how the calculator is used, then the habit to do without it.
    imitate(model, tokenizer, [p.called for p in shown], [calc], steps=250)
    habits = [p.called if rng.random() < CALLS_SHOWN else p.guessed for p in shown]
    imitate(model, tokenizer, habits, [calc], steps=60)

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=exact_match,
        tools=[calc],
        args=GRPOConfig(
            output_dir, seed=seed, max_steps=steps, learning_rate=2e-4, max_completion_length=48, **CPU_SETTINGS
        ),
        train_dataset=Dataset.from_list([p.row for p in train]),
        eval_dataset=Dataset.from_list([p.row for p in held_out]),
        callbacks=[Progress("reward", "tools/call_frequency")],
    )
    trainer.remove_callback(PrinterCallback)
    before = report("before", measure(trainer))
    trainer.train()
    after = report("after", measure(trainer))
    print("\nA conversation:")
    show(trainer.rollout([trainer.eval_dataset[0]])[0])
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="updates (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and of sampling (default: %(default)s)")
    main(**vars(parser.parse_args()))
