"""int8 weights in the layout that this machine multiplies them in, in a file that is mapped: nothing is packed at a start.

oneDNN chooses the layout by the CPU, so the file carries what it was packed for, and is made anew where that differs. A mapped
tensor is made by the C interface that torch's ahead-of-time compiler keeps its constants with (`aoti_torch_create_tensor_from_blob_v2`).

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
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

DATA_FILE, INDEX_FILE = "packed.bin", "packed.json"


def pack(weight: torch.Tensor) -> torch.Tensor:
    """int8 [out, in] as oneDNN's opaque tensor."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    return packed


def key() -> str:
    """What a layout depends on: torch's version and what the CPU can do."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8", errors="replace").splitlines() if cpu.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    text = f"{torch.__version__} {platform.machine()} {os.environ.get('ONEDNN_MAX_CPU_ISA', '')} {flags}"
    return hashlib.sha256(text.encode()).hexdigest()


def write(folder: Path, weights: Iterable[tuple[tuple[str, ...], torch.Tensor]]) -> None:
    """Write packed weights under the names of the layers they hold. Raises OSError."""
    index = []
    half, listed = folder / (DATA_FILE + ".part"), folder / (INDEX_FILE + ".part")
    with half.open("wb") as file:
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
    listed.write_text(json.dumps({"key": key(), "weights": index}))
    # A reader in between finds no index, and packs for itself.
    (folder / INDEX_FILE).unlink(missing_ok=True)
    half.rename(folder / DATA_FILE)
    listed.rename(folder / INDEX_FILE)


def fresh(folder: Path) -> bool:
    """Whether a folder holds weights packed for this machine."""
    try:
        return bool(json.loads((folder / INDEX_FILE).read_text())["key"] == key())
    except (OSError, ValueError, KeyError):
        return False


def read(folder: Path) -> dict[tuple[str, ...], torch.Tensor]:
    """The packed weights of a folder by the names of their layers; empty where there are none for this machine."""
    try:
        if not fresh(folder):
            return {}
        index = json.loads((folder / INDEX_FILE).read_text())
        with (folder / DATA_FILE).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if len(mapped) != max(w["offset"] + w["size"] for w in index["weights"]):
            return {}
        make = _Maker(mapped)
        return {tuple(w["names"]): make(w["shape"], w["offset"], b64decode(w["layout"])) for w in index["weights"]}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        log.info("no packed weights in %s: %s", folder, error)
        return {}


class _Maker:
    """Tensors over one mapping. It is never unmapped: they outlive whoever made them."""

    _kept: list[mmap.mmap] = []  # noqa: RUF012 — of the process, on purpose

    def __init__(self, mapped: mmap.mmap) -> None:
        self._kept.append(mapped)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._torch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self._capsule: Any = new

    def __call__(self, shape: list[int], offset: int, layout: bytes) -> torch.Tensor:
        dims = (ctypes.c_int64 * len(shape))(*shape)
        handle = ctypes.c_void_p()
        failed = self._torch.aoti_torch_create_tensor_from_blob_v2(
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
        if failed:
            raise ValueError("torch takes no tensor of this layout")
        tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(self._capsule(handle, None, None))
        return tensor
