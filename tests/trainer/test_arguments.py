"""What is told about the trainer's arguments before a model is loaded, and what is let through."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from gruppo.errors import ConfigError
from gruppo.rewards.models import load_reward_model
from gruppo.trainer.construct.arguments import INSTEAD, columns_of
from gruppo.trainer.grpo import GRPOTrainer
from gruppo.trainer.rloo import RLOOTrainer
from tests.helpers import length_reward, prompts
from tests.trainer.runs import RecordedGRPO, make, run


def names_turns(completions: list[Any], turns: list[int], **kwargs: Any) -> list[float]:
    """Asks for something that is no column of the dataset."""
    return [float(turn) for turn in turns]


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_the_decorator_leaves_the_signature_alone(trainer_class):
    signature = inspect.signature(trainer_class)
    assert list(signature.parameters)[:4] == ["model", "reward_funcs", "args", "train_dataset"]
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    assert not set(INSTEAD) & set(signature.parameters), "a hint about an argument that is there"


def test_a_missing_argument_is_pythons_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        GRPOTrainer()


# ---- rewards whose columns are not known at construction


class AddsColumns(RecordedGRPO):
    def _calculate_rewards(self, inputs: Any, *args: Any) -> Any:
        return super()._calculate_rewards([{**row, "turns": i} for i, row in enumerate(inputs)], *args)


def test_a_subclass_may_add_columns(tmp_path):
    assert run(tmp_path, AddsColumns, rewards=names_turns, max_steps=1).state.global_step == 1


def test_a_rollout_function_may_add_columns(tmp_path):
    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        n = len(texts)
        ids = {"prompt_ids": [[9, 9]] * n, "completion_ids": [[8, 7, 1]] * n, "logprobs": [[-0.1] * 3] * n}
        return {**ids, "turns": list(range(n))}

    assert run(tmp_path, rewards=names_turns, rollout_func=rollout, max_steps=1).state.global_step == 1


def test_evaluation_sets_that_are_never_asked_may_lack_columns(tmp_path):
    def graded(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
        return length_reward(completions)

    dataset = prompts(16, solution=["1"] * 16)
    assert make(tmp_path, dataset=dataset, rewards=graded, eval_dataset=prompts(4)).args.eval_strategy == "no"


def added(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {**rows, "turns": [0] * len(rows["prompt"])}


@pytest.mark.parametrize(
    ("dataset", "removes", "expected"),
    [
        (prompts(4, level=[1] * 4, completion=["x"] * 4), False, ["answer", "level"]),
        (prompts(4, images=["x"] * 4), True, ["images"]),
        (prompts(4).with_format(columns=["prompt"]), False, []),
        (prompts(4).with_transform(added), False, None),
        (prompts(0), False, None),
        (prompts(4).to_iterable_dataset(), False, None),
        (None, False, None),
    ],
)
def test_which_columns_are_known(dataset: Dataset, removes, expected):
    assert columns_of(dataset, SimpleNamespace(remove_unused_columns=removes)) == expected


# ---- names of reward models


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"string '{tmp_path}'. A string means a reward model.*could not be loaded"):
        load_reward_model(str(tmp_path), trust_remote_code=False)


def test_a_name_that_is_nearly_a_function(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("We couldn't connect")

    monkeypatch.setattr("gruppo.rewards.models.AutoModelForSequenceClassification.from_pretrained", refuse)
    with pytest.raises(ConfigError, match=r"'accuracy'.*rewards import accuracy_reward`\? .*We couldn't connect"):
        load_reward_model("accuracy", trust_remote_code=False)


def test_a_folder_of_that_name_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accuracy_reward").mkdir()
    with pytest.raises(ConfigError, match="The model could not be loaded"):
        load_reward_model("accuracy_reward", trust_remote_code=False)
