from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.audio import Pcm
from antiphon.contracts import Hypothesis, HypothesisWord
from antiphon.events.transcription import ServerVad, SpeechStarted, SpeechStopped, TurnCommitted
from antiphon.events.words import Word
from antiphon.turns.segmenter import Segmenter, SegmenterEvent
from antiphon.turns.windows import TurnEnded, WindowEnded
from tests.scripted import PROFILE

FRAME = 512
VAD = ServerVad(0.5, 96, 192)


def sound(num_frames: int, start: int = 0) -> Pcm:
    """Return audio whose samples encode their positions."""
    return (np.arange(start, start + num_frames * FRAME) % 30000 / 30000).astype(np.float32)


def run(segmenter: Segmenter, loud: str) -> list[SegmenterEvent]:
    """Feed one frame per character: # is speech, and any other character is silence."""
    steps: list[SegmenterEvent] = []
    for c in loud:
        steps += segmenter.feed(sound(1, segmenter.now), [0.9 if c == "#" else 0.0])
    return steps


def kinds(steps: list[SegmenterEvent]) -> list[str]:
    return [type(s).__name__ for s in steps]


def test_when_speech_is_followed_by_silence_then_server_vad_makes_a_turn_with_its_audio() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    steps = run(segmenter, "." * 20 + "#" * 20 + "." * 40)
    assert kinds(steps) == ["SpeechStarted", "SpeechStopped", "TurnCommitted", "WindowEnded", "TurnEnded"]
    started, stopped, committed, window, ended = steps
    assert started == SpeechStarted(0, (20 * 32) - 96)
    assert stopped == SpeechStopped(0, 46 * 32)
    assert committed == TurnCommitted(0, (20 * 32) - 96, 46 * 32, 40 * 32)
    assert isinstance(window, WindowEnded)
    assert window.speech_end == 40 * FRAME
    # The window reaches from the padded start to the margin after the speech, with exactly the samples that were fed.
    assert np.array_equal(window.window.pcm, sound(80)[17 * FRAME : 40 * FRAME + 3200])
    assert ended == TurnEnded(0, 29 * FRAME / 16000)


def test_when_the_padding_is_changed_then_a_turn_may_begin_so_far_before_its_speech() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    assert segmenter.prefix_samples == 96 * 16
    segmenter.apply(PROFILE, replace(VAD, prefix_padding_ms=500))
    assert segmenter.prefix_samples == 500 * 16
    segmenter.apply(PROFILE, None)
    assert segmenter.prefix_samples == 300 * 16


def test_when_a_turn_has_ended_then_its_window_ends_after_the_settling_silence() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    assert kinds(run(segmenter, "#" * 20 + "." * 15)) == ["SpeechStarted", "SpeechStopped", "TurnCommitted"]
    assert kinds(run(segmenter, "." * 2)) == ["WindowEnded", "TurnEnded"]


def test_when_turns_follow_closely_then_they_share_a_window() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    run(segmenter, "#" * 20 + "." * 10)
    assert kinds(run(segmenter, "#" * 20)) == ["SpeechStarted"]
    assert segmenter.window is not None
    first, second = segmenter.window.spans
    assert (first.turn, second.turn) == (0, 1)
    # The border lies in the silence between the turns.
    assert 20 * FRAME < second.start < 30 * FRAME
    words = tuple(Word("w", at * FRAME / 16000, (at + 1) * FRAME / 16000, 1.0) for at in (18, 31))
    pieces = tuple(HypothesisWord(w.text, (1,), 1.0) for w in words)
    hypothesis = Hypothesis(pieces, "en", 1.0, True, 0, 0, words)
    assert segmenter.window.word_turns(hypothesis) == [0, 1]
    assert segmenter.window.word_turns(replace(hypothesis, words=())) == [1, 1]
    assert kinds(run(segmenter, "." * 30)) == [
        "SpeechStopped",
        "TurnCommitted",
        "WindowEnded",
        "TurnEnded",
        "TurnEnded",
    ]


def test_when_a_window_is_long_then_the_next_turn_begins_another() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    run(segmenter, "#" * 300 + "." * 10)
    assert kinds(run(segmenter, "##")) == ["WindowEnded", "TurnEnded", "SpeechStarted"]


def test_when_the_client_commits_then_a_settling_window_ends_first() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    run(segmenter, "#" * 20 + "." * 8)
    assert kinds(segmenter.commit()) == ["WindowEnded", "TurnEnded", "TurnCommitted", "TurnEnded"]
    run(segmenter, "#" * 20)
    assert kinds(segmenter.commit()) == ["SpeechStopped", "TurnCommitted", "WindowEnded", "TurnEnded"]


def test_when_the_client_commits_several_windows_then_they_are_one_turn() -> None:
    segmenter = Segmenter(PROFILE, None, FRAME)
    steps = run(segmenter, "#" * 30 + "." * 40 + "#" * 30)
    assert kinds(steps) == ["WindowEnded"]
    steps = segmenter.commit()
    assert kinds(steps) == ["TurnCommitted", "WindowEnded", "TurnEnded"]
    assert steps[0] == TurnCommitted(0, 0, 3200)
    assert isinstance(steps[1], WindowEnded)
    assert not steps[1].window.spans[0].first
    assert kinds(segmenter.commit()) == ["TurnCommitted", "TurnEnded"]


def test_when_a_long_window_has_a_pause_then_it_ends_there() -> None:
    segmenter = Segmenter(PROFILE, ServerVad(0.5, 96, 5000), FRAME)
    steps = run(segmenter, "#" * 300 + "." * 12 + "#" * 10)
    assert kinds(steps) == ["SpeechStarted", "WindowEnded"]
    assert segmenter.window is not None
    assert segmenter.window.spans[0].turn == 0
    assert segmenter.window.start > 300 * FRAME


def test_a_window_is_a_value_that_later_audio_does_not_change() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    run(segmenter, "#" * 20 + "." * 8)
    earlier = segmenter.window
    assert earlier is not None
    pcm, spans = earlier.pcm.copy(), earlier.spans
    run(segmenter, "#" * 300 + "." * 40 + "#" * 20)
    assert np.array_equal(earlier.pcm, pcm)
    assert (earlier.spans, earlier.end, earlier.quiet_since) == (spans, earlier.start + len(pcm), 20 * FRAME)


def test_when_a_window_is_cut_then_the_rest_is_another_window_with_the_same_turns() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    run(segmenter, "#" * 100)
    whole = segmenter.window
    assert whole is not None
    segmenter.cut(60 * FRAME)
    rest = segmenter.window
    assert rest is not None
    assert (rest.start, rest.after, rest.end) == (60 * FRAME, None, 100 * FRAME)
    assert rest.id != whole.id
    assert [(s.turn, s.first) for s in rest.spans] == [(0, False)]
    assert np.array_equal(rest.pcm, whole.from_sample(60 * FRAME).pcm)


def test_a_pause_ends_its_turn_after_what_was_said_last() -> None:
    """Without a call of `end_after`, a turn ends after 960 ms of silence, which is 30 frames."""

    def stopped(*silences: int) -> int:
        segmenter = Segmenter(PROFILE, ServerVad(0.5, 96, 960), FRAME)
        run(segmenter, "#" * 20 + "." * 4)
        pause = segmenter.quiet_since
        assert pause == 20 * FRAME
        for silence_ms in silences:
            assert segmenter.end_after(pause, silence_ms)
        assert not segmenter.end_after(pause - 1, 0)
        return next(k for k in range(5, 90) if "SpeechStopped" in kinds(run(segmenter, ".")))

    assert stopped() == 30
    assert stopped(192) == 6
    assert stopped(192, 1920) == 60
    # The pause has already lasted longer than that.
    assert stopped(1920, 32) == 5


def test_when_a_pause_is_over_then_its_end_is_not_decided_any_more() -> None:
    segmenter = Segmenter(PROFILE, ServerVad(0.5, 96, 960), FRAME)
    run(segmenter, "#" * 20 + "." * 4)
    assert segmenter.end_after(20 * FRAME, 192)
    run(segmenter, "#" * 4 + "." * 4)
    assert not segmenter.end_after(20 * FRAME, 192)
    assert kinds(run(segmenter, "." * 20)) == []
    assert not Segmenter(PROFILE, None, FRAME).end_after(0, 192)


def test_pauses_inside_turns_are_kept_as_the_speakers() -> None:
    segmenter = Segmenter(PROFILE, ServerVad(0.5, 96, 3200), FRAME)
    before = segmenter.speaker_pauses.scale
    for _ in range(8):
        run(segmenter, "#" * 10 + "." * 60)
    assert segmenter.speaker_pauses.scale > before


def test_pauses_are_counted_by_the_turn() -> None:
    segmenter = Segmenter(PROFILE, ServerVad(0.5, 96, 960), FRAME)
    for _ in range(8):
        run(segmenter, "#" * 10 + "." * 10 + "#" * 10 + "." * 40)
    assert segmenter.speaker_pauses.shift == 0
    run(segmenter, ("#" * 10 + "." * 10) * 20)
    assert segmenter.speaker_pauses.shift < 0


def test_when_a_turn_continues_the_last_one_then_the_pause_between_them_is_the_speakers() -> None:
    segmenter = Segmenter(PROFILE, ServerVad(0.5, 96, 192), FRAME)
    run(segmenter, "#" * 10)
    before = segmenter.speaker_pauses.scale
    for _ in range(8):
        segmenter.turn_goes_on(1900)
    assert segmenter.speaker_pauses.scale > before
    assert "SpeechStopped" not in [type(step).__name__ for step in run(segmenter, "." * 11)]


def test_when_turns_continue_the_last_one_then_they_are_one_turn_of_the_speaker() -> None:
    segmenter = Segmenter(PROFILE, ServerVad(0.5, 96, 192), FRAME)
    for _ in range(8):
        run(segmenter, "#" * 10)
        segmenter.turn_goes_on(600)
        assert kinds(run(segmenter, "." * 15))[0] == "SpeechStopped"
    assert segmenter.speaker_pauses.shift < 0


def test_when_cleared_then_an_open_turn_leaves_no_trace() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    run(segmenter, "#" * 20)
    segmenter.clear()
    assert segmenter.window is None
    assert segmenter.uncommitted_ms == 0
    assert kinds(run(segmenter, "." * 40)) == []


def test_when_a_session_goes_on_for_long_then_only_a_few_seconds_of_audio_are_kept() -> None:
    segmenter = Segmenter(PROFILE, VAD, FRAME)
    largest = 0
    for _ in range(60):
        run(segmenter, "#" * 60 + "." * 60)
        largest = max(largest, len(pickle.dumps(segmenter)))
    # This is all of the segmenter's memory: float32 samples, and a few numbers.
    assert largest < 12 * 16000 * 4


@settings(max_examples=60, deadline=None)
@given(st.text("#.", max_size=300), st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.booleans())
def test_when_the_audio_is_cut_otherwise_then_the_events_are_the_same(
    loud: str, sizes: list[int], manual: bool
) -> None:
    """The same frames give the same events in the same order if they are fed in other chunks."""
    vad = None if manual else VAD
    whole = Segmenter(PROFILE, vad, FRAME)
    steps = run(whole, loud) + whole.commit()
    other = Segmenter(PROFILE, vad, FRAME)
    probabilities = [0.9 if c == "#" else 0.0 for c in loud]
    pcm, again, judged = sound(len(loud)), list[SegmenterEvent](), 0
    at, k = 0, 0
    while at < len(pcm):
        chunk = pcm[at : at + sizes[k % len(sizes)]]
        at, k = at + len(chunk), k + 1
        done = at // FRAME
        again += other.feed(chunk, probabilities[judged:done])
        judged = done
    again += other.commit()
    assert kinds(steps) == kinds(again)
    for a, b in zip(steps, again, strict=True):
        if isinstance(a, WindowEnded):
            assert isinstance(b, WindowEnded)
            assert a == b
            assert np.array_equal(a.window.pcm, b.window.pcm)
        elif not isinstance(a, TurnEnded):
            assert a == b


KEEPS = replace(PROFILE, context_pause_s=math.inf, long_window_s=9)


def test_when_audio_is_kept_over_pauses_then_a_window_begins_with_it_until_both_would_be_long() -> None:
    segmenter = Segmenter(KEEPS, None, FRAME)
    run(segmenter, "#" * 20 + "." * 150)
    for after in (1, 2):
        run(segmenter, "#" * 5)
        assert segmenter.window is not None
        assert (segmenter.window.start, segmenter.window.after) == (0, after)
        assert np.array_equal(segmenter.window.pcm, sound(segmenter.now // FRAME))
        run(segmenter, "." * 30)
    # More than 9 s after its start, the first window is no longer context.
    run(segmenter, "." * 60 + "#" * 5)
    assert segmenter.window is not None
    assert (segmenter.window.after, segmenter.window.start > 0) == (None, True)


def test_when_nothing_is_said_for_long_then_kept_audio_is_given_back() -> None:
    segmenter = Segmenter(KEEPS, VAD, FRAME)
    run(segmenter, "#" * 200)
    held = segmenter.num_bytes
    run(segmenter, "." * 40)
    assert segmenter.num_bytes >= held
    run(segmenter, "." * 4000)
    assert segmenter.num_bytes < 5 * 16000 * 4


def test_audio_that_was_handed_out_stays_as_it_was() -> None:
    segmenter = Segmenter(PROFILE, None, FRAME)
    handed = []
    for number in range(300):
        run(segmenter, "#")
        if segmenter.window:
            handed.append((number + 1, segmenter.window.pcm))
    assert len(handed) > 200
    assert all(np.array_equal(pcm, sound(end)[-len(pcm) :]) for end, pcm in handed)


def test_when_detection_is_switched_on_while_somebody_speaks_then_a_turn_begins_and_ends() -> None:
    segmenter = Segmenter(PROFILE, None, FRAME)
    run(segmenter, "#" * 20)
    steps = segmenter.apply(PROFILE, VAD)
    steps += run(segmenter, "#" * 20 + "." * 40)
    found = [k for k in kinds(steps) if k in ("SpeechStarted", "SpeechStopped", "TurnCommitted")]
    assert found == ["SpeechStarted", "SpeechStopped", "TurnCommitted"]
