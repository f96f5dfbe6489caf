"""Text on images by RapidOCR (PP-OCRv6 detection and recognition, ONNX; the models are in the library's wheel)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from antiphon.engine.lane import Lane
from antiphon.vision.images import decode

# Screens at their own size are read best; more than this costs time and finds no more.
MAX_SIDE = 1600
# What is less likely than this is no text: windows of a far house are read as letters, with 0.4 to 0.62, and signs with 0.9 and more.
LEAST_SCORE = 0.75


class RapidOcr:
    """The loaded reader and its lane. The models are loaded with the first image: 0.3 GB that most sessions never need."""

    def __init__(
        self,
        *,
        workers: int = 1,
        max_queue: int = 64,
        observe: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self._engine: Any = None
        self.lane: Lane[bytes, tuple[str, ...]] = Lane(
            "reader", self._work, workers=workers, max_queue=max_queue, observe=observe
        )

    async def read(self, image: bytes) -> tuple[str, ...]:
        """See Reader."""
        return await self.lane.run(image)

    def _work(self, jobs: Sequence[bytes]) -> list[tuple[str, ...]]:
        return [self._read(image) for image in jobs]

    def _read(self, image: bytes) -> tuple[str, ...]:
        pixels = decode(image, MAX_SIDE)
        if self._engine is None:
            from rapidocr import RapidOCR  # 0.9 s, in the lane's thread

            one = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
            self._engine = RapidOCR(params={"Global.log_level": "error", "Global.text_score": LEAST_SCORE, **one})
        # The library wants BGR, as OpenCV has it.
        found = self._engine(pixels[:, :, ::-1], use_cls=False)
        # A letter alone is an edge more often than a text.
        return tuple(t for t in found.txts or () if t.strip() and not (len(t.strip()) == 1 and t.strip().isalpha()))
