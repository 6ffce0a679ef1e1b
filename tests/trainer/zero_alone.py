"""A run in bfloat16 under DeepSpeed on a single process, on a GPU if there is one: `zero_alone FOLDER STAGE`."""

import os
import sys
from pathlib import Path

import torch

from tests import zero
from tests.processes import free_port
from tests.trainer.sharded_run import seen
from tests.trainer.zero_run import STEPS, same, trainer_of


def as_launched() -> None:
    """Set the environment variables that a launcher sets for a single process."""
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"})


def main(folder: Path, stage: int) -> None:
    as_launched()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        torch.distributed.init_process_group("gloo")
        zero.prepare()
    settings = {**STEPS, "save_strategy": "steps", "save_steps": 1, "bf16": True, "use_cpu": on_cpu}
    straight = trainer_of(folder, 1, stage=stage, **settings)
    straight.train()
    assert zero.stage_of(straight) == stage
    assert {weight.dtype for weight in straight.model.parameters()} == {torch.bfloat16}
    first, second = [log for log in straight.state.log_history if "loss" in log]
    assert first["kl"] == 0 < second["kl"]
    assert second["sampling/sampling_logp_difference/mean"] < 0.02
    found = seen(straight)
    resumed = trainer_of(folder, 1, stage=stage, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    same(seen(resumed)["weights"], found["weights"])
    print(f"stage {stage} on {straight.accelerator.device}: {[log['loss'] for log in (first, second)]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
