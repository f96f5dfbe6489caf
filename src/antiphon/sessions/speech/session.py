"""One live speech session: text arrives while it is being written, and the audio of its sentences is returned in order.

The session has one task, which puts audio into a queue that is bounded in bytes. It synthesizes the next sentence while
the current one is sent, and waits if the reader is slow. Cancelling empties the queue and ends the synthesis within one
chunk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import anyio
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler, from_pcm16
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.contracts import Synthesizer, Transcriber
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    ConfigureSpeech,
    ContinueSpeech,
    FlushText,
    SentenceAudio,
    SentenceDone,
    SentenceStarted,
    SpeechCommand,
    SpeechConfig,
    SpeechEvent,
    UtteranceDone,
)
from antiphon.events.words import Word
from antiphon.sessions.speech.render import speak
from antiphon.signals import Signal
from antiphon.text.markup import MarkupReader, without_pauses
from antiphon.text.sentences import SentenceSplitter

log = logging.getLogger(__name__)

# Maximum bytes of events that wait for a slow reader, 40 s of PCM. When it is reached, synthesis waits.
MAX_WAITING_BYTES = 2 << 20
# Maximum characters of text that wait to be spoken, about ten hours of speech. When it is reached, text is refused.
MAX_WAITING_CHARS = 1 << 19
# Maximum number of flushed utterances that wait to be spoken. When it is reached, text is refused.
MAX_WAITING_UTTERANCES = 1000
# Bytes of a sample of PCM16.
BYTES_PER_SAMPLE = 2
# Bytes that an event counts as, in addition to its audio.
EVENT_BYTES = 200


class _LiveText:
    """The text of an utterance that a synthesizer speaks while the text is being written. Iterating waits for more
    text.

    `on_read` is called with the number of characters that the synthesizer has read, or that will no longer be read.
    `text` is all the text so far, and `starved` is true while the synthesizer waits for text.
    """

    def __init__(self, on_read: Callable[[int], None]) -> None:
        self._on_read = on_read
        # The pieces of unread text. Bound: the session's MAX_WAITING_CHARS.
        self._unread: deque[str] = deque()
        self._is_complete = self._is_abandoned = False
        self._changed = Signal()
        self.has_words = False
        self.text, self.starved = "", False

    def feed(self, text: str) -> None:
        """Append text, which may end in the middle of a word."""
        if self._is_abandoned:
            self._on_read(len(text))
            return
        self._unread.append(text)
        self.text += text
        self.has_words = self.has_words or any(c.isalnum() for c in text)
        self._changed.notify()

    def abandon(self) -> None:
        """Drop the unread text and all text that follows, because the audio has ended."""
        self._is_abandoned = True
        self._on_read(sum(map(len, self._unread)))
        self._unread.clear()

    def complete(self) -> None:
        """End the text. The synthesizer finishes after it has read the rest."""
        self._is_complete = True
        self._changed.notify()

    def __aiter__(self) -> _LiveText:
        return self

    async def __anext__(self) -> str:
        while not self._unread:
            if self._is_complete:
                raise StopAsyncIteration
            self.starved = True
            await self._changed.wait()
        self.starved = False
        text = self._unread.popleft()
        self._on_read(len(text))
        return text


@dataclass(slots=True)
class _Utterance:
    """The text between two flushes."""

    # The number of the utterance, counted from 0 over the session.
    index: int
    # The session's configuration when the utterance began.
    config: SpeechConfig
    # Divides the text into sentences.
    splitter: SentenceSplitter
    # Removes markup from the text.
    markup: MarkupReader = field(default_factory=MarkupReader)
    # Number of characters that are not part of a sentence yet.
    num_pending: int = 0
    # Whether text has arrived, with or without words.
    has_text: bool = False
    # Sentences that wait to be spoken.
    sentences: deque[str] = field(default_factory=deque)
    # Whether the client has flushed it, so that no more text follows.
    is_complete: bool = False
    # Whether it was cancelled, after which none of its events is emitted.
    is_cancelled: bool = False
    # Number of sentences whose synthesis has begun, or that another session has spoken.
    num_started: int = 0
    # Number of sentences that another session has spoken.
    num_spoken: int = 0
    # Bytes of the next sentence's audio that another session has sent.
    num_sent: int = 0
    # The whole text, if it is spoken while it is being written, else None.
    live: _LiveText | None = None

    @property
    def says_nothing(self) -> bool:
        """Whether text has arrived, but no part of it was or will be spoken."""
        speaks_live = self.live is not None and (self.live.has_words or self.num_started > 0)
        return self.has_text and not self.sentences and not self.num_started and not speaks_live

    @property
    def live_to_start(self) -> _LiveText | None:
        """The live text, if it has a word and its synthesis has not begun, else None."""
        return self.live if self.live and self.live.has_words and not self.num_started else None

    @property
    def is_due(self) -> bool:
        """Whether text waits to be spoken, or the end of the utterance waits to be reported."""
        speaks_live = self.live is not None and self.live.has_words and not self.num_started
        return bool(self.sentences) or self.is_complete or speaks_live


class SpeechSession:
    """The utterances of one client. `handle` takes its commands and never waits. `next_event` returns the events.

    `run` has to run concurrently, in the same event loop. The caller owns `synthesizer` and `aligner`. `measure` is
    called with "first_sound" and the seconds from the start of a sentence to its first audio. If the voice gives no
    word times, `aligner` finds the words in its audio. Without an `aligner`, sentences of such a voice have no word
    times.

    `audio_s` is the number of seconds of audio made so far.
    """

    def __init__(
        self,
        synthesizer: Synthesizer,
        measure: Callable[[str, float], None] | None = None,
        aligner: Transcriber | None = None,
    ) -> None:
        self._synthesizer = synthesizer
        self._aligner = aligner
        self._measure = measure
        self._config = SpeechConfig()
        # Unfinished utterances, in order. The last of them may still get text.
        self._utterances: deque[_Utterance] = deque()
        self._open: _Utterance | None = None
        self._num_utterances = 0
        self._continued: ContinueSpeech | None = None
        self._listener = PlaybackClock(time.monotonic)
        self._speaking: anyio.CancelScope | None = None
        self._is_closed = self._has_ended = False
        self._changed = Signal()
        # Bound: MAX_WAITING_BYTES. When it is reached, `_emit` waits for the reader.
        self._events: deque[SpeechEvent] = deque()
        self._num_bytes = 0
        # Number of received characters that are not spoken yet.
        self._num_chars = 0
        self.audio_s = 0.0

    @property
    def num_bytes(self) -> int:
        """Memory of the text that waits to be spoken, and of the unread events."""
        return 4 * self._num_chars + self._num_bytes

    @property
    def idle(self) -> bool:
        """True if nothing is being spoken or waits to be spoken, and all events were read.

        An utterance whose text is incomplete counts as idle while it waits for the client to continue.
        """
        is_due = any(u.is_due for u in self._utterances)
        first = self._utterances[0] if self._utterances else None
        is_speaking = self._speaking is not None and not (first and first.live and first.live.starved)
        return not self._events and not is_speaking and not is_due

    @property
    def num_utterances(self) -> int:
        """Number of unfinished utterances, including one whose text is incomplete."""
        return len(self._utterances)

    def handle(self, command: SpeechCommand) -> None:
        """Apply one command, without waiting.

        Raises RemoteProtocolError, and changes nothing, for a configuration in the middle of an utterance, and for text
        that would exceed MAX_WAITING_CHARS or MAX_WAITING_UTTERANCES.
        """
        match command:
            case ConfigureSpeech(config):
                if self._open:
                    raise RemoteProtocolError(
                        "utterance_open",
                        "session.config cannot be applied while an utterance is in progress; send input.done first",
                    )
                self._config = config
            case AppendText(text):
                self._append(text)
            case FlushText():
                utterance = self._open or self._begin()
                self._add(utterance, utterance.markup.flush(), is_last=True)
                if utterance.says_nothing:
                    utterance.sentences.append("")
                if utterance.live:
                    utterance.live.complete()
                utterance.is_complete, self._open = True, None
            case CancelSpeech():
                self._cancel()
            case ContinueSpeech(utterance=first):
                self._continued, self._num_utterances = command, first
        self._changed.notify()

    def close(self) -> None:
        """End the input. `run` then speaks all complete text and returns.

        If an utterance was not flushed, its complete sentences are spoken, or the live text received so far.
        """
        self._is_closed = True
        if self._open and self._open.live:
            self._open.live.complete()
        self._changed.notify()

    async def run(self) -> None:
        """Speak until the session is closed and all text is spoken. Waits while the event queue is full.

        If a sentence fails, its SentenceDone reports the failure, and the next sentence follows.
        """
        while utterance := await self._next_due():
            with anyio.CancelScope() as self._speaking:
                if live := utterance.live_to_start:
                    await self._speak(utterance, live)
                elif utterance.sentences:
                    text = utterance.sentences.popleft()
                    self._num_chars -= len(text)
                    if utterance.num_started < utterance.num_spoken:
                        utterance.num_started += 1
                    else:
                        await self._speak(utterance, text)
                elif await self._emit(utterance, UtteranceDone(utterance.index, utterance.num_started)):
                    self._utterances.popleft()
                    if utterance.live:
                        # The synthesizer has never read a text without words.
                        utterance.live.abandon()
            self._speaking = None
        self._has_ended = True
        self._changed.notify()

    async def next_event(self) -> SpeechEvent | None:
        """Wait for the next event, remove it and return it. Returns None if `run` has returned and all events were
        read.
        """
        while not self._events:
            if self._has_ended:
                return None
            await self._changed.wait()
        event = self._events.popleft()
        self._num_bytes -= _weight(event)
        self._changed.notify()
        return event

    # --- text ---------------------------------------------------------------------------------------------------------

    def _append(self, text: str) -> None:
        if self._num_chars + len(text) > MAX_WAITING_CHARS:
            raise RemoteProtocolError("too_much_text", f"more than {MAX_WAITING_CHARS} characters wait to be spoken")
        if not text:
            return
        utterance = self._open or self._begin()
        utterance.has_text = True
        self._add(utterance, utterance.markup.feed(text))

    def _add(self, utterance: _Utterance, text: str, *, is_last: bool = False) -> None:
        """Append text without markup. `is_last`: whether the utterance ends with this text."""
        if utterance.live:
            self._num_chars += len(text)
            utterance.live.feed(text)
            return
        splitter, before = utterance.splitter, utterance.num_pending
        sentences = splitter.feed(text)
        if is_last:
            sentences += splitter.flush()
        utterance.sentences += sentences
        utterance.num_pending = splitter.num_pending
        self._num_chars += sum(map(len, sentences)) + utterance.num_pending - before

    def _begin(self) -> _Utterance:
        if len(self._utterances) >= MAX_WAITING_UTTERANCES:
            raise RemoteProtocolError(
                "too_much_text", f"more than {MAX_WAITING_UTTERANCES} utterances wait to be spoken"
            )
        splitter = SentenceSplitter(self._config.granularity)
        utterance = self._open = _Utterance(self._num_utterances, self._config, splitter)
        # A model that needs the whole text waits until the text is complete.
        reads_on = self._synthesizer.profile.streams_text and not self._config.whole_text
        if self._config.granularity == "none" and reads_on:
            utterance.live = _LiveText(self._on_read)
        if continued := self._continued:
            utterance.num_spoken, utterance.num_sent = continued.sentence, continued.num_bytes
            self._continued = None
            if utterance.live and utterance.num_spoken:
                utterance.num_started = 1
                utterance.live.abandon()
        self._num_utterances += 1
        self._utterances.append(utterance)
        return utterance

    def _on_read(self, num_chars: int) -> None:
        # The count may be zero already: `_cancel` resets it before it abandons the cancelled texts.
        self._num_chars = max(0, self._num_chars - num_chars)

    def _cancel(self) -> None:
        """End every utterance. Events that were already read stay valid. No other events of these utterances follow."""
        if self._speaking:
            self._speaking.cancel()
        # If the only waiting event of an utterance is its end, it was spoken in full.
        cut = {event.utterance for event in self._events if not isinstance(event, UtteranceDone)}
        ends = [event for event in self._events if isinstance(event, UtteranceDone)]
        self._events = deque(replace(end, cancelled=end.utterance in cut or end.cancelled) for end in ends)
        for utterance in self._utterances:
            utterance.is_cancelled = True
            self._events.append(UtteranceDone(utterance.index, utterance.num_started, cancelled=True))
        self._num_bytes = sum(map(_weight, self._events))
        self._num_chars = 0
        self._utterances.clear()
        self._open = None
        self._listener = PlaybackClock(time.monotonic)

    # --- audio --------------------------------------------------------------------------------------------------------

    async def _next_due(self) -> _Utterance | None:
        """Wait for an utterance that is due, and return it. None means that the session is closed and all is spoken."""
        while True:
            first = self._utterances[0] if self._utterances else None
            if first and first.is_due:
                return first
            if self._is_closed:
                return None
            await self._changed.wait()

    async def _speak(self, utterance: _Utterance, text: str | _LiveText) -> None:
        """Speak one sentence of an utterance, or its live text as if it were one sentence, and emit the events."""
        index, config, profile = utterance.num_started, utterance.config, self._synthesizer.profile
        utterance.num_started += 1
        known_text = text if isinstance(text, str) else text.text
        rate_hz = config.rate_hz or profile.sample_rate_hz
        started = SentenceStarted(utterance.index, index, without_pauses(known_text), config, rate_hz)
        await self._emit(utterance, started)
        aligns = config.word_times and not profile.word_times
        words, data = list[Word](), list[bytes]()
        left_out = utterance.num_sent if index == utterance.num_spoken else 0
        skipped, error, asked_s, has_begun = "", "", time.monotonic(), False
        try:
            async with aclosing(speak(self._synthesizer, text, config, self._listener)) as chunks:
                async for chunk in chunks:
                    if self._measure and not has_begun:
                        self._measure("first_sound", time.monotonic() - asked_s)
                    has_begun = True
                    words += chunk.words
                    skipped += chunk.skipped
                    self.audio_s += chunk.end_s - chunk.start_s
                    if aligns:
                        data.append(chunk.data)
                    new = chunk.data[left_out:]
                    left_out -= len(chunk.data) - len(new)
                    if new:
                        # Only PCM is divided. All other audio is one file, which was sent or not.
                        start_s = max(chunk.start_s, chunk.end_s - len(new) / BYTES_PER_SAMPLE / rate_hz)
                        await self._emit(utterance, SentenceAudio(utterance.index, index, new, start_s, chunk.end_s))
        except (RemoteProtocolError, Refused) as failure:
            error = str(failure)
        except ModelError as failure:
            log.error("a sentence failed: %s", failure)
            error = "the model failed"
        finally:
            if isinstance(text, _LiveText):
                text.abandon()
        word_times = tuple(words)
        if aligns and not error:
            word_times = await self._aligned(text if isinstance(text, str) else text.text, b"".join(data), rate_hz)
        await self._emit(utterance, SentenceDone(utterance.index, index, word_times, skipped, error))

    async def _aligned(self, text: str, data: bytes, rate_hz: int) -> tuple[Word, ...]:
        """Find the words of a text in its audio, which is PCM16 at `rate_hz`. Other formats have no word times."""
        profile = self._synthesizer.profile
        if self._aligner is None:
            return ()
        resampler = Resampler(rate_hz, SAMPLE_RATE_HZ)
        pcm = np.concatenate((resampler.feed(from_pcm16(data)), resampler.flush()))
        try:
            language = next(iter(profile.languages), "en")
            return await self._aligner.align(pcm, without_pauses(text).split(), language)
        except (Refused, ModelError) as failure:
            log.warning("no word times: %s", failure)
            return ()

    async def _emit(self, utterance: _Utterance, event: SpeechEvent) -> bool:
        """Queue an event, unless its utterance was cancelled. Returns whether the event was queued.

        The check is needed because a cancel may arrive after the awaited operation has finished, when the scope no
        longer stops the task.
        """
        while self._num_bytes >= MAX_WAITING_BYTES and not utterance.is_cancelled:
            await self._changed.wait()
        if utterance.is_cancelled:
            return False
        self._events.append(event)
        self._num_bytes += _weight(event)
        self._changed.notify()
        return True


def _weight(event: SpeechEvent) -> int:
    return EVENT_BYTES + (len(event.data) if isinstance(event, SentenceAudio) else 0)
