"""Makes several recordings of the one by which a user is enrolled, so that their voice is known in noise too. Pure."""

from __future__ import annotations

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

# White, pink and brown noise: by so many dB it falls with each octave, and it lies so far below the speech.
SLOPES_DB, NOISE_DB = (0, 3, 6), -10.0
# Noise has the same level everywhere below this.
LOWEST_HZ = 50.0
FRAME_SAMPLES = SAMPLE_RATE_HZ // 100


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
