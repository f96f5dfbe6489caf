"""What a model hears and sees, as rows of its decoder's input.

The types between encoders, which adapters have, and conversations, which put these rows where the template has a
placeholder. Nothing here encodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from antiphon.contracts import MediaPart
from antiphon.engine.api import Position
from antiphon.errors import EngineError, Refused

# Of callers that have to wait until other conversations hold fewer rows.
RETRY_AFTER_S = 10.0


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

    @property
    def num_bytes(self) -> int:
        """The bytes of `rows`. What a tapped layer makes of them has about as many again."""
        return int(self.rows.numel() * self.rows.element_size())


class MediaBudget:
    """The bytes of encoded sound and images that all conversations of a model hold.

    These rows lie on the model's device, beside the KV. The engine refers to the same rows, which it needs to compute
    what has left its memory anew, so they are counted once. Used from one event loop.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def is_full(self, limit_bytes: int) -> bool:
        """Whether so many bytes are held; 0: there is no limit."""
        return 0 < limit_bytes <= self.num_bytes

    def check(self, limit_bytes: int) -> None:
        """Raise Refused where so many bytes are held.

        To be called before anything is encoded, whose size nobody knows: the limit is exceeded by that, at most.
        """
        if self.is_full(limit_bytes):
            held, most = self.num_bytes >> 20, limit_bytes >> 20
            raise Refused(f"conversations hold {held} of {most} MB of encoded sound and images", RETRY_AFTER_S)


class HeldMedia:
    """The encoded audio clips and images of one conversation, counted in its model's budget. `rows`: not to be changed
    by others.
    """

    def __init__(self, budget: MediaBudget) -> None:
        self.rows: dict[MediaPart, MediaRows] = {}
        self._budget = budget
        self._closed = False

    def make_room(self, limit_bytes: int, used: Collection[MediaPart]) -> None:
        """Raise Refused where the budget is full, even without the parts that the conversation does not use."""
        if self._budget.is_full(limit_bytes):
            self.keep(used)
        self._budget.check(limit_bytes)

    def put(self, part: MediaPart, rows: MediaRows) -> None:
        """Hold a part, unless it is held. Raises EngineError where the conversation is closed."""
        if self._closed:
            raise EngineError("the conversation is closed")
        if part not in self.rows:
            self.rows[part] = rows
            self._budget.num_bytes += rows.num_bytes

    def keep(self, used: Collection[MediaPart], spare: int = 0) -> None:
        """Drop the parts that are not used, but for so many of the newest."""
        unused = [part for part in self.rows if part not in used]
        for part in unused[: len(unused) - spare] if len(unused) > spare else ():
            self._budget.num_bytes -= self.rows.pop(part).num_bytes

    def close(self) -> None:
        """Drop all parts, for good."""
        self._closed = True
        self.keep(())


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
