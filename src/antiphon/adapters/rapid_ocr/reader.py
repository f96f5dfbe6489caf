"""Reads text on images with RapidOCR (PP-OCRv6 detection and recognition, ONNX; its wheel contains the models)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from antiphon.adapters.spec import LaneModelOptions
from antiphon.engine.lane import Lane
from antiphon.vision.images import EncodedImage

# Limit of the longer side in pixels. Screenshots are read best at their own size. Reading a larger image takes longer
# and finds no more text.
MAX_SIDE = 1600
# Lines with a lower score are dropped. For example, the windows of a distant house were read as letters with scores of
# 0.4 to 0.62. Real signs have scores of 0.9 or more.
MIN_SCORE = 0.75


class RapidOcr:
    """An ImageReader. Its lane has one thread, which computes on one core.

    The models take 0.3 GB, and most sessions never need them. So they are loaded with the first image, in the lane's
    thread.
    """

    def __init__(self, options: LaneModelOptions) -> None:
        self._engine: Any = None
        self.lane: Lane[EncodedImage, tuple[str, ...]] = Lane(
            "reader", self._work, max_queue=options.max_queue, observe=options.observe
        )

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        """Return the lines of text on an encoded image, from top to bottom. Lines with a low score are left out.

        Single letters are also left out, because most of them are edges of objects. Waits in the lane; the first call
        also waits 0.9 s for the models. Raises MediaError if `image` is not an image, Refused if the lane is full, and
        ModelError.
        """
        return await self.lane.run(image)

    def _work(self, jobs: Sequence[EncodedImage]) -> list[tuple[str, ...]]:
        return [self._read(image) for image in jobs]

    def _read(self, image: EncodedImage) -> tuple[str, ...]:
        pixels = image.pixels(MAX_SIDE)
        if self._engine is None:
            from rapidocr import RapidOCR  # Takes 0.9 s, so it is imported in the lane's thread.

            one = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
            self._engine = RapidOCR(params={"Global.log_level": "error", "Global.text_score": MIN_SCORE, **one})
        # The library expects BGR, the channel order of OpenCV.
        found = self._engine(pixels[:, :, ::-1], use_cls=False)
        return tuple(text for text in found.txts or () if text.strip() and not _is_letter(text.strip()))


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isalpha()
