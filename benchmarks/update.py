"""What each optimisation of the update gains: the same update with one of them switched off at a time.

    python benchmarks/update.py --out benchmarks/results/update_qwen2-1.5b.json
    python benchmarks/update.py --tiny      (on a CPU, to try it)

Forward and backward passes over 32 prompts of 200 tokens × 16 completions of 512, a 1.5B Qwen2 shape with random
weights in bfloat16, without optimizer. For comparison, the result contains the time that the arithmetic alone would
take at the rate that a large matrix product reaches on the device in the same run.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.common import provenance
from gruppo.plan import ModelShape, Passes, plan_update
from gruppo.policy.inplace import without_collection
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.packing import Packer
from gruppo.types import TrainBatch

GIB = 2**30
SHAPE: dict[str, Any] = dict(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, max_position_embeddings=32768, tie_word_embeddings=True,
)  # fmt: skip
TINY = SHAPE | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)


class Bench:
    """A model and the rows of an update."""

    def __init__(self, tiny: bool, prompts: int, completions: int, prompt_tokens: int, new_tokens: int):
        self.device = torch.device("cpu" if tiny else "cuda")
        torch.manual_seed(0)
        with self.device:
            self.model = Qwen2ForCausalLM(Qwen2Config(**(TINY if tiny else SHAPE)))
        self.model.to(torch.float32 if tiny else torch.bfloat16).train()
        self.shape = ModelShape.from_config(self.model.config)
        vocabulary = self.model.config.vocab_size
        ids = torch.randint(10, vocabulary, (prompts, prompt_tokens), device=self.device)
        ids = ids.repeat_interleave(completions, 0)
        new = torch.randint(10, vocabulary, (len(ids), new_tokens), device=self.device)
        self.batch = TrainBatch(ids, torch.ones_like(ids), new, torch.ones_like(new))
        self.weights = torch.randn(new.shape, device=self.device) / new.numel()  # like advantages / token count
        self.tokens = plan_update(
            self.shape, Passes(stream=2, product=2, device=self.device.type),
            longest_row=prompt_tokens + new_tokens, free_bytes=60 * GIB,
        ).tokens  # fmt: skip

    def packed(self, *, tokens: int | None = None, share: bool = True, **options: Any) -> int:
        """Run the update in packs and return the number of tokens processed."""
        policy, ran = PackedPolicy(**options), 0
        with policy.active(self.model):
            for pack in Packer(self.batch, share=share).packs(range(len(self.batch)), tokens or self.tokens):
                logps = pack.padded(policy.score(self.model, pack, entropy=True).logps)
                (logps * self.weights[list(pack.rows)]).sum().backward()
                ran += pack.tokens
        return ran

    def padded(self, rows: int) -> int:
        """Run the update in padded micro-batches and return the number of tokens processed."""
        batch, width = self.batch, self.batch.completion_ids.shape[1]
        ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
        mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
        for i in range(0, len(ids), rows):
            part = slice(i, i + rows)
            logps: Tensor = score_tokens(self.model, ids[part], mask[part], width, entropy=True).logps_BT
            (logps * self.weights[part]).sum().backward()
        return ids.numel()

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        yield
        self.model.gradient_checkpointing_disable()

    def measure(self, run: Callable[[], int]) -> dict[str, float]:
        """Time the second of two runs. The first, over 32 rows, compiles kernels and fills caches."""
        cuda, seconds = self.device.type == "cuda", 0.0
        for last in (False, True):
            self.model.zero_grad(set_to_none=False)
            gc.collect()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            whole, self.batch = self.batch, self.batch if last else self.batch.rows(slice(0, 32))
            start = time.perf_counter()
            tokens = run()
            if cuda:
                torch.cuda.synchronize()
            first, seconds = seconds, time.perf_counter() - start
            self.batch = whole
        peak = torch.cuda.max_memory_allocated() / GIB if cuda else float("nan")
        times = {"seconds": round(seconds, 3), "first_seconds": round(first, 3)}
        return {**times, "tokens": tokens, "peak_gib": round(peak, 2)}

    def limit(self) -> dict[str, float]:
        """Seconds that the update's FLOPs, with shared prompts, take at the rate of one large matrix product."""
        size = 8192 if self.device.type == "cuda" else 512
        dtype = self.model.dtype
        a, b = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in range(2))
        for count in (3, 10):
            start = time.perf_counter()
            for _ in range(count):
                a @ b
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        rate = 10 * 2 * size**3 / (time.perf_counter() - start)
        prompts, rows = len(self.batch.prompt_ids.unique(dim=0)), len(self.batch)
        before, new = self.batch.prompt_ids.shape[1], self.batch.completion_ids.shape[1]
        tokens = prompts * before + rows * (new - 1)
        keys = (prompts * before * before / 2 + rows * (new - 1) * (before + new / 2)) / tokens
        flops = 3 * self.shape.forward_flops(tokens, keys, rows * new)
        return {"flops": flops, "measured_flops_per_second": rate, "seconds": round(flops / rate, 3)}


def cases(bench: Bench) -> dict[str, tuple[Any, Callable[[], int]]]:
    """By name: the context manager around a run, and the run."""
    quiet = without_collection
    return {
        "everything": (quiet, bench.packed),
        "fused_layers=False": (quiet, lambda: bench.packed(fused_layers=False)),
        "fused_head=False": (quiet, lambda: bench.packed(fused_head=False)),
        "prompts not shared": (quiet, lambda: bench.packed(share=False)),
        "garbage collection": (nullcontext, bench.packed),
        "max_tokens_per_micro_batch=4400": (quiet, lambda: bench.packed(tokens=4400)),
        "max_tokens_per_micro_batch=2300": (quiet, lambda: bench.packed(tokens=2300)),
        "gradient_checkpointing=True": (bench.checkpointed, bench.packed),
        "packed_update=False, 8 rows at a time": (nullcontext, lambda: bench.padded(8)),
        "packed_update=False, checkpointing": (bench.checkpointed, lambda: bench.padded(8)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of cases")
    options = parser.parse_args()
    sizes = (4, 8, 20, 16) if options.tiny else (32, 16, 200, 512)
    bench = Bench(options.tiny, *sizes)
    result: dict[str, Any] = {**provenance(), "shape": TINY if options.tiny else SHAPE}
    result |= {"prompts": sizes[0], "completions": sizes[1], "prompt_tokens": sizes[2], "new_tokens": sizes[3]}
    result |= {"max_tokens_per_micro_batch": bench.tokens, "limit": bench.limit(), "cases": {}}
    print(f"arithmetic alone: {result['limit']['seconds']:.2f} s")
    for name, (around, run) in cases(bench).items():
        if options.only and name not in options.only:
            continue
        with around():
            record = result["cases"][name] = bench.measure(run)
        print(
            f"{name:42s} {record['seconds']:8.3f} s {record['tokens']:8d} tokens {record['peak_gib']:6.1f} GiB",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
