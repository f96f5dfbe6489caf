"""Sentences of a voice on another server: ahead of need, word times by the sound, and a voice that breaks off."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.contracts import ResponseAudio, SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.errors import AntiphonError, RemoteError
from antiphon.events.words import Word
from antiphon.pipelines.sentences import DUE_S, MAX_FAILURES, speak_sentences

RATE_HZ, WORD_S, LIMIT_S = 8000, 0.25, 10
TONE = np.sin(np.arange(round(RATE_HZ * WORD_S)) / 2).astype(np.float32) / 2


class Voice:
    """Speaks each word for WORD_S. The first `!dies` ends a text within it, each `!fails` before it.

    `log`: the texts that began and ended. `gate`: awaited before each word.
    """

    def __init__(self, texts_ahead: int = 1) -> None:
        profile = SynthesizerProfile("voice", RATE_HZ, ("one",), (), (1.0, 1.0), word_times=False)
        self.profile = replace(profile, texts_ahead=texts_ahead)
        self.log: list[str] = []
        self.has_died = False
        self.gate = asyncio.Semaphore(1 << 20)

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.log.append(f"begin {text}")
        try:
            if "!fails" in text:
                raise RemoteError("it failed")
            for word in text.split():
                await self.gate.acquire()
                if word == "!dies" and not self.has_died:
                    self.has_died = True
                    raise RemoteError("it died")
                yield SpeechChunk(TONE)
        finally:
            self.log.append(f"end {text}")


class Left:
    """The audio that is left for a listener with its own clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.playback = PlaybackClock(lambda: self.now_s)
        self.num_waiting = 0


class Taken:
    """What a response gets: its seconds of audio, and its words with the seconds of audio before each."""

    def __init__(self) -> None:
        self.audio_s = 0.0
        self.words: list[tuple[Word, float]] = []
        self.gate = asyncio.Semaphore(1 << 20)

    async def put(self, chunk: object) -> None:
        assert isinstance(chunk, ResponseAudio)
        await self.gate.acquire()
        self.words += [(word, self.audio_s) for word in chunk.words]
        self.audio_s += len(chunk.pcm) / RATE_HZ

    @property
    def text(self) -> str:
        return " ".join(word.text for word, _ in self.words)


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


async def sent(*sentences: str) -> AsyncGenerator[str, None]:
    for sentence in sentences:
        yield sentence


def spoken(voice: Voice, taken: Taken, *sentences: str) -> AntiphonError | None:
    """Speak sentences. Returns the error that is raised after the last one."""

    async def main() -> AntiphonError | None:
        left = Left()
        left.num_waiting = len(sentences)
        try:
            await speak_sentences(voice, VoiceOptions("one"), sent(*sentences), taken.put, left)
        except AntiphonError as error:
            return error
        finally:
            assert left.num_waiting == 0
            assert len(voice.log) % 2 == 0
        return None

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_the_next_sentence_is_spoken_while_this_one_is_taken_and_no_further_one() -> None:
    voice, taken = Voice(), Taken()

    async def main() -> None:
        taken.gate = asyncio.Semaphore(0)
        speaking = asyncio.create_task(
            speak_sentences(voice, VoiceOptions("one"), sent("One two.", "Three.", "Four."), taken.put, Left())
        )
        await until(lambda: len(voice.log) == 4)
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(voice.log) == ["begin One two.", "begin Three.", "end One two.", "end Three."]
        for _ in range(20):
            taken.gate.release()
        await speaking
        assert taken.text == "One two. Three. Four."

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_cancelling_ends_the_sentence_and_the_one_ahead() -> None:
    voice, taken = Voice(), Taken()

    async def main() -> None:
        voice.gate = asyncio.Semaphore(0)
        speaking = asyncio.create_task(
            speak_sentences(voice, VoiceOptions("one"), sent("One two.", "Three."), taken.put, Left())
        )
        await until(lambda: len(voice.log) == 2)
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        assert sorted(voice.log) == ["begin One two.", "begin Three.", "end One two.", "end Three."]

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_sentence_that_breaks_off_is_continued_with_its_remaining_words() -> None:
    voice, taken = Voice(), Taken()
    # The words are as long as their audio is, by the pace of speech.
    assert spoken(voice, taken, "aaa bbb ccc !dies ddd.", "Eee.") is None
    assert [entry for entry in voice.log if entry.startswith("begin")] == [
        "begin aaa bbb ccc !dies ddd.",
        "begin Eee.",
        "begin !dies ddd.",
    ]
    assert taken.text == "aaa bbb ccc !dies ddd. Eee."
    times = [word.end_s for word, _ in taken.words]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(taken.audio_s, abs=0.05)


def test_a_sentence_that_is_not_spoken_fails_the_response_at_its_end_only() -> None:
    voice, taken = Voice(), Taken()
    error = spoken(voice, taken, "One.", "!fails two.", "Three.")
    assert isinstance(error, RemoteError)
    assert taken.text == "One. Three."


def test_a_voice_that_fails_again_and_again_is_not_asked_for_the_rest() -> None:
    voice, taken = Voice(), Taken()
    error = spoken(voice, taken, *(f"!fails {k}." for k in range(6)))
    assert isinstance(error, RemoteError)
    asked = [entry for entry in voice.log if entry.startswith("begin")]
    # The next sentence was begun ahead.
    assert MAX_FAILURES <= len(asked) <= MAX_FAILURES + 1


def test_words_get_their_times_before_they_are_played_even_if_the_voice_stalls() -> None:
    voice, taken, left = Voice(), Taken(), Left()

    async def main() -> None:
        voice.gate = asyncio.Semaphore(8)
        text = "aaa bbb ccc ddd eee fff ggg hhh iii jjj"
        speaking = asyncio.create_task(speak_sentences(voice, VoiceOptions("one"), sent(text), taken.put, left))
        await until(lambda: taken.audio_s > 7.5 * WORD_S)
        # The times of later words wait for the end of the sentence.
        assert len(taken.words) <= DUE_S * 13 / 3
        left.now_s = 1.0
        await until(lambda: sum(word.end_s <= left.now_s for word, _ in taken.words) >= 4)
        for _ in range(2):
            voice.gate.release()
        await speaking
        assert taken.text == text
        times = [word.end_s for word, _ in taken.words]
        assert times == sorted(times)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


class Recorded:
    """A voice whose word times are known to the test only. Pauses between words are of random lengths."""

    def __init__(self, seed: int, texts_ahead: int) -> None:
        profile = SynthesizerProfile("recorded", RATE_HZ, ("one",), (), (1.0, 1.0), word_times=False)
        self.profile = replace(profile, texts_ahead=texts_ahead)
        self.chance = random.Random(seed)
        self.ends_s: list[float] = []
        self.num_samples = 0

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        self.num_samples += RATE_HZ // 5
        yield SpeechChunk(np.zeros(RATE_HZ // 5, np.float32))
        for word in text.split():
            sound = np.resize(TONE, round(RATE_HZ * 0.075 * len(word) * self.chance.uniform(0.8, 1.25)))
            pause: Pcm = np.zeros(round(RATE_HZ * self.chance.choice((0.0, 0.0, 0.0, 1.2))), np.float32)
            self.ends_s.append((self.num_samples + len(sound)) / RATE_HZ)
            self.num_samples += len(sound) + len(pause)
            yield SpeechChunk(np.concatenate((sound, pause)))


@pytest.mark.parametrize("texts_ahead", [0, 1])
def test_what_was_heard_is_known_within_a_word(texts_ahead: int) -> None:
    """The words of 50 cuts at random moments, by the sound of a voice that tells no word times."""
    near, chance = 0, random.Random(3)
    for k in range(50):
        voice, taken = Recorded(k, texts_ahead), Taken()
        sentences = ["The quick brown fox jumps over it again and again.", "A dog is lazy, and sleeps on until noon."]

        async def main(voice: Recorded = voice, taken: Taken = taken, said: list[str] = sentences) -> None:
            async with aclosing(sent(*said)) as texts:
                await speak_sentences(voice, VoiceOptions("one"), texts, taken.put, Left())

        asyncio.run(main())
        assert taken.text == " ".join(sentences)
        cut_s = chance.uniform(0, taken.audio_s)
        heard = sum(word.end_s <= cut_s for word, _ in taken.words)
        near += abs(heard - sum(end_s <= cut_s for end_s in voice.ends_s)) <= 1
    assert near >= 49
