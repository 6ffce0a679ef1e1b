"""The demo's tiny model, taught to hold a conversation with tools: what the examples beside this file share.

A call is written in square brackets. This is what the chat template makes of a conversation:

    [calc term]                     the tools that there are
    Q: How many are 347 times 86?   user
    [calc term=347*86]<eos>         assistant
    = 29842                         tool
    A: 29842<eos>                   assistant
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from gruppo.demo import model_path
from gruppo.types import Message, Rollout

# A format of one's own has two sides. The chat template writes it: each message by itself, so that a conversation
# keeps its tokens when messages are added. `generation` marks what the model writes, for the loss of the warm-up.
CHAT_TEMPLATE = """
{%- for tool in tools or [] %}
    {{- '[' + tool.function.name + ' ' + tool.function.parameters.properties | join(' ') + ']\\n' }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {{- '[' + call.function.name }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- ' ' + name + '=' + value | string }}
                {%- endfor %}
                {{- ']' }}
            {%- endfor %}
            {{- eos_token }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- ('Q: ' if message.role == 'user' else '= ') + message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
""".strip()

# The response template reads it back: where the model's turn begins, what is a call, and what is plain content.
RESPONSE_TEMPLATE = {
    "start_anchor": "\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[(?P<name>\w+) ",
            "close_pattern": r"\]|(?=<eos>)",
            "content": "kv-lines",  # term=347*86 becomes {"term": "347*86"}
            "content_args": {"line_sep": " ", "kv_sep": "="},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            "repeats": True,
        },
        "content": {"close": "<eos>"},
    },
}

Scores = dict[str, float]

# Settings of every run here: 16 prompts × 8 completions an update, float32 on the CPU.
CPU_SETTINGS: dict[str, Any] = dict(
    per_device_train_batch_size=128,
    per_device_eval_batch_size=256,
    num_generations=8,
    num_generations_eval=1,
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The demo's model, and its tokenizer with the format above."""
    model = AutoModelForCausalLM.from_pretrained(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return model, tokenizer


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def calls(name: str, **arguments: Any) -> Message:
    """The assistant's message that calls a tool, as in `calls("calc", term="347*86")`."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def answers(content: Any) -> Message:
    return {"role": "tool", "content": str(content)}


def imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    tools: list[Callable[..., Any]],
    steps: int,
    learning_rate: float = 2e-3,
    batch_size: int = 16,
) -> None:
    """Supervised warm-up: learn to write the assistant's part of the conversations."""
    print(f"warm-up: {steps} steps", flush=True)
    batch = tokenizer.apply_chat_template(
        list(conversations),
        tools=tools,
        padding=True,
        return_tensors="pt",
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    written_BT = torch.as_tensor(batch["assistant_masks"]).bool()
    labels_BT = batch["input_ids"].masked_fill(~written_BT, -100)  # no loss where others speak
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    rng = random.Random(0)
    for _ in range(steps):
        rows = rng.sample(range(len(conversations)), batch_size)
        loss = model(
            input_ids=batch["input_ids"][rows], attention_mask=batch["attention_mask"][rows], labels=labels_BT[rows]
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


class Progress(TrainerCallback):
    """Prints some of what is logged, instead of all of it."""

    def __init__(self, *names: str):
        self.names = names

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if all(name in logs for name in self.names):
            values = "  ".join(f"{name} {logs[name]:.2f}" for name in self.names)
            print(f"step {state.global_step:3d}  {values}", flush=True)


def report(when: str, scores: Scores) -> Scores:
    """Print measurements, and hand them on."""
    print(f"{when}: " + ", ".join(f"{name} {value:.3f}" for name, value in scores.items()), flush=True)
    return scores


def show(rollout: Rollout) -> None:
    """Print one conversation."""
    for message in [*rollout.prompt.text, *rollout.output]:
        asked = [
            f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", [])
        ]
        print(f"  {message['role']:>9}: {message['content'] or ', '.join(asked)}")
