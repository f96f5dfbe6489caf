"""The takes of an enrolment are the recording, and copies of it with noise of three colours."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.turns.voices.enrolment import MARGIN_FRAMES, MAX_SPEECH_S, enrolment_takes, speech_of
from tests.conftest import Recording


def test_when_a_voice_is_enrolled_then_its_takes_have_noise_ten_db_below_it(recordings: dict[str, Recording]) -> None:
    pcm = recordings["jfk"].pcm[: 3 * SAMPLE_RATE_HZ]
    quiet, *noisy = enrolment_takes(pcm)
    assert quiet is pcm
    assert len(noisy) == 3
    # Half of a noise's energy lies below its middle frequency, which falls from one noise to the next.
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


def test_the_speech_of_a_recording_is_what_is_found_and_the_frames_around_it() -> None:
    frame = 512
    pcm = np.arange(40 * frame, dtype=np.float32)
    probabilities = [0.9 if 20 <= k < 22 else 0.1 for k in range(40)]
    found = speech_of(pcm, probabilities, frame)
    assert np.array_equal(found, pcm[(20 - MARGIN_FRAMES) * frame : (22 + MARGIN_FRAMES) * frame])
    # Every frame appears once, even if the parts are close to each other and to the ends.
    assert np.array_equal(speech_of(pcm, [0.9, *([0.1] * 4), *([0.9] * 35)], frame), pcm)
    for nothing in ([], [0.1] * 40):
        assert len(speech_of(pcm, nothing, frame)) == 0


def test_of_a_long_recording_the_beginning_counts() -> None:
    pcm = np.zeros(int(2 * MAX_SPEECH_S * SAMPLE_RATE_HZ), np.float32)
    assert len(speech_of(pcm, [1.0] * (len(pcm) // 512), 512)) == MAX_SPEECH_S * SAMPLE_RATE_HZ
