"""A tokenizer whose template renders tools, a backend that writes scripted text, and small trainers with both."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.rollout.base import RolloutBackend
from gruppo.types import Completion, SampleRequest, StopReason
from tests.helpers import base_args, tiny_model, tiny_tokenizer

# Hermes style, without line breaks, because the tiny tokenizer has no token for them.
TEMPLATE = """
{%- if tools %}<system>{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}<eos>{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<user><tool_response>' + message.content + '</tool_response><eos>' }}
    {%- else %}
        {{- '<' + message.role + '>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}
        {{- '<eos>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
""".strip()

EOS = 1


def tool_tokenizer(**settings: Any) -> Any:
    return tiny_tokenizer(**{"chat_template": TEMPLATE, **settings})


def tokens(text: str) -> list[int]:
    return list(tool_tokenizer()(text)["input_ids"])


def call(name: str, **arguments: Any) -> str:
    """The text with which the model calls a tool."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def response(text: str) -> str:
    """A result as the template renders it, up to the model's next turn."""
    return f"<user><tool_response>{text}</tool_response><eos><assistant>"


Script = Callable[[str, int], str]


class ScriptedBackend(RolloutBackend):
    """Writes the text that `script(prompt text, sample number)` returns, within the limits of the requests."""

    name = "scripted"

    def __init__(self, config: Any, script: Script):
        self.config, self.script = config, script
        self.asked: list[list[SampleRequest]] = []

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self.asked.append(list(requests))
        return [self._write(request, i) for request in requests for i in range(request.count)]

    def _write(self, request: SampleRequest, i: int) -> Completion:
        text = self.script(tool_tokenizer().decode(request.prompt_ids), request.first_sample + i)
        ids = tokens(text)[: request.limit(self.config.max_new_tokens)]
        stop = StopReason.EOS if ids and ids[-1] == EOS else StopReason.LENGTH
        # All values are distinct and nonzero, so that a value in the wrong place is noticed.
        return Completion(
            ids,
            stop,
            plain_logps=[-1.0 - t for t in range(len(ids))],
            entropies=[0.5 + t for t in range(len(ids))],
        )


def questions(*texts: str, **columns: list[Any]) -> Dataset:
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    return Dataset.from_list([{**row, **{k: v[i] for k, v in columns.items()}} for i, row in enumerate(rows)])


def turns_in(prompt: str) -> int:
    """The number of tool results in the prompt."""
    return prompt.count("</tool_response>")


def no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(i) for i in range(len(completions))]


def make(
    folder: Any,
    script: Script | None = None,
    *,
    trainer_class: Any = GRPOTrainer,
    rewards: Any = no_reward,
    dataset: Any = None,
    tokenizer: Any = None,
    model: Any = None,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer with tools and scripted completions; without a script, its own backend samples."""
    config = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    sizes = {"max_completion_length": 400, "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 1}
    trainer = trainer_class(
        model=tiny_model(max_position_embeddings=2048) if model is None else model,
        reward_funcs=rewards,
        args=config(**base_args(folder, **{**sizes, "parity_check": "off", **settings})),
        processing_class=tokenizer or tool_tokenizer(),
        **{"train_dataset": questions("q") if dataset is None else dataset, **(arguments or {})},
    )
    if script is not None:
        trainer.backend = ScriptedBackend(trainer.backend.config, script)
    return trainer


def eventually(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until another thread makes `happened()` true."""
    deadline = time.perf_counter() + seconds
    while not happened():
        assert time.perf_counter() < deadline, "it did not happen"
        time.sleep(0.01)


ENDS = list(range(1, 40))  # so many end tokens that a random model soon ends its turn


def random_caller(folder: Any, name: str, values: dict[str, Any], **settings: Any) -> Any:
    """A trainer with a random model and the real backend; everything the model writes is parsed as this call."""
    model = tiny_model(max_position_embeddings=2048)
    model.generation_config.eos_token_id = ENDS
    trainer = make(folder, model=model, max_completion_length=200, **settings)
    read = trainer.tool_loop.parse
    calls = [{"type": "function", "function": {"name": name, "arguments": values}}]
    trainer.tool_loop.parse = lambda episode: {**read(episode), "tool_calls": calls}
    return trainer
