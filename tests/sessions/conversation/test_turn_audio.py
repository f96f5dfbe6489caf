"""The audio of turns, for a model that takes audio."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from antiphon.contracts import AudioPart, ImagePart
from antiphon.events.conversation import ContentPart, Item
from antiphon.events.transcription import SpeechStarted, TranscriptDone, TurnCleared, TurnCommitted
from antiphon.sessions.conversation.history import IMAGE_GONE, ConversationHistory
from antiphon.sessions.conversation.turn_audio import (
    KEPT_AUDIO_S,
    KEPT_IMAGES,
    MAX_AUDIO_S,
    MAX_IMAGES,
    MAX_TURN_S,
    TurnAudio,
    drop_old_media,
)
from antiphon.vision.images import EncodedImage


def feed(audio: TurnAudio, seconds: float, *, from_s: float = 0) -> None:
    """Feed audio whose samples are the time since the start, in hours; `from_s`: seconds that were fed before."""
    whole = ((from_s * 16_000 + np.arange(int(seconds * 16_000))) / (16_000 * 3600)).astype(np.float32)
    for at in range(0, len(whole), 3_200):
        asyncio.run(audio.append_audio(whole[at : at + 3_200]))


def fed(seconds: float) -> TurnAudio:
    audio = TurnAudio()
    feed(audio, seconds)
    return audio


def seconds(part: AudioPart) -> tuple[float, float]:
    """Return the part's start and length in seconds."""
    return round(float(part.pcm[0]) * 3600, 0), round(len(part.pcm) / 16_000, 3)


def done(turn: int) -> TranscriptDone:
    return TranscriptDone(turn, "Hello.", "Hello.", (), "en", 1.0, 0, 0)


def test_when_a_turn_ends_then_its_audio_is_from_its_start_to_just_after_its_speech() -> None:
    audio = fed(9)
    audio.follow(SpeechStarted(0, 2_000))
    # Up to the end of speech and a little more, or to the turn's end if the user still spoke.
    assert seconds(audio.ended_turn(TurnCommitted(0, 2_000, 6_500, 6_000))) == (2, 4.1)
    audio.follow(SpeechStarted(1, 2_000))
    assert seconds(audio.ended_turn(TurnCommitted(1, 2_000, 6_500))) == (2, 4.6)


def test_when_the_guessed_pause_ends_the_turn_then_guess_and_turn_are_the_same_audio() -> None:
    audio = fed(5)
    audio.follow(SpeechStarted(3, 1_000))
    guess = audio.paused_turn(3, 4_700)
    assert seconds(guess) == (1, 3.8)
    feed(audio, 0.5, from_s=5)
    committed = TurnCommitted(3, 1_000, 5_400, 4_700)
    audio.follow(committed)
    assert audio.ended_turn(committed) is guess
    # A guess may be used after the turn has ended.
    assert audio.paused_turn(3, 4_700) is guess
    audio.follow(done(3))
    assert not audio.open_turns
    # Another pause ended it: the turn is longer than the guess.
    audio.follow(SpeechStarted(4, 1_000))
    early = audio.paused_turn(4, 3_000)
    later = audio.ended_turn(TurnCommitted(4, 1_000, 5_400, 4_700))
    assert seconds(early) == (1, 2.1)
    assert seconds(later) == (1, 3.8)


def test_when_the_client_commits_a_turn_then_its_audio_begins_where_the_last_turn_ended() -> None:
    audio = fed(9)
    first = TurnCommitted(0, 0, 4_000)
    assert seconds(audio.paused_turn(0, 2_000)) == (0, 2.1)
    assert seconds(audio.ended_turn(first)) == (0, 4.1)
    audio.follow(first)
    audio.follow(done(0))
    assert seconds(audio.paused_turn(1, 6_000)) == (4, 2.1)
    assert seconds(audio.ended_turn(TurnCommitted(1, 4_000, 8_000))) == (4, 4.1)
    audio.follow(TurnCleared())
    feed(audio, 2, from_s=9)
    assert seconds(audio.paused_turn(2, 10_500)) == (9, 1.6)


def test_when_much_audio_has_come_then_only_the_last_of_it_is_held() -> None:
    audio = fed(MAX_TURN_S + 30)
    # A turn that is longer than the kept audio gets all of it.
    part = audio.ended_turn(TurnCommitted(0, 0, (MAX_TURN_S + 30) * 1000))
    assert len(part.pcm) <= (MAX_TURN_S + 1) * 16_000
    start, length = seconds(part)
    assert start == pytest.approx(30, abs=1)
    assert length == pytest.approx(MAX_TURN_S, abs=1)
    # None of its audio is left.
    assert len(audio.ended_turn(TurnCommitted(1, 0, 20_000)).pcm) == 0


def test_when_audio_is_louder_than_full_scale_then_it_is_clipped() -> None:
    audio = TurnAudio()
    asyncio.run(audio.append_audio(np.array([1.3, -1.3, 0.5], np.float32)))
    np.testing.assert_allclose(audio.ended_turn(TurnCommitted(0, 0, 1)).pcm, [1, -1, 0.5], atol=1e-4)


def test_when_turns_keep_too_much_audio_then_that_of_the_oldest_is_dropped_at_once() -> None:
    minute = np.zeros(60 * 16_000, np.float32)
    items = [Item(str(i), parts=[ContentPart("input_audio", "said", media=AudioPart(minute))]) for i in range(11)]
    conversation = ConversationHistory()
    conversation.restore(items[:10])
    drop_old_media(conversation, items[9])
    assert all(i.parts[0].media for i in items[:10])
    before = conversation.num_bytes
    conversation.add(items[10])
    drop_old_media(conversation, items[10])
    assert conversation.num_bytes < before * 0.6
    left = [i.parts[0].media is not None for i in items]
    assert left == [False] * 6 + [True] * 5
    assert (MAX_AUDIO_S, KEPT_AUDIO_S) == (600, 300)


def test_when_there_are_too_many_images_then_the_oldest_are_dropped() -> None:
    items = [
        Item(str(i), parts=[ContentPart("input_image", media=ImagePart(EncodedImage(b"")))])
        for i in range(MAX_IMAGES + 1)
    ]
    conversation = ConversationHistory()
    conversation.restore(items[:-1])
    drop_old_media(conversation, items[-2])
    assert all(i.parts[0].media for i in items)
    conversation.add(items[-1])
    drop_old_media(conversation, items[-1])
    gone = len(items) - KEPT_IMAGES
    assert [i.parts[0].text for i in items] == [IMAGE_GONE] * gone + [""] * KEPT_IMAGES
    assert all((i.parts[0].media is None) == (n < gone) for n, i in enumerate(items))


def test_after_its_first_window_a_turn_that_continues_is_given_every_second() -> None:
    async def main() -> list[float]:
        audio, found = TurnAudio(window_ms=2500), list[float]()
        for _ in range(85):
            await audio.append_audio(np.zeros(1_600, np.float32))
            if part := audio.growing_turn(detected=False):
                found.append(len(part.pcm) / 16_000)
        return found

    # Windows are complete at 2.5, 5 and 7.5 s.
    assert asyncio.run(main()) == [2.6, 3.6, 4.6, 5.1, 6.1, 7.1, 7.6]
