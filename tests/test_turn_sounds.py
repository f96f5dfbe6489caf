"""The sound of turns, as a partner that hears is given it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from antiphon.adapters.base import SoundPart
from antiphon.events import GuessDropped, SpeechStarted, TranscriptGuess, TurnCommitted
from antiphon.talk_events import Item, Part
from antiphon.turn_sounds import LEFT_S, LONGEST_S, MOST_S, TurnSounds, bound


def fed(seconds: float) -> TurnSounds:
    """Sound whose samples say when they came, in hours."""
    sounds = TurnSounds()
    whole = (np.arange(int(seconds * 16_000)) / (16_000 * 3600)).astype(np.float32)
    for at in range(0, len(whole), 3_200):
        asyncio.run(sounds.hear(whole[at : at + 3_200]))
    return sounds


def seconds(part: SoundPart) -> tuple[float, float]:
    """From when to when it is."""
    return round(float(part.pcm[0]) * 3600, 0), round(len(part.pcm) / 16_000, 3)


def test_a_turn_has_its_sound() -> None:
    sounds = fed(9)
    sounds.take(SpeechStarted(0, 2_000))
    assert sounds.guess(0) is None
    assert seconds(sounds.of(TurnCommitted(0, 2_000, 6_500))) == (2, 4.5)


def test_what_was_guessed_is_the_turns_where_the_guess_held() -> None:
    sounds = fed(5)
    sounds.take(SpeechStarted(3, 1_000))
    sounds.take(TranscriptGuess(3, "Hello"))
    guess = sounds.guess(3)
    assert guess
    assert seconds(guess) == (1, 4)
    # Some silence more; the same turn.
    asyncio.run(sounds.hear(np.zeros(8_000, np.float32)))
    assert sounds.of(TurnCommitted(3, 1_000, 5_400)) is guess
    sounds.take(SpeechStarted(4, 1_000))
    sounds.take(TranscriptGuess(4, "Hello"))
    sounds.take(GuessDropped(4))
    assert sounds.guess(4) is None
    assert seconds(sounds.of(TurnCommitted(4, 1_000, 5_400))) == (1, 4.4)


def test_what_is_held_is_bounded() -> None:
    sounds = fed(LONGEST_S + 30)
    assert sum(map(len, sounds._held)) <= (LONGEST_S + 1) * 16_000
    start, length = seconds(sounds.of(TurnCommitted(0, 0, (LONGEST_S + 30) * 1000)))
    assert start == pytest.approx(30, abs=1)
    assert length == pytest.approx(LONGEST_S, abs=1)
    # Nothing of it is left.
    assert len(sounds.of(TurnCommitted(1, 0, 20_000)).pcm) == 0


def test_the_oldest_turns_sound_goes_in_one_sweep() -> None:
    minute = np.zeros(60 * 16_000, np.float32)
    items = [Item(str(i), parts=[Part("input_audio", "said", media=SoundPart(minute))]) for i in range(11)]
    bound(items[:10])
    assert all(i.parts[0].media for i in items[:10])
    bound(items)
    left = [i.parts[0].media is not None for i in items]
    assert left == [False] * 6 + [True] * 5
    assert (MOST_S, LEFT_S) == (600, 300)
