"""Which frames of a stream are worth keeping, and what can be said of one without a model. Pure: pixels in, numbers and words out.

EVS is the filter other servers have: the mean square difference of thumbnails. It is blind to what is small: a ball in the air changes a hundredth
of the picture. `BlockFilter` looks at the block that changed most.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from PIL import Image

from antiphon.vision.images import Pixels

THUMBNAIL_SIDE = 64
# Blocks a side of BlockFilter, each 4 x 4 of the thumbnail.
BLOCKS_PER_SIDE = 16


class FrameFilter(Protocol):
    """Decides, frame by frame."""

    def keeps(self, pixels: Pixels) -> bool:
        """Whether this frame is to be kept; one that is, is what the next is compared with. pixels: uint8 [height, width, 3]."""
        ...


def thumbnail(pixels: Pixels) -> np.ndarray:
    """float32 [64, 64, 3] in 0..255, bilinear."""
    small = Image.fromarray(pixels).resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BILINEAR)
    return np.asarray(small, np.float32)


class EvsFilter:
    """Likeness 1 - MSE / 255² of thumbnails; a frame at or above `threshold` is dropped. The first is kept."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._last: np.ndarray | None = None

    def keeps(self, pixels: Pixels) -> bool:
        """See FrameFilter."""
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
        size = THUMBNAIL_SIDE // BLOCKS_PER_SIDE
        blocks = (difference**2).reshape(BLOCKS_PER_SIDE, size, BLOCKS_PER_SIDE, size, 3).mean(axis=(1, 3, 4))
        return 1.0 - float(blocks.max()) / 255.0**2


def sample_frames(count: int, most: int) -> list[int]:
    """Which of `count` frames a question is answered from: all, or `most` of them, evenly and the last."""
    if count <= most:
        return list(range(count))
    stride = max(1, count // most)
    return [i * stride for i in range(most - 1)] + [count - 1]
