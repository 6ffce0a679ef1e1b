"""Microseconds of one layer's decode attention, with each prompt read by every row or once for several rows.

    python benchmarks/decode_attention.py                 (needs a CUDA device)

Rows, heads and sizes are those of the rollout cases, and prompts have several lengths. The tails (the tokens sampled
so far) have half the maximum length of a completion. `floor` is the time that a device-to-device copy needs to move
the distinct bytes (each prompt once, every tail). The copy is captured in a CUDA graph like the rest and writes as
much as it reads, so a kernel that only reads can be faster.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import provenance
from gruppo.engine import ops

PROMPT_LENGTHS = (100, 200, 400, 1000)


class Shape(NamedTuple):
    prompts: int
    samples: int
    heads: int
    kv_heads: int
    size: int
    tail: int


SHAPES = {
    "qwen2-1.5b": Shape(32, 16, 12, 2, 128, 256),
    "qwen2-7b": Shape(16, 16, 28, 4, 128, 512),
    "smollm2": Shape(64, 16, 9, 3, 64, 128),
}


def tensors(shape: Shape, prompt: int) -> list[torch.Tensor]:
    """The query, the KV pools, and the prompt and tail ranges of every row."""
    rows = shape.prompts * shape.samples
    places = shape.prompts * prompt + rows * shape.tail
    pools = [torch.randn(places, shape.kv_heads, shape.size, device="cuda").bfloat16() for _ in range(2)]
    query = torch.randn(rows, shape.heads, shape.size, device="cuda").bfloat16()
    prompt_start = (torch.arange(shape.prompts, device="cuda") * prompt).repeat_interleave(shape.samples)
    tail_start = shape.prompts * prompt + torch.arange(rows, device="cuda") * shape.tail
    lengths = [torch.full((rows,), length, device="cuda") for length in (prompt, shape.tail)]
    return [query, *pools, prompt_start, lengths[0], tail_start, lengths[1]]


def microseconds(call: Any, repeats: int = 10) -> float:
    """Microseconds per call: the median over five replays of a CUDA graph of `repeats` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / repeats)
    return sorted(times)[2]


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (microseconds(lambda: target.copy_(source), 3) * 1e-6)


def measure(shape: Shape, prompt: int, bandwidth: float) -> dict[str, float]:
    rows = tensors(shape, prompt)
    options = dict(scale=shape.size**-0.5, window=None, softcap=None, sinks=None)
    tokens = shape.prompts * prompt + shape.prompts * shape.samples * shape.tail
    times = {
        name: microseconds(lambda shared=shared: ops.decode_attention(*rows, **options, shared=shared))
        for name, shared in (("every_row", False), ("shared", True))
    }
    return {**times, "floor": 1e6 * tokens * shape.kv_heads * shape.size * 4 / bandwidth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/decode_attention.json")
    out = parser.parse_args().out
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    result = {
        name: {str(prompt): measure(shape, prompt, bandwidth) for prompt in PROMPT_LENGTHS}
        for name, shape in SHAPES.items()
    }
    for name, lengths in result.items():
        for prompt, times in lengths.items():
            print(name, prompt, {key: round(value, 1) for key, value in times.items()})
    written = {**provenance("triton"), "copy_bytes_per_second": bandwidth, "microseconds": result}
    out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
