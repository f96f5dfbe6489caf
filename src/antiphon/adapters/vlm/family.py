"""What differs between families of vision-language models: how a picture becomes rows, and how a turn is written.

`session.py` keeps a session's rows in order and knows none of these formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.tokens import Vocabulary
from antiphon.vision.images import Pixels

# A stretch of a session's input: tokens, or the rows of one picture.
FamilyPart = Sequence[int] | PictureRows


class VisionFamily(Protocol):
    """One loaded checkpoint of a family. The methods that write a turn return its parts in order, and keep nothing.

    `vocabulary`: its tokens. `decoder`: the module that the engine's runner steps, with its output head.
    `position_axes`: coordinates in a row's position, 1, or 3 where it is (time, height, width).
    `input_width`: numbers in an embedding row where it is wider than the decoder (Qwen3-VL's DeepStack); 0 where it is
    as wide as the decoder.
    """

    vocabulary: Vocabulary
    decoder: Any
    position_axes: int
    input_width: int

    def prepare(self, pixels: Pixels) -> Any:
        """Return a picture scaled and cut as `encode` wants it. pixels: uint8 [height, width, 3], RGB.

        Takes milliseconds of CPU and runs outside the model's thread, so it must not run products of torch: OpenMP
        would keep a second team of threads (engine/threads.py).
        """
        ...

    def encode(self, prepared: Any) -> PictureRows:
        """Return the rows of a picture that `prepare` prepared. Runs in the model's thread, between two steps."""
        ...

    def opening(self, instructions: str) -> list[FamilyPart]:
        """Return the system turn. No text in `instructions` becomes a control token."""
        ...

    def turn(self) -> list[FamilyPart]:
        """Return what begins a user's turn, before its frames."""
        ...

    def frame(self, picture: PictureRows, at_s: float) -> list[FamilyPart]:
        """Return one frame inside a user's turn, with its time in seconds since the session began, as text."""
        ...

    def question(self, text: str) -> list[FamilyPart]:
        """Return the question, the end of the user's turn, and the beginning of the model's.

        No text in the question becomes a control token.
        """
        ...

    def end(self) -> list[FamilyPart]:
        """Return what ends the model's turn where the model did not end it: after a cut, or at the limit of tokens."""
        ...
