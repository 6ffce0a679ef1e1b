"""Environments in the trainer: a game, several games, failures, and runs without a dataset."""

import asyncio
import logging
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.errors import ConfigError, DataError, RewardError
from tests.tools.scripted import call, eventually, make, no_reward, questions, tool_tokenizer, turns_in


class Guess:
    """Guess a number; every instance keeps a list of what happened to it."""

    instances: list["Guess"]

    def __init__(self) -> None:
        type(self).instances.append(self)
        self.number, self.tries, self.closed, self.rows = 0, 0, False, []

    def reset(self, number: int = 2, **row: Any) -> str:
        assert not self.closed
        self.rows.append(row)
        self.number, self.tries = number, 0
        return f" (1 to {number})"

    def guess(self, number: int) -> str:
        """Make a guess.

        Args:
            number: what it may be
        """
        self.tries += 1
        return "right" if number == self.number else "wrong"

    def get_reward(self) -> float:
        return 1.0 / (1 + self.tries)

    def close(self) -> None:
        self.closed = True


class Chess:
    def reset(self, **row: Any) -> list[dict[str, str]]:
        return [{"type": "text", "text": " White to "}, {"type": "text", "text": "move."}]

    async def move(self, to: str) -> str:
        """Move a piece.

        Args:
            to: its square
        """
        await asyncio.sleep(0)
        return f"moved to {to}"

    async def get_reward(self) -> float:
        return 0.25


@pytest.fixture(autouse=True)
def no_instances() -> None:
    for cls in (Guess, *Guess.__subclasses__()):
        cls.instances = []


def play(prompt: str, sample: int) -> str:
    """Sample i makes i guesses."""
    return (call("guess", number=1) if turns_in(prompt) < sample else "done") + "<eos>"


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_a_game(tmp_path: Path, trainer_class: Any) -> None:
    seen: list[Any] = []

    def reward(environments: list[Any], prompts: list[Any], **kwargs: Any) -> list[float]:
        seen.append(([env.tries for env in environments], prompts))
        return [0.0] * len(prompts)

    trainer = make(
        tmp_path,
        play,
        trainer_class=trainer_class,
        rewards=reward,
        dataset=questions("Guess", number=[7]),
        arguments={"environment_factory": Guess, "eval_dataset": questions("Try", number=[3])},
        eval_strategy="steps",
        eval_steps=1,
    )
    assert trainer.reward_func_names == ["reward", "Guess"]
    assert trainer.reward_weights.tolist() == [1, 1]
    assert [tool.__name__ for tool in trainer.tools] == ["guess"]
    trainer.train()
    (tries, prompts), (_, held_out) = seen
    assert tries == [0, 1, 2, 3]
    assert prompts == [[{"role": "user", "content": "Guess (1 to 7)"}]] * 4
    assert held_out == [[{"role": "user", "content": "Try (1 to 3)"}]] * 4
    assert trainer.train_dataset[0]["prompt"][0]["content"] == "Guess", "the row is as it was"
    train, held_out_log = (
        next(record for record in trainer.state.log_history if key in record) for key in ("loss", "eval_reward")
    )
    assert train["rewards/Guess/mean"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert train["tools/call_frequency"] == held_out_log["eval_tools/call_frequency"] == 6 / 4
    assert train["tools/failed_resets"] == 0
    assert len(Guess.instances) == 8, "four to train with, four to evaluate with"
    assert all(env.closed for env in Guess.instances), "the run is over"
    assert trainer.evaluate()["eval_rewards/Guess/mean"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert len(Guess.instances) == 12


def test_environments_are_kept_from_step_to_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, play, rewards=None, arguments={"environment_factory": Guess}, max_steps=3)
    trainer.train()
    assert len(Guess.instances) == 4
    assert [len(env.rows) for env in Guess.instances] == [3] * 4


def test_reward_weights_are_those_of_the_users_functions(tmp_path: Path) -> None:
    trainer = make(tmp_path, play, arguments={"environment_factory": Guess}, reward_weights=[0.5])
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    with pytest.raises(ConfigError, match=r"2 entries for 1 reward functions.*weight 1"):
        make(tmp_path, play, arguments={"environment_factory": Guess}, reward_weights=[0.5, 1.0])


def test_several_environments(tmp_path: Path) -> None:
    rendered: list[str] = []

    def script(prompt: str, sample: int) -> str:
        if turns_in(prompt):
            return "done<eos>"
        rendered.append(prompt)
        return (call("guess", number=1) if "[guess]" in prompt else call("move", to="e4")) + "<eos>"

    rows = questions("Guess", "Play", number=[7, 7], environment=["number", "chess"])
    trainer = make(
        tmp_path,
        script,
        dataset=rows,
        arguments={"environment_factory": {"number": Guess, "chess": Chess}},
        per_device_train_batch_size=8,
        shuffle_dataset=False,
    )
    assert trainer.reward_func_names == ["no_reward", "Guess", "Chess"]
    rollouts = trainer.rollout([rows[0]] * 2 + [rows[1]] * 2)
    assert [m["content"] for r in rollouts for m in r.output if m["role"] == "tool"] == ["wrong"] * 2 + [
        "moved to e4"
    ] * 2
    assert rollouts[0].prompt.text[0]["content"] == "Guess (1 to 7)"
    assert tool_tokenizer().decode(rollouts[0].prompt.ids).startswith("<system>[guess]<eos>")
    assert tool_tokenizer().decode(rollouts[2].prompt.ids).startswith("<system>[move]<eos><user>Play White to move.")
    rewards = trainer.reward(rollouts).values_NR
    assert rewards[:, 1].tolist()[:2] == [0.5, 0.5]
    assert rewards[:, 1].isnan().tolist() == [False, False, True, True]
    assert rewards[2:, 2].tolist() == [0.25, 0.25]
    trainer.train()


def test_without_a_dataset_the_environment_asks(tmp_path: Path) -> None:
    trainer = make(tmp_path, play, rewards=None, arguments={"environment_factory": Guess, "train_dataset": None})
    assert trainer.reward_func_names == ["Guess"]
    (rollout, *_) = trainer.rollout([trainer.train_dataset[0]] * 4)
    assert rollout.prompt.text == [{"role": "user", "content": " (1 to 2)"}]
    trainer.train()
    assert trainer.state.global_step == 1


class Moody(Guess):
    broken = 2

    def reset(self, **row: Any) -> Any:
        if self.instances.index(self) == type(self).broken:
            raise OSError("no display")
        return super().reset(**row)


def test_a_failed_reset_costs_its_own_row_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path, play, arguments={"environment_factory": Moody})
    with caplog.at_level(logging.WARNING):
        batch = trainer.collect([trainer.train_dataset[0]] * 4)
    assert "Moody.reset failed: no display" in caplog.text
    assert batch.advantages is not None
    assert batch.advantages[2] == 0, "the row counts for nothing"
    assert (batch.advantages[[0, 1, 3]] != 0).all()
    rewards = torch.tensor([0.0 + 1, 1 + 1 / 2, 3 + 1 / 4])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(batch.advantages[[0, 1, 3]], expected)
    values = trainer.metrics.values["train"]
    assert values["tools/failed_resets"] == [0.25]
    assert values["rewards/unscorable"] == [1.0]
    trainer.collect([trainer.train_dataset[0]] * 4)
    assert values["tools/failed_resets"] == [0.25, 0.0], "another environment took its place"
    assert len(Moody.instances) == 5
    eventually(lambda: Moody.instances[2].closed)


def test_a_failed_reset_may_end_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path, play, arguments={"environment_factory": Moody}, reward_on_error="raise")
    with pytest.raises(RewardError, match="reset of 1 of 4 environments failed, with OSError: no display"):
        trainer.collect([trainer.train_dataset[0]] * 4)


class Unfair(Guess):
    def get_reward(self) -> float:
        if self.tries == 1:
            raise ZeroDivisionError("oops")
        return float(self.tries)


def test_a_failed_get_reward_costs_its_own_row_only(tmp_path: Path) -> None:
    trainer = make(tmp_path, play, arguments={"environment_factory": Unfair})
    batch = trainer.collect([trainer.train_dataset[0]] * 4)
    assert batch.advantages is not None
    assert (batch.advantages == 0).tolist() == [False, True, False, False]
    assert trainer.metrics.values["train"]["rewards/Unfair/failures"] == [1.0]


class Slow(Guess):
    def guess(self, number: int) -> str:
        """Make a guess.

        Args:
            number: what it may be
        """
        time.sleep(2.0 if self.instances.index(self) == 1 else 0.0)
        return super().guess(number)


def test_an_environment_that_overran_is_replaced(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, play, arguments={"environment_factory": Slow}, tool_timeout=0.3, max_tool_calling_iterations=1
    )
    rollouts = trainer.rollout([trainer.train_dataset[0]] * 4)
    assert "took longer" in rollouts[1].output[1]["content"]
    assert rollouts[1].extra["environments"] is Slow.instances[1]
    assert not Slow.instances[1].closed, "its episode is still to be scored"
    assert trainer.environments == [rollout.extra["environments"] for rollout in rollouts]
    again = trainer.rollout([trainer.train_dataset[0]] * 4)
    assert Slow.instances[1] not in [rollout.extra["environments"] for rollout in again]
    eventually(lambda: Slow.instances[1].closed)


def test_an_environment_that_overran_is_not_asked_for_a_reward(tmp_path: Path) -> None:
    trainer = make(tmp_path, play, arguments={"environment_factory": Slow}, tool_timeout=0.3)
    start = time.perf_counter()
    batch = trainer.collect([trainer.train_dataset[0]] * 4)
    assert time.perf_counter() - start < 20
    assert batch.advantages is not None
    assert (batch.advantages == 0).tolist() == [False, True, False, False], "its row counts for nothing"


class NoTools:
    def reset(self, **row: Any) -> str:
        return "?"

    def get_reward(self) -> float:
        return 1.0


def test_an_environment_without_tools(tmp_path: Path) -> None:
    trainer = make(tmp_path, lambda prompt, sample: "done<eos>", arguments={"environment_factory": NoTools})
    (rollout, *_) = trainer.rollout([trainer.train_dataset[0]] * 4)
    assert tool_tokenizer().decode(rollout.prompt.ids) == "<user>q?<eos><assistant>"
    assert rollout.output == [{"role": "assistant", "content": "done"}]
    trainer.train()
    assert "tools/call_frequency" not in trainer.state.log_history[0]


def test_replacements_play_too(tmp_path: Path) -> None:
    """Dynamic sampling: the second prompt's group has no spread and is played again with the next prompt."""

    def script(prompt: str, sample: int) -> str:
        return play(prompt, 0 if "flat" in prompt else sample)

    trainer = make(
        tmp_path,
        script,
        rewards=None,
        dataset=questions("one", "flat", "two", "three"),
        arguments={"environment_factory": Guess},
        per_device_train_batch_size=8,
        dynamic_sampling=True,
        shuffle_dataset=False,
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["dynamic_sampling/prompts_replaced"] == 1
    assert log["frac_reward_zero_std"] == 0
    assert not math.isnan(log["reward"])
    assert log["tools/call_frequency"] == 12 / 12, "calls of all samples, those that were replaced among them"
    assert log["tools/turns"] == 24 / 12
    assert log["tools/failed_resets"] == 0


def guess(number: int) -> str:
    """Guess elsewhere.

    Args:
        number: what it may be
    """
    return str(number)


class NoReset:
    pass


class Level:
    def reset(self, level: int, **row: Any) -> None: ...


BOTH = {"number": Guess, "chess": Chess}


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "words"),
    [
        ({"environment_factory": NoReset}, {}, ConfigError, "no method `reset`"),
        (
            {"environment_factory": Guess, "tools": [guess]},
            {},
            ConfigError,
            "`guess` is a tool and a method of .* Guess",
        ),
        ({"environment_factory": BOTH}, {}, DataError, "A row has environment=None, but"),
        ({"environment_factory": BOTH, "train_dataset": None}, {}, ConfigError, "works with one environment"),
        ({"environment_factory": Guess, "train_dataset": None}, {"max_steps": -1}, ConfigError, "Set max_steps"),
        ({"train_dataset": None}, {}, ConfigError, "train_dataset is missing"),
        (
            {"environment_factory": BOTH, "train_dataset": questions("q", environment=["go"])},
            {},
            DataError,
            "environment='go', but environment_factory has 'number', 'chess'",
        ),
        ({"environment_factory": BOTH}, {"remove_unused_columns": True}, ConfigError, "would remove the column"),
        (
            {"environment_factory": Guess, "train_dataset": questions("q", environments=["x"])},
            {},
            DataError,
            "column `environments`",
        ),
        (
            {"environment_factory": Level},
            {},
            DataError,
            r"Level.reset\(level.*the columns of a row, prompt, do not match: missing.*'level'",
        ),
        (
            {"environment_factory": {"level": Level}, "train_dataset": questions("q", environment=["level"])},
            {},
            DataError,
            "missing a required argument: 'level'",
        ),
    ],
)
def test_bad_input(tmp_path: Path, arguments: Any, settings: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make(tmp_path, rewards=no_reward, arguments=arguments, **settings)


def test_there_must_be_a_reward(tmp_path: Path) -> None:
    class Unpaid:
        def reset(self, **row: Any) -> None: ...

    with pytest.raises(ConfigError, match="There is no reward"):
        make(tmp_path, rewards=None, arguments={"environment_factory": Unpaid})
