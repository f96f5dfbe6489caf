"""The encoder's input: the energies of 40 mel bands in windows of 25 ms, one every 10 ms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

WINDOW, HOP, NUM_BANDS = 400, 160, 40
# Slaney's scale: bands of 200/3 Hz up to 1 kHz, and above it 27 to a factor of 6.4.
LINEAR_HZ, BREAK_HZ, LOG_STEP = 200 / 3, 1000.0, np.log(6.4) / 27


def _to_hz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    break_mel = BREAK_HZ / LINEAR_HZ
    return np.where(mels < break_mel, LINEAR_HZ * mels, BREAK_HZ * np.exp(LOG_STEP * (mels - break_mel)))


def _filters() -> npt.NDArray[np.float32]:
    """The triangles of the bands, each of area 1: float32 [num_bins, NUM_BANDS]."""
    top_hz = SAMPLE_RATE_HZ / 2
    top_mel = BREAK_HZ / LINEAR_HZ + np.log(top_hz / BREAK_HZ) / LOG_STEP
    edges = _to_hz(np.linspace(0, top_mel, NUM_BANDS + 2))
    bins = np.linspace(0, top_hz, WINDOW // 2 + 1)[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    triangles = np.maximum(0, np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)))
    return (triangles * 2 / (high - low)).astype(np.float32)


FILTERS = _filters()
# A periodic Hann window, as for a spectrogram.
HANN = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)


def mel_frames(pcm: Pcm) -> npt.NDArray[np.float32]:
    """Return the energies of the bands, float32 [num_frames, NUM_BANDS], of mono audio at 16 kHz.

    A frame lies around each 160th sample, the first around sample 0, with silence before and after the audio. The
    energies are not logarithms.
    """
    padded = np.pad(pcm, WINDOW // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    spectrum = np.abs(np.fft.rfft(windows * HANN, axis=1)) ** 2
    return np.asarray(spectrum.astype(np.float32) @ FILTERS, np.float32)
