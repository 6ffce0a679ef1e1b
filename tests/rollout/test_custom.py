"""Rollouts that a user's function makes."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from gruppo.config.grpo import GRPOConfig
from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.custom import CustomRollout
from gruppo.trainer.grpo import GRPOTrainer
from gruppo.types import Completion, StopReason
from tests.helpers import base_args, prompts, tiny_model, tiny_tokenizer

TRAINER = SimpleNamespace(args="the args", processing_class="the tokenizer")


def returning(**output: Any) -> CustomRollout:
    """A rollout function for two prompts: its output, with defaults for what is not given."""
    defaults = {"prompt_ids": [[1], [1, 2]], "completion_ids": [[5, 6], [7]], "logprobs": [[-0.1, -0.2], [-0.3]]}
    return CustomRollout(lambda texts, trainer: defaults | output, TRAINER)


# ---- how it is called


class Rollouts:
    def method(self, texts: Any, trainer: Any) -> Any:
        return echo(texts, trainer)

    def __call__(self, texts: Any, args: Any, processing_class: Any) -> Any:
        return echo(texts, args, processing_class)


def echo(texts: list[Any], *context: Any) -> dict[str, Any]:
    n = len(texts)
    return {
        "prompt_ids": [[1]] * n,
        "completion_ids": [[2]] * n,
        "logprobs": None,
        "text": texts,
        "context": context[0],
    }


def with_trainer(texts: Any, trainer: Any) -> Any:
    return echo(texts, trainer)


def with_option(texts: Any, trainer: Any, retries: int = 3) -> Any:
    return echo(texts, trainer)


def with_args(texts: Any, args: Any, processing_class: Any) -> Any:
    return echo(texts, args, processing_class)


@pytest.mark.parametrize(
    ("function", "context"),
    [
        (with_trainer, TRAINER),
        (with_option, TRAINER),
        (echo, TRAINER),
        (Rollouts().method, TRAINER),
        (functools.partial(with_option, retries=1), TRAINER),
        (with_args, "the args"),
        (Rollouts(), "the args"),
    ],
)
def test_both_signatures_are_known(function, context):
    _, _, extras = CustomRollout(function, TRAINER)(["a", "b"])
    assert [extra["text"] for extra in extras] == ["a", "b"]
    assert [extra["context"] for extra in extras] == [context, context]


@pytest.mark.parametrize("function", [lambda texts: {}, lambda a, b, c, d: {}, lambda *, texts: {}])
def test_other_signatures_are_refused_before_the_run(function):
    with pytest.raises(ConfigError, match=r"it is called as f\(prompts, trainer\)"):
        CustomRollout(function, TRAINER)


def test_the_function_may_change_the_prompts_it_gets():
    chat = [{"role": "user", "content": "a"}]
    lengths = []

    def function(texts: list[Any], trainer: Any) -> Any:
        for text in texts:
            text.append({"role": "assistant", "content": "b"})
        lengths.extend(map(len, texts))
        output = echo(texts, trainer)
        return output | {"text": [texts.pop() for _ in range(2)]}

    given = [chat, chat]  # a group shares one object
    CustomRollout(function, TRAINER)(given)
    assert lengths == [2, 2]
    assert given == [[{"role": "user", "content": "a"}]] * 2


# ---- what it returns


def test_prompts_and_completions_come_back_one_per_prompt():
    prompt_ids, completions, extras = returning()(["a", "b"])
    assert prompt_ids == [[1], [1, 2]]
    assert completions == [
        Completion([5, 6], StopReason.UNKNOWN, [-0.1, -0.2]),
        Completion([7], StopReason.UNKNOWN, [-0.3]),
    ]
    assert extras == [{}, {}]


def test_log_probs_may_be_unknown_for_all_or_for_some():
    assert [c.logps for c in returning(logprobs=None)(["a", "b"])[1]] == [None, None]
    assert [c.logps for c in returning(logprobs=[None, [-0.3]])(["a", "b"])[1]] == [None, [-0.3]]


def test_env_mask_is_the_mask_of_the_model():
    _, completions, extras = returning(env_mask=[[1, 0], None])(["a", "b"])
    assert [c.model_mask for c in completions] == [[1, 0], None]
    assert extras == [{}, {}]


@pytest.mark.parametrize(
    ("names", "picked"),
    [
        ([[[5, 9], [4, 6]], [[8, 7]]], [[-0.1, -2.0], [-4.0]]),
        ([[[9, 5], [6, 4]], [[7, 8]]], [[-1.0, -0.2], [-0.3]]),
        ([[[9, 8], [6, 4]], [[1, 2]]], [[None, -0.2], [None]]),  # the sampled token is not among the candidates
        (None, [[-0.1, -0.2], [-0.3]]),  # without names the first one is the sampled token's
        ([None, [[8, 7]]], [[-0.1, -0.2], [-4.0]]),
    ],
)
def test_nested_log_probs_give_the_sampled_tokens(names, picked):
    nested = [[[-0.1, -1.0], [-0.2, -2.0]], [[-0.3, -4.0]]]
    _, completions, extras = returning(logprobs=nested, logprob_token_ids=names)(["a", "b"])
    assert [c.logps for c in completions] == picked
    assert extras == [{}, {}]


def test_further_fields_are_split_by_prompt_or_the_same_for_all():
    _, _, extras = returning(turns=[1, 2], scores=("x", "y"), env="maze", options={"a": 1})(["a", "b"])
    assert extras == [
        {"turns": 1, "scores": "x", "env": "maze", "options": {"a": 1}},
        {"turns": 2, "scores": "y", "env": "maze", "options": {"a": 1}},
    ]


def test_an_empty_completion_is_a_completion():
    _, completions, _ = returning(completion_ids=[[], [7]], logprobs=[[], [-0.3]])(["a", "b"])
    assert [list(c.ids) for c in completions] == [[], [7]]


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        ({"prompt_ids": None}, ValueError, "missing: prompt_ids"),
        ({"prompt_ids": [[1]]}, RolloutError, "1 entries in 'prompt_ids' for 2 prompts"),
        ({"completion_ids": [[1]] * 3}, RolloutError, "3 entries in 'completion_ids' for 2 prompts"),
        ({"logprobs": [[-0.1, -0.2]]}, RolloutError, "1 entries in 'logprobs' for 2 prompts"),
        ({"logprobs": [[-0.1, -0.2], [-0.3, -0.4]]}, RolloutError, r"logprobs\[1\] has 2 entries for 1"),
        ({"env_mask": [[1], [1]]}, RolloutError, r"env_mask\[0\] has 1 entries for 2"),
        ({"logprob_token_ids": [[[5]], [[7]]]}, RolloutError, r"logprob_token_ids\[0\] has 1 entries for 2"),
        ({"turns": [1, 2, 3]}, RolloutError, "3 entries in 'turns' for 2 prompts"),
        ({"prompt_ids": [[1], []]}, RolloutError, r"prompt_ids\[1\] is empty"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(output, error, message):
    with pytest.raises(error, match=message):
        returning(**output)(["a", "b"])


# ---- inside a trainer


def test_a_trainer_takes_masks_and_extra_fields_from_it(tmp_path):
    seen: dict[str, Any] = {}

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        n = len(texts)
        return {
            "prompt_ids": [trainer.processing_class(text)["input_ids"] for text in texts],
            "completion_ids": [[20, 21, 22, 1]] * n,
            "logprobs": [[-0.5] * 4] * n,
            "env_mask": [[1, 0, 0, 1]] * n,
            "turns": list(range(n)),
            "env": "maze",
        }

    def reward(completions: list[str], turns: list[int], env: list[str], **kwargs: Any) -> list[float]:
        seen.update(completions=completions, turns=turns, env=env, ids=kwargs["completion_ids"])
        return [float(turn) for turn in turns]

    trainer = GRPOTrainer(
        tiny_model(),
        reward,
        GRPOConfig(**base_args(tmp_path, max_steps=1)),
        prompts(),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
    )
    batch = trainer.collect(trainer.train_dataset.select([0, 0, 1, 1]))
    assert seen["turns"] == [0, 1, 2, 3]
    assert seen["env"] == ["maze"] * 4
    assert seen["ids"] == [[20, 21, 22, 1]] * 4
    assert batch.tool_mask.tolist() == [[1, 0, 0, 1]] * 4
    assert batch.loss_mask_BT.sum() == 8
    assert batch.sampling_per_token_logps.tolist() == [[-0.5] * 4] * 4
    assert [round(a, 3) for a in batch.advantages.tolist()] == [-0.707, 0.707, -0.707, 0.707]


def test_a_token_outside_the_vocabulary_is_named():
    def far(prompts, trainer):
        return {"prompt_ids": [[5]] * len(prompts), "completion_ids": [[7, 101]] * len(prompts), "logprobs": None}

    with pytest.raises(RolloutError, match=r"token id 101 in row 0.* 101 tokens"):
        CustomRollout(far, None, vocabulary_size=101)(["p"])
    assert CustomRollout(far, None, vocabulary_size=102)(["p"])[1][0].ids == [7, 101]
