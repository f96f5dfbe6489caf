"""The audio of turns, as a model that hears is given it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from antiphon.contracts import AudioPart, ImagePart
from antiphon.events.conversation import ContentPart, Item
from antiphon.events.transcription import SpeechStarted, TranscriptDone, TurnCleared, TurnCommitted
from antiphon.sessions.conversation.history import IMAGE_GONE
from antiphon.sessions.conversation.turn_audio import (
    LEFT_IMAGES,
    LEFT_S,
    LONGEST_S,
    MOST_IMAGES,
    MOST_S,
    TurnAudio,
    bound,
)
from antiphon.vision.images import EncodedImage


def feed(sounds: TurnAudio, seconds: float, *, from_s: float = 0) -> None:
    """Audio whose samples are the time since the start, in hours; `from_s`: seconds that were fed before."""
    whole = ((from_s * 16_000 + np.arange(int(seconds * 16_000))) / (16_000 * 3600)).astype(np.float32)
    for at in range(0, len(whole), 3_200):
        asyncio.run(sounds.hear(whole[at : at + 3_200]))


def fed(seconds: float) -> TurnAudio:
    sounds = TurnAudio()
    feed(sounds, seconds)
    return sounds


def seconds(part: AudioPart) -> tuple[float, float]:
    """From when on, and for how long it is."""
    return round(float(part.pcm[0]) * 3600, 0), round(len(part.pcm) / 16_000, 3)


def done(turn: int) -> TranscriptDone:
    return TranscriptDone(turn, "Hello.", "Hello.", (), "en", 1.0, 0, 0)


def test_when_a_turn_ends_then_its_audio_is_from_its_start_to_just_after_its_speech() -> None:
    sounds = fed(9)
    sounds.take(SpeechStarted(0, 2_000))
    # Up to where it fell silent, and a little more; or to its end, where somebody still spoke.
    assert seconds(sounds.of(TurnCommitted(0, 2_000, 6_500, 6_000))) == (2, 4.1)
    sounds.take(SpeechStarted(1, 2_000))
    assert seconds(sounds.of(TurnCommitted(1, 2_000, 6_500))) == (2, 4.6)


def test_when_the_guessed_pause_ends_the_turn_then_guess_and_turn_are_the_same_audio() -> None:
    sounds = fed(5)
    sounds.take(SpeechStarted(3, 1_000))
    guess = sounds.guess(3, 4_700)
    assert seconds(guess) == (1, 3.8)
    feed(sounds, 0.5, from_s=5)
    committed = TurnCommitted(3, 1_000, 5_400, 4_700)
    sounds.take(committed)
    assert sounds.of(committed) is guess
    # A guess may be told after the turn has ended.
    assert sounds.guess(3, 4_700) is guess
    sounds.take(done(3))
    assert not sounds.open_turns
    # Another pause ended it: there was more.
    sounds.take(SpeechStarted(4, 1_000))
    early = sounds.guess(4, 3_000)
    later = sounds.of(TurnCommitted(4, 1_000, 5_400, 4_700))
    assert seconds(early) == (1, 2.1)
    assert seconds(later) == (1, 3.8)


def test_when_the_client_commits_a_turn_then_its_audio_begins_where_the_last_turn_ended() -> None:
    sounds = fed(9)
    first = TurnCommitted(0, 0, 4_000)
    assert seconds(sounds.guess(0, 2_000)) == (0, 2.1)
    assert seconds(sounds.of(first)) == (0, 4.1)
    sounds.take(first)
    sounds.take(done(0))
    assert seconds(sounds.guess(1, 6_000)) == (4, 2.1)
    assert seconds(sounds.of(TurnCommitted(1, 4_000, 8_000))) == (4, 4.1)
    sounds.take(TurnCleared())
    feed(sounds, 2, from_s=9)
    assert seconds(sounds.guess(2, 10_500)) == (9, 1.6)


def test_when_much_audio_has_come_then_only_the_last_of_it_is_held() -> None:
    sounds = fed(LONGEST_S + 30)
    # A turn that was all of it has whatever is held.
    part = sounds.of(TurnCommitted(0, 0, (LONGEST_S + 30) * 1000))
    assert len(part.pcm) <= (LONGEST_S + 1) * 16_000
    start, length = seconds(part)
    assert start == pytest.approx(30, abs=1)
    assert length == pytest.approx(LONGEST_S, abs=1)
    # Nothing of it is left.
    assert len(sounds.of(TurnCommitted(1, 0, 20_000)).pcm) == 0


def test_when_audio_is_louder_than_full_scale_then_it_is_clipped() -> None:
    sounds = TurnAudio()
    asyncio.run(sounds.hear(np.array([1.3, -1.3, 0.5], np.float32)))
    np.testing.assert_allclose(sounds.of(TurnCommitted(0, 0, 1)).pcm, [1, -1, 0.5], atol=1e-4)


def test_when_turns_keep_too_much_audio_then_that_of_the_oldest_is_dropped_at_once() -> None:
    minute = np.zeros(60 * 16_000, np.float32)
    items = [Item(str(i), parts=[ContentPart("input_audio", "said", media=AudioPart(minute))]) for i in range(11)]
    bound(items[:10])
    assert all(i.parts[0].media for i in items[:10])
    bound(items)
    left = [i.parts[0].media is not None for i in items]
    assert left == [False] * 6 + [True] * 5
    assert (MOST_S, LEFT_S) == (600, 300)


def test_when_there_are_too_many_images_then_the_oldest_are_dropped() -> None:
    items = [
        Item(str(i), parts=[ContentPart("input_image", media=ImagePart(EncodedImage(b"")))])
        for i in range(MOST_IMAGES + 1)
    ]
    bound(items[:-1])
    assert all(i.parts[0].media for i in items)
    bound(items)
    gone = len(items) - LEFT_IMAGES
    assert [i.parts[0].text for i in items] == [IMAGE_GONE] * gone + [""] * LEFT_IMAGES
    assert all((i.parts[0].media is None) == (n < gone) for n, i in enumerate(items))
