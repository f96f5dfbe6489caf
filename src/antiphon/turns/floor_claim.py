"""Decides by sound alone, within a quarter of a second, whether speech over a response claims the floor. Pure.

The voice activity detector's own certainty tells a speaker from most other sounds: it stays certain through the first
syllables of a sentence, and wavers within a quarter of a second in a cough, a nod, music and noise. Two more
conditions: a hum ("mm-hm") has no energy above 900 Hz, and a sound that is much quieter than the user is from somebody
or something else. The limits were chosen on the speakers of one half of the recordings (docs/design/turns.md).
"""

from __future__ import annotations

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# Frames of speech in a row after which speech may claim the floor (256 ms), and frames in a row after which it does,
# however it sounds (512 ms).
MIN_FRAMES, LONG_FRAMES = 8, 16
# Minimum probability of each of these frames, and of each of the newest SURE_FRAMES frames.
SPEECH_PROBABILITY, SURE_PROBABILITY, SURE_FRAMES = 0.7, 0.95, 4
# A sound is no hum if the energy from 900 Hz on, relative to that below, reaches BRIGHT_DB in one of the frames.
BRIGHT_DB, LOW_HZ, MIDDLE_HZ, HIGH_HZ = -14.0, 80.0, 900.0, 5000.0
# Speech has to be at most QUIETER_DB quieter than the user's speech so far, which LEVEL_SHARE of each frame updates.
QUIETER_DB, LEVEL_SHARE = 15.0, 0.02
_SILENT = 1e-10


class FloorClaim:
    """Follows the audio of one session, and judges the speech that goes on now.

    `frame_samples`: the samples of a frame of the voice activity detector.
    """

    def __init__(self, frame_samples: int) -> None:
        self._frame_samples = frame_samples
        self._window = np.hanning(frame_samples)
        hz = np.fft.rfftfreq(frame_samples, 1 / SAMPLE_RATE_HZ)
        self._low = (hz >= LOW_HZ) & (hz < MIDDLE_HZ)
        self._high = (hz >= MIDDLE_HZ) & (hz < HIGH_HZ)
        # The audio of the incomplete frame.
        self._rest: Pcm = np.zeros(0, np.float32)
        # The frames of speech in a row: their number, the newest probabilities, the mean of their levels in decibels,
        # and the energy above MIDDLE_HZ relative to that below, in decibels, of the brightest.
        self._num_frames = 0
        self._newest: list[float] = []
        self._level_db = 0.0
        self._brightest_db = -np.inf
        # The level of the user's speech so far in decibels; None before there was any.
        self._user_db: float | None = None

    @property
    def claims(self) -> bool:
        """Whether the speech that goes on now claims the floor."""
        if self._num_frames >= LONG_FRAMES:
            return True
        is_sure = len(self._newest) == SURE_FRAMES and min(self._newest) >= SURE_PROBABILITY
        is_loud = self._user_db is None or self._level_db >= self._user_db - QUIETER_DB
        return self._num_frames >= MIN_FRAMES and is_sure and is_loud and self._brightest_db >= BRIGHT_DB

    def feed(self, pcm: Pcm, probabilities: list[float]) -> None:
        """Add audio, float32 [num_samples] at 16 kHz, and the speech probability of each frame that it completes, which
        is 0 for an echo.
        """
        audio, size = np.concatenate((self._rest, pcm)), self._frame_samples
        self._rest = audio[size * len(probabilities) :]
        for k, probability in enumerate(probabilities):
            if probability < SPEECH_PROBABILITY:
                self._num_frames, self._newest, self._level_db, self._brightest_db = 0, [], 0.0, -np.inf
                continue
            self._add(audio[k * size : (k + 1) * size], probability)

    def clear(self) -> None:
        """Drop the incomplete frame and the speech that goes on now, after the client cleared its audio."""
        self._rest, self._num_frames, self._newest = self._rest[:0], 0, []

    def _add(self, frame: Pcm, probability: float) -> None:
        power = np.abs(np.fft.rfft(frame * self._window)) ** 2
        low, high = float(power[self._low].sum()), float(power[self._high].sum())
        level_db = 10 * np.log10(float(np.mean(frame.astype(np.float64) ** 2)) + _SILENT)
        self._num_frames += 1
        self._newest = [*self._newest[1 - SURE_FRAMES :], probability]
        self._level_db += (level_db - self._level_db) / self._num_frames
        self._brightest_db = max(self._brightest_db, 10 * np.log10((high + _SILENT) / (low + _SILENT)))
        if self._user_db is None:
            self._user_db = level_db
        elif probability >= SURE_PROBABILITY and level_db >= self._user_db - QUIETER_DB:
            self._user_db += LEVEL_SHARE * (level_db - self._user_db)
