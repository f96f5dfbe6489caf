"""Sample rates that files, clients and stored sessions may have."""

from __future__ import annotations

import numpy as np
import pytest
import soxr

from antiphon.audio import Pcm
from antiphon.audio.pcm import Doubler, Resampler


@pytest.mark.parametrize("rates_hz", [(0, 16_000), (10**15, 16_000), (16_000, 7), (-8_000, 16_000)])
def test_a_rate_that_no_sound_has_is_refused_at_once(rates_hz: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="Hz"):
        Resampler(*rates_hz)


def test_a_doubler_is_a_resampler_that_does_not_wait() -> None:
    noise = np.random.default_rng(3).normal(0, 0.1, 8000).astype(np.float32)
    # A telephone's band, 300 to 3400 Hz.
    spectrum = np.fft.rfft(noise)
    spectrum[:300] = spectrum[3400:] = 0
    narrow = np.fft.irfft(spectrum).astype(np.float32)
    doubler, sizes = Doubler(), [1, 160, 7, 0, 500, 3]
    parts, at = list[Pcm](), 0
    while at < len(narrow):
        size = sizes[len(parts) % len(sizes)]
        parts.append(doubler.feed(narrow[at : at + size]))
        # Twice as much comes out, at once.
        assert len(parts[-1]) == 2 * len(narrow[at : at + size])
        at += size
    right = soxr.resample(narrow, 8000, 16_000)
    late = 63
    error = np.concatenate(parts)[late + 2000 : -2000] - right[2000 : -2000 - late]
    assert np.sqrt(np.mean(error**2)) < 1e-3 * np.sqrt(np.mean(right**2))
