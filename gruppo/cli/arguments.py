"""Arguments of the training commands besides the fields of GRPOConfig and RLOOConfig, as flags or in a file.

RunArguments      data, rewards, tools and environments: those of a TRL script, shorter names for them, and a few more
ModelArguments    the model
LaunchArguments   the processes to launch, and whether to resume
"""

from dataclasses import dataclass
from typing import Any

from gruppo.config.fields import option
from gruppo.config.model import ModelConfig
from gruppo.config.script import GRPOScriptArguments

__all__ = ["LaunchArguments", "ModelArguments", "RunArguments"]

NAMED = "`module:name` or `file.py:name`"


@dataclass
class RunArguments(GRPOScriptArguments):
    """Data, rewards and tools of a run. In a file, `dataset` may be a mapping or a list, and rewards take arguments.

    Example:
        RunArguments(dataset_name="prompts.jsonl", reward_funcs=["accuracy_reward", "my_rewards.py:brevity"])
    """

    dataset_name: str | None = option(
        None, "Hub id, a JSONL, parquet or CSV file, several of them (`data/*.jsonl`), or a folder.", "dataset"
    )
    dataset_map: str | None = option(
        None, f"A function that takes a row of the dataset and returns the columns to add or replace: {NAMED}."
    )
    eval_dataset: str | None = option(
        None, "Dataset to evaluate on, named like dataset_name; None uses dataset_test_split."
    )
    reward_funcs: list[str] | None = option(
        None,
        f"Rewards: the name of a shipped one, {NAMED}, a dotted path, or the name of a reward model. In a file, "
        "a name with a mapping of arguments is a function to call, which returns the reward.",
        "reward",
        "rewards",
    )
    tools: list[str] | None = option(None, f"Functions that the model may call: {NAMED}.")
    environment_factory: str | None = option(
        None, f"A class or function that creates the environment of a completion: {NAMED}."
    )
    rollout_func: str | None = option(None, f"A function that samples in place of the engine (GRPO): {NAMED}.")
    peft: dict[str, Any] | None = option(None, "Fields of peft.LoraConfig; an alternative to use_peft with lora_*.")


@dataclass
class ModelArguments(ModelConfig):
    """ModelConfig, with a shorter name for the model.

    Example:
        ModelArguments(model_name_or_path="Qwen/Qwen2.5-0.5B-Instruct", dtype="bfloat16")
    """

    model_name_or_path: str | None = option(None, "Hub id or local folder of the model.", "model")


@dataclass
class LaunchArguments:
    """Whether this process trains itself or launches processes that do.

    Example:
        LaunchArguments(launch="fsdp2", nproc=8)
    """

    launch: str | None = option(
        None, "Start several processes that share the work by this method: ddp, fsdp2, zero1, zero2, zero3."
    )
    nproc: int | None = option(None, "Number of processes for launch; None starts one per GPU of this machine.")
    accelerate_config: str | None = option(
        None,
        "Like launch, in accelerate's terms: a config file, or single_gpu, multi_gpu, fsdp2, zero1, zero2, zero3.",
    )
    resume: bool = option(False, "Resume from the newest good checkpoint in output_dir.")
