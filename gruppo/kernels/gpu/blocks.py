"""Block sizes of a launch that fit into the shared memory of the GPU at hand.

The tables of the attention kernels were tuned on an H200, which has 227 KiB of shared memory per program. An A100 has
163 KiB, GPUs for workstations and inference (RTX 3090 to 5090, A10, L4) have 99 KiB, a T4 has 64: there the kernels
start from the same row of their table and go on to smaller blocks until one fits.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from triton import OutOfResources

__all__ = ["Blocks", "launch_fitting"]

_LEAST = 16  # rows and columns of the smallest matrix product
_TOO_LARGE = (
    "This model's attention heads are too large for this GPU: the smallest block needs {1} bytes of {0}, and there "
    "are {2}. Train in half precision (bf16=True), which needs half as much, or without these kernels "
    "(packed_update=False, rollout_backend='transformers')."
)


class Blocks(NamedTuple):
    """Queries and keys per block, and how many warps and pipeline stages work on it."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return dict(BLOCK_M=self.queries, BLOCK_N=self.keys, num_warps=self.warps, num_stages=self.stages)

    def smaller(self) -> "Blocks | None":
        """The next blocks to try where these need too much memory; None if there are none.

        A second stage, which loads the next keys during the products of these, is given up after half the block:
        (128, 64, 8, 3) → (128, 64, 8, 2) → (64, 64, 8, 2) → (64, 64, 8, 1) → (32, 64, 8, 1) …
        """
        if self.stages > 2:
            return self._replace(stages=self.stages - 1)
        if self.stages == 2 and self.queries * self.keys > 64 * 64:
            return self._halved()
        if self.stages == 2:
            return self._replace(stages=1)
        return self._halved() if max(self.queries, self.keys) > _LEAST else None

    def _halved(self) -> "Blocks":
        if self.queries >= self.keys:
            return self._replace(queries=self.queries // 2)
        return self._replace(keys=self.keys // 2)


_fitting: dict[Hashable, Blocks] = {}  # what the first launch of a kind found


def launch_fitting(launch: Callable[[Blocks], None], blocks: Blocks, kind: Hashable) -> None:
    """Call `launch` with these blocks, or with the largest smaller ones that fit into the device's shared memory.

    `kind` identifies the compiled kernel and its device: what fits is tried once for each. RuntimeError if nothing
    fits, which happens with large heads in float32.
    """
    start = blocks
    blocks = _fitting.get((kind, start), start)
    while True:
        try:
            launch(blocks)
        except OutOfResources as error:
            fewer = blocks.smaller()
            if fewer is None:
                raise RuntimeError(_TOO_LARGE.format(error.name, error.required, error.limit)) from error
            blocks = fewer
            continue
        _fitting[kind, start] = blocks
        return
