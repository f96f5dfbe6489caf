"""Finds the speech in the recording by which a user is enrolled, and makes several recordings of it, so that their
voice is known in noise too. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# White, pink and brown noise: by so many dB it falls with each octave, and it lies so far below the speech.
SLOPES_DB, NOISE_DB = (0, 3, 6), -10.0
# Noise has the same level everywhere below this.
LOWEST_HZ = 50.0
FRAME_SAMPLES = SAMPLE_RATE_HZ // 100
# With less speech than this nobody is enrolled; of more than MAX_SPEECH_S the beginning counts.
MIN_SPEECH_S, MAX_SPEECH_S = 3.0, 20.0
# The probability from which a frame is speech. So many frames around it are kept too, for the edges of words.
SPEECH_FROM, MARGIN_FRAMES = 0.5, 3


def speech_of(pcm: Pcm, probabilities: Sequence[float], frame_samples: int) -> Pcm:
    """Return what is speech of a recording, without its pauses, MAX_SPEECH_S at most. `probabilities`: of speech, one
    for each frame of `frame_samples`.
    """
    found = np.asarray(probabilities) >= SPEECH_FROM
    near = np.convolve(found, np.ones(2 * MARGIN_FRAMES + 1), "same")[: len(found)] > 0 if len(found) else found
    frames = pcm[: len(near) * frame_samples].reshape(-1, frame_samples)
    return frames[near].reshape(-1)[: int(MAX_SPEECH_S * SAMPLE_RATE_HZ)]


def enrolment_takes(pcm: Pcm) -> tuple[Pcm, ...]:
    """Return a recording of the user, and three more with a made-up noise each, white, pink and brown.

    A voice in noise is far from the same voice in the quiet; with the vectors of all takes enrolled, noise costs far
    fewer of the user's turns (docs/design/turns.md). pcm: float32 [num_samples], mono, 16 kHz: speech, a few seconds at
    best. The same recording gives the same takes; silence gives
    itself alone.
    """
    level = _speech_rms(pcm) * 10 ** (NOISE_DB / 20)
    if not level:
        return (pcm,)
    chance = np.random.default_rng(0)
    return (pcm, *(pcm + level * _noise(len(pcm), slope_db, chance) for slope_db in SLOPES_DB))


def _speech_rms(pcm: Pcm) -> float:
    """The level of the loud parts, those at most 20 dB below the loudest 10 ms. 0 where there is nothing."""
    frames = pcm[: len(pcm) // FRAME_SAMPLES * FRAME_SAMPLES].reshape(-1, FRAME_SAMPLES)
    power = (frames**2).mean(1)
    return float(np.sqrt(power[power >= power.max() / 100].mean())) if len(power) else 0.0


def _noise(num_samples: int, slope_db: float, chance: np.random.Generator) -> Pcm:
    """Noise of the level 1; num_samples > 1."""
    spectrum = np.fft.rfft(chance.normal(size=num_samples))
    octaves = np.log2(np.maximum(np.fft.rfftfreq(num_samples, 1 / SAMPLE_RATE_HZ), LOWEST_HZ) / LOWEST_HZ)
    noise = np.fft.irfft(spectrum * 10 ** (-slope_db * octaves / 20), num_samples)
    return np.asarray(noise / np.sqrt((noise**2).mean()), np.float32)
