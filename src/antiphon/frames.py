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
# Hues by name, each up to so many degrees; what is less coloured than GREY is no hue.
HUES = (
    (15, "red"),
    (40, "orange"),
    (68, "yellow"),
    (165, "green"),
    (200, "turquoise"),
    (260, "blue"),
    (300, "purple"),
    (340, "pink"),
    (361, "red"),
)
NAMES = ("black", "grey", "white", "brown", *dict.fromkeys(name for _, name in HUES))
GREY, DARK, LIGHT = 0.18, 0.18, 0.78
# A colour is told if it covers this much.
SHARE = 0.12


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
    shares = np.bincount(_named(now), minlength=len(NAMES)) / SIDE**2
    colours = tuple(NAMES[i] for i in np.argsort(-shares, kind="stable")[:3] if shares[i] >= SHARE)
    motion = float(np.abs(now - before).mean()) / 255 if before is not None else 0.0
    brightness = float((now @ np.array([0.299, 0.587, 0.114], np.float32)).mean()) / 255
    return Look(brightness, colours, motion, before is not None and motion >= SCENE), now


def _named(picture: np.ndarray) -> np.ndarray:
    """The place in NAMES of each pixel's colour: int [pixels]."""
    flat = picture.reshape(-1, 3) / 255.0
    high, low = flat.max(1), flat.min(1)
    spread = high - low
    red, green, blue = flat.T
    safe = np.where(spread > 0, spread, 1.0)
    hue = np.where(
        high == red,
        (green - blue) / safe % 6,
        np.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    degrees = hue * 60
    out = np.full(len(flat), NAMES.index("grey"))
    for upto, name in reversed(HUES):
        out[degrees < upto] = NAMES.index(name)
    warm = (degrees >= 10) & (degrees < 45)
    out[warm & (high < 0.6)] = NAMES.index("brown")
    saturation = spread / np.where(high > 0, high, 1.0)
    out[(saturation < 0.45) & (high > 0.75) & ((degrees < 15) | (degrees >= 300))] = NAMES.index("pink")
    grey = saturation < GREY
    out[grey] = NAMES.index("grey")
    out[grey & (high > LIGHT)] = NAMES.index("white")
    out[high < DARK] = NAMES.index("black")
    return out
