"""Callbacks that sample completions of evaluation prompts and log them."""

import copy
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig, TrainerCallback, TrainerState

from gruppo.data.chat import is_conversational, maybe_apply_chat_template
from gruppo.data.probing import inner_tokenizer
from gruppo.errors import ConfigError, DataError
from gruppo.policy.inplace import finite_masks
from gruppo.policy.unwrap import bare_model
from gruppo.trainer.display.completions import log_to_trackers
from gruppo.trainer.display.console import printing

__all__ = ["LogCompletionsCallback", "WeaveCallback"]


class LogCompletionsCallback(TrainerCallback):
    """Sample completions of evaluation prompts every `freq` steps and log them as the table `completions`.

    The table has the columns step, prompt and completion and grows over the run. It goes to wandb, trackio and comet,
    whichever `report_to` names; without any of them it is printed.

    Args:
        trainer: the trainer, with an `eval_dataset` that has a `prompt` column (of a dict of sets, the first is used).
        generation_config: how to sample; None takes the model's, with the trainer's `max_completion_length`.
        num_prompts: how many prompts, from the beginning; None takes all.
        freq: every how many steps; None takes `eval_steps`.
    """

    def __init__(
        self,
        trainer: Any,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ) -> None:
        if freq is None and trainer.args.eval_steps is None:
            raise ConfigError("LogCompletionsCallback needs `freq`, or `eval_steps` in the trainer's config.")
        self.trainer = trainer
        self.generation_config = generation_config
        self.freq = freq
        self.table: list[dict[str, Any]] = []
        self._prompts = _evaluation_prompts(trainer, num_prompts, "LogCompletionsCallback")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # The config may give eval_steps as a fraction of the run; the state has it as a number of steps.
        if state.global_step % (self.freq or state.eval_steps):
            return
        sampled = _sample(self.trainer, self._prompts, self.generation_config)
        if state.is_world_process_zero:
            self.table += [{"step": state.global_step, "prompt": p, "completion": c} for p, c in sampled]
            _log_table(self.table, args.report_to)


class WeaveCallback(TrainerCallback):
    """After every evaluation, log the prompts, sampled completions and their scores to W&B Weave.

    Args:
        trainer: the trainer, with an `eval_dataset` that has a `prompt` column.
        project_name: the Weave project; None takes the one that is open, else that of the wandb run.
        scorers: name → `scorer(prompt, completion)` returning a number; None logs the completions alone.
        generation_config, num_prompts: as in `LogCompletionsCallback`.
        dataset_name, model_name: names under which the evaluation is logged; `model_name=None` takes the model's own.
    """

    def __init__(
        self,
        trainer: Any,
        project_name: str | None = None,
        scorers: dict[str, Callable[[str, str], float]] | None = None,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        dataset_name: str = "eval_dataset",
        model_name: str | None = None,
    ) -> None:
        self._weave = _import_weave()
        self.trainer = trainer
        self.project_name = project_name
        self.scorers = scorers or {}
        self.generation_config = generation_config
        self.dataset_name = dataset_name
        self.model_name = model_name or getattr(trainer.model.config, "_name_or_path", "") or "model"
        self._prompts = _evaluation_prompts(trainer, num_prompts, "WeaveCallback")

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._open_project()

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        sampled = _sample(self.trainer, self._prompts, self.generation_config)
        if not state.is_world_process_zero:
            return
        self._open_project()
        evaluation = self._weave.EvaluationLogger(
            model=self.model_name, dataset=self.dataset_name, eval_attributes={"step": state.global_step}
        )
        totals = dict.fromkeys(self.scorers, 0.0)
        for prompt, completion in sampled:
            prediction = evaluation.log_prediction(inputs={"prompt": prompt}, output=completion)
            for name, scorer in self.scorers.items():
                score = scorer(prompt, completion)
                prediction.log_score(scorer=name, score=score)
                totals[name] += float(score)
            prediction.finish()
        evaluation.log_summary({name: total / len(sampled) for name, total in totals.items()})

    def _open_project(self) -> None:
        if self._weave.get_client() is not None:
            return
        project = self.project_name
        if project is None:
            import wandb

            project = wandb.run.project if wandb.run is not None else None
        if project is None:
            raise ConfigError("WeaveCallback needs `project_name`: neither a Weave client nor a wandb run is open.")
        self._weave.init(project)


def _import_weave() -> Any:
    try:
        import weave
    except ImportError as error:
        raise ImportError("WeaveCallback needs the package weave: pip install weave") from error
    return weave


def _evaluation_prompts(trainer: Any, count: int | None, who: str) -> list[Any]:
    dataset = trainer.eval_dataset
    if isinstance(dataset, Mapping) and not hasattr(dataset, "column_names"):
        dataset = next(iter(dataset.values()), None)
    if dataset is None:
        raise ConfigError(f"{who} needs an `eval_dataset` in the trainer, to take prompts from.")
    rows = list(islice(dataset, count))
    if not rows or "prompt" not in rows[0]:
        raise DataError(
            f"{who} needs a `prompt` column in the evaluation set; it has {list(rows[0]) if rows else []}."
        )
    return [row["prompt"] for row in rows]


def _sample(trainer: Any, prompts: list[Any], config: GenerationConfig | None) -> list[tuple[str, str]]:
    """One completion of each prompt, as (prompt text, completion) in the order of the prompts, on every process."""
    accelerator = trainer.accelerator
    model = bare_model(accelerator, trainer.model)
    if config is None:
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = getattr(trainer.args, "max_completion_length", None) or config.max_new_tokens
    # Every process makes the same number of calls; otherwise, with sharded weights, they would wait forever.
    rounds = math.ceil(len(prompts) / (accelerator.num_processes * trainer.args.eval_batch_size))
    mine = list(range(accelerator.process_index, len(prompts), accelerator.num_processes))
    batches = [mine[i * trainer.args.eval_batch_size :][: trainer.args.eval_batch_size] for i in range(rounds)]
    was_training = model.training
    model.eval()
    found: list[tuple[int, str, str]] = []
    # Sampling completions for a log must not change the random numbers that training draws.
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for batch in batches:
            texts = _complete(trainer, model, [prompts[i] for i in batch or [0]], config)
            found += [(i, *pair) for i, pair in zip(batch, texts, strict=False)]
    model.train(was_training)
    return [(prompt, completion) for _, prompt, completion in sorted(gather_object(found))]


def _complete(trainer: Any, model: Any, prompts: list[Any], config: GenerationConfig) -> list[tuple[str, str]]:
    processing = trainer.processing_class
    tokenizer = inner_tokenizer(processing)
    options = getattr(trainer.args, "chat_template_kwargs", None) or {}
    texts = [maybe_apply_chat_template({"prompt": p}, processing, **options)["prompt"] for p in prompts]
    # A chat template writes the special tokens itself.
    plain = not is_conversational({"prompt": prompts[0]})
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=plain)
    inputs = inputs.to(trainer.accelerator.device)
    with finite_masks():
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            generation_config=config,
            pad_token_id=tokenizer.pad_token_id,
        )
    completions = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return list(zip(texts, completions, strict=True))


def _log_table(table: list[dict[str, Any]], report_to: list[str]) -> None:
    columns = {name: [row[name] for row in table] for name in table[0]}
    log_to_trackers(report_to, columns, unique_prompts=False)
    if "comet_ml" in report_to:
        import comet_ml
        import pandas as pd

        comet_ml.get_running_experiment().log_table("completions.csv", pd.DataFrame(columns))
    if not {"wandb", "trackio", "comet_ml"} & set(report_to):
        step = table[-1]["step"]
        shown = Table("prompt", "completion", title=f"Completions at step {step}", show_lines=True)
        for row in table:
            if row["step"] == step:
                shown.add_row(Text(row["prompt"]), Text(row["completion"]))
        printing(Console()).print(shown)
