"""The player of responses: frames of 20 ms, and how much of each item was heard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.events.conversation import ContentPart, ContentPartDone, ContentPosition, ResponseAudioDelta
from antiphon.events.playback import PlaybackStarted, PlaybackStopped
from antiphon.transports.player import ResponsePlayer, padded

RATE_HZ = 48_000


def at(item: str, response: str = "resp_1") -> ContentPosition:
    return ContentPosition(response, item, 0)


def tone(seconds: float) -> Pcm:
    return np.full(int(24_000 * seconds), 0.5, np.float32)


def done(item: str, response: str = "resp_1") -> ContentPartDone:
    return ContentPartDone(at(item, response), ContentPart("output_audio"))


def test_when_playback_is_silenced_then_what_was_played_is_known_to_the_frame() -> None:
    reported: list[Any] = []
    player = ResponsePlayer(RATE_HZ)
    player.attach(reported.append)
    assert not len(player.take())
    player.send(ResponseAudioDelta(at("a"), tone(1.0), 24_000))
    for _ in range(25):
        assert len(player.take()) == player.frame_samples == 960
    assert reported == [PlaybackStarted("resp_1")]
    assert player.silence() == [(at("a"), 500)]
    # Further audio of this item is not played, but the next answer is.
    player.send(ResponseAudioDelta(at("a"), tone(1.0), 24_000))
    assert not len(player.take())
    player.send(done("a"))
    player.send(ResponseAudioDelta(at("b", "resp_2"), tone(0.5), 24_000))
    player.send(done("b", "resp_2"))
    num_samples = 0
    while player.has_frame:
        num_samples += len(player.take())
    assert num_samples / RATE_HZ == pytest.approx(0.5, abs=0.01)
    assert reported[1:] == [PlaybackStarted("resp_2"), PlaybackStopped("resp_2")]
    assert player.silence() == []
    assert player.is_idle


def test_when_an_unfinished_item_was_played_then_it_is_cut_where_it_is() -> None:
    player = ResponsePlayer(RATE_HZ)
    player.send(ResponseAudioDelta(at("a"), tone(0.2), 24_000))
    for _ in range(40):
        player.take()
    ((place, heard_ms),) = player.silence()
    assert place == at("a")
    assert heard_ms == pytest.approx(200, abs=40)


def test_when_playing_is_held_then_it_goes_on_from_the_very_sample() -> None:
    player = ResponsePlayer(RATE_HZ)
    ramp = np.linspace(-0.5, 0.5, RATE_HZ, dtype=np.float32)
    player.send(ResponseAudioDelta(at("a"), ramp, RATE_HZ))
    before = [player.take() for _ in range(3)]
    player.hold(True)
    assert not player.has_frame
    assert not any(len(player.take()) for _ in range(5))
    player.hold(False)
    after = [player.take() for _ in range(3)]
    whole = np.concatenate(before + after)
    expected = (ramp[: len(whole)] * 32767).astype(np.int16)
    assert np.abs(whole.astype(int) - expected).max() <= 2
    # The response was cut while it was held. Only what was played counts as heard, and new audio plays at once.
    player.hold(True)
    assert player.silence() == [(at("a"), 120)]
    player.send(ResponseAudioDelta(at("next"), ramp, RATE_HZ))
    assert player.take().any()


def test_when_a_response_lags_then_no_frame_is_ready_and_one_that_is_due_is_padded() -> None:
    player = ResponsePlayer(8000)
    player.send(ResponseAudioDelta(at("a"), np.full(100, 0.5, np.float32), 8000))
    assert not player.has_frame
    player.send(ResponseAudioDelta(at("a"), np.full(100, 0.5, np.float32), 8000))
    assert player.has_frame
    assert len(player.take()) == 160
    late = padded(player.take(), 160)
    assert (len(late), np.count_nonzero(late)) == (160, 40)


def test_with_marks_only_what_was_reached_counts_as_heard() -> None:
    reported: list[Any] = []
    player = ResponsePlayer(8000, by_marks=True)
    player.attach(reported.append)
    player.send(ResponseAudioDelta(at("a"), np.full(8000, 0.5, np.float32), 8000))
    marks = []
    for _ in range(4):
        for _ in range(5):
            player.take()
        marks.append(player.mark())
    assert (reported, player.awaits_marks) == ([], True)
    # The second mark covers the first, whose echo may be lost.
    player.reached(marks[1])
    assert reported == [PlaybackStarted("resp_1")]
    player.reached(marks[0])
    assert player.silence() == [(at("a"), 200)]
    # The carrier returns the marks that were in its buffer. They are of the old audio, and count for nothing.
    player.send(done("a"))
    player.send(ResponseAudioDelta(at("b", "resp_2"), np.full(1600, 0.5, np.float32), 8000))
    player.reached(marks[2])
    player.reached(marks[3])
    assert reported == [PlaybackStarted("resp_1")]
    assert player.silence() == [(at("b", "resp_2"), 0)]


def test_when_the_last_mark_is_reached_then_the_response_has_ended() -> None:
    reported: list[Any] = []
    player = ResponsePlayer(8000, by_marks=True)
    player.attach(reported.append)
    player.send(ResponseAudioDelta(at("a"), np.full(200, 0.5, np.float32), 8000))
    player.send(done("a"))
    while player.has_frame:
        player.take()
    name = player.mark()
    assert not player.is_idle
    player.reached(name)
    assert reported == [PlaybackStarted("resp_1"), PlaybackStopped("resp_1")]
    assert player.is_idle


def test_audio_of_no_response_is_played_and_reported_as_none() -> None:
    reported: list[Any] = []
    player = ResponsePlayer(8000)
    player.attach(reported.append)
    player.play(np.full(200, 0.5, np.float32))
    assert [len(player.take()), len(player.take()), reported] == [160, 40, []]
    assert player.is_idle
