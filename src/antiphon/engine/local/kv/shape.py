"""What one row of a decoder's KV is: how many numbers it has, of which type, and how its keys are turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class KvRange(Protocol):
    """Rows start .. stop of one session, which a step computes; `handle` is where its KV lies."""

    @property
    def handle(self) -> Any:
        """The session's KV memory, with room for the rows up to `stop`."""
        ...

    @property
    def start(self) -> int:
        """How many rows of the session are in the KV already."""
        ...

    @property
    def stop(self) -> int:
        """How many are after the step."""
        ...

    @property
    def count(self) -> int:
        """How many rows the step computes, which is at least one."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KvShape:
    """One row of a decoder's KV: [layers, 2, kv_heads, head_dim], keys before values.

    `dtype`, `device`: of the tensors it lies in. `frequencies`: radians by which the halves of a key are turned for
    each position, float32 [head_dim / 2]; None where this model's keys are turned otherwise, and so cannot be moved.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    frequencies: torch.Tensor | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def empty(self, rows: int) -> torch.Tensor:
        """Return a tensor [layers, 2, rows, kv_heads, head_dim], not initialized.

        Raises torch.OutOfMemoryError where the device is full.
        """
        return torch.empty(self._of(rows), dtype=self.dtype, device=self.device)

    def zeros(self, rows: int) -> torch.Tensor:
        """Return such a tensor of zeros. On a CPU it takes no memory before it is written to. Raises as `empty`."""
        return torch.zeros(self._of(rows), dtype=self.dtype, device=self.device)

    def _of(self, rows: int) -> tuple[int, ...]:
        return (self.layers, 2, rows, self.kv_heads, self.head_dim)

    def moved_keys(self, keys: torch.Tensor, positions: int) -> torch.Tensor:
        """Return keys [rows, kv_heads, head_dim] turned by `positions`, which is negative for an earlier place.

        Turning a rotary key by the positions it moves gives the key that would have been computed there
        (arXiv:2104.09864, section 3.2). Needs `frequencies`.
        """
        assert self.frequencies is not None
        angles = self.frequencies * positions
        cos, sin = torch.cos(angles), torch.sin(angles)
        low, high = keys.float().chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(keys.dtype)
