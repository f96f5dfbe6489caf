"""Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631): pictures of any shape, rows placed by (time, height, width).

A frame is told with its time before it, as Qwen3-VL is given video, and has its places as a picture. Qwen2.5-VL knows times of video by the places
of rows instead; but those that `transformers` 5.23 gives it (text goes on from the first frame's places) are not those it was trained with (from the
last one's), so it too is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from antiphon.adapters.vlm.family import FamilyPart
from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.qwen_vision import QwenVisionEncoder
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.vocabulary import Vocabulary

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
        model = whole.to(device).eval().model
        self.vocabulary = Vocabulary(folder, END)
        vision = whole.config.vision_config
        deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        self.decoder = TextDecoder(model.language_model, whole.lm_head, deep)
        self.input_width = self.decoder.input_width
        eyes = QwenVisionEncoder(folder, model, vision)
        self.prepare, self.look = eyes.prepare, eyes.look

    def opening(self, instructions: str) -> list[FamilyPart]:
        """See Family."""
        words = self.vocabulary
        return [words.control("<|im_start|>system\n"), words.plain(instructions), words.control(END)]

    def turn(self) -> list[FamilyPart]:
        """See Family."""
        return [self.vocabulary.control("\n<|im_start|>user\n")]

    def frame(self, picture: PictureRows, at_s: float) -> list[FamilyPart]:
        """See Family."""
        words = self.vocabulary
        return [
            words.plain(f"<{at_s:.1f} seconds>"),
            words.control("<|vision_start|>"),
            picture,
            words.control("<|vision_end|>"),
        ]

    def question(self, text: str) -> list[FamilyPart]:
        """See Family."""
        words = self.vocabulary
        return [words.plain(text), words.control(f"{END}\n<|im_start|>assistant\n")]

    def end(self) -> list[FamilyPart]:
        """See Family."""
        return [self.vocabulary.control(END)]
