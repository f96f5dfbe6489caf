"""What a model hears and sees, as rows of its decoder's input.

The types between encoders, which adapters have, and conversations, which put these rows where the template has a
placeholder. Nothing here encodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from antiphon.contracts import MediaPart
from antiphon.engine.api import Position


class MediaRows:
    """An audio clip or an image as the decoder's input: `rows`, float [n, width].

    `positions`: one for each row, counted from the first free one; None where they follow one another. `hidden`: what
    the decoder's tapped layer made of the rows, float [n, its width]; None until some were computed.
    """

    def __init__(self, rows: Any, positions: Sequence[Position] | None = None) -> None:
        self.rows, self.positions = rows, positions
        self.hidden: Any = None

    def sink(self, offset: int, hidden: Any) -> None:
        """Keep what the tapped layer made of rows from `offset` on; a Sink of the engine, called in its thread."""
        if self.hidden is None:
            # Rows that leave the context before they are computed stay zeros.
            self.hidden = hidden.new_zeros(len(self.rows), hidden.shape[1])
        self.hidden[offset : offset + len(hidden)] = hidden


class MediaEncoder(Protocol):
    """The encoders of a model that hears or sees.

    `placeholder_ids`: the tokens that stand for one audio clip or image each in a rendered conversation. `has_tap`: the
    model's decoder has a tapped layer, whose output `MediaRows.hidden` is to hold.
    """

    placeholder_ids: frozenset[int]
    has_tap: bool

    async def encode(self, part: MediaPart) -> MediaRows:
        """Return the rows of one audio clip or image. Waits for the encoder.

        Raises MediaError for what is no image, ModelError where the encoder fails, Refused where the engine is closed.
        """
        ...


@dataclass(frozen=True, slots=True)
class PictureRows:
    """A picture as the decoder sees it: `rows`, float [n, width], and one of `positions` for each (None: in a line)."""

    rows: torch.Tensor
    positions: tuple[Position, ...] | None = None
