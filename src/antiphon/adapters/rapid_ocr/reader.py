"""Text on images by RapidOCR (PP-OCRv6 detection and recognition, ONNX; the models are in the library's wheel)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from antiphon.adapters.spec import LaneModelOptions
from antiphon.engine.lane import Lane
from antiphon.vision.images import EncodedImage

# Pixels on the longer side. Screens at their own size are read best; more than this costs time and finds no more.
MAX_SIDE = 1600
# Lines that are recognized with less certainty are dropped: windows of a far house are read as letters, with 0.4 to
# 0.62, and signs with 0.9 and more.
MIN_SCORE = 0.75


class RapidOcr:
    """An ImageReader with a lane of one thread, which computes on one core.

    The models are loaded with the first image, in the lane's thread: they take 0.3 GB, which most sessions never need.
    """

    def __init__(self, options: LaneModelOptions) -> None:
        self._engine: Any = None
        self.lane: Lane[EncodedImage, tuple[str, ...]] = Lane(
            "reader", self._work, max_queue=options.max_queue, observe=options.observe
        )

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        """Return the lines of text on an encoded image, from the top; an empty tuple where none is certain enough.

        Single letters are left out: they are edges of things more often than text. Waits in the lane, the first call
        also 0.9 s for the models. Raises MediaError for what is no image, Refused where the lane is full, ModelError.
        """
        return await self.lane.run(image)

    def _work(self, jobs: Sequence[EncodedImage]) -> list[tuple[str, ...]]:
        return [self._read(image) for image in jobs]

    def _read(self, image: EncodedImage) -> tuple[str, ...]:
        pixels = image.pixels(MAX_SIDE)
        if self._engine is None:
            from rapidocr import RapidOCR  # 0.9 s, in the lane's thread

            one = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
            self._engine = RapidOCR(params={"Global.log_level": "error", "Global.text_score": MIN_SCORE, **one})
        # The library wants BGR, as OpenCV has it.
        found = self._engine(pixels[:, :, ::-1], use_cls=False)
        return tuple(text for text in found.txts or () if text.strip() and not _is_letter(text.strip()))


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isalpha()
