"""Extracts the speech from a user's enrolment recording, and makes noisy copies of it, so that the user's voice is
recognized in noise too. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# The decreases of white, pink and brown noise in dB per octave, and the noise's level in dB relative to the speech.
SLOPES_DB, NOISE_DB = (0, 3, 6), -10.0
# Frequency below which the spectrum of the noise is flat.
LOWEST_HZ = 50.0
FRAME_SAMPLES = SAMPLE_RATE_HZ // 100
# Seconds of speech in an enrolment. A recording with less than MIN_SPEECH_S is refused. Of a longer one, the first
# MAX_SPEECH_S count.
MIN_SPEECH_S, MAX_SPEECH_S = 3.0, 20.0
# A frame with at least the probability SPEECH_FROM is speech. MARGIN_FRAMES frames before and after it are kept too,
# for the edges of words.
SPEECH_FROM, MARGIN_FRAMES = 0.5, 3


def speech_of(pcm: Pcm, probabilities: Sequence[float], frame_samples: int) -> Pcm:
    """Return the speech of a recording without its pauses, at most MAX_SPEECH_S. `probabilities` has the speech
    probability of each frame of `frame_samples`.
    """
    found = np.asarray(probabilities) >= SPEECH_FROM
    near = np.convolve(found, np.ones(2 * MARGIN_FRAMES + 1), "same")[: len(found)] > 0 if len(found) else found
    frames = pcm[: len(near) * frame_samples].reshape(-1, frame_samples)
    return frames[near].reshape(-1)[: int(MAX_SPEECH_S * SAMPLE_RATE_HZ)]


def enrolment_takes(pcm: Pcm) -> tuple[Pcm, ...]:
    """Return a recording of the user, and three copies with synthetic white, pink and brown noise.

    The vector of a voice in noise is far from that of the same voice in quiet. If the vectors of all takes are
    enrolled, noise makes the server lose far fewer of the user's turns (docs/design/turns.md). `pcm` is float32
    [num_samples], mono, 16 kHz, and should be a few seconds of speech. The same recording gives the same takes. For
    silence, returns only the recording.
    """
    level = _speech_rms(pcm) * 10 ** (NOISE_DB / 20)
    if not level:
        return (pcm,)
    chance = np.random.default_rng(0)
    return (pcm, *(pcm + level * _noise(len(pcm), slope_db, chance) for slope_db in SLOPES_DB))


def _speech_rms(pcm: Pcm) -> float:
    """Return the RMS level of the parts that are at most 20 dB below the loudest 10 ms. 0 for an empty recording."""
    frames = pcm[: len(pcm) // FRAME_SAMPLES * FRAME_SAMPLES].reshape(-1, FRAME_SAMPLES)
    power = (frames**2).mean(1)
    return float(np.sqrt(power[power >= power.max() / 100].mean())) if len(power) else 0.0


def _noise(num_samples: int, slope_db: float, chance: np.random.Generator) -> Pcm:
    """Return noise with an RMS level of 1. `num_samples` > 1."""
    spectrum = np.fft.rfft(chance.normal(size=num_samples))
    octaves = np.log2(np.maximum(np.fft.rfftfreq(num_samples, 1 / SAMPLE_RATE_HZ), LOWEST_HZ) / LOWEST_HZ)
    noise = np.fft.irfft(spectrum * 10 ** (-slope_db * octaves / 20), num_samples)
    return np.asarray(noise / np.sqrt((noise**2).mean()), np.float32)
