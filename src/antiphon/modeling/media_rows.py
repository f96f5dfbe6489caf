"""What a model hears and sees, as rows of its decoder's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from antiphon.contracts import MediaPart
from antiphon.engine.api import Position


class MediaRows:
    """Sound or an image as the decoder takes it: `rows` float [n, width]; `positions` of each, where they do not follow one another.

    `hidden`: what the decoder's tapped layer made of them, float [n, width], once it has.
    """

    def __init__(self, rows: Any, positions: Sequence[Position] | None = None) -> None:
        self.rows, self.positions = rows, positions
        self.hidden: Any = None

    def sink(self, before: int, made: Any) -> None:
        """See engine/sequence.py."""
        if self.hidden is None:
            # Rows that leave the context before they are computed are nothing.
            self.hidden = made.new_zeros(len(self.rows), made.shape[1])
        self.hidden[before : before + len(made)] = made


class MediaEncoder(Protocol):
    """A model's encoders. `places`: the tokens that stand for one part each in a rendered conversation; `taps`: its decoder has a tapped layer."""

    places: frozenset[int]
    taps: bool

    async def take(self, part: MediaPart) -> MediaRows:
        """Encode it. Raises MediaError for what is no image, ModelError, Refused."""
        ...


@dataclass(frozen=True, slots=True)
class PictureRows:
    """A picture as the decoder sees it: `rows` [n, width]; `positions` of each, where they do not follow one another."""

    rows: torch.Tensor
    positions: tuple[Position, ...] | None = None
