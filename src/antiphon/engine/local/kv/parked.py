"""Copies of a session's KV outside the budget: in host memory, or in an unnamed file.

A parked copy is one contiguous tensor [layers, 2, rows, kv_heads, head_dim], whatever the layout of the session's KV.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ParkedFile:
    """A parked tensor of `shape` and `dtype` in an unlinked file. `descriptor` stays open until it is discarded."""

    descriptor: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return the whole tensor in host memory. Raises OSError if the file is shorter than the tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        into, at = _bytes(tensor), 0
        while at < len(into):
            count = os.preadv(self.descriptor, [into[at:]], at)
            if not count:
                raise OSError("the file of a parked session is truncated")
            at += count
        return tensor


def write_parked(parked: torch.Tensor, folder: Path | None) -> ParkedFile:
    """Write a parked copy to an unnamed file, which disappears with the process.

    `folder`: the file's folder; None: the system's temporary folder. Raises OSError if the disk is full.
    """
    with tempfile.TemporaryFile(dir=folder, prefix="antiphon-kv-") as file:
        file.write(_bytes(parked))
        file.flush()
        return ParkedFile(os.dup(file.fileno()), tuple(parked.shape), parked.dtype)


def read_parked(parked: torch.Tensor | ParkedFile) -> torch.Tensor:
    """Return a parked copy as a tensor in host memory. Raises OSError if its file cannot be read."""
    return parked.read() if isinstance(parked, ParkedFile) else parked


def discard_parked(parked: torch.Tensor | ParkedFile) -> None:
    """Free a parked copy. Closing a file deletes it; a tensor is freed with its last reference."""
    if isinstance(parked, ParkedFile):
        os.close(parked.descriptor)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
