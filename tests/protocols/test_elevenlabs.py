"""When each character of a text is spoken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from antiphon.events.words import Word
from antiphon.protocols.elevenlabs.alignment import char_times, file_alignment, stream_alignment

WORDS = some.lists(
    some.tuples(some.sampled_from(["one", "two", "tw", "three,", ""]), some.floats(-1, 9), some.floats(-1, 9)),
    max_size=6,
)


def test_times_of_words_are_spread_over_their_characters() -> None:
    times = char_times("ab c ", [Word("ab", 0.1, 0.3, 1.0), Word("c", 0.5, 0.6, 1.0)], 1.0)
    assert times.starts_s == pytest.approx([0.1, 0.2, 0.3, 0.5, 0.6])
    shown = stream_alignment(times)
    assert (shown.chars, shown.charDurationsMs) == (["a", "b", " ", "c", " "], [100, 100, 200, 100, 400])
    assert file_alignment(times).character_end_times_seconds == [0.2, 0.3, 0.5, 0.6, 1.0]


def test_without_words_the_characters_are_spread_evenly() -> None:
    assert stream_alignment(char_times("abcd", [], 0.4)).charStartTimesMs == [0, 100, 200, 300]


@given(WORDS, some.sampled_from(["", "one two three, one", "x", "two two"]), some.floats(0, 9))
def test_times_ascend_and_end_with_the_audio_whatever_the_words(
    words: list[tuple[str, float, float]], text: str, end_s: float
) -> None:
    times = char_times(text, [Word(word, start_s, stop_s, 1.0) for word, start_s, stop_s in words], end_s)
    assert len(times.starts_s) == len(text)
    assert times.starts_s == sorted(times.starts_s)
    assert all(0 <= start_s <= end_s for start_s in times.starts_s)
    shown = stream_alignment(times)
    assert all(duration >= 0 for duration in shown.charDurationsMs)
