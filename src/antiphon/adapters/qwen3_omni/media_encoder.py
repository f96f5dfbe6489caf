"""Audio and images as rows of the thinker's input: 13 rows a second of audio, up to 768 an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from antiphon.adapters.qwen3_omni.checkpoint import ThinkerParts
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import AudioPart, ImagePart, MediaPart
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import MediaError, ModelError
from antiphon.modeling.media_rows import MediaRows
from antiphon.modeling.qwen_vision import QwenVisionEncoder

# Pixels. Larger images are scaled down to this before anything else: the encoder sees no more of them.
MAX_SIDE = 2048
# Shorter audio is padded with silence: of less than this, nothing is left behind the encoder's convolutions.
MIN_SAMPLES = SAMPLE_RATE_HZ // 10


class OmniMediaEncoder:
    """A MediaEncoder: features are made in a helper thread, and both encoders run in the thinker's, between its steps.

    `thinker`: whose encoders are used. `thread`: the one that steps the thinker. Nothing is kept between calls.
    """

    def __init__(self, folder: Path, thinker: ThinkerParts, thread: ModelThread) -> None:
        """Read the processors' settings from the folder. Raises OSError, ValueError where they are missing."""
        config = thinker.model.config
        self.placeholder_ids = frozenset((int(config.audio_token_id), int(config.image_token_id)))
        self.has_tap = thinker.decoder.has_tap
        self._thread, self._model = thread, thinker.model
        self._vision_encoder = QwenVisionEncoder(folder, thinker.model, config.vision_config)
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)

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
        return self._features(part)

    def _features(self, part: AudioPart) -> Pcm:
        """The log-mel spectrogram: float32 [bins, frames of 10 ms]."""
        pcm = np.pad(part.pcm, (0, max(0, MIN_SAMPLES - len(part.pcm))))
        made = self._extract(
            pcm,
            sampling_rate=SAMPLE_RATE_HZ,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="np",
        )
        found: Pcm = made["input_features"][0][:, : int(made["attention_mask"][0].sum())]
        return found

    @torch.inference_mode()
    def _encode_audio(self, features: Pcm) -> torch.Tensor:
        batch = torch.from_numpy(features)[None].to(self._model.device, self._model.dtype)
        mask = torch.ones(1, batch.shape[2], dtype=torch.long, device=batch.device)
        rows: torch.Tensor = self._model.get_audio_features(batch, mask).last_hidden_state
        return rows
