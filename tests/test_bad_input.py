"""Wrong settings, datasets and arguments: each is refused with an error that names the value and the fix.

Rows whose builder trains or evaluates are about what shows only then; all others are refused at construction.
"""

import functools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainingArguments

from gruppo.config.grpo import GRPOConfig
from gruppo.config.rloo import RLOOConfig
from gruppo.errors import ConfigError, DataError, RewardError, RolloutError
from gruppo.trainer.grpo import GRPOTrainer
from gruppo.trainer.rloo import RLOOTrainer
from tests.helpers import base_args, chats, length_reward, prompts, tiny_gpt2, tiny_model, tiny_tokenizer

Build = Callable[[Path], Any]  # from the output folder to the thing that is refused

EVALUATE = {"eval_strategy": "steps", "eval_steps": 1}
SYNC = {"beta": 0.1, "sync_ref_model": True}
FUSED = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}}
UNBOUNDED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None}


# ---- configs


def grpo(**wrong: Any) -> Build:
    return lambda folder: GRPOConfig(**base_args(folder, **wrong))


def rloo(**wrong: Any) -> Build:
    return lambda folder: RLOOConfig(**base_args(folder, **wrong))


def vllm(**wrong: Any) -> Build:
    return grpo(use_vllm=True, **wrong)


def served(**wrong: Any) -> Build:
    return vllm(vllm_mode="server", **wrong)


def parallel(**sizes: int) -> Build:
    return lambda folder: GRPOConfig(**base_args(folder, parallelism_config=ParallelismConfig(**sizes)))


def generating(**kwargs: Any) -> Build:
    return grpo(generation_kwargs=kwargs)


def continuous(**settings: Any) -> Build:
    return grpo(use_transformers_continuous_batching=True, transformers_continuous_batching_config=settings)


def evaluating(**wrong: Any) -> Build:
    return grpo(**EVALUATE, **wrong)


# ---- trainers


def make_trainer(
    folder: Path, trainer: type = GRPOTrainer, config: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    config_class = RLOOConfig if issubclass(trainer, RLOOTrainer) else GRPOConfig
    right = {
        "model": tiny_model(),
        "reward_funcs": length_reward,
        "args": config_class(**base_args(folder, **(config or {}))),
        "train_dataset": prompts(),
        "processing_class": tiny_tokenizer(),
    }
    return trainer(**(right | arguments))


def trainer(**wrong: Any) -> Build:
    return lambda folder: make_trainer(folder, **wrong)


def loading(**kwargs: Any) -> Build:
    return trainer(model="unused", config={"model_init_kwargs": kwargs})


def data(dataset: Any, **config: Any) -> Build:
    return trainer(train_dataset=dataset, config=config)


def evaluation(dataset: Any) -> Build:
    return trainer(eval_dataset=dataset)


def judged(tokenizer: Any) -> Build:
    return trainer(reward_funcs=classifier(), reward_processing_classes=tokenizer)


# ---- runs


def train(**wrong: Any) -> Build:
    return lambda folder: make_trainer(folder, **wrong).train()


def evaluate(dataset: Any) -> Build:
    return lambda folder: make_trainer(folder, eval_dataset=dataset).evaluate()


def loss(**wrong: Any) -> Build:
    return lambda folder: make_trainer(folder).compute_loss(None, {}, **wrong)


def rewards(
    output: Any,
    trainer: type = GRPOTrainer,
    wrap: Callable[..., Any] = lambda function: function,
    **config: Any,
) -> Build:
    """A run whose reward function returns this, whatever it is asked."""

    def broken(**kwargs: Any) -> Any:
        return output

    return train(trainer=trainer, reward_funcs=wrap(broken), config=config)


def reward(value: Any) -> Build:
    return rewards([value] * 4, reward_on_error="raise")


def locked_reward() -> Callable[..., Any]:
    """A reward that no other process can be sent."""
    lock = threading.Lock()

    def locked(**kwargs: Any) -> Any:
        with lock:
            return [1.0]

    return locked


def partial_rewards(output: Any) -> Build:
    return rewards(output, wrap=lambda function: functools.partial(function, extra=1))


def rollout(drop: str | None = None, **changes: Callable[[int], Any]) -> Callable[..., Any]:
    """A rollout function that is right but for what is dropped or changed (given the number of prompts)."""

    def function(texts: list[Any], trainer: Any) -> dict[str, Any]:
        n = len(texts)
        output = {"prompt_ids": [[9, 9]] * n, "completion_ids": [[8, 7, 1]] * n, "logprobs": [[-0.1] * 3] * n}
        output |= {name: change(n) for name, change in changes.items()}
        return {name: value for name, value in output.items() if name != drop}

    return function


def rolled_out(**wrong: Any) -> Build:
    return train(rollout_func=rollout(**wrong))


def rolled_out_on(dataset: Any) -> Build:
    return trainer(rollout_func=rollout(), train_dataset=dataset)


# ---- what is passed to them


def rows(*values: Any) -> Dataset:
    return Dataset.from_list([{"prompt": value} for value in values])


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def unnamed() -> Dataset:
    return prompts().rename_column("prompt", "question")


def stream(count: int = 16) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(prompts(count)))


def untold() -> Any:
    return tiny_tokenizer(chat_template=None)


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


def adapted() -> Any:
    return get_peft_model(tiny_model(), lora())


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)


def classifier() -> LlamaForSequenceClassification:
    size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=101, num_labels=1, pad_token_id=0, **size))


def takes_solution(completions: list[Any], solution: list[str]) -> list[float]:
    return [1.0] * len(completions)


def takes_solution_and_more(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


class OverridesNothing(GRPOTrainer):
    """A trainer with another name."""


class OverridesGenerate(GRPOTrainer):
    def _generate(self, prompts: list[Any]) -> Any:
        return prompts


class OverridesToolLoop(GRPOTrainer):
    def _tool_call_loop(self, *args: Any) -> Any:
        return args


# error -> rows of: what is wrong, how it is made, what the message says (a regular expression)
CASES: dict[type[Exception], list[tuple[str, Build, str]]] = {
    ConfigError: [  # settings that cannot work
        ("field-of-the-other-recipe", rloo(loss_type="dapo"), "RLOOConfig has no field `loss_type`"),
        ("bool-as-text", grpo(shuffle_dataset="false"), "shuffle_dataset='false' must be True or False"),
        ("bool-as-number", grpo(log_completions=1), "log_completions=1 must be True or False"),
        ("number-as-text", grpo(entropy_coef="high"), "entropy_coef='high' must be a number"),
        ("number-as-bool", grpo(beta=True), "beta=True must be a number"),
        ("fraction-of-a-token", grpo(max_completion_length=6.5), "=6.5 must be a whole number"),
        ("text-as-number", grpo(loss_type=3), "loss_type=3 must be a string"),
        ("one-weight-no-list", grpo(reward_weights=0.5), "reward_weights=0.5 must be a list of numbers"),
        ("nan-weight", grpo(reward_weights=[math.nan]), r"reward_weights=\[nan\] must be a list of number"),
        ("infinite-weight", grpo(reward_weights=[1.0, -math.inf]), r"reward_weights=\[1.0, -inf\] must be finite"),
        ("infinite-beta", grpo(beta=math.inf), "beta=inf must be finite"),
        ("infinite-kl-in-reward", rloo(beta=math.inf), "beta=inf must be finite"),
        ("infinite-bonus", grpo(entropy_coef=-math.inf), "entropy_coef=-inf must be finite"),
        ("infinite-temperature", grpo(temperature=math.inf), "temperature=inf must be finite"),
        ("infinite-learning-rate", rloo(learning_rate=math.inf), "learning_rate=inf must be finite"),
        ("dict-as-text", grpo(generation_kwargs="top_p=1"), "generation_kwargs='top_p=1' must be a dict"),
        ("broken-json", grpo(chat_template_kwargs="{a: 1"), "chat_template_kwargs='{a: 1' is not valid JSON"),
        ("group-of-one", grpo(num_generations=1), "num_generations=1 must be at least 2"),
        ("no-group", grpo(num_generations=None), "num_generations=None must be a number"),
        ("rloo-group-of-one", rloo(num_generations=1), "num_generations=1 must be at least 2"),
        (
            "groups-not-whole",
            grpo(num_generations=3),
            r"size=4 .*by num_generations=3.*that fit the current batch: \[2, 4\]",
        ),
        (
            "no-group-fits",
            grpo(per_device_train_batch_size=1, gradient_accumulation_steps=1, num_generations=8),
            "per_device_train_batch_size to a multiple of 8, or gradient_accumulation_steps to a multiple of 8.$",
        ),
        (
            "groups-not-whole-accumulated",
            rloo(per_device_train_batch_size=2, gradient_accumulation_steps=3, num_generations=4),
            r"train_batch_size to a multiple of 4, or .*accumulation_steps to a multiple of 2\..*batch: \[2, 3, 6\]",
        ),
        (
            "groups-not-whole-in-steps",
            grpo(steps_per_generation=3, num_generations=8),
            "steps_per_generation to a multiple of 2, or generation_batch_size to a multiple of 8",
        ),
        ("generation-batch-indivisible", grpo(generation_batch_size=6), "=6 must be divisible by per_device.* = 4"),
        (
            "batches-contradict",
            grpo(generation_batch_size=8, steps_per_generation=3),
            "steps_per_generation=3 is set too",
        ),
        ("no-steps", grpo(steps_per_generation=0), "steps_per_generation=0 must be at least 1"),
        ("no-accumulation", grpo(gradient_accumulation_steps=0), "accumulation_steps=0 must be at least 1"),
        ("no-batch", grpo(per_device_train_batch_size=0), "train_batch_size=0 must be at least 1"),
        ("no-generation-batch", grpo(generation_batch_size=0), "generation_batch_size=0 must be at least 1"),
        ("no-iterations", grpo(num_iterations=0), "num_iterations=0 must be at least 1"),
        ("no-padding-multiple", grpo(pad_to_multiple_of=0), "pad_to_multiple_of=0 must be at least 1"),
        ("word-as-multiple", grpo(pad_to_multiple_of="wide"), "pad_to_multiple_of='wide' must be a whole"),
        (
            "eval-groups-not-whole",
            evaluating(per_device_eval_batch_size=5),
            r"= 5 must be divisible by .* size 2.*eval_batch_size to a multiple of 2.*fit the current batch: \[5\]",
        ),
        ("eval-group-negative", grpo(num_generations_eval=-2), "num_generations_eval=-2 must be at least 0"),
        ("auto-batch", grpo(auto_find_batch_size=True), "auto_find_batch_size=True would break up prompt"),
        ("tensor-parallel", parallel(tp_size=2), "parallelism_config with tp_size=2 cannot work.*Use data parallel"),
        ("context-parallel", parallel(cp_size=2), "context or sequence parallelism cannot work.*Use data parallel"),
        ("tensor-parallel-model", loading(tp_plan="auto"), r"model_init_kwargs\['tp_plan'\]='auto' shards the model"),
        ("tensor-parallel-size", loading(tp_size=2), r"model_init_kwargs\['tp_size'\]=2 shards the model"),
        (
            "model-on-a-mesh",
            loading(distributed_config={"tp_size": 2}),
            r"\['distributed_config'\]=.* shards the model",
        ),
        ("temperature-0", grpo(temperature=0.0), "temperature=0.0 must be greater than 0"),
        ("temperature-negative", grpo(temperature=-1.0), "temperature=-1.0 must be greater than 0"),
        ("temperature-nan", grpo(temperature=math.nan), "temperature=nan must be a number"),
        ("top-p-0", grpo(top_p=0.0), "top_p=0.0 must be greater than 0"),
        ("top-p-above-1", grpo(top_p=1.5), "top_p=1.5 must be at most 1"),
        ("top-k-negative", grpo(top_k=-1), "top_k=-1 must be at least 0"),
        ("min-p-above-1", grpo(min_p=2.0), "min_p=2.0 must be at most 1"),
        ("no-repetition", grpo(repetition_penalty=0.0), "repetition_penalty=0.0 must be greater than 0"),
        ("no-completion", grpo(max_completion_length=0), "max_completion_length=0 must be at least 1"),
        ("endless-completion", grpo(max_completion_length=None), "max_completion_length=None must be a"),
        ("no-prompt-tokens", grpo(max_prompt_length=0), "max_prompt_length=0 must be at least 1"),
        ("unknown-generation-kwarg", generating(max_new_token=3), "no field `max_new_token`.*mean `max_new_tokens`"),
        (
            "sequences-per-prompt",
            generating(num_return_sequences=4),
            r"\['num_return_sequences'\]=4 cannot be set.*by num_generations",
        ),
        (
            "own-end-token",
            generating(eos_token_id=[7]),
            r"\['eos_token_id'\]=\[7\] cannot be set.*config.eos_token_id",
        ),
        ("no-stop-string", generating(stop_strings=[]), r"\['stop_strings'\]=\[\] must be a string or a list"),
        ("empty-stop-string", generating(stop_strings=["a", ""]), r"=\['a', ''\] must be a string or a list"),
        ("stop-number", generating(stop_strings=3), r"\['stop_strings'\]=3 must be a string or a list"),
        ("stop-string-of-a-beam", generating(stop_strings=".", num_beams=2), "with num_beams=2.*Remove one"),
        ("parity-word", grpo(parity_check="always"), "parity_check='always' must be 'first', 'off' or 'every:N'"),
        ("parity-number", rloo(parity_check="every:0"), "parity_check='every:0' must be"),
        (
            "parity-of-padded-rows",
            grpo(parity_check="every:3", packed_update=False),
            "parity_check='every:3' compares packed rows: set packed_update=True",
        ),
        ("token-budget", grpo(max_tokens_per_micro_batch=0), "max_tokens_per_micro_batch=0 must be at least 1"),
        (
            "budget-of-padded-rows",
            grpo(max_tokens_per_micro_batch=4096, packed_update=False),
            "max_tokens_per_micro_batch=4096 needs packed rows: set packed_update=True",
        ),
        ("unknown-backend", grpo(rollout_backend="hf"), "rollout_backend='hf' is not one of auto, builtin"),
        (
            "misspelt-backend",
            rloo(rollout_backend="transformer"),
            "='transformer' is not one of.*Did you mean `transformers`",
        ),
        (
            "vllm-and-builtin",
            grpo(use_vllm=True, rollout_backend="builtin"),
            "use_vllm=True contradicts rollout_backend='builtin'; set one",
        ),
        (
            "vllm-and-transformers",
            grpo(use_vllm=True, rollout_backend="transformers"),
            "use_vllm=True contradicts rollout_backend='transformers'",
        ),
        (
            "continuous-and-builtin",
            grpo(use_transformers_continuous_batching=True, rollout_backend="builtin"),
            "use_transformers_continuous_batching=True contradicts rollout_backend='builtin'",
        ),
        (
            "paged-and-vllm",
            grpo(use_transformers_paged=True, rollout_backend="vllm"),
            "use_transformers_continuous_batching=True contradicts rollout_backend='vllm'",
        ),
        (
            "continuous-and-vllm",
            grpo(use_transformers_continuous_batching=True, use_vllm=True),
            "use_transformers_continuous_batching=True contradicts use_vllm=True",
        ),
        (
            "continuous-settings-alone",
            grpo(transformers_continuous_batching_config={"num_blocks": 4}),
            r"config={'num_blocks': 4} needs use_transformers_continuous_batching=True",
        ),
        (
            "unknown-continuous-setting",
            continuous(max_memory_percentage=0.5),
            "no field `max_memory_percentage`. Did you mean `max_memory_percent`",
        ),
        ("continuous-seed", continuous(seed=3), r"\['seed'\]=3 would draw the same random numbers.*set `seed`"),
        (
            "continuous-with-min-p",
            trainer(config={"use_transformers_continuous_batching": True, "min_p": 0.1}),
            "does not support min_p=0.1; remove it, or set use_transformers_continuous_batching=False",
        ),
        (
            "continuous-with-static-cache",
            trainer(config={"use_transformers_continuous_batching": True, "cache_implementation": "static"}),
            "does not support cache_implementation='static'",
        ),
        ("unknown-loss", grpo(loss_type="drgrpo"), "loss_type='drgrpo' is not one of.*mean `dr_grpo`"),
        ("loss-gspo", grpo(loss_type="gspo"), "GSPO is loss_type='grpo' with importance_sampling_level='sequence'"),
        ("loss-gspo-in-capitals", grpo(loss_type="GSPO"), "'GSPO' is not one of.*GSPO is loss_type='grpo' with"),
        ("loss-rloo", grpo(loss_type="rloo"), "RLOO has its own trainer: RLOOTrainer with RLOOConfig"),
        ("loss-reinforce", grpo(loss_type="reinforce"), "REINFORCE .*: RLOOTrainer with RLOOConfig"),
        ("loss-ppo", grpo(loss_type="ppo"), "PPO has a critic, which is not supported"),
        ("unknown-scale", grpo(scale_rewards="std"), "scale_rewards='std' is not one of batch, group, none"),
        ("unknown-level", grpo(importance_sampling_level="seq"), "level='seq' is not one of sequence, token"),
        ("unknown-aggregation", grpo(multi_objective_aggregation="sum"), "='sum' is not one of normalize_then_sum"),
        ("epsilon-negative", grpo(epsilon=-0.1), "epsilon=-0.1 must be at least 0"),
        ("epsilon-high-negative", rloo(epsilon_high=-0.1), "epsilon_high=-0.1 must be at least 0"),
        ("beta-negative", grpo(beta=-0.1), "beta=-0.1 must be at least 0"),
        ("delta-0", grpo(delta=0.0), "delta=0.0 must be greater than 0"),
        ("quantile-above-1", grpo(top_entropy_quantile=1.5), "top_entropy_quantile=1.5 must be at most 1"),
        ("sapo-temperature-0", grpo(sapo_temperature_pos=0.0), "sapo_temperature_pos=0.0 must be greater"),
        (
            "entropy-bounds",
            grpo(entropy_coef_min=0.5, entropy_coef_max=0.1),
            "coef_min=0.5 is above entropy_coef_max=0.1",
        ),
        ("sync-without-reference", grpo(sync_ref_model=True), "sync_ref_model=True needs .* beta > 0"),
        ("alpha-above-1", rloo(ref_model_mixup_alpha=1.5), "ref_model_mixup_alpha=1.5 must be at most 1"),
        ("sync-never", rloo(ref_model_sync_steps=0), "ref_model_sync_steps=0 must be at least 1"),
        ("reward-timeout-0", grpo(reward_timeout=0.0), "reward_timeout=0.0 must be greater than 0"),
        ("reward-timeout-infinite", grpo(reward_timeout=math.inf), "reward_timeout=inf must be at most 604800"),
        ("reward-timeout-text", grpo(reward_timeout="1 s"), "reward_timeout='1 s' must be"),
        ("sample-timeout-negative", rloo(reward_sample_timeout=-1.0), "reward_sample_timeout=-1.0 must be greater"),
        (
            "sample-timeout-above",
            grpo(reward_timeout=1.0, reward_sample_timeout=2.0),
            "reward_sample_timeout=2.0 must not be above reward_timeout=1.0",
        ),
        ("no-reward-workers", grpo(reward_workers=0), "reward_workers=0 must be at least 1"),
        ("no-reward-memory", grpo(reward_memory_gb=0.0), "reward_memory_gb=0.0 must be greater than 0"),
        ("no-concurrency", grpo(reward_concurrency=0), "reward_concurrency=0 must be at least 1"),
        ("retries-negative", grpo(reward_retries=-1), "reward_retries=-1 must be at least 0"),
        ("unknown-policy", rloo(reward_on_error="abstian"), "'abstian' is not one of abstain, raise.*mean `abstain`"),
        ("failure-rate-above-1", grpo(max_reward_failure_rate=1.5), "failure_rate=1.5 must be at most 1"),
        ("worker-env-text", grpo(worker_env="MY_KEY"), "worker_env='MY_KEY' must be a list of names"),
        ("clip-range-reversed", rloo(reward_clip_range=[1.0, -1.0]), "must be .low, high. with low < high"),
        ("clip-range-of-three", rloo(reward_clip_range=[0.0, 1.0, 2.0]), r"reward_clip_range=\[0.0, 1.0, 2"),
        ("clip-range-of-one", rloo(reward_clip_range=3.0), "reward_clip_range=3.0 must be a list"),
        ("label-smoothing", grpo(label_smoothing_factor=0.1), "label_smoothing_factor=0.1 has no meaning"),
        ("hub-repo-of-nothing", grpo(log_completions_hub_repo="a/b"), "'a/b' needs log_completions=True"),
        ("fused-cross-entropy", grpo(**FUSED), r"\['fused_linear_cross_entropy'\]=True.*remove it"),
        (
            "truncate-without-bound",
            grpo(**UNBOUNDED),
            "'token_truncate' needs a bound: set vllm_importance_sampling_clip_max",
        ),
        ("bounds-crossed", grpo(vllm_importance_sampling_clip_min=5.0), "clip_min=5.0 must be below .*=3.0"),
        ("unknown-correction", grpo(vllm_importance_sampling_mode="clip"), "mode='clip' is not one of"),
        ("vllm-field-alone", grpo(vllm_mode="server"), "vllm_mode='server' needs use_vllm=True"),
        ("vllm-mode", vllm(vllm_mode="remote"), "vllm_mode='remote' is not one of colocate, server"),
        ("vllm-model-impl", vllm(vllm_model_impl="hf"), "vllm_model_impl='hf' is not one of"),
        ("vllm-memory", vllm(vllm_gpu_memory_utilization=1.5), "utilization=1.5 must be at most 1"),
        ("vllm-port", served(vllm_server_port=70000), "vllm_server_port=70000 must be at most 65535"),
        ("vllm-timeout", served(vllm_request_timeout=0), "vllm_request_timeout=0 must be greater than 0"),
        ("async-two", served(async_rollouts=2), "async_rollouts=2 must be at most 1"),
        ("async-negative", served(async_rollouts=-1), "async_rollouts=-1 must be at least 0"),
        ("async-flag", served(async_rollouts=True), "async_rollouts=True must be"),
        ("async-builtin", grpo(async_rollouts=1), "async_rollouts=1 .*set use_vllm=True and vllm_mode='server'"),
        ("async-colocate", vllm(async_rollouts=1), "async_rollouts=1 .*set use_vllm=True and vllm_mode='server'"),
        (
            "async-uncorrected",
            served(async_rollouts=1, vllm_importance_sampling_correction=False),
            "async_rollouts=1 .*correction=False would treat as samples of the current weights",
        ),
        (
            "async-rloo",
            rloo(async_rollouts=1, use_vllm=True, vllm_mode="server"),
            "async_rollouts=1 .*RLOO has no correction",
        ),
        ("vllm-server-field", vllm(vllm_server_port=9000), "vllm_server_port=9000 needs vllm_mode='server'"),
        (
            "vllm-colocate-field",
            served(vllm_gpu_memory_utilization=0.5),
            "needs vllm_mode='colocate'; start the server with `gruppo vllm-serve MODEL --gpu-memory-utilization",
        ),
        ("vllm-sleeping-server", served(vllm_enable_sleep_mode=True), "needs vllm_mode='colocate'; leave it out"),
        ("vllm-parallel", vllm(vllm_tensor_parallel_size=2), "must divide the number of processes, 1"),
        ("vllm-hot", vllm(temperature=2.5), "temperature=2.5 is outside of what vLLM samples with"),
        ("vllm-cold", vllm(temperature=0.001), "temperature=0.001 is outside of what vLLM samples with"),
        ("vllm-cache", vllm(cache_implementation="static"), "cache_implementation='static' is for transformers"),
        ("vllm-spread", vllm(ds3_gather_for_generation=False), "ds3_gather_for_generation=False .*Leave it out"),
        ("vllm-n", vllm(generation_kwargs={"n": 4}), r"\['n'\]=4 cannot be set: .* num_generations"),
        ("vllm-seed", vllm(generation_kwargs={"seed": 4}), r"\['seed'\]=4 cannot be set"),
        ("vllm-kwargs", vllm(generation_kwargs={"presence": 1}), "no field `presence` with vLLM"),
        ("vllm-beams", vllm(generation_kwargs={"num_beams": 2}), "no field `num_beams` with vLLM"),
        (
            "vllm-kwargs-of-a-server",
            vllm(generation_kwargs={"vllm_xargs": {"a": 1}}),
            "needs vllm_mode='server'",
        ),
        (
            "vllm-kwargs-of-an-engine",
            served(generation_kwargs={"bad_words": ["a"]}),
            "needs vllm_mode='colocate'",
        ),
        (
            "vllm-regex-twice",
            vllm(vllm_structured_outputs_regex="a+", generation_kwargs={"structured_outputs": {"regex": "b"}}),
            "contradicts vllm_structured_outputs_regex='a[+]'",
        ),
        (
            "vllm-regex-without-end",
            vllm(vllm_structured_outputs_regex="a+", generation_kwargs={"ignore_eos": True}),
            "contradicts vllm_structured_outputs_regex",
        ),
        (
            "vllm-limit-twice",
            vllm(generation_kwargs={"max_tokens": 3, "max_new_tokens": 4}),
            r"\['max_tokens'\]=3 and generation_kwargs\['max_new_tokens'\] mean the same",
        ),
        (
            "vespo-of-sequences",
            vllm(loss_type="vespo"),
            "loss_type='vespo' needs the correction of each token, not .*'sequence_mask'",
        ),
        (
            "bad-dtype",
            loading(dtype="float33"),
            r"model_init_kwargs\['dtype'\]='float33' is not a torch dtype; use 'auto'",
        ),
        ("no-eos", trainer(processing_class=tiny_tokenizer(eos_token=None)), "Set `tokenizer.eos_token`"),
        (
            "tokenizer-too-large",
            trainer(model=tiny_model(vocab_size=50)),
            "101 tokens .* embeds only 50.*resize_token_emb",
        ),
        ("peft-twice", trainer(model=adapted(), peft_config=lora()), "has adapters already.*PeftModel alone"),
        ("no-reward", trainer(reward_funcs=None), "There is no reward: pass at least one"),
        ("empty-rewards", trainer(reward_funcs=[]), "There is no reward: pass at least one"),
        ("reward-not-callable", trainer(reward_funcs=[length_reward, 3]), "reward_funcs contains 3, which is neither"),
        (
            "memory-without-workers",
            trainer(config={"reward_memory_gb": 1.0}),
            "limits rewards in workers.*reward_timeou",
        ),
        (
            "reward-not-to-be-sent",
            trainer(reward_funcs=locked_reward(), config={"reward_timeout": 1.0}),
            "The reward 'locked' cannot be sent to a worker process",
        ),
        (
            "reward-by-its-name",
            trainer(model="no/model", reward_funcs="accuracy_reward"),
            "'accuracy_reward'. A string means a reward model.*: from gruppo.rewards import accuracy_reward; reward_f",
        ),
        (
            "reward-maker-by-its-name",
            trainer(model="no/model", reward_funcs=[length_reward, "get_length_reward"]),
            r"from gruppo.rewards import get_length_reward; reward_funcs=get_length_reward\(…\)",
        ),
        ("weights-too-many", trainer(config={"reward_weights": [1.0, 2.0]}), "has 2 entries for 1 reward functions"),
        (
            "tokenizers-too-many",
            trainer(reward_processing_classes=[None, None]),
            "has 2 entries for 1 reward functions",
        ),
        (
            "reward-model-alone",
            trainer(reward_funcs=classifier()),
            "not loaded from a name.*in reward_processing_classes",
        ),
        (
            "reward-tokenizer-without-pad",
            judged(tiny_tokenizer(pad_token=None, eos_token=None)),
            "set its `pad_token`",
        ),
        ("tools", trainer(tools=[len]), "the tool `len` cannot be shown to the model: Argument obj is missing a type"),
        ("environments", trainer(environment_factory=dict), "made a dict, which has no method `reset`"),
        ("no-dataset", data(None), "train_dataset is missing: pass a datasets.Dataset"),
        ("iterable-without-end", data(stream(), max_steps=-1), "has no length: set max_steps"),
        (
            "iterable-dispatched",
            data(stream(), accelerator_config={"dispatch_batches": True}),
            "dispatch_batches=True c",
        ),
        ("eval-without-dataset", trainer(config=EVALUATE), "eval_strategy='steps' needs an eval_dataset"),
        ("rollout-not-callable", trainer(rollout_func="mine"), "rollout_func='mine' is not callable"),
        ("rollout-of-one-argument", trainer(rollout_func=lambda prompts: {}), r"takes \(prompts\); it is called as"),
    ],
    TypeError: [  # things of the wrong kind
        ("unknown-field", grpo(num_generation=4), "no field `num_generation`. Did you mean `num_generations`"),
        ("field-of-generate", grpo(max_new_tokens=9), "no field `max_new_tokens`. Use `max_completion_length`"),
        ("field-of-old-rloo", rloo(rloo_k=4), "RLOOConfig has no field `rloo_k`. Use `num_generations`"),
        ("field-of-the-trainer", grpo(reward_funcs=[]), "no field `reward_funcs`. It is an argument of the trainer"),
        ("tokenizer-of-another-kind", trainer(processing_class="gpt2"), "must be a PreTrainedTokenizerBase.*str"),
        (
            "peft-config-of-another-kind",
            trainer(peft_config={"r": 8}),
            "peft_config must be a peft.PeftConfig, not dict",
        ),
        (
            "reward-tokenizer-of-another-kind",
            judged("gpt2"),
            "reward_processing_classes must hold tokenizers, not str",
        ),
        ("list-as-dataset", data([{"prompt": "a"}] * 8), "not list. A list of dicts becomes one with"),
        (
            "splits-as-dataset",
            data(DatasetDict(test=prompts(), train=prompts())),
            r"not a DatasetDict of splits \(test, train\). Pass one of them: dataset\['train'\]",
        ),
        ("one-split-as-dataset", data({"dev": prompts()}), r"not a dict of splits \(dev\).*: dataset\['dev'\]"),
        ("tokenizer-argument", trainer(tokenizer=None), "no argument `tokenizer`. Pass it as processing_class"),
        (
            "reference-argument",
            trainer(trainer=RLOOTrainer, ref_model=None),
            "RLOOTrainer has no argument `ref_model`. Leave it out: with beta > 0 the reference is a copy",
        ),
        ("collator-argument", trainer(data_collator=None), "no argument `data_collator`.*Change rows with dataset"),
        ("metrics-argument", trainer(compute_metrics=None), "no argument `compute_metrics`.*log_metric"),
        ("field-as-argument", trainer(beta=0.1), r"`beta`. It is a field of the config: args=GRPOConfig\(beta=…\)"),
        ("misspelt-argument", trainer(reward_functions=[]), "`reward_functions`. Did you mean `reward_funcs`"),
        (
            "argument-of-a-subclass",
            trainer(trainer=OverridesNothing, tokenizer=None),
            "OverridesNothing has no argument `tokenizer`",
        ),
        ("eval-list", evaluation([{"prompt": "a"}]), "eval_dataset must be a datasets.Dataset.*not list"),
    ],
    NotImplementedError: [  # features that are not there yet
        ("hook-generate", trainer(trainer=OverridesGenerate), "OverridesGenerate overrides `_generate`.*rollout_func"),
        ("hook-tool-loop", trainer(trainer=OverridesToolLoop), "overrides `_tool_call_loop`"),
        ("sync-with-adapters", trainer(peft_config=lora(), config=SYNC), "with adapters.*set it to False"),
    ],
    DataError: [  # datasets
        ("images", data(prompts(8, images=[["x.png"]] * 8)), r"images \(column `images`\).*Pass the processor"),
        ("image", data(prompts(8, image=["x.png"] * 8)), r"images \(column `image`\).*Pass the processor"),
        ("empty-dataset", data(prompts(0)), "train_dataset is empty"),
        ("no-prompt-column", data(unnamed()), r"no `prompt` column; its columns are \['answer', 'question'\]. Rename"),
        ("too-few-prompts", data(prompts(3), gradient_accumulation_steps=2), "3 prompts, fewer than the 4 of one gen"),
        ("empty-prompt", data(rows("a", "b", "", "d")), "empty `prompt`. Remove it"),
        ("number-as-prompt", data(rows(1, 2, 3)), "must be a non-empty string or .* has 1"),
        ("none-as-prompt", data(rows("a", None, "b")), "but a row has None"),
        ("no-messages", data(rows(chat("a"), [])), r"non-empty list of messages.* has \[\]"),
        ("message-without-role", data(rows([{"content": "a"}])), "with `role` and `content`, not {'content': 'a'}"),
        (
            "message-without-content",
            data(rows([{"role": "user", "text": "a"}])),
            "neither content nor tool calls: {'role'",
        ),
        ("message-as-text", data(rows(["a"], ["b"])), "not 'a'"),
        (
            "no-chat-template",
            trainer(train_dataset=chats(), processing_class=untold()),
            "Set `tokenizer.chat_template`, or use",
        ),
        (
            "prompt-too-long",
            data(rows("a", "b" * 128)),
            "has 128 tokens.*of 128. Shorten or filter it, set max_prompt",
        ),
        ("iterable-empty", data(stream(0)), "train_dataset is empty"),
        ("iterable-without-prompt", data(unnamed().to_iterable_dataset()), "no `prompt` column"),
        ("eval-empty", evaluation(prompts(0)), "eval_dataset is empty"),
        ("eval-no-sets", evaluation({}), "eval_dataset is an empty dict"),
        (
            "eval-one-set-empty",
            evaluation({"easy": prompts(4), "hard": prompts(0)}),
            r"eval_dataset\['hard'\] is empty",
        ),
        ("eval-iterable-empty", evaluation(stream(0)), "eval_dataset is empty"),
        ("eval-no-prompt-column", evaluation(unnamed()), "no `prompt` column"),
        ("iterable-too-short", train(train_dataset=stream(1)), "ended after fewer than 2 prompts.*Lower"),
    ],
    RewardError: [  # rewards, while it runs; before the model is loaded where the columns are known
        (
            "reward-of-a-missing-column",
            trainer(model="no/model", reward_funcs=takes_solution_and_more),
            "'takes_solution_and_more' cannot be called: missing a required argument: 'solution'. It receives answer,",
        ),
        (
            "reward-of-wrong-arguments",
            trainer(model="no/model", reward_funcs=[length_reward, takes_solution], train_dataset=chats()),
            r"'takes_solution' cannot be called: .*add \*\*kwargs",
        ),
        (
            "reward-of-a-removed-column",
            trainer(
                model="no/model",
                reward_funcs=lambda completions, answer, **kwargs: completions,
                config={"remove_unused_columns": True},
            ),
            "cannot be called: missing a required argument: 'answer'",
        ),
        (
            "reward-of-a-column-that-evaluation-lacks",
            trainer(
                model="no/model",
                reward_funcs=takes_solution_and_more,
                train_dataset=prompts(16, solution=["1"] * 16),
                eval_dataset={"a": prompts(4, solution=["1"] * 4), "b": prompts(4)},
                config=EVALUATE | {"per_device_eval_batch_size": 4},
            ),
            "cannot be called: missing a required argument: 'solution'",
        ),
        (
            "reward-of-a-column-that-a-stream-lacks",
            train(train_dataset=stream(), reward_funcs=takes_solution_and_more),
            "cannot be called: missing a required argument: 'solution'",
        ),
        ("rewards-too-few", rewards([1.0]), "'broken' returned 1 rewards for 4 completions"),
        ("rewards-too-many", rewards([1.0] * 9), "'broken' returned 9 rewards for 4 completions"),
        ("reward-not-a-list", rewards(1.0), "'broken' returned float; it must return a list"),
        ("reward-none", rewards(None), "'broken' returned NoneType; it must return a list"),
        ("reward-digits", rewards("1234"), "'broken' returned str; it must return a list"),
        ("reward-dict", rewards({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}), "'broken' returned dict"),
        ("reward-nan", reward(math.nan), "'broken' returned nan for completion 0.*or None"),
        ("reward-inf", reward(-math.inf), "'broken' returned -inf for completion 0"),
        ("reward-beyond-float32", reward(1e39), r"'broken' returned 1e\+39 for completion 0"),
        ("reward-text", reward("0.5"), "'broken' returned '0.5' for completion 0"),
        ("reward-list", reward([1.0, 2.0]), r"'broken' returned \[1.0, 2.0\] for completion 0"),
        ("partial-reward-named", partial_rewards(None), "'broken' returned NoneType; it must return a list"),
        ("rloo-rewards-too-few", rewards([1.0], RLOOTrainer), "'broken' returned 1 rewards for 4 completions"),
    ],
    RolloutError: [  # rollout functions, while it runs
        (
            "rollout-no-dict",
            train(rollout_func=lambda prompts, trainer: [1]),
            "rollout_func must return a dict, not list",
        ),
        (
            "rollout-count",
            rolled_out(completion_ids=lambda n: [[1]] * (n - 2)),
            "2 entries in 'completion_ids' for 4 prompts",
        ),
        ("rollout-logprobs", rolled_out(logprobs=lambda n: [[-0.1]] * n), r"logprobs\[0\] has 1 entries for 3"),
        ("rollout-env-mask", rolled_out(env_mask=lambda n: [[1, 0]] * n), r"env_mask\[0\] has 2 entries for 3"),
        ("rollout-extra-count", rolled_out(turns=lambda n: [1] * (n - 1)), "3 entries in 'turns' for 4 prompts"),
        ("rollout-empty-prompt", rolled_out(prompt_ids=lambda n: [[]] * n), r"prompt_ids\[0\] is empty"),
    ],
    ValueError: [  # values, while it runs
        ("rollout-keys", rolled_out(drop="logprobs"), "must return .*; missing: logprobs"),
        ("rollout-none", rolled_out(completion_ids=lambda n: None), "missing: completion_ids"),
        ("evaluate-without-dataset", evaluate(dataset=None), "Evaluation needs an eval_dataset"),
        ("outputs-of-a-loss", loss(return_outputs=True), "return_outputs=True is not supported"),
    ],
}

# The class of args, datasets of rollout functions, models without a name.
CASES[TypeError] += [
    (
        "trainer-config",
        lambda f: make_trainer(f, args=TrainingArguments(str(f), use_cpu=True)),
        "a GRPOConfig, not Train",
    ),
    ("other-config", lambda f: make_trainer(f, args=RLOOConfig(str(f), use_cpu=True)), "a GRPOConfig, not RLOOConfig"),
    ("rloo-other-config", lambda f: make_trainer(f, RLOOTrainer, args=grpo()(f)), "a RLOOConfig, not GR"),
    ("model-of-another-kind", trainer(model=None), "model must be a .*PreTrainedModel"),
]
CASES[ConfigError] += [
    (
        "router-loss-of-dense-model",
        trainer(config={"router_aux_loss_coef": 0.1}),
        "router_aux_loss_coef=0.1 needs a mix",
    ),
    ("rollout-no-dataset", rolled_out_on(None), "train_dataset is missing"),
    (
        "prompt-length-of-a-rollout-function",
        trainer(rollout_func=rollout(), config={"max_prompt_length": 4}),
        "max_prompt_length has no effect with rollout_func",
    ),
    ("nameless-model", trainer(processing_class=None), "LlamaForCausalLM .*processing_class"),
]
CASES[ConfigError] += [
    (
        f"template-{name}",
        trainer(config={"chat_template_kwargs": {name: value}}),
        rf"chat_template_kwargs\['{name}'\]={value} cannot be set: .* Remove it",
    )
    for name, value in {"add_generation_prompt": False, "tokenize": True, "return_dict": False}.items()
]
CASES[ConfigError] += [
    ("frozen-model", trainer(model=frozen(tiny_model())), "No weight of the model is trainable.*pass a peft_config"),
    ("frozen-adapter", trainer(model=frozen(adapted())), "No weight of the model is trainable.*is_trainable=True"),
]
CASES[DataError] += [
    ("one-bad-row-among-many", data(rows("a", "", *["b"] * 600)), "Row 1: A row has an empty `prompt`"),
    ("column-of-the-rewards", data(prompts(4, completions=["x"] * 4)), "column `completions`.*Rename the column"),
    (
        "no-room-in-learned-positions",
        trainer(model=tiny_gpt2(), config={"max_completion_length": 63}),
        "no room for a completion of 63 in the model's context of 64.*lower max_completion_length",
    ),
    ("rollout-too-few-prompts", rolled_out_on(prompts(1)), "1 prompts, fewer than the 2"),
    ("rollout-no-prompt-column", rolled_out_on(unnamed()), "no `prompt` column"),
]


def test_the_table_is_as_long_as_promised():
    names = [name for table in CASES.values() for name, _, _ in table]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize(
    ("error", "build", "message"),
    [pytest.param(error, *row[1:], id=row[0]) for error, table in CASES.items() for row in table],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_bad_input_is_refused_with_a_reason(error, build, message, tmp_path):
    with pytest.raises(error, match=message):
        build(tmp_path)


def test_what_the_table_starts_from_is_right(tmp_path):
    assert make_trainer(tmp_path, config={"max_steps": 1}).train().global_step == 1
    assert make_trainer(tmp_path, config={"max_steps": 1}, rollout_func=rollout()).train().global_step == 1
