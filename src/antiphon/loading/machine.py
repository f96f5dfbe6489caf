"""The memory that this machine has for models: that of its GPUs, and what a process may take of the host's."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# NVIDIA's management library, which the driver installs. It answers in milliseconds and reserves no memory on the GPU.
LIBRARY = "libnvidia-ml.so.1"
# The size of the buffer for a GPU's name.
NAME_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, with its memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return NVIDIA's GPUs of this machine; () without a driver. Takes milliseconds, and does not import torch."""
    try:
        library = ctypes.CDLL(LIBRARY)
        if library.nvmlInit_v2():
            return ()
    except (OSError, AttributeError):
        return ()
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = []
    for number in range(count.value):
        handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(NAME_BYTES)
        if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
            continue
        library.nvmlDeviceGetName(handle, name, NAME_BYTES)
        if not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            found.append(Gpu(name.value.decode(errors="replace"), memory.total, memory.free))
    library.nvmlShutdown()
    return tuple(found)


def free_gb() -> float:
    """The memory that this process holds or can still allocate, in GB; infinity if the system does not report it."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return min(int(lines["MemAvailable"].split()[0]) / 1e6, _container_gb()) + held / 1e9
    except (OSError, KeyError, ValueError):
        return float("inf")


def _container_gb(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory left by a container's limit, in GB; infinity without a limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return float("inf") if limit == "max" else (int(limit) - int(used)) / 1e9
    except (OSError, ValueError):
        return float("inf")
