"""Audio and images as rows of the thinker's input: 13 or 25 rows a second of audio, up to 768 an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import torch

from antiphon.audio import Pcm
from antiphon.contracts import ImagePart, MediaPart
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import MediaError, ModelError
from antiphon.modeling.media_rows import MediaRows
from antiphon.modeling.omni.sound import SoundFeatures
from antiphon.modeling.qwen_vision import QwenVisionEncoder

# Pixels. Larger images are scaled down to this before anything else: the encoder sees no more of them.
MAX_SIDE = 2048


class OmniMediaEncoder:
    """A MediaEncoder: features are made in a helper thread, and both encoders run in the thinker's, between its steps.

    `thinker`: a model of `transformers` whose encoders are used. `thread`: the one that steps it. `has_tap`: as
    MediaEncoder has it. Nothing is kept between calls.
    """

    def __init__(self, folder: Path, thinker: Any, thread: ModelThread, *, has_tap: bool = False) -> None:
        """Read the processors' settings from the folder. Raises OSError, ValueError where they are missing."""
        config = thinker.config
        self.placeholder_ids = frozenset((int(config.audio_token_id), int(config.image_token_id)))
        self.has_tap = has_tap
        self._thread, self._model = thread, thinker
        self._vision_encoder = QwenVisionEncoder(folder, thinker, config.vision_config)
        # Only Qwen2.5-Omni's processor pads all sound to one length.
        self._sound = SoundFeatures(folder, zero_padded=config.model_type.startswith("qwen2_5"))

    async def encode(self, part: MediaPart) -> MediaRows:
        """Return the rows of one audio clip or image; those of an image have positions.

        Waits for a thread and for the engine. Raises MediaError for what is no image, ModelError for what a processor
        or an encoder fails on, Refused once the thread is closed.
        """
        try:
            prepared = await anyio.to_thread.run_sync(self._prepared, part)
        except MediaError:
            raise
        except Exception as error:
            # The edge of the model: what its processors raise fails the response, and nothing else.
            raise ModelError(f"{type(error).__name__}: {error}") from error
        if isinstance(part, ImagePart):
            seen = await self._thread.call_model(lambda: self._vision_encoder.look(prepared))
            return MediaRows(seen.rows, seen.positions)
        return MediaRows(await self._thread.call_model(lambda: self._encode_audio(prepared)))

    def _prepared(self, part: MediaPart) -> Any:
        """What the part's encoder is given. Makes no products of torch, which belong in the model's thread."""
        if isinstance(part, ImagePart):
            return self._vision_encoder.prepare(part.image.pixels(MAX_SIDE))
        return self._sound.clip(part.pcm)

    @torch.inference_mode()
    def _encode_audio(self, features: Pcm) -> torch.Tensor:
        batch = torch.from_numpy(features)[None].to(self._model.device, self._model.dtype)
        mask = torch.ones(1, batch.shape[2], dtype=torch.long, device=batch.device)
        rows: torch.Tensor = self._model.get_audio_features(batch, mask).last_hidden_state
        return rows
