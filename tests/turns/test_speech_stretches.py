"""The stretches of speech of a recording, and their times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.events.transcription import ServerVad
from antiphon.turns.speech_stretches import MAX_UNSURE, SpeechStretches, SpeechTimeline

FRAME = 512
# The padding is 2 frames, and the silence 4 frames.
VAD = ServerVad(prefix_padding_ms=64, silence_duration_ms=128)


def recording(speech: list[bool], rest: int = 0) -> Pcm:
    """Return audio in which each sample is its own number, with `rest` samples after the last whole frame."""
    return np.arange(len(speech) * FRAME + rest, dtype=np.float32)


def cut(speech: list[bool], chunk: int, rest: int = 0, vad: ServerVad = VAD) -> list[tuple[int, int]]:
    """Return the stretches of a recording that is fed in chunks, as (first sample, end)."""
    pcm, stretches, kept, judged = recording(speech, rest), SpeechStretches(vad, FRAME), list[tuple[int, Pcm]](), 0
    for at in range(0, len(pcm), chunk):
        whole = min(at + chunk, len(pcm)) // FRAME
        kept += stretches.feed(pcm[at : at + chunk], [0.9 if s else 0.0 for s in speech[judged:whole]])
        judged = whole
    kept += stretches.end()
    spans: list[tuple[int, int]] = []
    for sample, piece in kept:
        assert np.array_equal(piece, pcm[sample : sample + len(piece)])
        if spans and spans[-1][1] == sample:
            spans[-1] = (spans[-1][0], sample + len(piece))
        else:
            spans.append((sample, sample + len(piece)))
    return spans


def test_speech_is_kept_with_its_padding_and_the_silence_that_ends_it() -> None:
    speech = [False] * 10 + [True] * 5 + [False] * 10 + [True] * 3 + [False] * 2
    assert cut(speech, FRAME) == [(8 * FRAME, 19 * FRAME), (23 * FRAME, 30 * FRAME)]


def test_a_pause_shorter_than_the_silence_is_kept() -> None:
    assert cut([True] * 3 + [False] * 3 + [True] * 3, FRAME, rest=100) == [(0, 9 * FRAME + 100)]


def test_a_single_frame_and_silence_are_no_speech() -> None:
    assert cut([False] * 5 + [True] + [False] * 20, FRAME, rest=100) == []


def test_a_threshold_of_zero_keeps_all() -> None:
    assert cut([False] * 20, FRAME, rest=7, vad=ServerVad(threshold=0.0)) == [(0, 20 * FRAME + 7)]


def stretches_of(probabilities: list[float], threshold: float = 0.5) -> list[tuple[int, int]]:
    """Return the stretches, in frames, of a recording that is fed in one piece for each frame."""
    stretches = SpeechStretches(replace(VAD, threshold=threshold), FRAME)
    kept = [s for p in probabilities for s in stretches.feed(np.zeros(FRAME, np.float32), [p])] + stretches.end()
    return [(sample // FRAME, len(pcm) // FRAME) for sample, pcm in kept]


def test_what_the_detector_is_sure_of_nowhere_is_no_speech() -> None:
    barks, word, silence = [0.8] * 4, [0.6, 0.7, 0.9], [0.0] * 5
    assert stretches_of(barks + silence) == []
    assert stretches_of(barks) == []
    # Audio held until the detector was sure is returned in one piece, with the padding before it.
    assert stretches_of(silence + word + silence)[0] == (3, 5)
    # The first frames of a stretch count, and those of the previous stretch do not.
    assert stretches_of([*silence, 0.9, 0.6, 0.6, *silence])[0] == (3, 4)
    assert stretches_of(word + silence + barks + silence)[-1][0] < len(word + silence)
    # With a lower threshold a smaller probability is enough. With a threshold of zero, any probability is.
    assert stretches_of(silence + [0.5] * 3 + silence, threshold=0.25)[0] == (3, 4)
    assert stretches_of(silence + [0.44] * 3 + silence, threshold=0.25) == []


def test_little_is_held_of_what_the_detector_is_unsure_of() -> None:
    stretches = SpeechStretches(VAD, FRAME)
    second = np.zeros(32 * FRAME, np.float32)
    for _ in range(100):
        assert stretches.feed(second, [0.8] * 32) == []
    ((sample, pcm),) = stretches.feed(second, [0.8] * 31 + [0.95])
    assert sample + len(pcm) == 101 * 32 * FRAME
    assert len(pcm) <= MAX_UNSURE + 32 * FRAME


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5000), st.integers(0, FRAME - 1))
def test_stretches_do_not_depend_on_chunks(speech: list[bool], chunk: int, rest: int) -> None:
    assert cut(speech, chunk, rest) == cut(speech, 1 << 20, rest)


def test_little_is_held_of_a_long_silence() -> None:
    stretches = SpeechStretches(VAD, FRAME)
    for _ in range(100):
        assert stretches.feed(np.zeros(16 * FRAME, np.float32), [0.0] * 16) == []
    kept = stretches.feed(np.ones(2 * FRAME, np.float32), [0.9, 0.9])
    assert [(sample, len(pcm)) for sample, pcm in kept] == [((1600 - 2) * FRAME, 4 * FRAME)]


def test_times_of_joined_stretches_are_those_of_the_recording() -> None:
    timeline = SpeechTimeline()
    second = SAMPLE_RATE_HZ
    timeline.add(5 * second, 2 * second)
    timeline.add(7 * second, second)
    timeline.add(60 * second, second)
    assert timeline.end == 61 * second
    assert [timeline.start_s(t) for t in (0.0, 2.5, 3.0, 3.5)] == [5.0, 7.5, 60.0, 60.5]
    assert [timeline.end_s(t) for t in (0.0, 2.5, 3.0, 3.5)] == [5.0, 7.5, 8.0, 60.5]


def test_a_word_lies_in_one_stretch() -> None:
    timeline = SpeechTimeline()
    second = SAMPLE_RATE_HZ
    timeline.add(0, second)
    timeline.add(20 * second, second)
    assert timeline.span_s(0.2, 0.6) == (0.2, 0.6)
    assert timeline.span_s(0.5, 1.2) == (0.5, 1.0)
    assert timeline.span_s(0.875, 1.5) == (20.0, 20.5)
    assert timeline.span_s(1.0, 1.5) == (20.0, 20.5)
    assert timeline.span_s(0.5, 1.0) == (0.5, 1.0)
    assert timeline.span_s(1.5, 1.5) == (20.5, 20.5)
