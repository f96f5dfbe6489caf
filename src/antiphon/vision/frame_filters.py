"""Decides which frames of a stream are worth keeping, and which of them a question is answered from.

`EvsFilter` is the filter that other servers have: the mean square difference of thumbnails. It is blind to what is
small: a ball in the air changes a hundredth of the picture. `BlockFilter` compares the block that changed most.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from PIL import Image

from antiphon.vision.images import Pixels

THUMBNAIL_SIDE = 64
# BlockFilter divides each side of the thumbnail into so many blocks of 4 x 4 pixels.
BLOCKS_PER_SIDE = 16


class FrameFilter(Protocol):
    """Decides frame by frame whether a frame is kept. A filter holds the state of one stream."""

    def keeps(self, pixels: Pixels) -> bool:
        """Whether this frame is to be kept. A frame that is kept becomes the one that the next frames are compared
        with, so a slow drift is noticed in the end. pixels: uint8 [height, width, 3], RGB, of any size.
        """
        ...


def thumbnail(pixels: Pixels) -> np.ndarray:
    """Scale an RGB image, uint8 [height, width, 3], to float32 [64, 64, 3] in 0..255, bilinear. Its aspect ratio is
    lost, which does not matter to a comparison of frames of one stream.
    """
    small = Image.fromarray(pixels).resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BILINEAR)
    return np.asarray(small, np.float32)


class EvsFilter:
    """Drops a frame whose likeness to the last kept frame is at least `threshold`. The first frame is kept.

    The likeness is 1 - MSE / 255² of their thumbnails: 1 for equal frames, about 0.96 where all values differ by a
    fifth of full scale.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._last: np.ndarray | None = None

    def keeps(self, pixels: Pixels) -> bool:
        """Compares thumbnails of 64 x 64 pixels, and keeps the one of the last frame that was kept: 48 kB a stream."""
        now = thumbnail(pixels)
        if self._last is not None and self._likeness(now, self._last) >= self._threshold:
            return False
        self._last = now
        return True

    def _likeness(self, now: np.ndarray, last: np.ndarray) -> float:
        return 1.0 - float(np.mean((now - last) ** 2)) / 255.0**2


class BlockFilter(EvsFilter):
    """Compares as `EvsFilter` does, but only the block of 4 x 4 thumbnail pixels that differs most.

    What changed everywhere alike is taken out before: the camera's own exposure is no event.
    """

    def _likeness(self, now: np.ndarray, last: np.ndarray) -> float:
        difference = now - last
        difference = difference - np.median(difference, axis=(0, 1))
        size = THUMBNAIL_SIDE // BLOCKS_PER_SIDE
        blocks = (difference**2).reshape(BLOCKS_PER_SIDE, size, BLOCKS_PER_SIDE, size, 3).mean(axis=(1, 3, 4))
        return 1.0 - float(blocks.max()) / 255.0**2


def sample_frames(count: int, max_frames: int) -> list[int]:
    """The indices, in order, of the frames that a question is answered from: all `count` of them where they are at most
    `max_frames`, otherwise `max_frames` of them at an even stride, the last frame included.
    """
    if count <= max_frames:
        return list(range(count))
    stride = max(1, count // max_frames)
    return [i * stride for i in range(max_frames - 1)] + [count - 1]
