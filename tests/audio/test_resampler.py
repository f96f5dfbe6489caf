"""Sample rates that files, clients and stored sessions may have."""

from __future__ import annotations

import pytest

from antiphon.audio.pcm import Resampler


@pytest.mark.parametrize("rates_hz", [(0, 16_000), (10**15, 16_000), (16_000, 7), (-8_000, 16_000)])
def test_a_rate_that_no_sound_has_is_refused_at_once(rates_hz: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="Hz"):
        Resampler(*rates_hz)
