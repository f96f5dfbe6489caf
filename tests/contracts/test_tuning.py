from __future__ import annotations

import math
from dataclasses import replace

import pytest

from antiphon.contracts import TranscriberProfile, TuningLimits, tuned
from antiphon.events.transcription import StreamTuning
from tests.scripted import PROFILE

RAISED = replace(PROFILE, limits=TuningLimits(100.0, 1024, 4096, context_tokens=256, context_audio=True))


def limits_of(profile: TranscriberProfile) -> tuple[float, int, int]:
    return profile.max_window_s, profile.max_prefix_tokens, profile.max_tokens


@pytest.mark.parametrize(
    ("profile", "audio_s", "prefix", "tokens", "applied"),
    [
        (PROFILE, 5.0, 7, 9, (5.0, 7, 9)),
        (PROFILE, 300.0, 1024, 4096, (22, 180, 224)),
        (RAISED, 60.0, 1000, 128, (60.0, 1000, 128)),
        (RAISED, 300.0, 2000, 5000, (100.0, 1024, 4096)),
    ],
)
def test_a_session_may_lower_and_raise_its_values_to_the_limits_of_the_model(
    profile: TranscriberProfile, audio_s: float, prefix: int, tokens: int, applied: tuple[float, int, int]
) -> None:
    asked = StreamTuning(max_audio_s=audio_s, max_prefix_tokens=prefix, max_tokens=tokens)
    assert limits_of(tuned(profile, asked)) == applied
    assert limits_of(tuned(profile, StreamTuning())) == limits_of(profile)


def test_a_longer_window_is_called_long_later() -> None:
    assert tuned(RAISED, StreamTuning(max_audio_s=66.0)).long_window_s == 27
    assert tuned(RAISED, StreamTuning(max_audio_s=10.0)).long_window_s == 9
    assert tuned(RAISED, StreamTuning(max_audio_s=5.0)).long_window_s == 5


@pytest.mark.parametrize(
    ("profile", "tuning", "tokens", "pause_s"),
    [
        (RAISED, StreamTuning(), 0, 1.5),
        (RAISED, StreamTuning(keep_context=True), 256, math.inf),
        (RAISED, StreamTuning(keep_context=True, max_prefix_tokens=50), 50, math.inf),
        (RAISED, StreamTuning(keep_context=True, max_prefix_tokens=1000), 256, math.inf),
        (RAISED, StreamTuning(keep_context=False), 0, 0.0),
        (
            replace(PROFILE, limits=TuningLimits(22, 180, 224, context_tokens=200)),
            StreamTuning(keep_context=True),
            200,
            0.0,
        ),
        (PROFILE, StreamTuning(keep_context=True), 0, 0.0),
    ],
)
def test_context_over_pauses_is_text_and_where_the_model_goes_on_from_it_audio(
    profile: TranscriberProfile, tuning: StreamTuning, tokens: int, pause_s: float
) -> None:
    followed = tuned(profile, tuning)
    assert (followed.context_tokens, followed.context_pause_s) == (tokens, pause_s)
