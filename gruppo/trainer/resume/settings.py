"""The definition of a run as stored in a checkpoint: settings, model, prompts, rewards and tools.

A run resumed with different ones would continue as a different run, so each difference is reported by name.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from torch import nn

from gruppo.config.base import RENAMED
from gruppo.policy.sharding import shape_of
from gruppo.runs.lines import plain
from gruppo.runs.secrets import without_secrets

# Settings that do not affect the resulting weights: output locations, what is shown, when to save, and how the machine
# is used.
HARMLESS = {
    *("output_dir", "run_name", "project", "report_to", "disable_tqdm", "log_level", "log_level_replica"),
    *("do_train", "do_eval", "do_predict", "debug", "push_to_hub", "resume_from_checkpoint", "resume_allow_changes"),
    *("record", "audit", "max_bad_updates", "save_on_signal", "max_reward_failure_rate", "num_completions_to_print"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "prediction_loss_only"),
    *("restore_callback_states_from_checkpoint", "torch_empty_cache_steps", "skip_memory_metrics", "local_rank"),
    *("reward_workers", "reward_concurrency", "reward_retries", "worker_env", "max_parallel_tools"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_request_timeout", "vllm_group_port"),
    *("process_timeout", "stop_timeout"),
    *("per_device_eval_batch_size", "num_generations_eval", "parallelism_config", "accelerator_config"),
}
HARMLESS_PREFIXES = (
    "logging_",
    "log_",
    "save_",
    "hub_",
    "push_",
    "eval_",
    "dataloader_",
    "include_",
    "trackio_",
    "ddp_",
)
LENGTHS = ("max_steps", "num_train_epochs")
OF_THE_OPTIMIZER = {
    *LENGTHS,
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay"),
    *("max_grad_norm", "optim", "optim_args", "max_tokens_per_micro_batch", "gradient_checkpointing"),
}


def settings_of(
    args: Any, model: nn.Module, train_dataset: Any, rewards: Sequence[str], tools: Sequence[str], processes: int
) -> dict[str, Any]:
    """Everything that determines what a run computes, as JSON. Differences are reported by dotted name."""
    settings = {name: value for name, value in args.to_dict().items() if not _is_harmless(name, args)}
    weights = list(model.parameters())
    return without_secrets(plain(settings)) | {
        "model": {
            "class": type(model).__name__,
            "parameters": sum(shape_of(p).numel() for p in weights),
            "trainable": sum(shape_of(p).numel() for p in weights if p.requires_grad),
        },
        "train_dataset": fingerprint(train_dataset),
        "rewards": list(rewards),
        "tools": list(tools),
        "processes": processes,
    }


def _is_harmless(name: str, args: Any) -> bool:
    if name == "num_train_epochs" and args.max_steps > 0:
        return True
    if name in LENGTHS:  # harmless if the learning rate schedule does not depend on the length of the run
        schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        warmup_of_length = 0 < (getattr(args, "warmup_ratio", None) or args.warmup_steps or 0) < 1
        return schedule in ("constant", "constant_with_warmup", "inverse_sqrt") and not warmup_of_length
    if name in dict(RENAMED).values():  # duplicates the setting under its earlier name, which every release has
        return True
    return name in HARMLESS or name.startswith(HARMLESS_PREFIXES)


def keeps_the_queue(names: Sequence[str]) -> bool:
    """Whether completions that were sampled before these settings changed are still valid."""
    return all(name in OF_THE_OPTIMIZER or name.startswith("adam_") for name in names)


def fingerprint(dataset: Any) -> dict[str, Any]:
    """The number of rows and a hash of the prompts of some of them; a stream is not read, and has neither."""
    if not isinstance(dataset, Dataset):
        return {"rows": None}
    rows, some = len(dataset), 64
    places = sorted({i * (rows - 1) // max(some - 1, 1) for i in range(some)}) if rows else []
    prompts = dataset.select_columns([c for c in dataset.column_names if c == "prompt"]).select(places).to_list()
    text = json.dumps(prompts, default=str, sort_keys=True)
    return {"rows": rows, "hash": hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]}


def changed(names: Sequence[str], allowed: Sequence[str] | None) -> list[str]:
    """The dotted names that `resume_allow_changes` does not allow."""
    allowed = allowed or []
    if "*" in allowed:
        return []
    return [name for name in names if name not in allowed and name.partition(".")[0] not in allowed]


def common(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both without the settings that only one of them has, since other library versions have other settings."""
    names = saved.keys() & now.keys()
    return {name: saved[name] for name in names}, {name: now[name] for name in names}
