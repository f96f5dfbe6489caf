"""Notices an answering machine by its sound: a beep, or a greeting that goes on without a pause. Pure.

A person who answers a call says a few words, and waits. A machine speaks for longer, and then beeps.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

Sign = Literal["", "monologue", "beep"]
FRAME_SAMPLES = 512
FRAME_S = FRAME_SAMPLES / SAMPLE_RATE_HZ
# The first seconds of a call, in which a machine is looked for. Greetings are shorter.
LISTEN_S = 60.0
# A greeting of a machine: seconds of sound before the first pause of PAUSE_S. "Thank you for calling Smith and Sons,
# this is Maria, how can I help you?" has four.
MONOLOGUE_S, PAUSE_S = 6.0, 1.0
# Sound is louder than LEAST_DB (dBFS), and by OVER_FLOOR_DB than the quietest frame, whose level may rise by RISE_DB in
# each frame.
LEAST_DB, OVER_FLOOR_DB, RISE_DB = -50.0, 9.0, 0.1
# A beep: one frequency in this range for this time, at a level that changes by at most STEADY_DB.
BEEP_HZ, BEEP_S, STEADY_DB = (350.0, 2600.0), (0.16, 1.5), 6.0
# The least part of a frame's energy that the frequency and its neighbours within BINS have. Vowels have harmonics, and
# the keys of a telephone have two frequencies.
PURITY, BINS = 0.9, 2
# The frequency of a beep stays within this number of bins.
DRIFT_BINS = 1.0

_WINDOW = np.hanning(FRAME_SAMPLES).astype(np.float32)
_BIN_HZ = SAMPLE_RATE_HZ / FRAME_SAMPLES


class AnsweringMachine:
    """Listens to the called side of one call. `feed` returns a sign when it is complete."""

    def __init__(self) -> None:
        self._rest = np.zeros(0, np.float32)
        self._num_frames = 0
        self._greeting = _Greeting()
        self._beep = _Beep()

    def feed(self, pcm: Pcm) -> Sign:
        """Return what the next audio completes: `monologue` once at most, `beep` at the end of a beep, or "".

        `pcm`: float32 [num_samples], mono, 16 kHz, of any length. After LISTEN_S, always returns "".
        """
        found: Sign = ""
        if self._num_frames * FRAME_S >= LISTEN_S:
            return found
        self._rest = np.concatenate((self._rest, pcm))
        while len(self._rest) >= FRAME_SAMPLES:
            frame, self._rest = self._rest[:FRAME_SAMPLES], self._rest[FRAME_SAMPLES:]
            self._num_frames += 1
            level_db = float(10 * np.log10(np.mean(frame**2) + 1e-10))
            is_long = self._greeting.feed(level_db)
            if self._beep.feed(frame, level_db):
                found = "beep"
            elif is_long and not found:
                found = "monologue"
        return found


class _Greeting:
    """Measures the first stretch of sound."""

    def __init__(self) -> None:
        self._floor_db = 0.0
        self._sound_s = self._pause_s = 0.0
        self._is_over = False

    def feed(self, level_db: float) -> bool:
        """Return whether the first stretch of sound has just become a monologue."""
        self._floor_db = min(level_db, self._floor_db + RISE_DB)
        if self._is_over:
            return False
        if level_db > max(LEAST_DB, self._floor_db + OVER_FLOOR_DB):
            self._sound_s, self._pause_s = self._sound_s + FRAME_S, 0.0
            self._is_over = self._sound_s >= MONOLOGUE_S
            return self._is_over
        self._pause_s += FRAME_S
        # A click is no word.
        self._is_over = self._sound_s > 0.2 and self._pause_s >= PAUSE_S
        return False


class _Beep:
    """Follows a single frequency."""

    def __init__(self) -> None:
        # The bin and the level of each frame of the tone so far.
        self._bins: list[float] = []
        self._levels_db: list[float] = []

    def feed(self, frame: Pcm, level_db: float) -> bool:
        """Return whether a beep has ended before this frame."""
        bin = _pure_bin(frame) if level_db > LEAST_DB else None
        if bin is not None and (not self._bins or abs(bin - self._bins[0]) <= DRIFT_BINS):
            self._bins.append(bin)
            self._levels_db.append(level_db)
            return False
        lasts_s = len(self._bins) * FRAME_S
        # The first and the last frame may have only a part of the tone.
        levels_db = self._levels_db[1:-1]
        is_beep = BEEP_S[0] <= lasts_s <= BEEP_S[1] and max(levels_db) - min(levels_db) <= STEADY_DB
        self._bins, self._levels_db = ([bin], [level_db]) if bin is not None else ([], [])
        return is_beep


def _pure_bin(frame: Pcm) -> float | None:
    """Return the only frequency of a frame, in bins; None if it has several, or one outside BEEP_HZ."""
    power = np.abs(np.fft.rfft(frame * _WINDOW)) ** 2
    peak = int(power.argmax())
    near = slice(max(0, peak - BINS), peak + BINS + 1)
    around = power[near]
    if not BEEP_HZ[0] <= peak * _BIN_HZ <= BEEP_HZ[1] or around.sum() < PURITY * power.sum():
        return None
    return float((np.arange(len(power))[near] * around).sum() / around.sum())
