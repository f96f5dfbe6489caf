"""Reads the weights of voice encoders from checkpoints of PyTorch, without PyTorch.

Since PyTorch 1.6, a checkpoint is a zip archive with a pickle of the object, and a file with the elements of each
storage. Before, it began with five pickles: a magic number, the format's version, the sizes of the machine's integer
types, the object, and the keys of its storages. The storages followed, each as the number of its elements (int64), then
the elements. The unpickler accepts only the few names that tensors need, so a file cannot run code.
"""

from __future__ import annotations

import pickle
import zipfile
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
    """A tensor whose elements are later in the file: its storage's key, its offset in the storage, and its shape."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)


# The names that the file may refer to, and their replacements.
KNOWN: dict[str, Callable[..., object] | np.dtype[Any]] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.LongStorage": np.dtype("<i8"),
}


class _Reader(pickle.Unpickler):
    """Unpickles objects, and adds the dtype and the element count of each referenced storage to `storages` by key."""

    def __init__(self, file: IO[bytes], storages: dict[str, tuple[np.dtype[Any], int]]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (found := KNOWN.get(f"{module}.{name}")) is None:
            raise ValueError(f"{module}.{name} is not allowed in a checkpoint")
        return found

    def persistent_load(self, pid: Any) -> str:
        _, dtype, key, _, num_elements, *_ = pid
        self._storages[key] = (dtype, num_elements)
        return str(key)


def read_weights(path: Path, name: str = "") -> Weights:
    """Return the tensors of a checkpoint by name. `name`: the checkpoint's entry that has them; "": the whole object.

    Raises OSError if the file cannot be read, and ValueError, KeyError, an unpickling or a zip error if it is not such
    a checkpoint.
    """
    storages: dict[str, tuple[np.dtype[Any], int]] = {}
    elements: dict[str, npt.NDArray[Any]]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            root = next(entry for entry in archive.namelist() if entry.endswith("/data.pkl")).removesuffix("data.pkl")
            with archive.open(f"{root}data.pkl") as file:
                checkpoint = _Reader(file, storages).load()
            elements = {key: _array(archive.read(f"{root}data/{key}"), *facts) for key, facts in storages.items()}
    else:
        with path.open("rb") as file:
            magic, version, _, checkpoint, keys = (_Reader(file, storages).load() for _ in range(5))
            if (magic, version) != (MAGIC_NUMBER, PROTOCOL_VERSION):
                raise ValueError("not a checkpoint of PyTorch's old format")
            elements = {key: _storage(file, *storages[key]) for key in keys}
    state = checkpoint[name] if name else checkpoint
    return {name: _weight(tensor, elements[tensor.storage]) for name, tensor in state.items()}


def _storage(file: IO[bytes], dtype: np.dtype[Any], num_elements: int) -> npt.NDArray[Any]:
    written = int.from_bytes(file.read(8), "little")
    if written != num_elements:
        raise ValueError("the checkpoint's file is truncated")
    return _array(file.read(num_elements * dtype.itemsize), dtype, num_elements)


def _array(data: bytes, dtype: np.dtype[Any], num_elements: int) -> npt.NDArray[Any]:
    if len(data) < num_elements * dtype.itemsize:
        raise ValueError("the checkpoint's file is truncated")
    return np.frombuffer(data, dtype, num_elements)


def _weight(tensor: _Tensor, elements: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return a tensor as an array. Raises ValueError if it is not contiguous, as all weights are."""
    contiguous = tuple(int(np.prod(tensor.shape[axis + 1 :])) for axis in range(len(tensor.shape)))
    if any(s != c for s, c, size in zip(tensor.strides, contiguous, tensor.shape, strict=True) if size > 1):
        raise ValueError("a tensor of the checkpoint is not contiguous")
    size = int(np.prod(tensor.shape))
    return elements[tensor.offset : tensor.offset + size].reshape(tensor.shape).astype(np.float32)
