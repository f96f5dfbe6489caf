"""Decides which frames of a stream are kept, and which of the kept frames are used to answer a question.

`EvsFilter` uses the mean square difference of thumbnails, as other servers do. It misses small changes, such as a
flying ball that changes a hundredth of the picture. `BlockFilter` therefore compares only the block that changed most.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from PIL import Image

from antiphon.vision.images import Pixels

THUMBNAIL_SIDE = 64
# The number of blocks of 4 x 4 pixels along each side of BlockFilter's thumbnails.
BLOCKS_PER_SIDE = 16


class FrameFilter(Protocol):
    """Decides for each frame whether it is kept. A filter has the state of one stream."""

    def keeps(self, pixels: Pixels) -> bool:
        """Return whether to keep this frame. `pixels`: uint8 [height, width, 3], RGB, of any size.

        Each frame is compared with the last kept one, so a slow drift is eventually noticed.
        """
        ...


def thumbnail(pixels: Pixels) -> np.ndarray:
    """Scale an RGB image, uint8 [height, width, 3], bilinearly to float32 [64, 64, 3] in 0..255.

    The aspect ratio is lost. That does not affect comparisons of frames of one stream.
    """
    small = Image.fromarray(pixels).resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BILINEAR)
    return np.asarray(small, np.float32)


class EvsFilter:
    """Drops a frame whose similarity to the last kept frame is at least `threshold`. Keeps the first frame.

    The similarity is 1 - MSE / 255² of the thumbnails: 1 for equal frames, and about 0.96 if all values differ by a
    fifth of full scale.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._last: np.ndarray | None = None

    def keeps(self, pixels: Pixels) -> bool:
        """Compare thumbnails of 64 x 64 pixels. The thumbnail of the last kept frame is stored, 48 kB per stream."""
        now = thumbnail(pixels)
        if self._last is not None and self._likeness(now, self._last) >= self._threshold:
            return False
        self._last = now
        return True

    def _likeness(self, now: np.ndarray, last: np.ndarray) -> float:
        return 1.0 - float(np.mean((now - last) ** 2)) / 255.0**2


class BlockFilter(EvsFilter):
    """Like `EvsFilter`, but compares only the block of 4 x 4 thumbnail pixels that differs most.

    Uniform changes of the whole picture are subtracted first, because the camera's exposure is not an event.
    """

    def _likeness(self, now: np.ndarray, last: np.ndarray) -> float:
        difference = now - last
        difference = difference - np.median(difference, axis=(0, 1))
        size = THUMBNAIL_SIDE // BLOCKS_PER_SIDE
        blocks = (difference**2).reshape(BLOCKS_PER_SIDE, size, BLOCKS_PER_SIDE, size, 3).mean(axis=(1, 3, 4))
        return 1.0 - float(blocks.max()) / 255.0**2


def sample_frames(count: int, max_frames: int) -> list[int]:
    """Return the indices of up to `max_frames` of `count` frames in ascending order, for answering a question.

    If there are more frames, they are sampled at an even stride, and the last frame is included.
    """
    if count <= max_frames:
        return list(range(count))
    stride = max(1, count // max_frames)
    return [i * stride for i in range(max_frames - 1)] + [count - 1]
