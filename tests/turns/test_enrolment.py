"""The takes of an enrolment: the recording, and noise of three colours below it."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.turns.voices.enrolment import enrolment_takes
from tests.conftest import Recording


def test_when_a_voice_is_enrolled_then_its_takes_have_noise_ten_db_below_it(recordings: dict[str, Recording]) -> None:
    pcm = recordings["jfk"].pcm[: 3 * SAMPLE_RATE_HZ]
    quiet, *noisy = enrolment_takes(pcm)
    assert quiet is pcm
    assert len(noisy) == 3
    # Half of each noise's energy lies below an ever lower frequency.
    middles = []
    for take in noisy:
        assert take.dtype == np.float32
        power = np.cumsum(np.abs(np.fft.rfft(take - pcm)) ** 2)
        middles.append(float(np.searchsorted(power, power[-1] / 2)))
        rms = np.sqrt(((take - pcm) ** 2).mean())
        loud = np.sqrt((pcm**2).mean())
        assert -14 < 20 * np.log10(rms / loud) < -6
    assert middles[0] > 2 * middles[1] > 4 * middles[2]
    for once, again in zip(noisy, enrolment_takes(pcm)[1:], strict=True):
        assert np.array_equal(once, again)


@pytest.mark.parametrize("num_samples", [0, 1, 160, 16000])
def test_when_there_is_nothing_to_hear_then_there_is_one_take(num_samples: int) -> None:
    (take,) = enrolment_takes(np.zeros(num_samples, np.float32))
    assert len(take) == num_samples
