"""The interface of a family of vision-language models: how it turns pictures into rows, and how it formats turns.

`session.py` manages the rows of a session, independently of these formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.tokens import Vocabulary
from antiphon.vision.images import Pixels

# A part of a session's input: tokens, or the rows of one picture.
FamilyPart = Sequence[int] | PictureRows


class VisionFamily(Protocol):
    """One loaded checkpoint of a family. The methods that format a turn return its parts in order, and are stateless.

    `vocabulary`: its tokens. `decoder`: the module that the engine's runner steps, with its output head.
    `position_axes`: coordinates of a row's position: 1, or 3 for (time, height, width). `input_width`: width of an
    embedding row if it is wider than the decoder (Qwen3-VL's DeepStack); 0: the decoder's width.
    """

    vocabulary: Vocabulary
    decoder: Any
    position_axes: int
    input_width: int

    def prepare(self, pixels: Pixels) -> Any:
        """Return a picture scaled and cut for `encode`. `pixels`: uint8 [height, width, 3], RGB.

        Takes milliseconds of CPU time. It runs outside the model's thread, so it must not run matrix products of torch:
        OpenMP would keep a second team of threads (engine/threads.py).
        """
        ...

    def num_patches(self, prepared: Any) -> int:
        """Return the number of the encoder's patches of a picture that `prepare` returned."""
        ...

    def encode(self, prepared: Sequence[Any]) -> list[PictureRows]:
        """Return the rows of each picture that `prepare` returned, in one pass of the encoder.

        Runs in the model's thread, between two steps.
        """
        ...

    def opening(self, instructions: str) -> list[FamilyPart]:
        """Return the system turn. `instructions` is plain text: control tokens in it are not recognized."""
        ...

    def turn(self) -> list[FamilyPart]:
        """Return the beginning of a user's turn, before its frames."""
        ...

    def frame(self, picture: PictureRows, at_s: float) -> list[FamilyPart]:
        """Return one frame of a user's turn, after its time as text. `at_s`: seconds since the session began."""
        ...

    def question(self, text: str) -> list[FamilyPart]:
        """Return the question, the end of the user's turn, and the beginning of the model's turn.

        `text` is plain text: control tokens in it are not recognized.
        """
        ...

    def end(self) -> list[FamilyPart]:
        """Return the end of the model's turn, for a turn that was interrupted or reached the limit of tokens."""
        ...
