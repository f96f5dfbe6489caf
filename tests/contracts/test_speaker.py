"""What similarities mean between and beyond the lengths of speech in a profile."""

from __future__ import annotations

import pytest

from antiphon.contracts import SpeakerProfile, VoiceThreshold
from antiphon.contracts.speaker import shared_s

PROFILE = SpeakerProfile("toy", 4, 0.6, (VoiceThreshold(0.5, 0.1, 0.3), VoiceThreshold(1.5, 0.3, 0.4)))


@pytest.mark.parametrize(
    ("one_s", "other_s", "expected"),
    [
        (0.2, 0.2, (0.1, 0.3)),
        (1.0, 1.0, (0.1, 0.3)),
        (2.0, 2.0, (0.2, 0.35)),
        (3.0, 3.0, (0.3, 0.4)),
        (9, 30, (0.3, 0.4)),
    ],
)
def test_thresholds_are_interpolated_by_the_speech_of_both(
    one_s: float, other_s: float, expected: tuple[float, float]
) -> None:
    found = PROFILE.threshold(one_s, other_s)
    assert (found.other, found.same) == pytest.approx(expected)
    assert PROFILE.threshold(other_s, one_s) == found


def test_two_vectors_share_less_speech_than_the_shorter_one_has() -> None:
    assert shared_s(2.0, 2.0) == 1.0
    assert 0.9 < shared_s(1.0, 30.0) < 1.0
