"""vLLM's build for CPUs as a server that takes weights by IPC: bytes instead of handles to a GPU's memory.

The rest is vLLM's own: command line, HTTP, parsing and unpacking of what it is sent, loading, sampling. A plugin of
vLLM replaces what asks CUDA for a device and opens a handle. It needs no package of this project, so that the server
runs without it.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

GPU = "no GPU"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
PLUGIN = f"""
import types

import torch
from torch.multiprocessing import reductions


def bytes_again(content, *_):
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def register():
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(uuid="{GPU}")
    torch.accelerator.current_device_index = lambda: 0
    reductions.rebuild_cuda_tensor = bytes_again
"""


def share_bytes(buffer: Tensor) -> dict[str, Any]:
    """Replaces `transfer.share`: the bytes where a handle would be, and as many more arguments as vLLM expects."""
    return {GPU: (buffer.numpy().tobytes(), *[0] * 6)}


def make_plugin(folder: Path, release: str) -> Path:
    """A folder that, when it is on the path, makes vLLM take what `share_bytes` returns.

    It also says that the release is of a package `vllm`: the build is called `vllm-cpu`, and its command line does not
    find itself.
    """
    name = "gruppo_without_cuda"
    entry = _described(folder, name, "1") / "entry_points.txt"
    entry.write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    (folder / f"{name}.py").write_text(PLUGIN)
    _described(folder, "vllm", f"{release}+cpu")
    return folder


def _described(folder: Path, name: str, version: str) -> Path:
    """The metadata of a package."""
    described = folder / f"{name}-{version}.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return described
