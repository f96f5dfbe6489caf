"""KV memory as one contiguous tensor for each session, the layout that a CPU reads fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from antiphon.engine.local.kv.parked import ParkedFile, discard_parked, read_parked, write_parked
from antiphon.engine.local.kv.shape import KvRange, KvShape


class SessionTensors:
    """A Storage whose handles are tensors [layers, 2, rows, kv_heads, head_dim], one for each session.

    `folder`: the folder for files of parked copies; None: the system's temporary folder.
    """

    def __init__(self, shape: KvShape, folder: Path | None = None) -> None:
        self._shape, self._folder = shape, folder

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's keys and values over all layers."""
        return self._shape.row_bytes

    def extend(self, source: torch.Tensor | None, rows: int, valid: int, *, shared: bool) -> torch.Tensor:
        """Return a new tensor for `rows` rows that begins with a copy of the first `valid` rows of `source`.

        Raises torch.OutOfMemoryError if the device is full.
        """
        target = self._shape.empty(rows)
        if source is not None and valid:
            target[:, :, :valid].copy_(source[:, :, :valid])
        return target

    def own(self, handle: torch.Tensor, first: int) -> None:
        """A no-op: a tensor that no other session holds is the session's own."""

    def free(self, handle: torch.Tensor) -> None:
        """A no-op: a tensor is freed with its last reference."""

    def evict(self, handle: torch.Tensor, first: int, end: int, stop: int) -> bool:
        """Move rows end .. stop down to `first`, layer by layer, and rotate their keys by the same number of positions.

        Values carry no position and are copied. Returns False if this model's keys cannot be moved.
        """
        if self._shape.frequencies is None:
            return False
        into = slice(first, first + stop - end)
        for layer in handle:
            layer[0, into] = self._shape.moved_keys(layer[0, end:stop], first - end)
            layer[1, into] = layer[1, end:stop].clone()
        return True

    def to_host(self, source: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a contiguous copy of the first `rows` rows in host memory. Waits for the device."""
        return source[:, :, :rows].to("cpu", copy=True).contiguous()

    def to_disk(self, parked: torch.Tensor) -> ParkedFile:
        """Write a parked copy to an unnamed file, which disappears with the process. Raises OSError on a full disk."""
        return write_parked(parked, self._folder)

    def restore(self, parked: torch.Tensor | ParkedFile, target: torch.Tensor, rows: int) -> None:
        """Copy the first `rows` rows of a parked copy into `target`. Raises OSError if its file cannot be read."""
        target[:, :, :rows].copy_(read_parked(parked)[:, :, :rows])

    def discard(self, parked: torch.Tensor | ParkedFile) -> None:
        """Free a parked copy, in host memory or in a file."""
        discard_parked(parked)

    def step(self, ranges: Sequence[KvRange]) -> SessionViews:
        """Return access to the keys and values of a step, whose rows are packed in the order of `ranges`."""
        return SessionViews(ranges)


class SessionViews:
    """The KV of one step's sessions, as views of their tensors, made once for all layers."""

    def __init__(self, ranges: Sequence[KvRange]) -> None:
        self._ranges = ranges
        self._fresh = [_by_layer(r.handle[:, :, r.start : r.stop]) for r in ranges]
        self._whole = [_by_layer(r.handle[:, :, : r.stop].transpose(2, 3).unsqueeze(2)) for r in ranges]
        self.dtype: torch.dtype = ranges[0].handle.dtype

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's new keys and values, each [rows, kv_heads, head_dim], packed in the order of the ranges."""
        at = 0
        for place, (new_keys, new_values) in zip(self._ranges, self._fresh, strict=True):
            own = slice(at, at + place.count)
            new_keys[layer].copy_(keys[own])
            new_values[layer].copy_(values[own])
            at += place.count

    def read(self, layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a range's keys and values from its session's first row on, each [1, kv_heads, rows, head_dim]."""
        keys, values = self._whole[number]
        return keys[layer], values[layer]


def _by_layer(rows: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    return rows[:, 0].unbind(0), rows[:, 1].unbind(0)
