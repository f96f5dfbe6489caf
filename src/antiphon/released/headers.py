"""Reads the names, shapes and dtypes of a folder's tensors from the headers of its files, without the weights.

A safetensors file begins with the length of its header, 8 bytes, little-endian; then the header follows, a JSON object
of each tensor's dtype, shape and place. The tensors' bytes end with the file, so a file that was cut is recognized by
its size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

# The file of a checkpoint that is not sharded, and the file that names the shards of one that is.
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The limit of a header in bytes, as in the format's published reader.
MAX_HEADER_BYTES = 100_000_000
# The first bytes of other kinds of files, and what such a file is.
MAGIC = {
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a pickled file of PyTorch",
    b"\x80\x02": "a pickled file of PyTorch",
    b"version ": "the pointer of Git LFS to a file (`git lfs pull` fetches it)",
}
# The bytes of one number of each dtype of the format.
DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor as a header describes it. `data_offsets`: its first byte and the byte after its last, after the header.

    `dtype` has the name of the format, such as "BF16". The header's entry without a tensor has the defaults.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class ShardIndex(msgspec.Struct, frozen=True):
    """The file that names the shards. `weight_map`: the shard of each tensor."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its shape, the name of its dtype in safetensors, and its file below the model's folder."""

    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def num_elements(self) -> int:
        """The number of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """The bytes of its elements in the file."""
        return self.num_elements * DTYPE_BYTES.get(self.dtype, 1)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors that a safetensors file describes. Reads only the header.

    Raises ValueError if the file is of another kind, was cut, or has a header that cannot be read. The message names
    the file. Raises OSError if the file cannot be opened.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        size = file.seek(0, 2)
        file.seek(8)
        kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), "")
        if kind:
            raise ValueError(f"{path.name} is {kind}, not a safetensors file")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path.name} is no safetensors file, or only its beginning ({size:,} bytes)")
        header = file.read(length)
    try:
        tensors = msgspec.json.decode(header, type=dict[str, TensorEntry])
        tensors.pop("__metadata__", None)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} has a damaged header: {error}") from None
    end = 8 + length + max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    if size != end:
        what = "was cut" if size < end else "is longer than its header says"
        raise ValueError(f"{path.name} {what}: it has {size:,} bytes, and its header describes {end:,}")
    return tensors


def shards(folder: Path) -> tuple[str, ...]:
    """Return the names of the safetensors files that a loader reads from a folder, whether they exist or not.

    () if the folder has neither an index nor an unsharded file. Raises ValueError if the index cannot be read.
    """
    index = folder / INDEX
    if not index.is_file():
        return (WHOLE,) if (folder / WHOLE).is_file() else ()
    try:
        named = msgspec.json.decode(index.read_bytes(), type=ShardIndex).weight_map.values()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{INDEX} cannot be read: {error}") from None
    return tuple(dict.fromkeys(named))


def stored_tensors(folder: Path, parts: Iterable[str] = ("",)) -> dict[str, StoredTensor]:
    """Return all tensors of a folder and of its subfolders `parts`, by name. Those of a subfolder begin with "part/".

    Raises ValueError for the first file that is missing, was cut or is of another kind, and OSError if a file cannot
    be read.
    """
    found: dict[str, StoredTensor] = {}
    for part in parts:
        prefix = f"{part}/" if part else ""
        for name in shards(folder / part):
            path = folder / part / name
            if Path(name).name != name:
                raise ValueError(f"{INDEX} names {name}, which is not a file of the folder")
            if not path.is_file():
                raise ValueError(f"{prefix}{name} is missing, and {INDEX} names it")
            for tensor, entry in read_header(path).items():
                found[prefix + tensor] = StoredTensor(entry.shape, entry.dtype, prefix + name)
    return found
