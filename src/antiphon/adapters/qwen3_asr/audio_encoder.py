"""Audio as rows of Qwen3-ASR's decoder: 13 a second, from encoder windows of 8 s, each encoded independently."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

Features = npt.NDArray[np.float32]
# Frames at the end that change when more audio comes: there the transform mirrors the audio it has not got (torch.stft,
# 400 samples around every 160th).
EDGE_FRAMES = 2


class WindowedAudioEncoder:
    """The model's audio encoder with its feature extractor. Called in the model's thread.

    It keeps nothing between calls: what a stream has encoded is kept by the stream. `window_frames`: the mel frames of
    an encoder window, 800.
    """

    def __init__(self, model: Any) -> None:
        """`model`: a Qwen3ASRModel of `transformers`, whose encoder and projection are used, on its device."""
        config = model.config.audio_config
        self._model = model
        extractor: Any = Qwen3ASRFeatureExtractor
        self._extract = extractor(feature_size=config.num_mel_bins, n_window=config.n_window)
        self._chunk = 2 * int(config.n_window)
        self.window_frames = int(config.n_window_infer)

    def features(self, pcm: Pcm) -> Features:
        """Return the log-mel spectrogram of audio: float32 [bins, frames of 10 ms].

        pcm: float32 [num_samples], mono, 16 kHz, of any length. All frames depend on the loudest one, 8 decades below
        which is the floor: louder audio at the end may change frames at the start.
        """
        made = self._extract(pcm, sampling_rate=SAMPLE_RATE_HZ, padding="longest", n_window=0, return_tensors="np")
        found: Features = made["input_features"][0]
        return found

    @torch.inference_mode()
    def encode(self, features: Features) -> torch.Tensor:
        """Return the decoder's rows [n, width] for one encoder window: float32 [bins, frames], `window_frames` at most.

        A shorter window is padded to the encoder's chunks of 1 s and masked, so that its rows do not depend on the
        padding.
        """
        frames = features.shape[1]
        padded = np.pad(features, ((0, 0), (0, -frames % self._chunk)))
        mask = torch.arange(padded.shape[1]) < frames
        device, dtype = self._model.device, self._model.dtype
        batch = torch.from_numpy(padded)[None].to(device, dtype)
        out: torch.Tensor = self._model.get_audio_features(batch, mask[None].long().to(device)).pooler_output
        return out
