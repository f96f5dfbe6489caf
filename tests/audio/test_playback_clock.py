"""The audio that is left to be played, while playback runs in real time, pauses and stops."""

from __future__ import annotations

from antiphon.audio.playback_clock import PlaybackClock


def test_audio_is_played_one_after_the_other_and_gaps_are_not_made_up_for() -> None:
    now = [100.0]
    clock = PlaybackClock(lambda: now[0])
    assert clock.ends_s is None
    assert clock.left_s == 0.0
    clock.add(2.0)
    clock.add(1.0)
    now[0] += 1.0
    assert clock.left_s == 2.0
    now[0] += 10.0
    assert clock.left_s == 0.0
    clock.add(1.0)
    assert clock.left_s == 1.0


def test_while_playback_is_on_hold_nothing_is_heard() -> None:
    now = [100.0]
    clock = PlaybackClock(lambda: now[0])
    clock.add(2.0)
    now[0] += 0.5
    for _ in range(2):
        clock.hold(True)
        now[0] += 3.0
    assert clock.left_s == 1.5
    clock.add(1.0)
    for _ in range(2):
        clock.hold(False)
        now[0] += 0.5
    assert clock.left_s == 1.5
    assert clock.now_s == 101.5


def test_what_was_stopped_is_not_heard_and_a_hold_is_over() -> None:
    now = [100.0]
    clock = PlaybackClock(lambda: now[0])
    clock.add(2.0)
    clock.hold(True)
    clock.stop()
    assert clock.left_s == 0.0
    clock.add(1.0)
    now[0] += 0.25
    assert clock.left_s == 0.75
