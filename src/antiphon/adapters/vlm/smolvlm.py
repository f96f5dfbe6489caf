"""SmolVLM: SigLIP squares before Idefics3's decoder (arXiv:2504.05299). A frame is one square, as its makers give it frames of video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import SmolVLMForConditionalGeneration

from antiphon.adapters.vlm.family import FamilyPart
from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.vocabulary import Vocabulary
from antiphon.vision.images import Pixels

AROUND, WHOLE, END = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"


class SmolVlm:
    """See Family."""

    position_axes = 1
    input_width = 0

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        """Raises OSError, ValueError, KeyError, RuntimeError."""
        whole: Any = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model = whole.to(device).eval().model
        self.vocabulary = Vocabulary(folder, END)
        self.decoder = TextDecoder(self._model.text_model, whole.lm_head)
        self._side = int(whole.config.vision_config.image_size)

    def prepare(self, pixels: Pixels) -> Any:
        """See Family: float32 [3, side, side] in [-1, 1]."""
        square = Image.fromarray(pixels).resize((self._side, self._side), Image.Resampling.LANCZOS)
        return np.ascontiguousarray((np.asarray(square, np.float32) / 127.5 - 1.0).transpose(2, 0, 1))

    @torch.inference_mode()
    def look(self, prepared: Any) -> PictureRows:
        """See Family."""
        given = torch.from_numpy(prepared)[None, None].to(self._model.device)
        return PictureRows(self._model.get_image_features(given).pooler_output[0])

    def opening(self, instructions: str) -> list[FamilyPart]:
        """See Family."""
        words = self.vocabulary
        return [words.control("<|im_start|>System: "), words.plain(instructions), words.control(END)]

    def turn(self) -> list[FamilyPart]:
        """See Family."""
        return [self.vocabulary.plain("\nUser:")]

    def frame(self, picture: PictureRows, at_s: float) -> list[FamilyPart]:
        """See Family."""
        words = self.vocabulary
        time = words.plain(f"\nFrame from {int(at_s) // 60:02d}:{int(at_s) % 60:02d}:")
        return [time, words.control(AROUND + WHOLE), picture, words.control(AROUND)]

    def question(self, text: str) -> list[FamilyPart]:
        """See Family."""
        words = self.vocabulary
        return [words.plain("\n\n" + text), words.control(END), words.plain("\nAssistant:")]

    def end(self) -> list[FamilyPart]:
        """See Family."""
        return [self.vocabulary.control(END)]
