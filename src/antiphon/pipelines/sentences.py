"""Speaks the sentences of a response one after the other, with times for their words.

Some voices speak the next sentence while the audio of this one is taken (`SynthesizerProfile.texts_ahead`), so that
there is no gap between them. A sentence that fails after its first sound is continued with its remaining words, by
another server if the voice has one. A voice that fails ends neither the text nor the response before its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.audio.quiet import spread_over_sound
from antiphon.contracts import ResponseAudio, SpeechChunk, Synthesizer, Urgency, VoiceOptions
from antiphon.errors import AntiphonError, ModelError, Refused, RemoteError, RemoteProtocolError
from antiphon.events.words import Word
from antiphon.pipelines.merge import PutChunk
from antiphon.text.word_timing import WordPacer

log = logging.getLogger(__name__)

# Characters of a response that are used to detect the language of the next text.
MAX_SPOKEN_BEFORE = 300
# Chunks of a sentence that is spoken ahead that wait until they are taken: half a minute of a voice on another server.
MAX_CHUNKS = 64
# Words are given their final times when the audio of their sentence is complete, or DUE_S seconds before they are
# played.
DUE_S = 0.5
# After MAX_FAILURES sentences in a row that were not spoken, the rest of the response is text only.
MAX_FAILURES = 2
NO_AUDIO: Pcm = np.zeros(0, np.float32)


class AudioLeft(Protocol):
    """How much audio is left for the listener. `num_waiting`: the sentences that have not been spoken yet."""

    playback: PlaybackClock
    num_waiting: int


async def speak_sentences(
    synthesizer: Synthesizer,
    voice: VoiceOptions,
    sentences: AsyncIterator[str],
    put: PutChunk,
    audio_left: AudioLeft,
) -> None:
    """Speak one sentence after the other. Word times continue from sentence to sentence, and are estimated if the voice
    has none.

    A sentence that fails stays in the response as text. After the last sentence, raises the voice's error if one
    failed, or ModelError if nothing was spoken because no voice speaks the language.
    """
    profile, at_s, num_failures = synthesizer.profile, 0.0, 0
    failure: AntiphonError | None = None
    unspoken: RemoteProtocolError | None = None

    def begin(text: str, before: str) -> _Sentence:
        options = replace(voice, spoken_before=before)
        is_over = num_failures == MAX_FAILURES
        chunks = _nothing() if is_over else synthesizer.speak(text, options, lambda: Urgency.FINAL)
        return _SentenceAhead(text, chunks) if profile.texts_ahead else _Sentence(text, chunks)

    async with aclosing(_begun(sentences, begin, profile.texts_ahead)) as begun:
        async for sentence in begun:
            if num_failures == MAX_FAILURES:
                audio_left.num_waiting -= 1
                continue
            speaker = _SentenceSpeaker(profile.sample_rate_hz, profile.word_times, put, audio_left.playback, at_s)
            try:
                rest = await speaker.speak(sentence)
                if rest:
                    again = begin(rest, sentence.text)
                    try:
                        await speaker.speak(again, is_last=True)
                    finally:
                        await again.end()
                num_failures = 0
            except RemoteProtocolError as error:
                # The sentence stays in the response as text.
                if error.code == "language_not_spoken":
                    unspoken = error
                    log.warning("a sentence of a response is not spoken: %s", error.message)
                else:
                    log.info("a sentence of a response is not spoken: %s", error.code)
            except (ModelError, Refused) as error:
                log.warning("a sentence of a response is not spoken: %s", error)
                failure, num_failures = error, num_failures + 1
            finally:
                audio_left.num_waiting -= 1
            at_s = speaker.at_s
    if failure:
        raise failure
    if unspoken and not at_s:
        raise ModelError(unspoken.message)


async def _nothing() -> AsyncGenerator[SpeechChunk, None]:
    return
    yield


class _Sentence:
    """A sentence that is spoken while its chunks are taken."""

    def __init__(self, text: str, chunks: AsyncGenerator[SpeechChunk, None]) -> None:
        self.text = text
        self._chunks = chunks

    async def next(self, timeout_s: float | None = None) -> SpeechChunk | None:
        """Return the next chunk, or None at the end. Raises the voice's error.

        `timeout_s`: raise TimeoutError after it. A voice in this process, which speaks without pauses, ignores it.
        """
        return await anext(self._chunks, None)

    async def end(self) -> None:
        """Stop speaking, and wait until the voice has stopped."""
        await self._chunks.aclose()


class _SentenceAhead(_Sentence):
    """A sentence that is spoken in a task of its own, from construction until its audio is complete or `end`."""

    def __init__(self, text: str, chunks: AsyncGenerator[SpeechChunk, None]) -> None:
        super().__init__(text, chunks)
        # None marks the end. Bound: MAX_CHUNKS. When the queue is full, the voice waits.
        self._queue: asyncio.Queue[SpeechChunk | Exception | None] = asyncio.Queue(MAX_CHUNKS)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await self._queue.put(chunk)
            await self._queue.put(None)
        except Exception as error:
            await self._queue.put(error)

    async def next(self, timeout_s: float | None = None) -> SpeechChunk | None:
        """Return the next chunk, or None at the end. See `_Sentence.next`."""
        found = await (self._queue.get() if timeout_s is None else asyncio.wait_for(self._queue.get(), timeout_s))
        if isinstance(found, Exception):
            raise found
        return found

    async def end(self) -> None:
        """Stop speaking, and wait until the voice has stopped."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def _begun(
    sentences: AsyncIterator[str], begin: Callable[[str, str], _Sentence], texts_ahead: int
) -> AsyncGenerator[_Sentence, None]:
    """Yield the sentences in order. Up to `texts_ahead` of those that follow are already spoken. Ends each after it."""
    if not texts_ahead:
        before = ""
        async for text in sentences:
            sentence = begin(text, before)
            try:
                yield sentence
            finally:
                await sentence.end()
            before = _joined(before, text)
        return
    waiting: asyncio.Queue[_Sentence | None] = asyncio.Queue()
    room, under_way = asyncio.Semaphore(1 + texts_ahead), list[_Sentence]()

    async def run() -> None:
        before = ""
        async for text in sentences:
            await room.acquire()
            under_way.append(begin(text, before))
            waiting.put_nowait(under_way[-1])
            before = _joined(before, text)
        waiting.put_nowait(None)

    # This uses asyncio tasks for the same reason as `side_by_side`.
    task = asyncio.create_task(run())
    try:
        while following := await waiting.get():
            yield following
            await following.end()
            under_way.remove(following)
            room.release()
    finally:
        task.cancel()
        for left in under_way:
            await left.end()
        await asyncio.gather(task, return_exceptions=True)


def _joined(before: str, text: str) -> str:
    return f"{before} {text}"[-MAX_SPOKEN_BEFORE:].lstrip()


class _SentenceSpeaker:
    """Puts the audio of one sentence into a response. `at_s`: the seconds of the response's audio so far."""

    def __init__(self, rate_hz: int, word_times: bool, put: PutChunk, playback: PlaybackClock, start_s: float) -> None:
        self._rate_hz, self._put, self._playback = rate_hz, put, playback
        self._pacer = None if word_times else WordPacer()
        # The response's second at which the pacer's audio begins, and that audio.
        self._start_s, self._pcm = start_s, list[Pcm]()
        self.at_s = start_s

    async def speak(self, sentence: _Sentence, *, is_last: bool = False) -> str:
        """Put the audio and the words of a sentence. Returns the words that are left if the voice broke off; else "".

        With `is_last`, raises the voice's error instead. Always raises the errors before the first sound.
        """
        pacer, begins_s = self._pacer, self.at_s
        if pacer:
            self._pacer = pacer = WordPacer()
            pacer.feed(sentence.text)
            self._start_s, self._pcm = begins_s, []
        try:
            while chunk := await self._next(sentence, pacer):
                length_s = len(chunk.pcm) / self._rate_hz
                self.at_s += length_s
                self._playback.add(length_s)
                words: Sequence[Word] = chunk.words
                if pacer:
                    self._pcm.append(chunk.pcm)
                    words = pacer.advance(length_s, self._due_s)
                if len(chunk.pcm) or words:
                    await self._put(ResponseAudio(chunk.pcm, self._shifted(words, begins_s)))
        except RemoteError:
            if self.at_s == begins_s or pacer is None:
                raise
            await self._put_words(pacer.advance(0.0))
            if is_last or not pacer.rest.strip():
                raise
            return pacer.rest.strip()
        if pacer:
            pcm = np.concatenate(self._pcm) if self._pcm else NO_AUDIO
            left = pcm[round(pacer.timed_s * self._rate_hz) :]
            spread = partial(spread_over_sound, pcm=left, rate_hz=self._rate_hz)
            await self._put_words(pacer.finish(spread if len(left) * 10 > self._rate_hz else None))
        return ""

    async def _next(self, sentence: _Sentence, pacer: WordPacer | None) -> SpeechChunk | None:
        """Return the next chunk. While it does not arrive, put the words that are about to be played."""
        while pacer and pacer.rest.strip():
            due_s = pacer.timed_s - self._due_s
            try:
                return await sentence.next(max(0.05, due_s))
            except TimeoutError:
                if words := pacer.advance(0.0, self._due_s):
                    await self._put_words(words)
                elif self._playback.left_s == 0:
                    break
        return await sentence.next()

    @property
    def _due_s(self) -> float:
        """The second of the sentence's audio up to which words get their times now."""
        return self.at_s - self._start_s - self._playback.left_s + DUE_S

    async def _put_words(self, words: Sequence[Word]) -> None:
        if words:
            await self._put(ResponseAudio(NO_AUDIO, self._shifted(words, self._start_s)))

    def _shifted(self, words: Sequence[Word], by_s: float) -> tuple[Word, ...]:
        return tuple(replace(w, start_s=by_s + w.start_s, end_s=by_s + w.end_s) for w in words)
