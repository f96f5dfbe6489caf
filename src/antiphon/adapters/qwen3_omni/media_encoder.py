"""What the thinker hears and sees, as rows: 13 a second of sound, up to 768 a picture."""

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
from antiphon.engine.local.engine import Engine
from antiphon.errors import MediaError, ModelError
from antiphon.modeling.media_rows import MediaRows
from antiphon.modeling.qwen_vision import QwenVisionEncoder

# Larger pictures are scaled down to this before anything else: the encoder sees no more of them.
MAX_SIDE = 2048
# Shorter sounds are followed by silence: of less than this nothing is left behind the encoder's convolutions.
LEAST_SAMPLES = SAMPLE_RATE_HZ // 10


class OmniMediaEncoder:
    """See Senses."""

    def __init__(self, folder: Path, thinker: ThinkerParts, engine: Engine) -> None:
        """Raises OSError, ValueError."""
        config = thinker.model.config
        self.placeholder_ids = frozenset((int(config.audio_token_id), int(config.image_token_id)))
        self.has_tap = thinker.decoder.has_tap
        self._engine, self._model = engine, thinker.model
        self._eyes = QwenVisionEncoder(folder, thinker.model, config.vision_config)
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)

    async def encode(self, part: MediaPart) -> MediaRows:
        """See Senses."""
        try:
            prepared = await anyio.to_thread.run_sync(self._prepared, part)
        except MediaError:
            raise
        except Exception as error:
            # The edge of the model: what its processors do not take fails the answer.
            raise ModelError(f"{type(error).__name__}: {error}") from error
        if isinstance(part, ImagePart):
            seen = await self._engine.call_model(lambda: self._eyes.look(prepared))
            return MediaRows(seen.rows, seen.positions)
        return MediaRows(await self._engine.call_model(lambda: self._hear(prepared)))

    def _prepared(self, part: MediaPart) -> Any:
        """As its encoder wants it. No work of torch."""
        if isinstance(part, ImagePart):
            return self._eyes.prepare(part.image.pixels(MAX_SIDE))
        return self._features(part)

    def _features(self, part: AudioPart) -> Pcm:
        """Log-mel, float32 [bins, frames of 10 ms]."""
        pcm = np.pad(part.pcm, (0, max(0, LEAST_SAMPLES - len(part.pcm))))
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
    def _hear(self, features: Pcm) -> torch.Tensor:
        given = torch.from_numpy(features)[None].to(self._model.device, self._model.dtype)
        mask = torch.ones(1, given.shape[2], dtype=torch.long, device=given.device)
        rows: torch.Tensor = self._model.get_audio_features(given, mask).last_hidden_state
        return rows
