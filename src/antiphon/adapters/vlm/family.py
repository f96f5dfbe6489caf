"""What one family of models that see pictures must say of itself: how it looks, and how frames and questions are put to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.vocabulary import Vocabulary
from antiphon.vision.images import Pixels

FamilyPart = Sequence[int] | PictureRows


class VisionFamily(Protocol):
    """One loaded model. `whole`: the decoder for the engine, and where in it the text model is."""

    vocabulary: Vocabulary
    decoder: Any
    # Of a row's place: 1, or 3 where it is (time, height, width). Of a row: numbers in it, 0 where it is the decoder's own width.
    position_axes: int
    input_width: int

    def prepare(self, pixels: Pixels) -> Any:
        """A picture scaled and cut as the encoder wants it. Not in the engine's thread, and no work of torch."""
        ...

    def look(self, prepared: Any) -> PictureRows:
        """The picture's rows. In the engine's thread."""
        ...

    def opening(self, instructions: str) -> list[FamilyPart]:
        """The system's turn."""
        ...

    def turn(self) -> list[FamilyPart]:
        """Begins a turn of whoever asks."""
        ...

    def frame(self, picture: PictureRows, at_s: float) -> list[FamilyPart]:
        """A frame inside a turn."""
        ...

    def question(self, text: str) -> list[FamilyPart]:
        """The question, the end of its turn, and the beginning of the answer's."""
        ...

    def end(self) -> list[FamilyPart]:
        """Ends a turn that did not end by itself."""
        ...
