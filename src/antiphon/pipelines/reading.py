"""The stage before every voice, which converts written text into spoken text, and pause marks into silence."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import anyio.lowlevel
import numpy as np

from antiphon.contracts import LiveSynthesizer, SpeechChunk, Synthesizer, Urgency, VoiceOptions
from antiphon.events.words import Word
from antiphon.text.markup import pause_s, split_pauses
from antiphon.text.written import SaidWord, WrittenReader, is_heard, said_text, said_words

# Number of words that are converted before the event loop can run other tasks. They take some milliseconds.
WORDS_AT_ONCE = 64


class ReadingVoice:
    """A LiveSynthesizer that wraps `voice`. Its texts have no markup, but may have pause marks (`text/markup.py`).

    Word times are those of the written words. `speak_live` works only if `voice` has that method.
    """

    def __init__(self, voice: Synthesizer) -> None:
        self.voice = voice
        self.profile = voice.profile

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Speak a written text. A text without spoken words yields no samples. Raises the errors of the voice."""
        rate_hz, at_s = self.profile.sample_rate_hz, 0.0
        for part in split_pauses(text):
            chunks = self._paused(part) if pause_s(part) else self._spoken(part, options, urgency)
            start_s = at_s
            async with aclosing(chunks):
                async for chunk in chunks:
                    at_s += len(chunk.pcm) / rate_hz
                    words = (replace(w, start_s=w.start_s + start_s, end_s=w.end_s + start_s) for w in chunk.words)
                    yield replace(chunk, words=tuple(words))

    async def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        """Speak a text that is still being written. The voice gets each word when the next one has arrived."""
        async with aclosing(_said(texts, self._language(options))) as said:
            while True:
                part = _UntilPause(said)
                async with aclosing(cast(LiveSynthesizer, self.voice).speak_live(part, options)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                if not part.mark:
                    return
                async for chunk in self._paused(part.mark):
                    yield chunk

    async def _spoken(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        written: list[SaidWord] = []
        for word in said_words(text, self._language(options)):
            written.append(word)
            if not len(written) % WORDS_AT_ONCE:
                # A long text must not block the event loop.
                await anyio.lowlevel.checkpoint()
        said, times = said_text(written), _WrittenTimes(written)
        if is_heard(said):
            async with aclosing(self.voice.speak(said, options, urgency)) as chunks:
                async for chunk in chunks:
                    yield replace(chunk, words=tuple(times.of(chunk.words)))
        if self.profile.word_times and (rest := tuple(times.rest())):
            yield SpeechChunk(np.zeros(0, np.float32), rest)

    async def _paused(self, mark: str) -> AsyncGenerator[SpeechChunk, None]:
        yield SpeechChunk(np.zeros(round(pause_s(mark) * self.profile.sample_rate_hz), np.float32))

    def _language(self, options: VoiceOptions) -> str | None:
        languages = self.profile.languages_of(options.voice)
        return options.language or (languages[0] if len(languages) == 1 else None)

    @property
    def engines(self) -> tuple[Any, ...]:
        """The engines of the voice. Empty for a voice that runs in a lane."""
        return tuple(getattr(self.voice, "engines", ()))

    def close(self) -> None:
        """Close the voice, if it can be closed."""
        if close := getattr(self.voice, "close", None):
            close()


async def _said(texts: AsyncIterator[str], language: str | None) -> AsyncGenerator[str, None]:
    """Yield the spoken form of a text that arrives in pieces, and its pause marks as separate pieces."""
    reader = WrittenReader(language)
    async for text in texts:
        for part in split_pauses(text):
            if pause_s(part):
                yield reader.flush()
                yield part
            else:
                yield reader.feed(part)
    yield reader.flush()


class _UntilPause:
    """Iterates over the pieces of a text up to the next pause. After that, `mark` is the mark of this pause, or "" at
    the end of the text.
    """

    def __init__(self, said: AsyncIterator[str]) -> None:
        self._said = said
        self.mark = ""

    def __aiter__(self) -> _UntilPause:
        return self

    async def __anext__(self) -> str:
        while not self.mark:
            piece = await anext(self._said)
            if pause_s(piece):
                self.mark = piece
            elif piece:
                return piece
        raise StopAsyncIteration


class _WrittenTimes:
    """Gives written words the times of their spoken forms. Spoken words are matched to them by counting letters."""

    def __init__(self, words: Sequence[SaidWord]) -> None:
        self._words = iter([(w.written, w.said, len("".join(w.said.split()))) for w in words])
        self._next()
        # The number of letters of the current written word that were spoken, and the time at which they began.
        self._num_heard = 0
        self._start_s = self._at_s = 0.0

    def _next(self) -> None:
        self._current = next(self._words, None)

    def of(self, heard: Sequence[Word]) -> Iterator[Word]:
        """Yield the written words that end within these spoken words. A word without a spoken form takes no time."""
        for word in heard:
            yield from self._unsaid()
            if self._current is None:
                return
            written, said, num_chars = self._current
            self._start_s = self._start_s if self._num_heard else word.start_s
            self._num_heard, self._at_s = self._num_heard + len(word.text), word.end_s
            if written == said:
                # A voice may split the word further, for example into ideographs.
                yield word
            if self._num_heard >= num_chars:
                if written != said:
                    yield replace(word, text=written, start_s=self._start_s)
                self._num_heard = 0
                self._next()
                yield from self._unsaid()

    def rest(self) -> Iterator[Word]:
        """Yield the remaining written words, which have not ended within a spoken word."""
        while self._current:
            yield Word(self._current[0], self._at_s, self._at_s, 1.0)
            self._next()

    def _unsaid(self) -> Iterator[Word]:
        while self._current and not self._current[2]:
            yield Word(self._current[0], self._at_s, self._at_s, 1.0)
            self._next()
