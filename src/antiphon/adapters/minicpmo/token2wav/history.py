"""Keys and values of many streams in tables with fixed addresses.

Each stream has a slot, which is a row of every table. A slot has a fixed number of positions. The host decides which
position each frame of a stream takes: a new frame takes the place of one that was forgotten, so no frame ever moves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class Held:
    """The frames that one table holds for one slot: the positions of the frames, in an order that the caller chooses.

    `capacity`: the slot's number of positions.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.positions: Positions = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def free(self, count: int) -> Positions:
        """Return `count` positions that hold no frame. Raises ValueError if there are fewer."""
        taken = np.zeros(self.capacity, bool)
        taken[self.positions] = True
        free = np.flatnonzero(~taken)[:count]
        if len(free) < count:
            raise ValueError(f"{count} frames do not fit: {len(self)} of {self.capacity} positions are taken")
        return free

    def numbers(self, new: Positions) -> Positions:
        """Return the number of the frame at each position, int64 [capacity]; -1: none.

        The frames that are held are numbered in their order, and the frames at `new` continue the numbers.
        """
        numbers = np.full(self.capacity, -1, np.int64)
        numbers[self.positions] = np.arange(len(self))
        numbers[new] = len(self) + np.arange(len(new))
        return numbers


class FramePlaces(NamedTuple):
    """Where the streams of one call have their frames in a table. All tensors are int64, on the device."""

    # The slot of each stream, [streams].
    slots: torch.Tensor
    # The position of each new frame, [streams, frames].
    new: torch.Tensor
    # See Held.numbers, [streams, capacity].
    numbers: torch.Tensor
    # The number of new frames of each stream, [streams]. The frames after these fill up the call, and are not held.
    counts: torch.Tensor

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to attention scores: 0 for positions that hold a frame, else -inf: [n, 1, 1, capacity].

        `dtype`: the type of the scores.
        """
        none = torch.zeros_like(self.numbers, dtype=dtype).masked_fill(self.numbers < 0, -torch.inf)
        return none[:, None, None]

    def guided(self) -> FramePlaces:
        """Return the places in a table with two rows for each slot: with the conditions, and without them."""
        slots = (self.slots[:, None] * 2 + torch.arange(2, device=self.slots.device)).flatten()
        return FramePlaces(slots, *(each.repeat_interleave(2, 0) for each in (self.new, self.numbers, self.counts)))

    def ends(self, length: int) -> torch.Tensor:
        """Return which frames a convolution that keeps `length` frames keeps, [streams, 1, length]. See `continued`."""
        return (self.counts[:, None] + torch.arange(length, device=self.counts.device))[:, None]


def extended(table: torch.Tensor, places: FramePlaces, new: torch.Tensor) -> torch.Tensor:
    """Write the new frames [streams, frames, width] into a table [slots, capacity, width].

    Returns all positions of these streams, [streams, capacity, width].
    """
    capacity, width = table.shape[1:]
    at = (places.slots[:, None] * capacity + places.new).flatten()
    table.view(-1, width).index_copy_(0, at, new.reshape(-1, width))
    return table.index_select(0, places.slots)


def continued(table: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Put the frames before the new ones: those that a convolution over [streams, channels, frames] still needs.

    `table`, [slots, channels, frames kept]: keeps the last frames of each slot, and is updated. `ends`: their numbers
    among the kept and the new frames, see FramePlaces.ends. Returns both, [streams, channels, kept + frames].
    """
    frames = torch.cat([table.index_select(0, slots), new], 2)
    table.index_copy_(0, slots, frames.gather(2, ends.expand(-1, frames.shape[1], -1)))
    return frames
