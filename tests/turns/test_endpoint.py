from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.turns.endpoint import (
    MAX_BACKDATED,
    EndpointChange,
    Endpointer,
    SpeechBegan,
    SpeechEnded,
    SpeechPaused,
    SpeechResumed,
)

FRAME = 512
LOUD, SOFT, QUIET = 0.9, 0.4, 0.05


def run(endpointer: Endpointer, probabilities: list[float]) -> list[EndpointChange]:
    return [c for p in probabilities for c in endpointer.feed(p, FRAME)]


def test_when_two_loud_frames_follow_then_speech_begins_with_padding_taken_off() -> None:
    endpointer = Endpointer(0.5, 64, 200)
    assert run(endpointer, [QUIET] * 10 + [LOUD]) == []
    assert run(endpointer, [LOUD]) == [SpeechBegan(10 * FRAME - 1024)]


def test_when_single_frames_are_loud_then_no_speech_begins() -> None:
    assert run(Endpointer(0.5, 300, 200), [QUIET, LOUD, QUIET, LOUD, QUIET] * 10) == []


def test_when_silence_lasts_as_configured_then_the_turn_ends() -> None:
    endpointer = Endpointer(0.5, 0, 192)
    changes = run(endpointer, [LOUD] * 10 + [QUIET] * 6)
    assert changes == [SpeechBegan(0), SpeechPaused(10 * FRAME), SpeechEnded(16 * FRAME, 10 * FRAME)]
    assert not endpointer.speaking


def test_when_a_pause_is_shorter_then_speech_resumes() -> None:
    changes = run(Endpointer(0.5, 0, 192), [LOUD] * 4 + [QUIET] * 5 + [LOUD] * 4)
    assert changes == [SpeechBegan(0), SpeechPaused(4 * FRAME), SpeechResumed(9 * FRAME)]


def test_when_the_probability_is_between_the_thresholds_then_the_turn_stays_open() -> None:
    endpointer = Endpointer(0.5, 0, 192)
    assert run(endpointer, [LOUD] * 4 + [SOFT] * 40) == [SpeechBegan(0)]
    assert endpointer.speaking


def test_when_turns_follow_closely_then_padding_does_not_reach_into_the_last_one() -> None:
    endpointer = Endpointer(0.5, 300, 64)
    changes = run(endpointer, [LOUD] * 4 + [QUIET] * 2 + [LOUD] * 2)
    assert changes[-1] == SpeechBegan(6 * FRAME)


def test_when_speech_had_begun_before_it_was_recognized_then_an_interrupted_onset_does_not_lose_that() -> None:
    endpointer = Endpointer(0.5, 0, 200)
    run(endpointer, [QUIET] * 10)
    endpointer.backdate(4 * FRAME)
    assert run(endpointer, [LOUD, QUIET]) == []
    # A later call with a later sample does not replace the first.
    endpointer.backdate(11 * FRAME)
    assert run(endpointer, [LOUD, LOUD]) == [SpeechBegan(4 * FRAME)]


def test_when_speech_does_not_begin_soon_then_it_does_not_reach_back() -> None:
    endpointer = Endpointer(0.5, 0, 200)
    run(endpointer, [QUIET] * 10)
    endpointer.backdate(4 * FRAME)
    later = MAX_BACKDATED // FRAME
    assert run(endpointer, [QUIET] * later + [LOUD, LOUD]) == [SpeechBegan((10 + later) * FRAME)]


def test_when_a_turn_has_begun_then_the_next_does_not_reach_back_into_it() -> None:
    endpointer = Endpointer(0.5, 0, 64)
    run(endpointer, [QUIET] * 4)
    endpointer.backdate(2 * FRAME)
    changes = run(endpointer, [LOUD, LOUD, QUIET, QUIET, LOUD, LOUD])
    assert [c.sample for c in changes if isinstance(c, SpeechBegan)] == [2 * FRAME, 8 * FRAME]


def test_when_a_pause_has_a_silence_of_its_own_then_only_that_pause_is_shorter() -> None:
    endpointer = Endpointer(0.5, 0, 3200)
    run(endpointer, [LOUD] * 4 + [QUIET] * 4)
    endpointer.end_after(192)
    assert run(endpointer, [QUIET] * 2) == [SpeechEnded(10 * FRAME, 4 * FRAME)]
    assert run(endpointer, [LOUD] * 4 + [QUIET] * 50)[-1] == SpeechPaused(14 * FRAME)
    # Speech has cancelled the earlier `end_after`.
    endpointer.end_after(1920)
    assert run(endpointer, [LOUD]) == [SpeechResumed(64 * FRAME)]
    assert not [c for c in run(endpointer, [QUIET] * 70) if isinstance(c, SpeechEnded)]
    # Outside a pause the call is a no-op.
    other = Endpointer(0.5, 0, 3200)
    other.end_after(32)
    run(other, [LOUD] * 3)
    other.end_after(32)
    assert run(other, [QUIET] * 20) == [SpeechPaused(3 * FRAME)]


def test_when_the_speaker_has_paused_for_longer_then_only_the_open_turn_waits_longer() -> None:
    endpointer = Endpointer(0.5, 0, 320)
    endpointer.be_patient(1000)
    assert run(endpointer, [LOUD] * 4 + [QUIET] * 10)[-1] == SpeechEnded(14 * FRAME, 4 * FRAME)
    run(endpointer, [LOUD] * 4)
    # 412 ms are 13 frames.
    endpointer.be_patient(300)
    assert run(endpointer, [QUIET] * 13)[-1] == SpeechEnded(31 * FRAME, 18 * FRAME)
    run(endpointer, [LOUD] * 4)
    # At most twice the configured silence.
    endpointer.be_patient(5000)
    assert run(endpointer, [QUIET] * 20)[-1] == SpeechEnded(55 * FRAME, 35 * FRAME)
    # A shorter pause changes nothing.
    run(endpointer, [LOUD] * 4)
    endpointer.be_patient(0)
    assert run(endpointer, [QUIET] * 10)[-1] == SpeechEnded(69 * FRAME, 59 * FRAME)


def test_when_flushed_then_an_open_turn_ends_where_speech_ended() -> None:
    endpointer = Endpointer(0.5, 0, 1000)
    run(endpointer, [LOUD] * 4 + [QUIET] * 2)
    assert endpointer.flush() == [SpeechEnded(6 * FRAME, 4 * FRAME)]
    assert endpointer.flush() == []


@given(st.lists(st.floats(0, 1), max_size=400), st.integers(0, 500), st.integers(32, 2000))
def test_starts_and_stops_alternate_and_times_never_go_back(
    probabilities: list[float], prefix: int, silence: int
) -> None:
    endpointer = Endpointer(0.5, prefix, silence)
    open_turn, last = False, 0
    for change in run(endpointer, probabilities) + endpointer.flush():
        match change:
            case SpeechBegan(sample):
                assert not open_turn
                assert sample >= last
                open_turn, last = True, sample
            case SpeechEnded(sample, speech_end):
                assert open_turn
                assert last <= speech_end <= sample
                open_turn, last = False, sample
            case SpeechPaused() | SpeechResumed():
                assert open_turn
    assert not open_turn
