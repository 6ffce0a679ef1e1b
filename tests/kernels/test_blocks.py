"""The kernels on GPUs that are not here: they compile, and their blocks fit into the shared memory of each."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from triton import OutOfResources

from gruppo.engine.kernels import prefill
from gruppo.kernels.gpu import attention
from gruppo.kernels.gpu.blocks import Blocks, launch_fitting
from tests.kernels.compiling import SHARED_MEMORY, Case, Compiled

TABLES = {
    "forward_kernel": (attention.FORWARD_HALF, attention.FORWARD_FLOAT),
    "query_gradient_kernel": (attention.QUERIES_HALF, attention.QUERIES_FLOAT),
    "key_gradient_kernel": (attention.KEYS_HALF, attention.KEYS_FLOAT),
    "_prefill_kernel": (prefill.PREFILL_HALF, prefill.PREFILL_FLOAT),
}
# Largest heads that fit, in half precision and in float32, where the largest of the tables, 512, do not.
LARGEST = {75: (256, 128), 86: (512, 256), 89: (512, 256), 120: (512, 256)}
KERNELS = {
    *TABLES, "add_up_kernel", "_decode_kernel", "_prompt_kernel", "_merge_kernel", "_write_kernel", "_norm_kernel",
    "_norm_backward_kernel", "_rotary_kernel", "_gated_kernel", "_gated_backward_kernel", "_take_in_kernel",
    "_differentiate_kernel", "_chunk_kernel", "_row_kernel",
}  # fmt: skip
FEW = [
    Case(90, size=128),  # as in the tables
    Case(89, size=128, everything=True),
    Case(80, "float16", 256, 8),
]


def compiled_for(cases: list[Case], folder: Path) -> dict[Case, list[Compiled]]:
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", str(folder / "cases.json")],
        env=environment | {"TRITON_CACHE_DIR": str(folder / "cache")},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {case: [Compiled(**x) for x in part] for case, part in zip(cases, found, strict=True)}


def in_table(kernel: str, case: Case) -> tuple[int, int, int]:
    """Queries, keys and stages that the table has for a kernel."""
    table = TABLES[kernel][case.dtype == "float32"]
    queries, keys, _, stages = table[max(16, 1 << (case.size - 1).bit_length())]
    return queries, keys, stages


def check(compiled: dict[Case, list[Compiled]]) -> None:
    for case, found in compiled.items():
        assert {x.kernel for x in found} == KERNELS, case
        assert all(x.shared <= SHARED_MEMORY[case.arch] for x in found), case
        # Where there is as much memory as on the GPU of the tables, nothing is given up.
        chosen = {x.kernel: (x.queries, x.keys, x.stages) for x in found if x.kernel in TABLES}
        if SHARED_MEMORY[case.arch] >= SHARED_MEMORY[90]:
            assert chosen == {kernel: in_table(kernel, case) for kernel in TABLES}, case


@pytest.mark.timeout(300)
def test_the_kernels_compile_for_gpus_of_several_generations(tmp_path: Path) -> None:
    compiled = compiled_for(FEW, tmp_path)
    check(compiled)
    smaller = {x.kernel: x for x in compiled[FEW[1]]}["query_gradient_kernel"]
    assert (smaller.queries, smaller.keys, smaller.stages) == (128, 64, 2) != in_table("query_gradient_kernel", FEW[1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_size_of_head_compiles(arch: int, tmp_path: Path) -> None:
    half = "float16" if arch < 80 else "bfloat16"
    shapes = itertools.product((half, "float32"), (16, 32, 64, 128, 256, 512), ((1, False), (8, True)))
    cases = [Case(arch, dtype, size, group, everything) for dtype, size, (group, everything) in shapes]
    largest = LARGEST.get(arch, (512, 512))
    check(compiled_for([case for case in cases if case.size <= largest[case.dtype == "float32"]], tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [Case(75, "float16", 512), Case(75, "float32", 256), Case(89, "float32", 512)])
def test_heads_that_do_not_fit_are_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="attention heads are too large for this GPU"):
        compiled_for([case], tmp_path)


@pytest.mark.parametrize(
    ("blocks", "smaller"),
    [
        ((128, 64, 8, 3), (128, 64, 8, 2)),
        ((128, 64, 8, 2), (64, 64, 8, 2)),
        ((64, 128, 8, 2), (64, 64, 8, 2)),
        ((64, 64, 8, 2), (64, 64, 8, 1)),
        ((64, 64, 8, 1), (32, 64, 8, 1)),
        ((32, 64, 8, 1), (32, 32, 8, 1)),
        ((16, 32, 8, 1), (16, 16, 8, 1)),
    ],
)
def test_blocks_shrink_one_step_at_a_time(blocks: tuple[int, ...], smaller: tuple[int, ...]) -> None:
    assert Blocks(*blocks).smaller() == Blocks(*smaller)


def test_the_smallest_blocks_have_no_smaller_ones() -> None:
    assert Blocks(16, 16, 4, 1).smaller() is None


def limited_to(products: int) -> tuple[Callable[[Blocks], None], list[Blocks]]:
    """A launch that needs memory for queries times keys times stages, and what it was tried with."""
    tried: list[Blocks] = []

    def launch(blocks: Blocks) -> None:
        tried.append(blocks)
        if (needed := blocks.queries * blocks.keys * blocks.stages) > products:
            raise OutOfResources(needed, products, "shared memory")

    return launch, tried


def test_a_launch_tries_smaller_blocks_once_and_remembers_them() -> None:
    launch, tried = limited_to(64 * 64)
    most, kind = Blocks(128, 64, 8, 2), object()
    launch_fitting(launch, most, kind)
    assert tried == [most, Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 1)]
    launch_fitting(launch, most, kind)
    assert tried[3:] == [Blocks(64, 64, 8, 1)]
    launch_fitting(launch, most, object())  # another kernel has its own blocks
    assert tried[4] == most


def test_where_nothing_fits_the_error_says_what_to_do() -> None:
    launch, tried = limited_to(100)
    with pytest.raises(
        RuntimeError, match=r"256 bytes of shared memory, and there are 100.*bf16=True.*packed_update=False"
    ):
        launch_fitting(launch, Blocks(32, 16, 4, 1), object())
    assert tried[-1] == Blocks(16, 16, 4, 1)
