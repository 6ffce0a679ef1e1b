"""GPU memory that keeps its addresses while other code uses the physical memory.

A captured CUDA graph reads keys and values at fixed addresses, so their pool must never move. But between two rollouts
nothing reads it, and the training update could use the memory. So a range of addresses is reserved permanently, and
physical memory is mapped to it only during a rollout (CUDA's virtual memory management). Where that is unavailable,
the pool is ordinary memory and stays allocated.
"""

import ctypes
import logging
import weakref
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _AccessDescription(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Driver:
    """The few functions of the CUDA driver that torch does not expose."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has no memory left.")
        if status:
            raise DriverError(f"{name} returned {status}.")


class LentMemory:
    """`size` bytes on a CUDA device. While they are lent, nothing may read or write them; their content is lost."""

    def __init__(self, size: int, device: torch.device):
        torch.zeros(1, device=device)  # creates the CUDA context
        self.driver = _Driver()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._location = _Location(type=1, id=index)  # CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = _AllocationProperties(type=1, location=self._location)  # CU_MEM_ALLOCATION_TYPE_PINNED
        step = ctypes.c_size_t()
        self.driver("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), 0)
        self.size = -(-size // step.value) * step.value
        self._address = ctypes.c_uint64()
        size_ = ctypes.c_size_t(self.size)
        self.driver(
            "cuMemAddressReserve", ctypes.byref(self._address), size_, ctypes.c_size_t(0), 0, ctypes.c_uint64(0)
        )
        self._handle = ctypes.c_uint64()
        self.held = False
        self._finalizer = weakref.finalize(self, _give_up, self.driver, self._address, self._handle, size_)
        self.take()
        self.bytes = self._as_tensor(size, device)

    def _as_tensor(self, size: int, device: torch.device) -> Tensor:
        class Range:
            __cuda_array_interface__ = {  # noqa: RUF012
                "shape": (size,),
                "typestr": "|u1",
                "data": (self._address.value, False),
                "version": 3,
            }

        return torch.as_tensor(Range(), device=device)

    def take(self) -> None:
        """Map physical memory to the addresses."""
        if self.held:
            return
        size, none = ctypes.c_size_t(self.size), ctypes.c_uint64(0)
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= self.size:
            torch.cuda.empty_cache()  # reuse what the last update left: the peak is the larger phase, not the sum
        try:
            self.driver("cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(self._properties), none)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # the blocks that torch caches may be enough
            self.driver("cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(self._properties), none)
        access = _AccessDescription(self._location, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.driver("cuMemMap", self._address, size, ctypes.c_size_t(0), self._handle, none)
        self.driver("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.held = True

    def lend(self) -> None:
        """Give the physical memory back to the device; the addresses stay reserved."""
        if self.held:
            torch.cuda.synchronize()
            self.driver("cuMemUnmap", self._address, ctypes.c_size_t(self.size))
            self.driver("cuMemRelease", self._handle)
            self._handle.value = 0
            self.held = False


def _give_up(driver: _Driver, address: ctypes.c_uint64, handle: ctypes.c_uint64, size: ctypes.c_size_t) -> None:
    try:
        if handle.value:
            torch.cuda.synchronize()
            driver("cuMemUnmap", address, size)
            driver("cuMemRelease", handle)
        driver("cuMemAddressFree", address, size)
    except (DriverError, RuntimeError):  # at process exit the driver may already be shut down
        logger.debug("the memory of the KV cache was not released", exc_info=True)


def lent_memory(size: int, device: torch.device) -> LentMemory | None:
    """Memory that can be lent, or None where only ordinary memory is available."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return LentMemory(size, device)
    except (OSError, AttributeError, DriverError) as error:  # the library, function or feature is missing
        logger.info(f"Sampling keeps its memory between rollouts: {error}")
        return None
