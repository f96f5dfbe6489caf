"""SmolVLM: a SigLIP encoder of square pictures, and the decoder of Idefics3 (arXiv:2504.05299).

A frame is one square of the encoder's size, without slices, as in the released code for video frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import SmolVLMForConditionalGeneration

from antiphon.adapters.vlm.family import FamilyPart
from antiphon.engine.local.weights import load_whole
from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.tokens import Vocabulary
from antiphon.vision.images import Pixels

# The control tokens on either side of a picture, before a picture without slices, and at the end of a turn.
AROUND_IMAGE, WHOLE_IMAGE, END = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"


class SmolVlm:
    """A VisionFamily for SmolVLM2 checkpoints. All pictures have the same number of rows, regardless of their shape."""

    position_axes = 1
    input_width = 0

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        """Load the checkpoint. Raises OSError, ValueError, KeyError, RuntimeError."""
        whole = load_whole(SmolVLMForConditionalGeneration, folder, dtype=dtype, device_map=device)
        self._model = whole.model
        self.vocabulary = Vocabulary(folder, END)
        self.decoder = TextDecoder(self._model.text_model, whole.lm_head)
        vision = whole.config.vision_config
        self._side, self._patch = int(vision.image_size), int(vision.patch_size)

    def prepare(self, pixels: Pixels) -> Any:
        """Return float32 [3, side, side] in [-1, 1]: the picture stretched to the encoder's square, not padded."""
        square = Image.fromarray(pixels).resize((self._side, self._side), Image.Resampling.LANCZOS)
        return np.ascontiguousarray((np.asarray(square, np.float32) / 127.5 - 1.0).transpose(2, 0, 1))

    def num_patches(self, _: Any) -> int:
        """Return the number of patches of each picture."""
        return (self._side // self._patch) ** 2

    @torch.inference_mode()
    def encode(self, prepared: Sequence[Any]) -> list[PictureRows]:
        """Return the rows of each picture, on the model's device. Their positions are consecutive, like those of text.

        Each has a copy of its rows, so that the rows of a session do not keep those of the others alive.
        """
        batch = torch.from_numpy(np.stack(prepared))[:, None].to(self._model.device)
        return [PictureRows(rows.clone()) for rows in self._model.get_image_features(batch).pooler_output]

    def opening(self, instructions: str) -> list[FamilyPart]:
        """Return the system turn. `instructions` is plain text: it cannot open another turn."""
        words = self.vocabulary
        return [words.control("<|im_start|>System: "), words.plain(instructions), words.control(END)]

    def turn(self) -> list[FamilyPart]:
        """Return the beginning of a user's turn. This family marks turns by names in plain text, not control tokens."""
        return [self.vocabulary.plain("\nUser:")]

    def frame(self, picture: PictureRows, at_s: float) -> list[FamilyPart]:
        """Return "Frame from 01:23:", in minutes and seconds, and the picture between its control tokens."""
        words = self.vocabulary
        time = words.plain(f"\nFrame from {int(at_s) // 60:02d}:{int(at_s) % 60:02d}:")
        return [time, words.control(AROUND_IMAGE + WHOLE_IMAGE), picture, words.control(AROUND_IMAGE)]

    def question(self, text: str) -> list[FamilyPart]:
        """Return the question as plain text, after a blank line, and the name that begins the answer."""
        words = self.vocabulary
        return [words.plain("\n\n" + text), words.control(END), words.plain("\nAssistant:")]

    def end(self) -> list[FamilyPart]:
        """Return <end_of_utterance>, which the model itself writes unless it is interrupted."""
        return [self.vocabulary.control(END)]
