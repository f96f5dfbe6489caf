"""Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631): pictures of any shape, rows placed by (time, height, width).

A frame is told with its time before it, as Qwen3-VL is given video, and has its places as a picture. Qwen2.5-VL knows times of video by the places
of rows instead; but those that `transformers` 5.23 gives it (text goes on from the first frame's places) are not those it was trained with (from the
last one's), so it too is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from antiphon.adapters.decoder import Decoder
from antiphon.adapters.pictures.family import Part, Picture
from antiphon.adapters.vocabulary import Vocabulary
from antiphon.images import Pixels

# Rows of a frame at most: what the models' makers give a frame of video.
MAX_ROWS = 768
# The encoder takes no picture longer than this many times its width.
MAX_ASPECT = 200
END = "<|im_end|>"
MODELS: dict[str, Any] = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
}


class QwenVl:
    """See Family."""

    position_axes = 3

    def __init__(self, folder: Path, device: str, dtype: torch.dtype, kind: str) -> None:
        """`kind`: one of MODELS. Raises OSError, ValueError, KeyError, RuntimeError."""
        whole: Any = MODELS[kind].from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model = whole.to(device).eval().model
        self.vocabulary = Vocabulary(folder, END)
        vision = whole.config.vision_config
        self._merge = int(vision.spatial_merge_size)
        deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        self.decoder = Decoder(self._model.language_model, whole.lm_head, deep)
        self.input_width = self.decoder.input_width
        process = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        factor = int(vision.patch_size) * self._merge
        process.size = {
            "shortest_edge": process.size["shortest_edge"],
            "longest_edge": min(process.size["longest_edge"], MAX_ROWS * factor**2),
        }
        self._process: Any = process

    def prepare(self, pixels: Pixels) -> Any:
        """See Family: patches float32 [n, numbers] and their grid (time, height, width)."""
        height, width = pixels.shape[:2]
        if max(height, width) > MAX_ASPECT * min(height, width):
            # What it would refuse, it sees a part of.
            pixels = pixels[: MAX_ASPECT * width, : MAX_ASPECT * height]
        made = self._process(pixels, return_tensors="np", input_data_format="channels_last")
        return np.asarray(made["pixel_values"], np.float32), np.asarray(made["image_grid_thw"])

    @torch.inference_mode()
    def look(self, prepared: Any) -> Picture:
        """See Family."""
        patches, grid = (torch.from_numpy(part).to(self._model.device) for part in prepared)
        seen = self._model.get_image_features(patches, grid)
        rows = torch.cat([seen.pooler_output[0], *(f[0] for f in getattr(seen, "deepstack_features", None) or ())], -1)
        height, width = (int(n) // self._merge for n in grid[0, 1:])
        return Picture(rows, tuple((0, h, w) for h in range(height) for w in range(width)))

    def opening(self, instructions: str) -> list[Part]:
        """See Family."""
        words = self.vocabulary
        return [words.control("<|im_start|>system\n"), words.plain(instructions), words.control(END)]

    def turn(self) -> list[Part]:
        """See Family."""
        return [self.vocabulary.control("\n<|im_start|>user\n")]

    def frame(self, picture: Picture, at_s: float) -> list[Part]:
        """See Family."""
        words = self.vocabulary
        return [
            words.plain(f"<{at_s:.1f} seconds>"),
            words.control("<|vision_start|>"),
            picture,
            words.control("<|vision_end|>"),
        ]

    def question(self, text: str) -> list[Part]:
        """See Family."""
        words = self.vocabulary
        return [words.plain(text), words.control(f"{END}\n<|im_start|>assistant\n")]

    def end(self) -> list[Part]:
        """See Family."""
        return [self.vocabulary.control(END)]
