"""Two processes on one GPU over NCCL: `nccl_processes FOLDER WAY`; run by test_nccl.py.

Without a GPU they use gloo, so that this file can be tried.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from gruppo import GRPOConfig, GRPOTrainer
from tests import zero
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.sharded import FSDP2, as_on_gpus, is_sharded
from tests.trainer.scripted import make_trainer, rows_in_order, two_process_batches, update_of
from tests.trainer.sharded_processes import ADAPTER, OFF_POLICY
from tests.trainer.sharded_run import seen, settings_of_a_run, some_equal

RANK = int(os.environ.get("RANK", "0"))
ON_GPU = torch.cuda.is_available()
WAYS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2": FSDP2,
    "ZeRO-2": {"deepspeed": zero.config(2)},
    "ZeRO-3": {"deepspeed": zero.config(3)},
}
UPDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("grpo", {}),
    "adapter": ("dapo", ADAPTER),
    "checkpointing": ("gspo", {"gradient_checkpointing": True}),
    "off policy, a reference": ("rloo", OFF_POLICY),
    "micro-batches": ("bnpo", {}),
}


def precision(way: str) -> torch.dtype:
    """The dtype of updates that are compared; DeepSpeed does not support float64."""
    return torch.float32 if way.startswith("ZeRO") else torch.float64


def update(
    name: str, folder: Path, processes: int, dtype: torch.dtype = torch.float64, **way: Any
) -> dict[str, torch.Tensor]:
    """The change of each weight in an update on stored completions."""
    recipe, settings = UPDATES[name]
    how = {"parity_check": "off", "use_cpu": not ON_GPU, **two_process_batches(recipe, processes), **settings, **way}
    unset_hf_deepspeed_config()
    trainer = make_trainer(recipe, folder, dtype=dtype, **how)
    with rows_in_order("bnpo"):
        moved = update_of(trainer)
    check_spread(trainer, way)
    return {name: change.cpu() for name, change in moved.items()}


def check_spread(trainer: Any, way: dict[str, Any]) -> None:
    """Check that weights and optimizer state are sharded as requested, and on the expected device."""
    assert is_sharded(trainer.model) == ("fsdp" in way)
    if "deepspeed" in way:
        assert zero.stage_of(trainer) == way["deepspeed"]["zero_optimization"]["stage"]
    assert trainer.accelerator.device.type == ("cuda" if ON_GPU else "cpu")


def trainer_of(folder: Path, **way: Any) -> Any:
    """A full run in bfloat16; the engine samples from weights that the processes gather."""
    settings = settings_of_a_run(2) | {"bf16": True, "use_cpu": not ON_GPU, "parity_check": "off"} | way
    unset_hf_deepspeed_config()
    config = GRPOConfig(**base_args(folder, **settings))
    if config.fsdp:
        as_on_gpus()
    return GRPOTrainer(
        model=tiny_model(seed=5),
        reward_funcs=some_equal,
        args=config,
        train_dataset=prompts(30),
        eval_dataset=prompts(3),
        processing_class=tiny_tokenizer(),
    )


def check_a_run(folder: Path, **way: Any) -> None:
    """Check that a run is consistent: with its samples, with the saved model, and with a resumed second half."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    straight = trainer_of(folder / "straight", **way)
    straight.train()
    check_spread(straight, way)
    found = seen(straight)
    for log in [log for log in straight.state.log_history if "loss" in log]:
        assert log["sampling/sampling_logp_difference/mean"] < 0.02
    straight.save_model(str(folder / "final"))
    torch.distributed.barrier()
    unset_hf_deepspeed_config()  # with an active config of stage 3, transformers shards what it loads
    saved = AutoModelForCausalLM.from_pretrained(folder / "final", dtype="auto")
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, found["weights"][name].cpu().to(weight.dtype)), name
    resumed = trainer_of(folder / "straight", **way)
    resumed.train(resume_from_checkpoint=str(folder / "straight" / "checkpoint-2"))
    again = seen(resumed)
    for name, weight in again["weights"].items():
        assert torch.equal(weight, found["weights"][name]), name
    assert again["completions"] == found["completions"]
    torch.use_deterministic_algorithms(False)


def die(folder: Path) -> None:
    """Process 1 is killed in the middle of the second update."""
    calls = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        calls.append(completions)
        if RANK == 1 and len(calls) == 2:
            time.sleep(0.3)  # gives the process time to write its presence line
            os.kill(os.getpid(), signal.SIGKILL)
        return length_reward(completions)

    how = {"use_cpu": not ON_GPU, "max_steps": 4, "process_timeout": 5.0, "parity_check": "off"}
    make_trainer("grpo", folder, reward=reward, dtype=torch.float32, per_device_train_batch_size=4, **how).train()


def main(folder: Path, way: str) -> None:
    if not ON_GPU:
        os.environ["ACCELERATE_USE_CPU"] = "false" if "ZeRO" in way else "true"
        torch.distributed.init_process_group("gloo")
        if "ZeRO" in way:
            zero.prepare()
    if way == "a death":
        die(folder)
        return
    for name in UPDATES:
        moved = update(name, folder / name, 2, precision(way), **WAYS[way])
        if RANK == 0:
            torch.save(moved, folder / f"{name}.pt")
    check_a_run(folder / "run", **WAYS[way])
    print(f"{way}: done, over {torch.distributed.get_backend()}", flush=True)
    os._exit(0)  # does not wait for threads of the backend


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
