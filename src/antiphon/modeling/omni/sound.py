"""Log-mel spectrograms of sound, equal to those of the processors of Qwen2.5-Omni and Qwen3-Omni."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from transformers import WhisperFeatureExtractor

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import SoundTrack, SoundWindow

# The distance of two frames and the length of a frame, in samples.
HOP, SPAN = 160, 400
# The distance of the extractor's floor below the loudest frame: 8 decades, in units of 4 decades.
FLOOR = 2.0
# Shorter audio is padded with silence, because the encoder's convolutions would return no rows for it.
MIN_SAMPLES = SAMPLE_RATE_HZ // 10


class SoundFeatures:
    """Makes spectrograms, float32 [bins, frames of 10 ms], in any thread.

    `zero_padded`: compute the last frames as if silence followed the sound, as Qwen2.5-Omni's processor does. Otherwise
    the sound is mirrored at its end.
    """

    def __init__(self, folder: Path, *, zero_padded: bool) -> None:
        """Read the extractor's settings from a checkpoint's folder. Raises OSError if the folder lacks them."""
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        self._zero_padded = zero_padded
        # The loudest frame of each track so far.
        self._loudest: WeakKeyDictionary[SoundTrack, float] = WeakKeyDictionary()

    def clip(self, pcm: Pcm) -> Pcm:
        """Return the spectrogram of a separate clip: float32 [num_samples], mono, 16 kHz, of any length."""
        pcm = np.pad(pcm, (0, max(0, MIN_SAMPLES - len(pcm))))
        if self._zero_padded:
            return self._frames(np.pad(pcm, (0, SPAN)))[:, : -(-len(pcm) // HOP)]
        return self._frames(pcm)

    def window(self, window: SoundWindow) -> Pcm:
        """Return the spectrogram of a window of a video's sound, as a part of the spectrogram of all sound so far.

        All frames depend on the loudest one, because the floor is 8 decades below it. If louder sound follows, frames
        that were already returned do not change.
        """
        num_own = len(window.pcm) - window.num_before - window.num_after
        is_last = self._zero_padded and not window.num_after
        frames = self._frames(np.pad(window.pcm, (0, SPAN)) if is_last else window.pcm)
        begin = window.num_before // HOP
        end = begin + (-(-num_own // HOP) if is_last else num_own // HOP)
        loudest = max(self._loudest.get(window.track, -np.inf), float(frames.max()))
        self._loudest[window.track] = loudest
        floored: Pcm = np.maximum(frames[:, begin:end], loudest - FLOOR)
        return floored

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
