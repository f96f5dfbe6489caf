"""One text to sound in one format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

import anyio
import anyio.to_thread

from antiphon.audio.encode import Encoder
from antiphon.audio.stretch import Stretch
from antiphon.contracts import LiveSynthesizer, Synthesizer, Urgency, VoiceOptions
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import (
    SpeechConfig,
)
from antiphon.events.words import Word

# Sound of one unit that is sent as one file, in seconds: it is held until it is complete.
MAX_FILE_S = 1200.0
# Sound in hand below which the next chunk is urgent, or soon due; seconds.
URGENT_S, DUE_S = 0.3, 2.0


@dataclass(frozen=True, slots=True)
class EncodedSpeech:
    """More of a text in its format: `data` is sound from `start_s` to `end_s`. The other fields are as in `Sound`."""

    data: bytes
    start_s: float
    end_s: float
    words: tuple[Word, ...] = ()
    skipped: str = ""
    num_symbols: int = 0
    num_frames: int = 0


@dataclass(slots=True)
class ListenerBuffer:
    """How far what was made is ahead of a listener who plays it as it comes. Tells the lane whose chunk is due first."""

    clock: Callable[[], float] = time.monotonic
    _until_s: float = 0.0

    def more(self, seconds: float) -> None:
        """`seconds` of sound are made."""
        self._until_s = max(self._until_s, self.clock()) + seconds

    def urgency(self) -> Urgency:
        """Of the next chunk."""
        ahead_s = self._until_s - self.clock()
        return Urgency.FINAL if ahead_s < URGENT_S else Urgency.PARTIAL if ahead_s < DUE_S else Urgency.BULK


async def speak(
    synthesizer: Synthesizer,
    text: str | AsyncIterator[str],
    config: SpeechConfig,
    playback: ListenerBuffer | None = None,
) -> AsyncGenerator[EncodedSpeech, None]:
    """A text in the format asked for; one that is still being written where the synthesizer `streams_text`.

    Closing the generator ends it within a chunk.

    Raises RemoteProtocolError where nothing of it can be spoken, Refused, ModelError.
    """
    profile = synthesizer.profile
    playback = playback or ListenerBuffer()
    speed = min(max(config.speed, profile.speeds[0]), profile.speeds[1])
    tempo = config.speed / speed
    stretch = Stretch(profile.sample_rate_hz, tempo) if tempo != 1.0 else None
    encoder = Encoder(config.format, profile.sample_rate_hz, whole=not config.stream)
    cheap = config.format in ("wav", "pcm")
    options = VoiceOptions(
        config.voice or profile.voices[0],
        speed,
        config.seed,
        config.language,
        config.instructions,
        config.sample,
        config.max_frames,
        config.first_frames,
    )
    at_s = 0.0
    if isinstance(text, str):
        made = synthesizer.speak(text, options, playback.urgency)
    else:
        made = cast(LiveSynthesizer, synthesizer).speak_live(text, options)
    async with aclosing(made) as sounds:
        async for sound in sounds:
            pcm = stretch.feed(sound.pcm) if stretch else sound.pcm
            # A codec takes milliseconds a chunk: not on the event loop.
            data = encoder.feed(pcm) if cheap else await anyio.to_thread.run_sync(encoder.feed, pcm)
            start_s, at_s = at_s, at_s + len(pcm) / profile.sample_rate_hz
            if not config.stream and at_s > MAX_FILE_S:
                raise RemoteProtocolError(
                    "too_long",
                    f"one file may hold {MAX_FILE_S:.0f} s of sound: stream it, or send shorter units",
                    "input",
                )
            playback.more(at_s - start_s)
            words = tuple(replace(w, start_s=w.start_s / tempo, end_s=w.end_s / tempo) for w in sound.words)
            yield EncodedSpeech(data, start_s, at_s, words, sound.skipped, sound.num_symbols, sound.num_frames)
    rest = encoder.feed(stretch.flush()) if stretch else b""
    rest += encoder.finish() if cheap else await anyio.to_thread.run_sync(encoder.finish)
    if rest:
        yield EncodedSpeech(rest, at_s, at_s)
