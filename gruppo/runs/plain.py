"""Whether a checkpoint without a manifest, as transformers writes it, looks complete.

There are no checksums to compare with, so this detects truncated and missing files, not changed content.
"""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["damages"]

STATE = "trainer_state.json"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors", "adapter_model.bin")
SHARDED = ("pytorch_model_fsdp*", "global_step*")  # folders of FSDP and DeepSpeed
PICKLES = ("*.bin", "*.pt", "*.pth")
LARGEST_HEADER = 100_000_000  # bytes, of a safetensors file; the format's own limit
ZIP = b"PK\x03\x04"


def damages(checkpoint: Path) -> list[str]:
    """One sentence for each file that is missing or truncated."""
    return [*_state(checkpoint), *_weights(checkpoint), *_indexes(checkpoint), *_pickles(checkpoint)]


def _state(checkpoint: Path) -> Iterator[str]:
    path = checkpoint / STATE
    if not path.is_file():
        yield f"{STATE} is missing"
        return
    if not isinstance(_json(path), dict):
        yield f"{STATE} is not readable JSON: it was cut off or changed"


def _weights(checkpoint: Path) -> Iterator[str]:
    files = sorted({path for pattern in WEIGHTS for path in checkpoint.glob(pattern) if path.is_file()})
    folders = [path for pattern in SHARDED for path in checkpoint.glob(pattern) if path.is_dir()]
    if not files and not any(any(folder.iterdir()) for folder in folders):
        yield "there are no weights (such as model.safetensors, adapter_model.safetensors or a folder of shards)"
    for path in files:
        if not path.stat().st_size:
            yield f"{path.name} is empty"
        elif path.suffix == ".safetensors" and (trouble := _safetensors(path)):
            yield f"{path.name} {trouble}"


def _safetensors(path: Path) -> str | None:
    """The damage of a safetensors file: eight bytes of header length, the header, then the tensors."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > LARGEST_HEADER or 8 + length > size:
            return f"has {size:,} bytes, too few for its header: it was cut off or changed"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            needed = 8 + length + max(ends, default=0)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return "has a header that cannot be read: it was changed"
    if needed != size:
        return f"has {size:,} bytes, its header says {needed:,}: it was {'cut off' if size < needed else 'changed'}"
    return None


def _indexes(checkpoint: Path) -> Iterator[str]:
    for path in sorted(checkpoint.glob("*.index.json")):
        content = _json(path) if path.is_file() else None
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            yield f"{path.name} cannot be read as an index of weights"
            continue
        for name in sorted(set(names.values())):
            if Path(name).name != name:
                yield f"{path.name} names {name!r}, which is not a file beside it"
            elif not (checkpoint / name).is_file():
                yield f"{name} is missing: {path.name} names it"


def _pickles(checkpoint: Path) -> Iterator[str]:
    """Find truncated torch files: they are zip files, whose table of contents comes last."""
    for path in sorted(path for pattern in PICKLES for path in checkpoint.glob(pattern) if path.is_file()):
        with open(path, "rb") as file:
            is_zip = file.read(len(ZIP)) == ZIP
        if is_zip and not zipfile.is_zipfile(path):
            yield f"{path.name} has no table of contents: it was cut off"


def _json(path: Path) -> Any:
    """The content of a JSON file, or None if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
