"""Log-mel spectrograms of sound, as the processors of Qwen2.5-Omni and Qwen3-Omni make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import WhisperFeatureExtractor

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# Samples between two frames, and those that a frame is made of.
HOP, SPAN = 160, 400
# Shorter audio is padded with silence: of less than this, nothing is left behind the encoder's convolutions.
MIN_SAMPLES = SAMPLE_RATE_HZ // 10


class SoundFeatures:
    """Makes spectrograms, float32 [bins, frames of 10 ms], in any thread.

    `zero_padded`: the last frames are those of sound that silence follows, as Qwen2.5-Omni's processor has it; else the
    sound is mirrored at its end.
    """

    def __init__(self, folder: Path, *, zero_padded: bool) -> None:
        """Read the extractor's settings from a checkpoint's folder. Raises OSError where there are none."""
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        self._zero_padded = zero_padded

    def clip(self, pcm: Pcm) -> Pcm:
        """Return the spectrogram of a clip by itself: float32 [num_samples], mono, 16 kHz, of any length."""
        pcm = np.pad(pcm, (0, max(0, MIN_SAMPLES - len(pcm))))
        if self._zero_padded:
            return self._frames(np.pad(pcm, (0, SPAN)))[:, : -(-len(pcm) // HOP)]
        return self._frames(pcm)

    def _frames(self, pcm: Pcm) -> Pcm:
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
