"""Devices: their datasheet peaks, and the memory that a program finds free on them."""

from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """The properties of a device that a plan depends on.

    Example:
        Device("H100", halves=989, singles=67, bandwidth=3.35, memory=79.2)
    """

    name: str
    halves: float  # TFLOP/s of 16-bit matmuls that accumulate in 32 bits, without sparsity
    singles: float  # TFLOP/s of float32, without the tensor cores
    bandwidth: float  # TB/s of its memory
    memory: float  # GiB free on an idle device, approximately: less than the nominal size because of ECC and firmware
    kind: str = "cuda"

    def peak(self, product_bytes: int) -> float:
        """Floating-point operations per second of matmuls whose operands have `product_bytes` bytes per value."""
        return (self.halves if product_bytes <= 2 else self.singles) * 1e12

    @property
    def bytes_per_second(self) -> float:
        return self.bandwidth * 1e12

    @property
    def memory_bytes(self) -> int:
        return int(self.memory * GIB)


_DEVICES = (
    Device("GB200", 2500, 80, 8.0, 184),
    Device("B200", 2250, 75, 7.7, 178),
    Device("GH200", 989, 67, 4.0, 94),
    Device("H200", 989, 67, 4.8, 139.8),
    Device("H200 NVL", 835, 60, 4.8, 139.8),
    Device("H100", 989, 67, 3.35, 79.2),
    Device("H100 NVL", 835, 60, 3.9, 93),
    Device("H100 PCIE", 756, 51, 2.0, 79.2),
    Device("A100", 312, 19.5, 2.0, 79.2),
    Device("A100 40GB", 312, 19.5, 1.55, 39.4),
    Device("A40", 150, 37.4, 0.696, 44.4),
    Device("A10", 125, 31.2, 0.6, 22.0),
    Device("A6000", 155, 38.7, 0.768, 47.4),
    Device("L40S", 362, 91.6, 0.864, 44.4),
    Device("L40", 181, 90.5, 0.864, 44.4),
    Device("L4", 121, 30.3, 0.3, 22.0),
    Device("RTX 4090", 165, 82.6, 1.008, 23.5),
    Device("RTX 3090", 71, 35.6, 0.936, 23.6),
    Device("MI300X", 1307, 163, 5.3, 191),
)
DEVICES: dict[str, Device] = {device.name: device for device in _DEVICES}
# Words that mark a partition or variant of a device: its name contains the device's name, but its peak differs.
_NOT_THE_SAME = {"LAPTOP", "MIG", "D", "TI"}


def find_device(name: str | None) -> Device | None:
    """The table entry that matches the most words of the name that a driver gives a device, or None.

    Example:
        find_device("NVIDIA H100 PCIe").bandwidth == 2.0
    """
    words = set((name or "").upper().replace("-", " ").split())
    names = [known for known in DEVICES if words.issuperset(known.split())]
    if not names or words & _NOT_THE_SAME:
        return None
    return DEVICES[max(names, key=lambda known: len(known.split()))]


def peak_flops(device_name: str | None, dtype: Any) -> float | None:
    """Peak floating-point operations per second of a device; None if it is not in the table.

    `device_name` is the driver's name of the device, see `find_device`. `dtype` is the dtype of the matmuls, a torch
    dtype or its name.

    Example:
        peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    """
    device, kind = find_device(device_name), str(dtype).removeprefix("torch.")
    if device is None or kind not in ("bfloat16", "float16", "float32"):
        return None
    return device.peak(4 if kind == "float32" else 2)
