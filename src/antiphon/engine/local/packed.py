"""int8 weights in the layout that this machine's matrix products use, in a file that is mapped when a model is loaded.

oneDNN chooses the layout by the CPU. So the file identifies the machine for which it was packed, and is written again
on a different machine. Mapped tensors are created by the C interface that torch's ahead-of-time compiler uses for its
constants (`aoti_torch_create_tensor_from_blob_v2`). This module knows the names and bytes of weights, not models.

    <folder>/packed.bin     the weights one after another, each at a page's start
    <folder>/packed.json    {"key", "weights": [{"names", "shape", "offset", "size", "layout"}]}
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
import platform
from base64 import b64decode, b64encode
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

DATA_FILE, INDEX_FILE = "packed.bin", "packed.json"


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of an int8 weight [out, in] as an opaque oneDNN tensor in this machine's layout.

    The weight is divided by `weight_divisor`.
    """
    if (divisor := weight_divisor()) > 1:
        weight = weight.float().div_(divisor).round_().to(torch.int8)
    return _pack(weight)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed


def product(x: torch.Tensor, zero_point: int, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return (x - zero_point) @ weight * scale, float32 [rows, out].

    `x`: uint8 [rows, in]. `weight`: packed. `scale`: float32 [out].
    """
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero_point, weight, scale, _zero(), None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


@cache
def _zero() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


@cache
def weight_divisor() -> int:
    """Return the divisor of int8 weights, 1 or 2, that keeps this machine's sums of products from overflowing.

    CPUs without VNNI add pairs of 8-bit products in int16, with saturation. With weights of 7 bits, the sums always
    fit. Activations have outliers that need all bits, so it is better to reduce the weights.
    """
    largest = torch.full((1, 64), 255, dtype=torch.uint8)
    summed = product(largest, 0, _pack(torch.full((16, 64), 127, dtype=torch.int8)), torch.ones(16))
    return 1 if summed[0, 0].item() == 255 * 127 * 64 else 2


def machine_key() -> str:
    """Return a hash of everything that a layout depends on.

    These are torch's version, the CPU's flags, oneDNN's limit on them, and the weights' divisor.
    """
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8", errors="replace").splitlines() if cpu.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    text = f"{torch.__version__} {platform.machine()} {limit} {flags} {weight_divisor()}"
    return hashlib.sha256(text.encode()).hexdigest()


def write(folder: Path, weights: Iterable[tuple[tuple[str, ...], torch.Tensor]]) -> None:
    """Write packed weights, each under the names of its layers, replacing any that exist.

    A concurrent reader finds the old weights or none, never a mixture. Raises OSError.
    """
    index = []
    new_data, new_index = folder / (DATA_FILE + ".part"), folder / (INDEX_FILE + ".part")
    with new_data.open("wb") as file:
        for names, packed in weights:
            file.write(bytes(-file.tell() % mmap.PAGESIZE))
            size = int(torch.ops.mkldnn._nbytes(packed))
            layout = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
            index.append(
                {
                    "names": list(names),
                    "shape": list(packed.shape),
                    "offset": file.tell(),
                    "size": size,
                    "layout": b64encode(layout.numpy().tobytes()).decode(),
                }
            )
            file.write((ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed)))
    new_index.write_text(json.dumps({"key": machine_key(), "weights": index}))
    # A process that reads between these two lines finds no index, and packs the weights itself.
    (folder / INDEX_FILE).unlink(missing_ok=True)
    new_data.rename(folder / DATA_FILE)
    new_index.rename(folder / INDEX_FILE)


def fits_machine(folder: Path) -> bool:
    """Return whether a folder holds weights packed for this machine. False if its index is missing or unreadable."""
    try:
        return bool(json.loads((folder / INDEX_FILE).read_text())["key"] == machine_key())
    except (OSError, ValueError, KeyError):
        return False


def read(folder: Path) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the packed weights of a folder by the names of their layers, mapped rather than read.

    Empty if there are none, if they are for another machine, or if they are damaged, which is logged.
    """
    try:
        if not fits_machine(folder):
            return {}
        index = json.loads((folder / INDEX_FILE).read_text())
        with (folder / DATA_FILE).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if len(mapped) != max(w["offset"] + w["size"] for w in index["weights"]):
            return {}
        make = _MappedTensors(mapped)
        return {tuple(w["names"]): make(w["shape"], w["offset"], b64decode(w["layout"])) for w in index["weights"]}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        log.info("no packed weights in %s: %s", folder, error)
        return {}


class _MappedTensors:
    """Creates tensors over one mapping, which is never unmapped: the tensors outlive this object."""

    _mappings: list[mmap.mmap] = []  # noqa: RUF012 — shared by the process, on purpose

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mappings.append(mapped)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._torch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self._capsule: Any = new_capsule

    def __call__(self, shape: list[int], offset: int, layout: bytes) -> torch.Tensor:
        dims = (ctypes.c_int64 * len(shape))(*shape)
        handle = ctypes.c_void_p()
        status = self._torch.aoti_torch_create_tensor_from_blob_v2(
            ctypes.c_void_p(self._address + offset),
            ctypes.c_int64(len(shape)),
            dims,
            dims,
            ctypes.c_int64(0),
            ctypes.c_int32(self._torch.aoti_torch_dtype_int8()),
            ctypes.c_int32(self._torch.aoti_torch_device_type_cpu()),
            ctypes.c_int32(-1),
            ctypes.byref(handle),
            ctypes.c_int32(self._torch.aoti_torch_layout__mkldnn()),
            ctypes.c_char_p(layout),
            ctypes.c_int64(len(layout)),
        )
        if status:
            raise ValueError("torch does not accept a tensor of this layout")
        tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(self._capsule(handle, None, None))
        return tensor
