"""The shape of one row of a decoder's KV: its size and type, and the rotation of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class KvRange(Protocol):
    """Rows start .. stop of one session, which a step computes. `handle`: the session's KV memory."""

    @property
    def handle(self) -> Any:
        """The session's KV memory, with room for the rows up to `stop`."""
        ...

    @property
    def start(self) -> int:
        """The number of the session's rows that are in the KV already."""
        ...

    @property
    def stop(self) -> int:
        """The number of the session's rows in the KV after the step."""
        ...

    @property
    def count(self) -> int:
        """The number of rows that the step computes, at least one."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KvShape:
    """One row of a decoder's KV: [layers, 2, kv_heads, head_dim], keys before values."""

    # The number of layers.
    layers: int
    # The number of key heads of a layer.
    kv_heads: int
    # The width of a key or value.
    head_dim: int
    # The type of the tensors.
    dtype: torch.dtype
    # The device of the tensors.
    device: torch.device
    # The angle, in radians, by which the halves of a key are rotated for each position: float32 [head_dim / 2]. None if
    # this model's keys are rotated in another way, and therefore cannot be moved.
    frequencies: torch.Tensor | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def empty(self, rows: int) -> torch.Tensor:
        """Return an uninitialized tensor [layers, 2, rows, kv_heads, head_dim].

        Raises torch.OutOfMemoryError if the device is full.
        """
        return torch.empty(self._of(rows), dtype=self.dtype, device=self.device)

    def zeros(self, rows: int) -> torch.Tensor:
        """Like `empty`, filled with zeros. On a CPU it takes no memory before it is written to."""
        return torch.zeros(self._of(rows), dtype=self.dtype, device=self.device)

    def _of(self, rows: int) -> tuple[int, ...]:
        return (self.layers, 2, rows, self.kv_heads, self.head_dim)

    def moved_keys(self, keys: torch.Tensor, positions: int) -> torch.Tensor:
        """Return keys [rows, kv_heads, head_dim] rotated by `positions`, which is negative for an earlier position.

        A rotary key, rotated by the distance that it moves, equals the key that would have been computed there
        (arXiv:2104.09864, section 3.2). Needs `frequencies`.
        """
        assert self.frequencies is not None
        angles = self.frequencies * positions
        cos, sin = torch.cos(angles), torch.sin(angles)
        low, high = keys.float().chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(keys.dtype)
