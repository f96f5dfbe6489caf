"""Whether speech over a response claims the floor by its sound."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.turns.floor_claim import LONG_FRAMES, MIN_FRAMES, QUIETER_DB, FloorClaim

FRAME = 512


def tone(frames: int, hz: float = 1500.0, level: float = 0.1) -> Pcm:
    return np.asarray(level * np.sin(2 * np.pi * hz * np.arange(frames * FRAME) / SAMPLE_RATE_HZ), np.float32)


def claims(probabilities: list[float], pcm: Pcm, claim: FloorClaim | None = None) -> bool:
    """Return whether the sound claims the floor after its last frame. It arrives in pieces of another length."""
    claim, done = claim or FloorClaim(FRAME), 0
    for at in range(0, len(pcm), 320):
        ended = min(at + 320, len(pcm)) // FRAME
        claim.feed(pcm[at : at + 320], probabilities[done:ended])
        done = ended
    return claim.claims


def test_speech_that_is_surely_speech_claims_the_floor_after_a_quarter_of_a_second() -> None:
    assert MIN_FRAMES * FRAME / SAMPLE_RATE_HZ == 0.256
    assert claims([0.99] * 8, tone(8))
    assert not claims([0.99] * 7, tone(7))


@pytest.mark.parametrize(
    "wavers",
    [[0.99] * 7 + [0.9], [0.99, 0.4] + [0.99] * 6, [0.9] * 12, [0.0] * 4 + [0.99] * 7],
)
def test_a_sound_of_which_the_detector_is_not_sure_does_not(wavers: list[float]) -> None:
    assert not claims(wavers, tone(len(wavers)))


def test_a_hum_claims_the_floor_only_after_half_a_second() -> None:
    assert not claims([0.99] * (LONG_FRAMES - 1), tone(LONG_FRAMES - 1, hz=200))
    assert claims([0.99] * LONG_FRAMES, tone(LONG_FRAMES, hz=200))


def test_a_sound_that_is_much_quieter_than_the_user_does_not() -> None:
    claim = FloorClaim(FRAME)
    claims([0.99] * 40 + [0.0], tone(41), claim)
    far = 10 ** (-(QUIETER_DB + 3) / 20)
    assert not claims([0.99] * 8, tone(8, level=0.1 * far), claim)
    # It does not change what counts as the user's level either.
    claims([0.0], tone(1), claim)
    assert claims([0.99] * 8, tone(8, level=0.05), claim)


def test_when_the_client_clears_its_audio_then_the_speech_before_it_does_not_count() -> None:
    claim = FloorClaim(FRAME)
    claims([0.99] * 6, tone(6), claim)
    claim.clear()
    assert not claims([0.99] * 4, tone(4), claim)
