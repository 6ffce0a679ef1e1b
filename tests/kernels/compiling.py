"""Compile the kernels for GPUs that are not here: `python -m tests.kernels.compiling CASES.json` prints what came out.

Triton compiles for any NVIDIA architecture on a machine without one; only launching needs the device. So the ops run
here on CPU tensors, each of their launches is compiled and checked against the shared memory of the GPU, and nothing
is computed. The interpreter, in which the other tests run the kernels, knows no such limit and no code generator.
"""

import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import OutOfResources
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gruppo.engine import kernels as engine
from gruppo.kernels.attention import Segments
from gruppo.kernels.gpu import attention, blocks, head, layers, norm
from gruppo.kernels.head import Curve, Incoming, Running

# Bytes a program may use, by compute capability: T4; A100; RTX 3090, A10; RTX 4090, L4; H100, H200; B200; RTX 5090.
SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}

_launch = JITFunction.run


@dataclass(frozen=True)
class Case:
    """Shapes of attention: `group` query heads per key head, `everything` for window, softcap and sinks."""

    arch: int
    dtype: str = "bfloat16"
    size: int = 64
    group: int = 4
    everything: bool = False


@dataclass(frozen=True)
class Compiled:
    kernel: str
    shared: int
    queries: int | None
    keys: int | None
    stages: int | None


class NoDriver:
    """What Triton asks its driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # kernels are cached per device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(arch: int) -> list[Compiled]:
    """From now on launches compile for `arch` and are listed; one that needs too much memory fails as on a device."""
    compiled: list[Compiled] = []

    def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        binary = _launch(kernel, *args, grid=grid, warmup=True, **options)
        if binary.metadata.shared > SHARED_MEMORY[arch]:
            raise OutOfResources(binary.metadata.shared, SHARED_MEMORY[arch], "shared memory")
        sizes = (options.get(name) for name in ("BLOCK_M", "BLOCK_N", "num_stages"))
        compiled.append(Compiled(kernel.__name__, binary.metadata.shared, *sizes))
        return binary

    blocks._fitting.clear()
    driver.set_active(NoDriver(arch))
    JITFunction.run = compile_launch
    return compiled


def attend(case: Case) -> None:
    """Each attention of a training step: of packed rows, with its gradient, of prompts and of single tokens."""
    dtype, heads, tokens = getattr(torch, case.dtype), 2 * case.group, 100
    numbers: dict[str, Any] = dict(scale=0.1, window=None, softcap=None, sinks=None)
    if case.everything:
        numbers |= dict(window=64, softcap=30.0, sinks=torch.zeros(heads, dtype=dtype, requires_grad=True))
    query = torch.zeros(tokens, heads, case.size, dtype=dtype, requires_grad=True)
    key, value = torch.zeros(2, tokens, 2, case.size, dtype=dtype, requires_grad=True).unbind()
    segments = Segments.of((40, 30, 20, 10), (-1, 0, 0, -1), "cpu")  # the second and third go on from the first
    attention.packed_attention(query, key, value, segments, **numbers).sum().backward()
    with torch.no_grad():
        places, pools = torch.zeros(tokens, dtype=torch.long), (key.contiguous(), value.contiguous())
        for shared, splits in itertools.product((False, True), (1, 4)):
            engine.decode_attention(query, *pools, *[places] * 4, **numbers, shared=shared, splits=splits)
        for longest in (8, 64):  # queries of one sequence
            cu_query = torch.tensor([0, 10, 50, tokens], dtype=torch.int32)
            engine.prefill_attention(query, *pools, *[places[:3]] * 2, cu_query, max_query=longest, **numbers)
        engine.write_kv(key, value, *pools, places)


def project(case: Case) -> None:
    """Layers, head and sampling, with the vocabulary of Qwen3."""
    dtype, tokens, width, vocabulary = getattr(torch, case.dtype), 8, 1024, 151_936

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, requires_grad=True)

    x, scale = empty(tokens, width), empty(width)
    norm.rms_norm(x, scale, 1e-6, plus_one=case.everything, in_float32_weight=case.everything).sum().backward()
    angles = torch.empty(1, tokens, case.size, dtype=dtype)
    query, key = layers.rotary(empty(1, 8, tokens, case.size), empty(1, 2, tokens, case.size), angles, angles)
    (query.sum() + key.sum()).backward()
    activation = "gelu_tanh" if case.everything else "silu"
    gate, up, weight = empty(tokens, width), empty(tokens, width), empty(16, width)
    layers.gated_linear(gate, up, weight, activation=activation).sum().backward()

    products, row = torch.empty(tokens, vocabulary), torch.empty(tokens)
    targets, more = torch.empty(tokens, dtype=torch.long), row if case.everything else None
    bias, curve = (empty(vocabulary), Curve(0.1, 30.0)) if case.everything else (None, Curve(1.0, None))
    head.take_in(products, bias, targets, 0, curve, Running(row, row, more, row))
    head.differentiate(products, bias, 0, curve, Incoming(targets, row, row, more, more), products.to(dtype))
    logits = torch.empty(tokens, vocabulary, dtype=dtype)
    for greedy in (False, True):
        engine.sample_tokens(logits, targets, targets, row, greedy=greedy, entropy=case.everything)


def main(arguments: list[str]) -> None:
    """Print one list for each case of the file: what its launches compiled to."""
    found = []
    for fields in json.loads(Path(arguments[0]).read_text()):
        case = Case(**fields)
        compiled = compile_only(case.arch)
        attend(case)
        project(case)
        found.append([asdict(x) for x in compiled])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
