"""The input of Whisper's encoder for the last seconds of a turn, as Smart Turn and heads over its encoder take it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from faster_whisper.feature_extractor import FeatureExtractor

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

NUM_MELS, FRAMES_A_SECOND = 80, 100


class TurnFeatures:
    """Computes log-mel features of a fixed length. A shorter turn is padded with silence at its start.

    With `is_normalized`, the audio gets zero mean and unit variance first (pipecat-ai 1.14, audio/turn/smart_turn;
    BSD-2).
    """

    def __init__(self, num_frames: int, *, is_normalized: bool = True) -> None:
        """`num_frames`: mel frames of 10 ms."""
        self._num_frames, self._is_normalized = num_frames, is_normalized
        self._features = FeatureExtractor(feature_size=NUM_MELS)

    def __call__(self, pcm: Pcm) -> npt.NDArray[np.float32]:
        """Return float32 [1, NUM_MELS, num_frames] of the end of `pcm` (float32 [num_samples], 16 kHz)."""
        audio = np.zeros(self._num_frames * SAMPLE_RATE_HZ // FRAMES_A_SECOND, np.float32)
        last = pcm[-len(audio) :]
        audio[len(audio) - len(last) :] = last
        if self._is_normalized:
            audio = (audio - audio.mean()) / np.sqrt(audio.var() + 1e-7)
        return np.ascontiguousarray(self._features(audio, padding=0)[None, :, : self._num_frames], np.float32)
