"""Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631): pictures of any shape, rows at (time, height, width).

As in Qwen3-VL's video format, the time of each frame precedes it as text, and its rows have the positions of a picture.
Qwen2.5-VL was trained differently: the positions of a video's rows contained the time. But `transformers` 5.23 does not
number the text after a video as in training: there it continues from the position of the first frame instead of the
last. So Qwen2.5-VL also gets the time as text.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from antiphon.adapters.vlm.family import FamilyPart
from antiphon.engine.local.weights import load_whole
from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.qwen_vision import QwenVisionEncoder
from antiphon.modeling.text_decoder import EXPERTS, TextDecoder
from antiphon.modeling.tokens import Vocabulary

END = "<|im_end|>"
# `model_type` of config.json -> the class of `transformers` that loads it.
MODELS: dict[str, type[PreTrainedModel]] = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
}


class QwenVl:
    """A VisionFamily for the checkpoints of MODELS. Each picture has up to 768 rows, and fewer if it is small."""

    position_axes = 3

    def __init__(self, folder: Path, device: str, dtype: torch.dtype, model_type: str) -> None:
        """Load the checkpoint. `model_type`: one of MODELS. Raises OSError, ValueError, KeyError, RuntimeError."""
        experts = EXPERTS if model_type.endswith("_moe") else None
        whole = load_whole(MODELS[model_type], folder, dtype=dtype, device_map=device, experts_implementation=experts)
        model = whole.model
        self.vocabulary = Vocabulary(folder, END)
        vision = whole.config.vision_config
        num_deepstack = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        self.decoder = TextDecoder(model.language_model, whole.lm_head, num_deepstack)
        self.input_width = self.decoder.input_width
        encoder = QwenVisionEncoder(folder, model, vision)
        self.prepare, self.num_patches, self.encode = encoder.prepare, encoder.num_patches, encoder.look

    def opening(self, instructions: str) -> list[FamilyPart]:
        """Return the system turn, closed by <|im_end|>. `instructions` is plain text: it cannot open another turn."""
        words = self.vocabulary
        return [words.control("<|im_start|>system\n"), words.plain(instructions), words.control(END)]

    def turn(self) -> list[FamilyPart]:
        """Return the beginning of a user's turn, with the newline after the <|im_end|> of the previous turn."""
        return [self.vocabulary.control("\n<|im_start|>user\n")]

    def frame(self, picture: PictureRows, at_s: float) -> list[FamilyPart]:
        """Return "<12.3 seconds>", the format of Qwen3-VL's processor, then the picture between its control tokens."""
        words = self.vocabulary
        return [
            words.plain(f"<{at_s:.1f} seconds>"),
            words.control("<|vision_start|>"),
            picture,
            words.control("<|vision_end|>"),
        ]

    def question(self, text: str) -> list[FamilyPart]:
        """Return the question as plain text, and the beginning of the assistant's turn."""
        words = self.vocabulary
        return [words.plain(text), words.control(f"{END}\n<|im_start|>assistant\n")]

    def end(self) -> list[FamilyPart]:
        """Return <|im_end|>. The next `turn` adds the newline after it."""
        return [self.vocabulary.control(END)]
