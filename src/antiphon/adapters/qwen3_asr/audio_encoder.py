"""Sound as Qwen3-ASR's decoder takes it: 13 rows a second, in encoder windows of 8 s that know nothing of one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

Features = npt.NDArray[np.float32]
# Frames at the end that change when more sound comes: the transform mirrors what it has not (torch.stft, 400 samples around every 160th).
UNSURE_FRAMES = 2


class WindowedAudioEncoder:
    """The encoder. In the engine's thread."""

    def __init__(self, model: Any) -> None:
        config = model.config.audio_config
        self._model = model
        extractor: Any = Qwen3ASRFeatureExtractor
        self._extract = extractor(feature_size=config.num_mel_bins, n_window=config.n_window)
        self._chunk = 2 * int(config.n_window)
        # Mel frames of an encoder window.
        self.window_frames = int(config.n_window_infer)

    def features(self, pcm: Pcm) -> Features:
        """Log-mel of sound, float32 [bins, frames of 10 ms]. All of it hangs on the loudest frame: 8 decades below are floor."""
        made = self._extract(pcm, sampling_rate=SAMPLE_RATE_HZ, padding="longest", n_window=0, return_tensors="np")
        found: Features = made["input_features"][0]
        return found

    @torch.inference_mode()
    def encode(self, features: Features) -> torch.Tensor:
        """Rows [n, width] of one encoder window, whole or not: float32 [bins, frames]."""
        frames = features.shape[1]
        padded = np.pad(features, ((0, 0), (0, -frames % self._chunk)))
        mask = torch.arange(padded.shape[1]) < frames
        device, dtype = self._model.device, self._model.dtype
        given = torch.from_numpy(padded)[None].to(device, dtype)
        out: torch.Tensor = self._model.get_audio_features(given, mask[None].long().to(device)).pooler_output
        return out
