"""How reward functions and reward models are called."""

import asyncio
import functools
import logging
import math
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from gruppo.config.grpo import GRPOConfig
from gruppo.errors import ConfigError, RewardError
from gruppo.rewards.models import load_reward_tokenizer, score_with_model, scored_text
from gruppo.rewards.runner import (
    RewardInputs,
    RewardRunner,
    checked,
    function_name,
    is_async,
    is_reward_model,
    resolve_rewards,
    unique_names,
)
from gruppo.trainer.grpo import GRPOTrainer
from tests.helpers import base_args, chats, prompts, sharp, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
BATCH = RewardInputs(
    rows=[{"prompt": "p", "answer": "1", "level": 3}, {"prompt": "q", "answer": "2", "completion": "x"}],
    prompts=["p", "q"],
    completions=["a", "bc"],
    completion_ids=[(5, 1), (6, 7, 1)],
)


def runner(*functions: Any, tokenizers: Any = None, batch_size: int = 8, **kwargs: Any) -> RewardRunner:
    names = unique_names([function_name(f) for f in functions])
    return RewardRunner(
        functions, names, tokenizers or [None] * len(functions), device=CPU, batch_size=batch_size, **kwargs
    )


def constant(value: Any) -> Any:
    def reward(completions: list[Any], **kwargs: Any) -> list[Any]:
        return [value] * len(completions)

    return reward


def same(found: torch.Tensor, expected: list[list[float]]) -> bool:
    return torch.equal(found.nan_to_num(9e9), torch.tensor(expected).nan_to_num(9e9))


# ---- what a function is given


def test_every_keyword_of_the_protocol():
    given: dict[str, Any] = {}

    def reward(*args: Any, **kwargs: Any) -> list[float]:
        assert not args
        given.update(kwargs)
        return [0.0, 0.0]

    tools = {"trainer_state": object(), "log_extra": print, "log_metric": print}
    runner(reward).score(BATCH, **tools)
    assert given == {
        "prompts": ["p", "q"],
        "completions": ["a", "bc"],
        "completion_ids": [[5, 1], [6, 7, 1]],
        "answer": ["1", "2"],
        "level": [3, None],  # the second row has no such column
        **tools,
    }


def test_a_column_that_only_later_rows_have_is_given_too():
    batch = RewardInputs([{"prompt": "p"}, {"prompt": "q", "hint": "h"}], ["p", "q"], ["a", "b"], [[1], [1]])
    assert batch.columns() == {"hint": [None, "h"]}


def test_columns_called_like_arguments_of_ours_do_not_shadow_them():
    rows = [{"prompt": "p", "prompts": "x", "completions": "y", "trainer_state": "z"}]
    seen: dict[str, Any] = {}

    def reward(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0]

    runner(reward).score(RewardInputs(rows, ["p"], ["a"], [[1]]), trainer_state="state")
    assert (seen["prompts"], seen["completions"], seen["trainer_state"]) == (["p"], ["a"], "state")


def test_a_function_may_name_what_it_wants():
    def reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(a) + len(c) for c, a in zip(completions, answer, strict=True)]

    assert runner(reward).score(BATCH).tolist() == [[2.0], [4.0]]


# ---- what a function returns


@pytest.mark.parametrize(
    ("output", "values"),
    [
        ([1, 0.5], [1.0, 0.5]),
        ((True, False), [1.0, 0.0]),
        ([None, 2], [math.nan, 2.0]),
        (np.array([1.5, 2.5], dtype=np.float32), [1.5, 2.5]),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        ([torch.tensor(3.0), np.float64(4)], [3.0, 4.0]),
        ([Fraction(1, 2), -0.0], [0.5, 0.0]),
        ((x for x in (1, 2)), [1.0, 2.0]),
        ([3.4e38, -3.4e38], [3.4e38, -3.4e38]),
    ],
)
def test_numbers_of_every_kind(output, values):
    assert checked(output, "f", 2) == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([1.0], "'f' returned 1 rewards for 2 completions"),
        ([], "'f' returned 0 rewards for 2 completions"),
        (1.0, "'f' returned float; it must return a list"),
        (None, "'f' returned NoneType"),
        (torch.tensor(1.0), "'f' returned Tensor"),
        ("12", "'f' returned str"),
        (b"12", "'f' returned bytes"),
        ({0: 1.0, 1: 2.0}, "'f' returned dict"),
        ({1.0, 2.0}, "'f' returned set"),
        ([1.0, math.nan], "'f' returned nan for completion 1"),
        ([math.inf, 1.0], "'f' returned inf for completion 0"),
        ([1.0, 1e39], r"'f' returned 1e\+39 for completion 1"),
        ([1.0, 10**400], "'f' returned 1000.* for completion 1"),
        ([1.0, "2"], "'f' returned '2' for completion 1"),
        ([1.0, [2.0]], r"'f' returned \[2.0\] for completion 1"),
        ([1.0, 1j], "'f' returned 1j for completion 1"),
        ([torch.ones(2), 1.0], "for completion 0"),
    ],
)
def test_anything_else_is_an_error_that_names_the_function(output, message):
    with pytest.raises(RewardError, match=message):
        checked(output, "f", 2)


def test_none_becomes_nan_in_float32():
    rewards = runner(constant(None), constant(0.1)).score(BATCH)
    assert rewards.dtype == torch.float32
    assert same(rewards, [[math.nan, 0.1], [math.nan, 0.1]])


def test_a_completion_that_nothing_scores_is_reported_with_its_row(caplog):
    def second_only(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None, 1.0]

    with caplog.at_level(logging.WARNING, "gruppo.rewards.runner"):
        runner(second_only, constant(0.0)).score(BATCH)
        assert not caplog.records
        runner(second_only, second_only).score(BATCH)
    (record,) = caplog.records
    assert "1 of 2 completions" in record.message
    assert "prompt 'p', completion 'a'" in record.message
    assert "'answer': '1'" in record.message


def test_an_exception_propagates():
    def broken(**kwargs: Any) -> list[float]:
        raise ZeroDivisionError("mine")

    async def broken_too(**kwargs: Any) -> list[float]:
        raise ZeroDivisionError("async")

    with pytest.raises(ZeroDivisionError, match="mine"):
        runner(broken).score(BATCH)
    with pytest.raises(ZeroDivisionError, match="async"):
        runner(broken_too).score(BATCH)


# ---- order


def test_columns_are_in_the_order_of_the_functions_sync_and_async_mixed():
    async def later(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [2.0, 2.0]

    assert runner(constant(1.0), later, constant(3.0)).score(BATCH).tolist() == [[1.0, 2.0, 3.0]] * 2


def test_sync_functions_run_in_order_and_before_async_ones():
    calls: list[str] = []

    def named(name: str) -> Any:
        def reward(**kwargs: Any) -> list[float]:
            calls.append(name)
            return [0.0, 0.0]

        return reward

    async def waiting(**kwargs: Any) -> list[float]:
        calls.append("async")
        return [0.0, 0.0]

    runner(waiting, named("a"), named("b")).score(BATCH)
    assert calls == ["a", "b", "async"]


def test_async_functions_run_at_the_same_time():
    # Each waits until both have started: one after the other, they would wait for ever.
    async def meet(barrier: list[asyncio.Barrier], **kwargs: Any) -> list[float]:
        if not barrier:
            barrier.append(asyncio.Barrier(2))
        async with asyncio.timeout(20):
            await barrier[0].wait()
        return [1.0, 1.0]

    barrier: list[asyncio.Barrier] = []
    together = [functools.partial(meet, barrier), functools.partial(meet, barrier)]
    assert runner(*together).score(BATCH).tolist() == [[1.0, 1.0]] * 2


def test_async_functions_keep_their_event_loop():
    loops: list[Any] = []

    async def reward(**kwargs: Any) -> list[float]:
        loops.append((asyncio.get_running_loop(), threading.current_thread().name))
        return [0.0, 0.0]

    scoring = runner(reward)
    scoring.score(BATCH)
    scoring.score(BATCH)
    assert loops[0] == loops[1]
    assert loops[0][1] == "gruppo-async-rewards"


def test_every_function_is_timed_under_its_name():
    timed: list[str] = []

    class Timer:
        def __init__(self, name: str):
            timed.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: Any) -> None: ...

    async def slow(**kwargs: Any) -> list[float]:
        return [0.0, 0.0]

    runner(constant(1.0), slow, timer=Timer).score(BATCH)
    assert timed == ["reward", "slow"]


# ---- what counts as a reward, and its name


def plain(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


async def coroutine(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


class Judge:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    def method(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


class AsyncJudge:
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    async def method(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


def own_name() -> Any:
    judge = Judge()
    judge.__name__ = "my_judge"
    return judge


@pytest.mark.parametrize(
    ("function", "name", "asynchronous"),
    [
        (plain, "plain", False),
        (coroutine, "coroutine", True),
        (functools.partial(plain, extra=1), "plain", False),
        (functools.partial(functools.partial(coroutine), extra=1), "coroutine", True),
        (Judge(), "Judge", False),
        (AsyncJudge(), "AsyncJudge", True),
        (functools.partial(AsyncJudge(), extra=1), "AsyncJudge", True),
        (Judge().method, "method", False),
        (AsyncJudge().method, "method", True),
        (own_name(), "my_judge", False),
        (lambda completions, **kwargs: [1.0] * len(completions), "<lambda>", False),
    ],
)
def test_callables_of_every_kind(function, name, asynchronous):
    assert function_name(function) == name
    assert is_async(function) is asynchronous
    assert not is_reward_model(function)
    assert runner(function).score(BATCH).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("names", "unique"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "a"], ["a", "a_2", "a_3"]),
        (["a", "b", "a", "b"], ["a", "b", "a_2", "b_2"]),
        (["a_2", "a", "a"], ["a_2", "a", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_2", "a_2_2"]),
        ([], []),
    ],
)
def test_names_are_never_shared(names, unique):
    assert unique_names(names) == unique
    assert len(set(unique)) == len(names)


def test_the_users_lists_are_not_touched():
    functions, tokenizers, weights = [plain], [None], [2.0]
    resolved, _, tensor = resolve_rewards(functions, tokenizers, weights, trust_remote_code=False)
    assert resolved == [plain]
    assert resolved is not functions
    assert (functions, tokenizers, weights) == ([plain], [None], [2.0])
    assert (tensor.tolist(), tensor.dtype) == ([2.0], torch.float32)


def test_a_single_function_and_default_weights():
    functions, tokenizers, weights = resolve_rewards(plain, None, None, trust_remote_code=False)
    assert (functions, tokenizers, weights.tolist()) == ([plain], [None], [1.0])


def test_a_trainer_leaves_the_list_alone_and_logs_duplicates_apart(tmp_path):
    functions = [plain, plain]
    trainer = GRPOTrainer(
        tiny_model(), functions, GRPOConfig(**base_args(tmp_path)), prompts(), processing_class=tiny_tokenizer()
    )
    assert functions == [plain, plain]
    assert trainer.reward_func_names == ["plain", "plain_2"]
    trainer.collect(trainer.train_dataset.select([0, 0, 1, 1]))
    assert {"rewards/plain/mean", "rewards/plain_2/mean"} <= trainer.metrics.values["train"].keys()


# ---- reward models


def classifier(**kwargs: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    size = dict(vocab_size=101, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    settings = size | dict(num_labels=1, pad_token_id=0, max_position_embeddings=64, bos_token_id=None) | kwargs
    return sharp(LlamaForSequenceClassification(LlamaConfig(**settings)))


def gpt2_classifier() -> GPT2ForSequenceClassification:
    """Its positions are learned: padding on the left would shift them."""
    torch.manual_seed(0)
    size = dict(vocab_size=101, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    return sharp(GPT2ForSequenceClassification(GPT2Config(**size, num_labels=1, pad_token_id=0)))


def alone(model: Any, tokenizer: Any, text: str) -> float:
    """The score of one unpadded text: the head at its last token."""
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return float(model.score(model.base_model(ids).last_hidden_state)[0, -1, 0])


TEXTS = ["a", "abcdef", "hello there", "xyz", "q" * 30]


@pytest.mark.parametrize("make", [classifier, gpt2_classifier])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 99])
def test_a_score_is_that_of_the_text_alone(make, side, batch_size):
    model, tokenizer = make(), tiny_tokenizer(padding_side=side)
    scores = score_with_model(model, tokenizer, TEXTS, batch_size=batch_size, device=CPU)
    assert scores == pytest.approx([alone(model, tokenizer, text) for text in TEXTS], rel=1e-5)
    assert len({round(score, 4) for score in scores}) == len(TEXTS)
    assert tokenizer.padding_side == side


def test_no_special_tokens_are_added():
    model, plain_tokenizer, adding = classifier(), tiny_tokenizer(), tiny_tokenizer()
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<user> $A", special_tokens=[("<user>", 2)])
    assert adding("a")["input_ids"][0] == 2
    score = functools.partial(score_with_model, model, texts=TEXTS, batch_size=5, device=CPU)
    assert score(tokenizer=adding) == score(tokenizer=plain_tokenizer)


def test_no_more_than_a_batch_at_a_time():
    model, sizes = classifier(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    score_with_model(model, tiny_tokenizer(), TEXTS, batch_size=2, device=CPU)
    assert sizes == [2, 2, 1]


def test_a_tokenizer_without_pad_token_gets_one_and_the_model_learns_it():
    model, tokenizer = classifier(pad_token_id=None), tiny_tokenizer(pad_token=None)
    assert load_reward_tokenizer(model, tokenizer, False) is tokenizer
    assert (tokenizer.pad_token, model.config.pad_token_id) == ("<eos>", 1)
    scores = score_with_model(model, tokenizer, TEXTS, batch_size=5, device=CPU)
    assert scores == pytest.approx([alone(model, tokenizer, text) for text in TEXTS], rel=1e-5)


def test_the_models_pad_token_follows_the_tokenizer():
    model = classifier(pad_token_id=7)
    load_reward_tokenizer(model, tiny_tokenizer(), False)
    assert model.config.pad_token_id == 0


def test_the_tokenizer_of_a_named_model_is_found(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    classifier().float().save_pretrained(tmp_path)
    functions, tokenizers, _ = resolve_rewards(str(tmp_path), None, None, trust_remote_code=False)
    assert isinstance(functions[0], LlamaForSequenceClassification)
    assert tokenizers[0].pad_token == "<pad>"
    assert function_name(functions[0]) == tmp_path.name
    expected = [alone(classifier().float(), tokenizers[0], text) for text in TEXTS]
    found = score_with_model(functions[0].eval(), tokenizers[0], TEXTS, batch_size=3, device=CPU)
    assert found == pytest.approx(expected, abs=1e-5)


def test_plain_texts_are_joined_and_conversations_rendered_with_the_models_own_template():
    tokenizer = tiny_tokenizer(
        chat_template="{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }};{% endfor %}{{ tail }}"
    )
    user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    assert scored_text(tokenizer, "q: ", "a", {}) == "q: a"
    assert scored_text(tokenizer, [user], [assistant], {"tail": "!"}) == "u=q;a=a;!"


def test_models_and_functions_side_by_side():
    model, tokenizer = classifier(), tiny_tokenizer()
    rewards = runner(plain, model, tokenizers=[None, tokenizer], batch_size=1).score(BATCH)
    expected = [alone(model, tokenizer, text) for text in ("pa", "qbc")]
    assert rewards[:, 0].tolist() == [1.0, 1.0]
    assert rewards[:, 1].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_module_that_is_no_pretrained_model_needs_its_tokenizer():
    compiled = nn.Sequential(nn.Linear(2, 2))
    assert is_reward_model(compiled)
    with pytest.raises(ConfigError, match=r"Sequential is not a PreTrainedModel.*reward_processing_classes"):
        resolve_rewards(compiled, None, None, trust_remote_code=False)
    _, tokenizers, _ = resolve_rewards(compiled, tiny_tokenizer(), None, trust_remote_code=False)
    assert tokenizers[0].pad_token == "<pad>"


def test_a_trainer_scores_conversations_with_a_model_in_evaluation_mode(tmp_path):
    model, tokenizer = classifier(attention_dropout=0.9).train(), tiny_tokenizer()
    trainer = GRPOTrainer(
        tiny_model(),
        [model, plain],
        GRPOConfig(**base_args(tmp_path)),
        chats(),
        processing_class=tiny_tokenizer(),
        reward_processing_classes=[tokenizer, None],
    )
    assert not trainer.reward_funcs[0].training
    turns = [[{"role": "assistant", "content": text}] for text in ("ab", "c", "defg", "")]
    questions = [row["prompt"] for row in chats(4)]
    scores = trainer._calculate_rewards([{}] * 4, questions, turns, [[1]] * 4)[:, 0]
    expected = [
        alone(model, tokenizer, f"<user>p{i}<eos><assistant>{turn[0]['content']}<eos>") for i, turn in enumerate(turns)
    ]
    assert scores.tolist() == pytest.approx(expected, rel=1e-5)
