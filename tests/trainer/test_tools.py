"""Rollouts with tools, in the trainer: what the model sees, what rewards see, and what is trained on."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.data.templates import add_response_schema
from gruppo.errors import ConfigError, DataError
from gruppo.rollout.base import RolloutBackend
from gruppo.trainer.collect.tool_turns import tool_metrics
from gruppo.types import Completion, StopReason
from tests.data.imitations import HERMES, QWEN2_5, byte_tokenizer
from tests.helpers import prompts, tiny_model
from tests.processes import run_together
from tests.tools.scripted import (
    ENDS,
    EOS,
    call,
    make,
    no_reward,
    questions,
    random_caller,
    response,
    tokens,
    tool_tokenizer,
    turns_in,
)
from tests.trainer.runs import slow_scores

RANK = int(os.environ.get("RANK", "0"))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    if a == 99:
        raise ValueError("nope")
    return a + b


async def slowly(word: str) -> str:
    """Say a word after a while.

    Args:
        word: which
    """
    await asyncio.sleep(0.01)
    return word


FIRST = [call("add", a=1, b=2), call("add", a=99, b=1), "plain", call("mul", a=1)]


def worked_example(prompt: str, sample: int) -> str:
    return f"done{sample}<eos>" if turns_in(prompt) else FIRST[sample] + "<eos>"


def rollouts(trainer: Any) -> Any:
    return trainer.rollout([trainer.train_dataset[0]] * 4)


def test_the_worked_example(tmp_path: Path) -> None:
    trainer = make(tmp_path, worked_example, arguments={"tools": [add]})
    assert trainer.tools == [add]
    told = ["3", "{'error': 'nope'}", None, "{'error': 'Tool mul not found.'}"]
    for i, (rollout, content) in enumerate(zip(rollouts(trainer), told, strict=True)):
        text = FIRST[i] + "<eos>" + ("" if content is None else f"{response(content)}done{i}<eos>")
        assert list(rollout.completion.ids) == tokens(text), "what was sampled, and between it what was answered"
        written = len(tokens(FIRST[i])) + 1
        answered = 0 if content is None else len(tokens(response(content)))
        last = 0 if content is None else len("done0") + 1
        assert rollout.completion.model_mask == [1] * written + [0] * answered + [1] * last
        assert [m["content"] for m in rollout.output if m["role"] == "tool"] == ([] if content is None else [content])
        assert [m["role"] for m in rollout.output][:1] == ["assistant"]
    first, second = trainer.backend.asked
    assert [request.count for request in first] == [4]
    assert [(r.count, r.turn, r.noise_key, r.first_sample) for r in second] == [
        (1, 1, first[0].noise_key, sample) for sample in (0, 1, 3)
    ]
    metrics = tool_metrics(trainer._under_way.tool_counts)
    assert metrics["tools/call_frequency"] == 0.75
    assert metrics["tools/failure_frequency"] == pytest.approx(2 / 3)
    assert metrics["tools/turns"] == 7 / 4
    assert 0 < metrics["tools/seconds"] < 10


def test_prompts_show_the_tools(tmp_path: Path) -> None:
    trainer = make(tmp_path, worked_example, arguments={"tools": [add, slowly]})
    rollout = rollouts(trainer)[0]
    assert tool_tokenizer().decode(rollout.prompt.ids) == "<system>[add][slowly]<eos><user>q<eos><assistant>"


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_a_run_in_training_and_evaluation(tmp_path: Path, trainer_class: Any) -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], completion_ids: list[Any], **kwargs: Any) -> list[float]:
        seen.append((completions, completion_ids))
        return no_reward(completions)

    trainer = make(
        tmp_path,
        worked_example,
        trainer_class=trainer_class,
        rewards=reward,
        arguments={"tools": [add], "eval_dataset": questions("e")},
        log_completions=True,
        num_completions_to_print=1,
    )
    trainer.train()
    (log,) = [record for record in trainer.state.log_history if "loss" in record]
    assert log["tools/call_frequency"] == 0.75
    lengths = [len(tokens(text)) + 1 + 6 * (i != 2) for i, text in enumerate(FIRST)]
    assert log["completions/mean_length"] == sum(lengths) / 4, "tokens of the model only"
    assert log["num_tokens"] == sum(lengths) + 4 * len(tokens("<system>[add]<eos><user>q<eos><assistant>"))
    completions, ids = seen[0]
    assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
    assert ids[0] == tokens(FIRST[0] + "<eos>" + response("3") + "done0<eos>")
    assert trainer.evaluate()["eval_tools/call_frequency"] == 0.75
    if trainer_class is GRPOTrainer:
        table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
        assert "done0" in str(table["completion"][0])


@pytest.mark.parametrize("settings", [{"loss_type": "dapo"}, {"loss_type": "grpo"}, {"beta": 0.1}])
def test_packed_rows_with_tool_tokens_equal_their_padded_twin(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Packed and padded rows give the same update."""
    updates = []
    for packed in (True, False):
        trainer = make(
            tmp_path, worked_example, arguments={"tools": [add]}, packed_update=packed, optim="sgd",
            learning_rate=1.0, max_grad_norm=0.0, lr_scheduler_type="constant", **settings,
        )  # fmt: skip
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        updates.append({name: before[name] - weight.detach() for name, weight in trainer.model.named_parameters()})
    for name, update in updates[0].items():
        torch.testing.assert_close(update, updates[1][name], rtol=1e-4, atol=1e-6)


def test_the_loss_is_that_of_the_models_tokens(tmp_path: Path) -> None:
    trainer = make(tmp_path, worked_example, arguments={"tools": [add]}, loss_type="dapo")
    model = trainer.model
    batch = trainer.collect([trainer.train_dataset[0]] * 4)
    assert batch.tool_mask is not None
    assert batch.advantages is not None
    tensors = trainer._prepare_inputs(batch.to_dict())
    trainer.compute_loss(model, tensors).backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    # The same by hand: the policy gradient of each token that the model wrote, over their number.
    total = batch.loss_mask_BT.sum()
    for row in range(4):
        keep_prompt, keep = batch.prompt_mask[row].bool(), batch.completion_mask[row].bool()
        prompt, completion = batch.prompt_ids[row][keep_prompt], batch.completion_ids[row][keep]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
        (-batch.advantages[row] * (logps * batch.tool_mask[row][keep]).sum() / total).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-6)


def test_results_are_told_in_the_order_of_the_calls(tmp_path: Path) -> None:
    def script(prompt: str, sample: int) -> str:
        if turns_in(prompt):
            return "done<eos>"
        return call("slowly", word="x") + call("add", a=1, b=1) + call("slowly", word="y") + "<eos>"

    trainer = make(tmp_path, script, arguments={"tools": [add, slowly]})
    output = rollouts(trainer)[0].output
    assert [(m["name"], m["content"]) for m in output if m["role"] == "tool"] == [
        ("slowly", "x"), ("add", "2"), ("slowly", "y"),
    ]  # fmt: skip


def for_ever(prompt: str, sample: int) -> str:
    return call("add", a=1, b=2) + "<eos>"


def test_the_budget_is_that_of_all_turns(tmp_path: Path) -> None:
    turn, answer = len(tokens(for_ever("", 0))), len(tokens(response("3")))
    # Two turns and their answers fit, and some tokens of a third.
    trainer = make(tmp_path, for_ever, arguments={"tools": [add]}, max_completion_length=2 * (turn + answer) + 5)
    rollout = rollouts(trainer)[0]
    assert len(rollout.completion.ids) == 2 * (turn + answer) + 5
    assert rollout.completion.stop is StopReason.LENGTH
    limits = [[request.max_new_tokens for request in asked] for asked in trainer.backend.asked]
    assert limits == [[None], [turn + answer + 5] * 4, [5] * 4]
    assert "tool_calls" not in rollout.output[-1], "half a call is text"
    assert rollout.output[-1]["content"].startswith("<tool")


def test_a_result_that_does_not_fit_is_taken_back_and_counts_as_truncated(tmp_path: Path) -> None:
    turn, answer = len(tokens(for_ever("", 0))), len(tokens(response("3")))
    trainer = make(tmp_path, for_ever, arguments={"tools": [add]}, max_completion_length=turn + answer)
    rollout = rollouts(trainer)[0]
    assert list(rollout.completion.ids) == tokens(for_ever("", 0))
    assert rollout.completion.ids[-1] == EOS
    assert rollout.completion.stop is StopReason.TOOL_BUDGET
    assert [message["role"] for message in rollout.output] == ["assistant"]
    trainer.train()
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 1.0


@pytest.mark.parametrize("rounds", [0, 2])
def test_rounds_are_limited(tmp_path: Path, rounds: int) -> None:
    trainer = make(tmp_path, for_ever, arguments={"tools": [add]}, max_tool_calling_iterations=rounds)
    rollout = rollouts(trainer)[0]
    assert [m["role"] for m in rollout.output] == ["assistant", "tool"] * rounds + ["assistant"]
    assert rollout.output[-1]["tool_calls"]
    assert len(trainer.backend.asked) == 1 + rounds


def test_malformed_calls_are_failures_that_the_model_is_told(tmp_path: Path) -> None:
    wrong = [
        '<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        call("add", a=1, c=2),
    ]

    def script(prompt: str, sample: int) -> str:
        return "done<eos>" if turns_in(prompt) else wrong[sample] + "<eos>"

    trainer = make(tmp_path, script, arguments={"tools": [add]})
    for rollout in rollouts(trainer):
        (told,) = [message["content"] for message in rollout.output if message["role"] == "tool"]
        assert told.startswith("{'error'")
        assert rollout.output[-1]["content"] == "done"
    assert tool_metrics(trainer._under_way.tool_counts)["tools/failure_frequency"] == 1.0


def hanging(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "slept"


def leaving() -> None:
    """End the program."""
    raise SystemExit(1)


def raw() -> bytes:
    """Give bytes."""
    return b"\xff"


def test_no_tool_can_hurt_the_run(tmp_path: Path) -> None:
    calls = [call("hanging", seconds=30), call("leaving"), call("raw"), call("hanging", seconds=0)]

    def script(prompt: str, sample: int) -> str:
        return "done<eos>" if turns_in(prompt) else calls[sample] + "<eos>"

    trainer = make(tmp_path, script, arguments={"tools": [hanging, leaving, raw]}, tool_timeout=0.3)
    start = time.perf_counter()
    told = [[m["content"] for m in r.output if m["role"] == "tool"] for r in rollouts(trainer)]
    assert time.perf_counter() - start < 20
    assert ["took longer than 0.3 s" in told[0][0], told[1], "returned bytes" in told[2][0], told[3]] == [
        True, ["{'error': '1'}"], True, ["slept"],
    ]  # fmt: skip


def test_a_rollout_function_runs_first(tmp_path: Path) -> None:
    def rollout_func(prompt_list: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [tokens(FIRST[i % 4] + "<eos>") for i in range(len(prompt_list))]
        return {
            "prompt_ids": [tokens("<user>q<eos><assistant>")] * len(prompt_list),
            "completion_ids": ids,
            "logprobs": [[-0.5] * len(row) for row in ids],
            "mood": ["good"] * len(prompt_list),
        }

    trainer = make(tmp_path, worked_example, arguments={"tools": [add], "rollout_func": rollout_func})
    rollout = rollouts(trainer)[0]
    assert list(rollout.completion.ids) == tokens(FIRST[0] + "<eos>" + response("3") + "done0<eos>")
    turn, answer = len(tokens(FIRST[0])) + 1, len(tokens(response("3")))
    assert rollout.completion.logps == [-0.5] * turn + [0.0] * answer + [None] * 6
    assert rollout.extra == {"mood": "good"}
    trainer.train()


def test_a_hook_writes_every_turn(tmp_path: Path) -> None:
    asked: list[tuple[int, Any]] = []

    class Hooked(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            asked.append((len(prompt_ids), kwargs.get("num_generations")))
            ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return ids, [[-0.25] * len(row) for row in ids]

    trainer = make(tmp_path, worked_example, trainer_class=Hooked, arguments={"tools": [add]})
    rollout = rollouts(trainer)[0]
    assert asked == [(4, None), (3, 1)]
    assert set(rollout.completion.logps) == {-0.25, 0.0}
    assert all(request.max_new_tokens for request in trainer.backend.asked[1]), "limits reach the backend all the same"


@pytest.mark.parametrize("backend", ["builtin", "transformers"])
def test_turns_of_a_real_backend(tmp_path: Path, backend: str) -> None:
    """Whatever a random model writes is taken for a call; tokens go to and fro unchanged, and so do log-probs."""
    trainer = random_caller(
        tmp_path,
        "add",
        {"a": 1, "b": 2},
        arguments={"tools": [add]},
        rollout_backend=backend,
        max_tool_calling_iterations=2,
    )
    model, read, sampled = trainer.model, trainer.tool_loop.parse, []

    def noted(episode: Any) -> Any:
        sampled.append((list(episode.prompt_ids), [list(turn.ids) for turn in episode.turns]))
        return read(episode)

    trainer.tool_loop.parse = noted
    answer = tokens(response("3"))
    blank = [0] * len(answer)
    for rollout, (prompt, turns) in zip(rollouts(trainer), sampled[8:], strict=True):
        assert len(turns) == 3
        assert all(turn[-1] in ENDS for turn in turns)
        ids, mask = list(rollout.completion.ids), rollout.completion.model_mask
        assert ids == [*turns[0], *answer, *turns[1], *answer, *turns[2]]
        assert mask == [*[1] * len(turns[0]), *blank, *[1] * len(turns[1]), *blank, *[1] * len(turns[2])]
        if backend == "builtin":
            expected, _ = slow_scores(model, prompt, ids)
            assert rollout.completion.plain_logps == pytest.approx(
                [own * logp for own, logp in zip(mask, expected, strict=True)], abs=1e-4
            )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["tools/turns"] == 3
    if backend == "builtin":
        assert logged["rollout/kept_ratio"] > 0.3, "what was said before is not encoded again"


@pytest.mark.parametrize("tools", [None, [add]])
def test_no_end_token_reaches_the_rewards(tmp_path: Path, tools: Any) -> None:
    """The model has two end tokens; the tokenizer, and so the parser, knows one of them."""
    tokenizer = byte_tokenizer(QWEN2_5)
    add_response_schema(tokenizer)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=2048)
    model.generation_config.eos_token_id = ends
    trainer = make(tmp_path, model=model, tokenizer=tokenizer, arguments={"tools": tools})

    class Backend(RolloutBackend):
        name, config = "fixed", trainer.backend.config

        def sample(self, requests: Any) -> list[Completion]:
            ids = tokenizer("42<|endoftext|>")["input_ids"]
            return [Completion(ids, StopReason.EOS) for request in requests for _ in range(request.count)]

    trainer.backend = Backend()
    assert [rollout.output for rollout in rollouts(trainer)] == [[{"role": "assistant", "content": "42"}]] * 4


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize("default", [CHATML, HERMES])
def test_of_named_templates_one_renders_everything(tmp_path: Path, default: str) -> None:
    made = []
    for template in (QWEN2_5, {"default": default, "tool_use": QWEN2_5}):
        tokenizer = byte_tokenizer(QWEN2_5)
        tokenizer.chat_template = template
        model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=2048)
        trainer = make(tmp_path, model=model, tokenizer=tokenizer, arguments={"tools": [add]})
        (prompt,) = trainer.prompt_encoder([trainer.train_dataset[0]])
        told = [{"role": "tool", "name": "add", "content": "3"}]
        made.append((prompt.ids, trainer.tool_loop.suffix(["add"], told, True), tokenizer.response_template))
    assert made[0] == made[1]


@pytest.mark.parametrize("named", [{"rag": CHATML}, {"default": CHATML}])
def test_named_templates_of_no_use(tmp_path: Path, named: dict[str, str]) -> None:
    tokenizer = byte_tokenizer(QWEN2_5)
    tokenizer.chat_template = named
    with pytest.raises(ConfigError, match=r"neither `tool_use` nor `default`|does not show tool calls"):
        make(tmp_path, tokenizer=tokenizer, model=tiny_model(vocab_size=len(tokenizer)), arguments={"tools": [add]})


BAD_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}<assistant>"


def undescribed(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Add."""
    return int(a + b)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"arguments": {"tools": [undescribed]}}, ConfigError, "`undescribed`.*Argument a is missing a type hint"),
        ({"arguments": {"tools": [add, add]}}, ConfigError, "Two tools have the name `add`"),
        ({"arguments": {"tools": add}}, ConfigError, "must be a list of functions"),
        ({"tokenizer": tool_tokenizer(chat_template=BAD_TEMPLATE)}, ConfigError, "does not show tool calls"),
        ({"tokenizer": tool_tokenizer(chat_template=None)}, ConfigError, "does not show tool calls"),
        ({"dataset": prompts(4)}, DataError, "prompts that are conversations"),
        ({"arguments": {"tools": [add], "eval_dataset": prompts(4)}}, DataError, "prompts that are conversations"),
        ({"max_tool_calling_iterations": -1}, ConfigError, "max_tool_calling_iterations=-1 must be at least 0"),
        ({"tool_timeout": 0}, ConfigError, "tool_timeout=0 must be greater than 0"),
        ({"max_parallel_tools": 0}, ConfigError, "max_parallel_tools=0 must be at least 1"),
    ],
)
def test_bad_input(tmp_path: Path, change: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make(tmp_path, **{"arguments": {"tools": [add]}, **change})


# ---- two processes


def uneven(prompt: str, sample: int) -> str:
    """Samples 0 and 1, on the first process, need no tool; sample 2 needs one round and sample 3 three."""
    rounds = [0, 0, 1, 3][sample]
    return (call("add", a=1, b=2) if turns_in(prompt) < rounds else "done") + "<eos>"


def calls_made(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(messages)) for messages in completions]


def main(folder: Path) -> None:
    trainer = make(folder, uneven, arguments={"tools": [add]}, per_device_train_batch_size=2)
    trainer.train()
    asked = [[request.turn for request in requests] for requests in trainer.backend.asked]
    # The first process has a group with spread, the second one that is replaced, by a prompt that needs tools.
    replacing = make(
        folder,
        lambda prompt, sample: "done<eos>" if "flat" in prompt else uneven(prompt, sample),
        rewards=calls_made,
        dataset=questions("one", "flat", "two", "three"),
        arguments={"tools": [add]},
        dynamic_sampling=True,
        shuffle_dataset=False,
    )
    replacing.train()
    seen = {"asked": asked, "log": trainer.state.log_history[0], "replacing": replacing.state.log_history[0]}
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))


@pytest.mark.medium
def test_processes_with_different_numbers_of_rounds(tmp_path: Path) -> None:
    run_together(2, __name__, tmp_path)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert zero["asked"] == [[0]]
    assert one["asked"] == [[0], [1, 1], [2], [3]]
    for seen in (zero, one):
        assert seen["log"]["tools/call_frequency"] == 1.0
        assert seen["log"]["tools/turns"] == 2.0
        assert seen["replacing"]["dynamic_sampling/prompts_replaced"] == 1.0
        assert seen["replacing"]["tools/turns"] == 20 / 12, "of all samples, those that were replaced among them"


def test_a_template_that_does_not_list_the_tools_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listing = tool_tokenizer().chat_template
    assert "tools" in listing
    make(tmp_path, worked_example, arguments={"tools": [add]})
    assert "does not list the tools" not in caplog.text
    silent = tool_tokenizer(chat_template=listing.replace("tools", "nothing"))
    make(tmp_path, worked_example, tokenizer=silent, arguments={"tools": [add]})
    assert "does not list the tools" in caplog.text
