"""The runs that are stopped and resumed: fourteen small configurations of the real trainers.

Each makes seven updates and saves after 2, 4, 6 and 7 of them, keeping two checkpoints.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.rollout.vllm import transfer
from tests.helpers import prompts, tiny_model
from tests.resume.moments import MOMENT
from tests.rollout.vllm_doubles import Double, saved_model, share_bytes
from tests.tools.scripted import questions, random_caller
from tests.trainer.runs import make

SAVING = dict(max_steps=7, save_strategy="steps", save_steps=2, save_total_limit=2)


def letters(completions: list[Any], log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
    """The number of letters; also logs a metric and an extra column."""
    MOMENT.reach("scoring")
    texts = [text if isinstance(text, str) else "".join(m["content"] or "" for m in text) for text in completions]
    counts = [sum(character.isalpha() for character in text) for text in texts]
    log_metric("most_letters", max(counts))
    log_extra("count", counts)
    return [count / 10 for count in counts]


def letters_of_odd_prompts(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """Every other prompt has groups without spread, which dynamic sampling replaces."""
    rewards = letters(completions, **kwargs)
    return [
        reward if int(re.sub(r"\D", "", prompt)) % 2 else 0.5 for prompt, reward in zip(prompts, rewards, strict=True)
    ]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def with_tools(folder: Path, **settings: Any) -> Any:
    """Everything the model writes is parsed as a tool call, up to twice per completion."""
    return random_caller(
        folder,
        "add",
        {"a": 1, "b": 2},
        rewards=letters,
        arguments={"tools": [add], "train_dataset": questions(*(f"q{i}" for i in range(8)))},
        max_tool_calling_iterations=2,
        **settings,
    )


def ahead(folder: Path, **settings: Any) -> Any:
    """A server, which ends with the process, samples one generation ahead."""
    transfer.share = share_bytes
    model = saved_model(folder.parent / "model")
    server = Double(model)
    server.slow = {"/v1/completions": 0.05}
    port = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url, "async_rollouts": 1}
    return make(
        folder,
        GRPOTrainer,
        model=str(model),
        rewards=letters,
        dataset=prompts(32),
        learning_rate=1e-2,
        **port,
        **settings,
    )


def lora(folder: Path, **settings: Any) -> Any:
    import peft

    adapter = peft.LoraConfig(
        r=2, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return plain(folder, peft_config=adapter, **settings)


def plain(folder: Path, **settings: Any) -> Any:
    """Completions of one to ten tokens: so many tokens are end tokens that a random model soon writes one."""
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(1, 20))
    given = {"trainer_class": GRPOTrainer, "rewards": letters, "dataset": prompts(32), "max_completion_length": 10}
    return make(folder, model=model, **(given | settings))


@dataclass(frozen=True)
class Case:
    """A configuration. Processes are killed only after `after` updates; earlier there is nothing to test."""

    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    build: Callable[..., Any] = plain
    processes: int = 1
    after: int = 2

    def trainer(self, folder: Path, **changes: Any) -> Any:
        return self.build(folder, **{**SAVING, **self.settings, **changes})


CASES: dict[str, Case] = {
    "grpo": Case(),
    "rloo-beta": Case(dict(trainer_class=RLOOTrainer, beta=0.1)),
    # Three updates per generation, so that the checkpoints after 2, 4 and 7 are in the middle of one.
    "iterations": Case(dict(num_iterations=3, beta=0.05)),
    # An update uses two slices and a generation has three: an update may span two generations.
    "slices": Case(dict(steps_per_generation=3, gradient_accumulation_steps=2, per_device_train_batch_size=2)),
    "second-epoch": Case(dict(dataset=prompts(8), num_train_epochs=2, max_steps=-1, logging_steps=3), after=5),
    "dynamic-sampling": Case(dict(rewards=letters_of_odd_prompts, dynamic_sampling=True)),
    "tools": Case(build=with_tools),
    "lora": Case(dict(beta=0.1), build=lora),
    "evaluation": Case(dict(eval_dataset=prompts(4), eval_strategy="steps", eval_steps=3, logging_steps=2)),
    "two-processes": Case(dict(num_generations=4), processes=2),
    "ahead": Case(build=ahead),
    "ahead-iterations": Case(
        dict(num_iterations=2, eval_dataset=prompts(2), eval_strategy="steps", eval_steps=3), build=ahead
    ),
    "transformers": Case(dict(rollout_backend="transformers")),
    "blended-reference": Case(
        dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5, num_iterations=2)
    ),
}
