"""Reads `pretrained.pt`, a checkpoint in PyTorch's format of before version 1.6, without PyTorch.

The file is a row of pickles (a magic number, the format's version, the machine's sizes, the object, the keys of its
storages), then each storage: the number of its elements as int64, and the elements. The unpickler knows the few names
that tensors need and refuses all others, so a file can run no code.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

Weights = dict[str, npt.NDArray[np.float32]]

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001


@dataclass(slots=True)
class _Tensor:
    """A tensor whose elements come later in the file: the key of its storage, where it begins there, and its shape."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)


# What the names in the file stand for here.
KNOWN: dict[str, Callable[..., object] | np.dtype[Any]] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.LongStorage": np.dtype("<i8"),
}


class _Reader(pickle.Unpickler):
    """`storages` gets the type and the number of elements of each storage that the object names, by its key."""

    def __init__(self, file: IO[bytes], storages: dict[str, tuple[np.dtype[Any], int]]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (found := KNOWN.get(f"{module}.{name}")) is None:
            raise ValueError(f"a checkpoint has no use for {module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> str:
        _, dtype, key, _, num_elements, _ = pid
        self._storages[key] = (dtype, num_elements)
        return str(key)


def read_weights(path: Path) -> Weights:
    """Return the tensors of the checkpoint's `model_state` by their names.

    Raises OSError for a file that cannot be read, and ValueError or what unpickling raises for one that is none.
    """
    storages: dict[str, tuple[np.dtype[Any], int]] = {}
    with path.open("rb") as file:
        magic, version, _, checkpoint, keys = (_Reader(file, storages).load() for _ in range(5))
        if (magic, version) != (MAGIC_NUMBER, PROTOCOL_VERSION):
            raise ValueError("not a checkpoint of PyTorch's old format")
        elements = {key: _read_storage(file, *storages[key]) for key in keys}
    return {name: _array(tensor, elements[tensor.storage]) for name, tensor in checkpoint["model_state"].items()}


def _read_storage(file: IO[bytes], dtype: np.dtype[Any], num_elements: int) -> npt.NDArray[Any]:
    written = int.from_bytes(file.read(8), "little")
    data = file.read(num_elements * dtype.itemsize)
    if written != num_elements or len(data) != num_elements * dtype.itemsize:
        raise ValueError("the checkpoint's file is cut short")
    return np.frombuffer(data, dtype)


def _array(tensor: _Tensor, elements: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A tensor as an array. Those of this checkpoint are contiguous."""
    contiguous = tuple(int(np.prod(tensor.shape[axis + 1 :])) for axis in range(len(tensor.shape)))
    if tensor.strides != contiguous:
        raise ValueError("a tensor of the checkpoint is not contiguous")
    size = int(np.prod(tensor.shape))
    return elements[tensor.offset : tensor.offset + size].reshape(tensor.shape).astype(np.float32)
