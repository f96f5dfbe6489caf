"""One live speech session: text in as it comes, units of sound out in order, the next one made while the last is sent.

`speak` is one text in one format; `SpeechSession` is a connection's utterances. The session owns one task, which makes sound into a
queue bounded in bytes: when the reader is slow, synthesis waits. Cancelling empties the queue and ends the synthesis within a chunk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import anyio
import anyio.to_thread
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler, from_pcm16
from antiphon.contracts import Synthesizer, Transcriber
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.events.speech import (
    AppendText,
    CancelSpeech,
    ConfigureSpeech,
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
from antiphon.sessions.speech.render import ListenerBuffer, speak
from antiphon.signals import Signal
from antiphon.text.sentences import SentenceSplitter

log = logging.getLogger(__name__)

# Sound that may wait for a slow reader, in bytes of the asked format: 40 s of PCM. Then synthesis waits.
MAX_WAITING_BYTES = 2 << 20
# Text that may wait to be spoken, in characters: about ten hours. Past it, text is refused.
MAX_WAITING_CHARS = 1 << 19
# Utterances that may wait, flushed one after another.
MAX_WAITING_UTTERANCES = 1000
# What an output weighs besides its sound.
OUTPUT_BYTES = 200


@dataclass(slots=True)
class _Utterance:
    """Text between two flushes: its units in order, and whether it is complete. `live`: it is spoken while it comes, as one unit."""

    index: int
    config: SpeechConfig
    splitter: SentenceSplitter
    units: deque[str] = field(default_factory=deque)
    complete: bool = False
    cancelled: bool = False
    started: int = 0
    live: _Live | None = None

    @property
    def due(self) -> bool:
        """There is something to say of it, or its end to tell."""
        return bool(self.units) or self.complete or (self.live is not None and self.live.begun and not self.started)


class _Live:
    """A text that is still being written, as its speaker takes it."""

    def __init__(self, taken: Callable[[int], None]) -> None:
        self._taken = taken
        self._pieces: deque[str] = deque()
        self._ended = self._begun = self._over = False
        self._changed = Signal()
        # All there is so far; what is starved waits for more.
        self.text, self.starved = "", False

    @property
    def begun(self) -> bool:
        """There is a word of it."""
        return self._begun

    def feed(self, text: str) -> None:
        """More of it."""
        if self._over:
            # Its sound has ended: nobody reads what follows.
            self._taken(len(text))
            return
        self._pieces.append(text)
        self.text += text
        self._begun = self._begun or any(c.isalnum() for c in text)
        self._changed.notify()

    def leave(self) -> None:
        """Whoever spoke it does so no more: what waits is dropped."""
        self._over = True
        self._taken(sum(map(len, self._pieces)))
        self._pieces.clear()

    def end(self) -> None:
        """That was all."""
        self._ended = True
        self._changed.notify()

    def __aiter__(self) -> _Live:
        return self

    async def __anext__(self) -> str:
        while not self._pieces:
            if self._ended:
                raise StopAsyncIteration
            self.starved = True
            await self._changed.wait()
        self.starved = False
        piece = self._pieces.popleft()
        self._taken(len(piece))
        return piece


class SpeechSession:
    """The utterances of one connection. `receive` never waits; outputs are taken with `next_output`."""

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
        self._utterances: deque[_Utterance] = deque()
        self._next = 0
        self._open: _Utterance | None = None
        self._playback = ListenerBuffer()
        self._speaking: anyio.CancelScope | None = None
        self._closed = self._ended = False
        self._changed = Signal()
        # Bound: MAX_WAITING_BYTES of data, after which `_put` waits for the reader.
        self._outputs: deque[SpeechEvent] = deque()
        self._bytes = 0
        # Characters that were received and not yet begun to be spoken.
        self._chars = 0
        self.audio_s = 0.0

    @property
    def idle(self) -> bool:
        """Nothing is being spoken and nothing waits to be taken. An utterance whose text is not complete is the client's to go on with."""
        waiting = any(u.due for u in self._utterances)
        first = self._utterances[0] if self._utterances else None
        speaking = self._speaking is not None and not (first and first.live and first.live.starved)
        return not self._outputs and not speaking and not waiting

    @property
    def waiting_bytes(self) -> int:
        """Sound that was made and not yet taken."""
        return self._bytes

    def receive(self, item: SpeechCommand) -> None:
        """Take one input. Raises RemoteProtocolError for a configuration inside an utterance and for too much text."""
        match item:
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
                before = utterance.splitter.num_pending
                self._add(utterance, utterance.splitter.flush(), before)
                if utterance.live:
                    utterance.live.end()
                utterance.complete, self._open = True, None
            case CancelSpeech():
                self._cancel()
        self._changed.notify()

    def close(self) -> None:
        """No more input: `run` ends when what was said is spoken. An utterance without a flush is dropped from its last unit on."""
        self._closed = True
        if self._open and self._open.live:
            self._open.live.end()
        self._changed.notify()

    async def run(self) -> None:
        """Speak until the session is closed and all is spoken."""
        while utterance := await self._due():
            with anyio.CancelScope() as self._speaking:
                if utterance.live and utterance.live.begun and not utterance.started:
                    await self._speak(utterance, utterance.live)
                elif utterance.units:
                    text = utterance.units.popleft()
                    self._chars -= len(text)
                    await self._speak(utterance, text)
                elif await self._put(utterance, UtteranceDone(utterance.index, utterance.started)):
                    self._utterances.popleft()
            self._speaking = None
        self._ended = True
        self._changed.notify()

    async def next_output(self) -> SpeechEvent | None:
        """The next output in order; waits for it. None once `run` has ended and all were taken."""
        while not self._outputs:
            if self._ended:
                return None
            await self._changed.wait()
        output = self._outputs.popleft()
        self._bytes -= _weight(output)
        self._changed.notify()
        return output

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _append(self, text: str) -> None:
        if self._chars + len(text) > MAX_WAITING_CHARS:
            raise RemoteProtocolError("too_much_text", f"more than {MAX_WAITING_CHARS} characters wait to be spoken")
        if not text:
            return
        utterance = self._open or self._begin()
        if utterance.live:
            self._chars += len(text)
            utterance.live.feed(text)
            return
        before = utterance.splitter.num_pending
        self._add(utterance, utterance.splitter.feed(text), before)

    def _add(self, utterance: _Utterance, units: list[str], pending: int) -> None:
        """Take the units that came of the splitter, which held `pending` characters before."""
        utterance.units += units
        self._chars += sum(map(len, units)) + utterance.splitter.num_pending - pending

    def _begin(self) -> _Utterance:
        if len(self._utterances) >= MAX_WAITING_UTTERANCES:
            raise RemoteProtocolError(
                "too_much_text", f"more than {MAX_WAITING_UTTERANCES} utterances wait to be spoken"
            )
        utterance = self._open = _Utterance(self._next, self._config, SentenceSplitter(self._config.granularity))
        if self._config.granularity == "none" and self._synthesizer.profile.streams_text:
            utterance.live = _Live(self._took)
        self._next += 1
        self._utterances.append(utterance)
        return utterance

    def _took(self, chars: int) -> None:
        self._chars = max(0, self._chars - chars)

    async def _due(self) -> _Utterance | None:
        while True:
            first = self._utterances[0] if self._utterances else None
            if first and first.due:
                return first
            if self._closed:
                return None
            await self._changed.wait()

    async def _speak(self, utterance: _Utterance, text: str | _Live) -> None:
        unit, config = utterance.started, utterance.config
        utterance.started += 1
        rate_hz = self._synthesizer.profile.sample_rate_hz
        known = text if isinstance(text, str) else text.text
        await self._put(utterance, SentenceStarted(utterance.index, unit, known, config, rate_hz))
        words, data = list[Word](), list[bytes]()
        skipped, error, asked, begun = "", "", time.monotonic(), False
        try:
            async with aclosing(speak(self._synthesizer, text, config, self._playback)) as pieces:
                async for piece in pieces:
                    if self._measure and not begun:
                        self._measure("first_sound", time.monotonic() - asked)
                    begun = True
                    words += piece.words
                    skipped += piece.skipped
                    self.audio_s += piece.end_s - piece.start_s
                    if config.word_times and not self._synthesizer.profile.word_times:
                        data.append(piece.data)
                    if piece.data:
                        sound = SentenceAudio(utterance.index, unit, piece.data, piece.start_s, piece.end_s)
                        await self._put(utterance, sound)
        except (RemoteProtocolError, Refused) as failure:
            error = str(failure)
        except ModelError as failure:
            log.error("a unit failed: %s", failure)
            error = "the model failed"
        finally:
            if isinstance(text, _Live):
                text.leave()
        found = tuple(words)
        if config.word_times and not error and not self._synthesizer.profile.word_times:
            found = await self._aligned(text if isinstance(text, str) else text.text, b"".join(data))
        await self._put(utterance, SentenceDone(utterance.index, unit, found, skipped, error))

    async def _aligned(self, text: str, data: bytes) -> tuple[Word, ...]:
        """Where the words lie in the sound of a synthesizer that does not say. The sound is PCM: words are given with no other."""
        profile = self._synthesizer.profile
        if self._aligner is None:
            return ()
        resampler = Resampler(profile.sample_rate_hz, SAMPLE_RATE_HZ)
        pcm = np.concatenate((resampler.feed(from_pcm16(data)), resampler.flush()))
        try:
            return await self._aligner.align(pcm, text.split(), profile.languages[0])
        except (Refused, ModelError) as failure:
            log.warning("no word times: %s", failure)
            return ()

    async def _put(self, utterance: _Utterance, output: SpeechEvent) -> bool:
        """Whether the output was put. A cancel may come while what is awaited is done already: then nothing follows it."""
        while self._bytes >= MAX_WAITING_BYTES and not utterance.cancelled:
            await self._changed.wait()
        if utterance.cancelled:
            return False
        self._outputs.append(output)
        self._bytes += _weight(output)
        self._changed.notify()
        return True

    def _cancel(self) -> None:
        """End every utterance there is. What was taken before stays said; nothing else of them is."""
        if self._speaking:
            self._speaking.cancel()
        # An utterance of which nothing but its end still waits was heard in full.
        cut = {o.utterance for o in self._outputs if not isinstance(o, UtteranceDone)}
        ended = [o for o in self._outputs if isinstance(o, UtteranceDone)]
        self._outputs = deque(replace(o, cancelled=o.utterance in cut or o.cancelled) for o in ended)
        for utterance in self._utterances:
            utterance.cancelled = True
            self._outputs.append(UtteranceDone(utterance.index, utterance.started, cancelled=True))
        self._bytes = sum(map(_weight, self._outputs))
        self._chars = 0
        self._utterances.clear()
        self._open = None
        self._playback = ListenerBuffer()


def _weight(output: SpeechEvent) -> int:
    return OUTPUT_BYTES + (len(output.data) if isinstance(output, SentenceAudio) else 0)
