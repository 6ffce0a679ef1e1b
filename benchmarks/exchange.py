"""The cost of balancing an update: two processes on one host exchange rows and return the scores to their owners.

python -m benchmarks.exchange --out benchmarks/results/exchange.json
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from accelerate.utils import gather_object

from benchmarks.common import provenance
from gruppo.algo.reduce import UpdateSize
from gruppo.trainer.processes.balancing import RowExchange, max_over_mean, plan_moves, units_of
from gruppo.trainer.update.rows import PackedUpdate
from gruppo.types import TrainBatch

PROMPTS, COMPLETIONS, PROMPT_TOKENS, LONGEST = 16, 16, 200, 1024


def batch_of(rank: int) -> TrainBatch:
    """Completions of different lengths; those of process 0 are longer."""
    chance, rows = random.Random(rank), PROMPTS * COMPLETIONS
    typical = 6.5 if rank == 0 else 5.5
    lengths = [min(max(int(chance.lognormvariate(typical, 0.6)), 2), LONGEST) for _ in range(rows)]
    mask = (torch.arange(LONGEST) < torch.tensor(lengths)[:, None]).long()
    prompts = torch.arange(rows // COMPLETIONS).repeat_interleave(COMPLETIONS)[:, None].expand(-1, PROMPT_TOKENS) + 1
    logps = torch.zeros(rows, LONGEST)
    return TrainBatch(
        prompts.contiguous(),
        torch.ones_like(prompts),
        mask,
        mask.clone(),
        advantages=torch.ones(rows),
        old_per_token_logps=logps,
        engine_logps=logps,
        engine_entropies=logps,
    )


def work(rank: int, meeting: str, rounds: int, out: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    batch, times = batch_of(rank), []
    facts: dict[str, Any] = {}
    for _ in range(rounds):
        update = PackedUpdate.of([batch], UpdateSize(rows=512, tokens=1, micro_batches=1))
        torch.distributed.barrier()
        start = time.perf_counter()
        units, costs = units_of(batch, range(len(batch)))
        every = gather_object([costs])
        moved = RowExchange.of(rank, update, units, plan_moves(every))
        away = time.perf_counter()
        moved.bring_home(accelerator)
        times.append({"exchange": away - start, "bring_home": time.perf_counter() - away})
        facts = {
            "rows_given": len(batch) - len(moved.kept),
            "rows": len(batch),
            "before": max_over_mean([sum(own) for own in every]),
        }
        tokens = int(moved.run.batch.completion_mask.sum())
        shares = torch.tensor([tokens, 0]) if rank == 0 else torch.tensor([0, tokens])
        torch.distributed.all_reduce(shares)
        facts["after"] = max_over_mean(shares.tolist())
    if rank == 0:
        seconds = {name: round(min(one[name] for one in times), 4) for name in times[0]}
        Path(out).write_text(json.dumps({**facts, "seconds": seconds}))
    torch.distributed.barrier()
    os._exit(0)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        torch.multiprocessing.spawn(work, (f"{folder}/meeting", chosen.rounds, str(found)), nprocs=2)
        result = {**provenance(), **json.loads(found.read_text())}
    print(json.dumps(result, indent=1))
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
