"""Which frames of a stream are worth keeping, and what can be said of one without a model. Pure: pixels in, numbers and words out.

EVS is the filter other servers have: the mean square difference of thumbnails. It is blind to what is small: a ball in the air changes a hundredth
of the picture. `BlockFilter` looks at the block that changed most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image

from antiphon.images import Pixels

SIDE = 64
# Blocks a side of BlockFilter, each 4 x 4 of the thumbnail.
BLOCKS = 16
# A picture is another scene when its thumbnail differs by so much of full scale on average.
SCENE = 0.18
# Mean difference to the frame before: much motion from here on, some from there.
MUCH, SOME = 0.05, 0.012
COLOURS = {
    "black": (20, 20, 20), "white": (240, 240, 240), "grey": (128, 128, 128), "red": (200, 40, 40), "green": (60, 150, 60),
    "blue": (50, 80, 190), "yellow": (225, 200, 60), "orange": (230, 130, 40), "brown": (120, 80, 50), "pink": (230, 150, 175),
    "purple": (120, 60, 150),
}  # fmt: skip


class Filter(Protocol):
    """Decides, frame by frame."""

    def keeps(self, pixels: Pixels) -> bool:
        """Whether this frame is to be kept; one that is, is what the next is compared with. pixels: uint8 [height, width, 3]."""
        ...


def thumbnail(pixels: Pixels) -> np.ndarray:
    """float32 [64, 64, 3] in 0..255, bilinear."""
    small = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(small, np.float32)


class EvsFilter:
    """Likeness 1 - MSE / 255² of thumbnails; a frame at or above `threshold` is dropped. The first is kept."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._last: np.ndarray | None = None

    def keeps(self, pixels: Pixels) -> bool:
        """See Filter."""
        now = thumbnail(pixels)
        if self._last is not None and self._likeness(now, self._last) >= self._threshold:
            return False
        self._last = now
        return True

    def _likeness(self, now: np.ndarray, last: np.ndarray) -> float:
        return 1.0 - float(np.mean((now - last) ** 2)) / 255.0**2


class BlockFilter(EvsFilter):
    """The same of the block that differs most, after what changed everywhere alike (the camera's own exposure) is taken out."""

    def _likeness(self, now: np.ndarray, last: np.ndarray) -> float:
        difference = now - last
        difference = difference - np.median(difference, axis=(0, 1))
        size = SIDE // BLOCKS
        blocks = (difference**2).reshape(BLOCKS, size, BLOCKS, size, 3).mean(axis=(1, 3, 4))
        return 1.0 - float(blocks.max()) / 255.0**2


def sample(count: int, most: int) -> list[int]:
    """Which of `count` frames a question is answered from: all, or `most` of them, evenly and the last."""
    if count <= most:
        return list(range(count))
    stride = max(1, count // most)
    return [i * stride for i in range(most - 1)] + [count - 1]


@dataclass(frozen=True, slots=True)
class Look:
    """What can be said of a frame: `brightness` in [0, 1]; `colours`, the commonest first; `motion`: mean difference to the frame before, in [0, 1]."""

    brightness: float
    colours: tuple[str, ...]
    motion: float
    new_scene: bool

    @property
    def light(self) -> str:
        """In a word."""
        return "dark" if self.brightness < 0.25 else "bright" if self.brightness > 0.65 else "normally lit"

    @property
    def moves(self) -> str:
        """In a word."""
        return "much motion" if self.motion >= MUCH else "some motion" if self.motion >= SOME else "still"


def look(pixels: Pixels, before: np.ndarray | None) -> tuple[Look, np.ndarray]:
    """Of a frame and the thumbnail of the one before; and its own thumbnail."""
    now = thumbnail(pixels)
    names = list(COLOURS)
    table = np.array([COLOURS[n] for n in names], np.float32)
    flat = now.reshape(-1, 3)
    nearest = np.argmin(((flat[:, None] - table[None]) ** 2).sum(-1), axis=1)
    shares = np.bincount(nearest, minlength=len(names)) / len(flat)
    colours = tuple(names[i] for i in np.argsort(-shares)[:3] if shares[i] >= 0.12)
    motion = float(np.abs(now - before).mean()) / 255 if before is not None else 0.0
    brightness = float((now @ np.array([0.299, 0.587, 0.114], np.float32)).mean()) / 255
    return Look(brightness, colours, motion, before is not None and motion >= SCENE), now
