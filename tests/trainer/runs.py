"""Small runs of the real trainers that record every generation, micro-batch and pass."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerCallback

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from tests.helpers import base_args, length_reward, prompts, scripted_completion, tiny_model, tiny_tokenizer


class Generation(NamedTuple):
    """One call of the sampler: the update that it was made for, the mode, and its distinct prompts."""

    step: int
    mode: str
    prompts: tuple[str, ...]


class Recorded:
    """Mixin for a trainer that records events in order. Completions are scripted, so that runs are fast and equal.

    It overrides nothing that gets padded rows, so that runs take the same code path as without it.
    """

    group_in_script = 2

    def __init__(self, *args: Any, **kwargs: Any):
        self.generations: list[Generation] = []
        self.rows: list[list[Mapping[str, Any]]] = []
        self.left_in_queue: list[int] = []  # length of the queue at the start of each generation
        self.slices: list[tuple[tuple[int, ...], ...]] = []  # completions of each micro-batch, in order of use
        self.frozen_passes = 0
        super().__init__(*args, **kwargs)

    def collect(self: Any, rows: Any) -> Any:
        texts = tuple(dict.fromkeys(str(row["prompt"]) for row in rows))
        self.generations.append(Generation(self.state.global_step, self.mode, texts))
        self.rows.append(rows)
        self.left_in_queue.append(len(self._buffered_inputs))
        return super().collect(rows)  # type: ignore[misc]

    def _generate_single_turn(self: Any, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        texts = [self.processing_class.decode(ids) for ids in prompt_ids]
        return [scripted_completion(text, i % self.num_generations) for i, text in enumerate(texts)], None

    def update_size(self: Any, batches: Any) -> Any:
        if self.mode == "train":
            for batch in batches:
                lengths = batch.completion_mask.sum(1).tolist()
                ids = zip(batch.completion_ids.tolist(), lengths, strict=True)
                self.slices.append(tuple(tuple(row[:length]) for row, length in ids))
        return super().update_size(batches)  # type: ignore[misc]

    def _frozen_logps(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.frozen_passes += 1
        return super()._frozen_logps(*args, **kwargs)  # type: ignore[misc]


class RecordedGRPO(Recorded, GRPOTrainer):
    pass


class RecordedRLOO(Recorded, RLOOTrainer):
    pass


def make(
    folder: Any,
    trainer_class: Any = RecordedGRPO,
    *,
    model: Any = None,
    rewards: Any = length_reward,
    dataset: Any = None,
    tokenizer: Any = None,
    eval_dataset: Any = None,
    callbacks: Any = None,
    peft_config: Any = None,
    rollout_func: Any = None,
    reward_processing_classes: Any = None,
    **settings: Any,
) -> Any:
    """A trainer of `trainer_class` with `base_args` and the given settings."""
    is_rloo = issubclass(trainer_class, RLOOTrainer)
    return trainer_class(
        model=tiny_model() if model is None else model,
        reward_funcs=rewards,
        args=(RLOOConfig if is_rloo else GRPOConfig)(**base_args(folder, **settings)),
        train_dataset=prompts(8) if dataset is None else dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer or tiny_tokenizer(),
        reward_processing_classes=reward_processing_classes,
        callbacks=callbacks,
        peft_config=peft_config,
        **({} if rollout_func is None else {"rollout_func": rollout_func}),
    )


def run(folder: Any, trainer_class: Any = RecordedGRPO, **settings: Any) -> Any:
    """Make a trainer and train it."""
    trainer = make(folder, trainer_class, **settings)
    trainer.train()
    return trainer


def stored(completions: Mapping[str, Sequence[str]]) -> Callable[..., dict[str, Any]]:
    """A rollout_func that answers each prompt with the given texts in turn; a final `<eos>` becomes the EOS token."""

    def rollout(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        seen: dict[str, int] = {}
        ids = []
        for prompt in prompt_list:
            texts = completions[prompt]
            ids.append(token_ids(texts[seen.get(prompt, 0) % len(texts)]))
            seen[prompt] = seen.get(prompt, 0) + 1
        return {"prompt_ids": tokenizer(prompt_list)["input_ids"], "completion_ids": ids, "logprobs": None}

    return rollout


def token_ids(text: str) -> list[int]:
    """Ids of a text for the tiny tokenizer, in which `<eos>` is one token."""
    body = text.removesuffix("<eos>")
    return [*tiny_tokenizer()(body)["input_ids"], *([1] if text.endswith("<eos>") else [])]


def slow_scores(
    model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
) -> tuple[list[float], list[float]]:
    """Log-probs and entropies of one completion, without padding, position by position."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt_ids, *completion_ids]])).logits[0].double() / temperature
    logps, entropies = [], []
    for t, token in enumerate(completion_ids):
        distribution = logits[len(prompt_ids) + t - 1].log_softmax(-1)
        logps.append(distribution[token].item())
        entropies.append(-(distribution.exp() * distribution).sum().item())
    return logps, entropies


class Weights(TrainerCallback):
    """Keeps a copy of the weights at the start of each update."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before.append({name: weight.detach().clone() for name, weight in model.state_dict().items()})


class SaveAt(TrainerCallback):
    """Saves one checkpoint."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self.step


def with_weights(state: Mapping[str, Tensor], **kwargs: Any) -> Any:
    """A tiny model with the given weights, in evaluation mode."""
    model = tiny_model(**kwargs)
    model.load_state_dict(state)
    return model.eval()


def logs(trainer: Any, key: str = "loss") -> list[dict[str, Any]]:
    """The logged records that have a key."""
    return [record for record in trainer.state.log_history if key in record]


def std(values: Sequence[float]) -> float:
    """Bessel-corrected standard deviation, computed directly."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
