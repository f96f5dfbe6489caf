"""Renders one text as audio in one format: synthesis, change of tempo, encoding. Knows no session and no protocol."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from antiphon.audio.encode import Encoder
from antiphon.audio.pcm import Resampler
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.contracts import LiveSynthesizer, Synthesizer, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import SpeechConfig
from antiphon.events.words import Word
from antiphon.shares.threads import in_thread

if TYPE_CHECKING:
    from antiphon.audio.stretch import Stretch

# The longest audio of a text that is sent as one file, which is held in memory until it is complete.
MAX_FILE_S = 1200.0
# A text that says nothing is this much silence, so that its file is valid in every format.
SILENCE_S = 0.08
# With less audio than this ahead of its listener, the next chunk is urgent, or soon due; seconds.
URGENT_S, SOON_DUE_S = 0.3, 2.0


@dataclass(frozen=True, slots=True)
class EncodedSpeech:
    """A part of a text's audio in its format.

    - `data`: the bytes of the audio from `start_s` to `end_s`, in seconds from the text's start. It is empty while an
      encoder has not filled a frame yet, and for a file until the audio is complete.
    - `words`, `skipped`, `num_symbols`, `num_frames`: as in SpeechChunk, with word times at the tempo asked for.
    """

    data: bytes
    start_s: float
    end_s: float
    words: tuple[Word, ...] = ()
    skipped: str = ""
    num_symbols: int = 0
    num_frames: int = 0


def urgency(listener: PlaybackClock) -> Urgency:
    """Return how urgent the next chunk is: FINAL below URGENT_S in hand, PARTIAL below SOON_DUE_S, else BULK."""
    left_s = listener.left_s
    return Urgency.FINAL if left_s < URGENT_S else Urgency.PARTIAL if left_s < SOON_DUE_S else Urgency.BULK


async def speak(
    synthesizer: Synthesizer,
    text: str | AsyncIterator[str],
    config: SpeechConfig,
    listener: PlaybackClock | None = None,
) -> AsyncGenerator[EncodedSpeech, None]:
    """Speak a text in the format that `config` asks for, in parts as they are made.

    `text` may be an iterator of a text that is still being written, if the synthesizer `streams_text`. `listener` tells
    how urgent the next chunk is, and is shared by the texts that one listener hears after each other. A speed that the
    voice does not have is made by stretching. A text that says nothing is a short silence. Encoders that take
    milliseconds run in a thread.

    Closing the generator ends the synthesis within a chunk. Raises RemoteProtocolError where nothing of the text can be
    spoken and for a file over MAX_FILE_S, Refused, ModelError.
    """
    profile = synthesizer.profile
    listener = listener or PlaybackClock(time.monotonic)
    options = _voice_options(config, profile)
    tempo = config.speed / options.speed
    is_cheap = config.format in ("wav", "pcm")
    stretch = None if tempo == 1.0 else await in_thread(_stretch, profile.sample_rate_hz, tempo)
    rate_hz = config.rate_hz or profile.sample_rate_hz
    resampler = Resampler(profile.sample_rate_hz, rate_hz)
    new_encoder = partial(Encoder, config.format, rate_hz, whole=not config.stream)
    encoder = new_encoder() if is_cheap else await in_thread(new_encoder)
    at_s = 0.0
    if isinstance(text, str):
        generated = synthesizer.speak(text, options, partial(urgency, listener))
    else:
        generated = cast(LiveSynthesizer, synthesizer).speak_live(text, options)
    async with aclosing(generated) as chunks:
        async for chunk in chunks:
            pcm = resampler.feed(stretch.feed(chunk.pcm) if stretch else chunk.pcm)
            data = encoder.feed(pcm) if is_cheap else await in_thread(encoder.feed, pcm)
            start_s, at_s = at_s, at_s + len(pcm) / rate_hz
            if not config.stream and at_s > MAX_FILE_S:
                message = f"one file may hold {MAX_FILE_S:.0f} s of sound: stream it, or send shorter units"
                raise RemoteProtocolError("too_long", message, "input")
            listener.add(at_s - start_s)
            words = chunk.words
            if stretch:
                words = tuple(replace(w, start_s=w.start_s / tempo, end_s=w.end_s / tempo) for w in words)
            yield EncodedSpeech(data, start_s, at_s, words, chunk.skipped, chunk.num_symbols, chunk.num_frames)
    last = resampler.feed(stretch.flush()) if stretch else np.zeros(0, np.float32)
    last = np.concatenate((last, resampler.flush()))
    if not at_s and not len(last):
        last = np.zeros(round(SILENCE_S * rate_hz), np.float32)
    rest = encoder.feed(last) if len(last) else b""
    rest += encoder.finish() if is_cheap else await in_thread(encoder.finish)
    if rest:
        yield EncodedSpeech(rest, at_s, at_s + len(last) / rate_hz)


def _stretch(rate_hz: int, tempo: float) -> Stretch:
    """Make a Stretch, and import FFmpeg where nothing has yet."""
    from antiphon.audio.stretch import Stretch

    return Stretch(rate_hz, tempo)


def _voice_options(config: SpeechConfig, profile: SynthesizerProfile) -> VoiceOptions:
    """What the synthesizer is asked for: of the speed, as much as the voice has by itself."""
    return VoiceOptions(
        config.voice or profile.voices[0],
        min(max(config.speed, profile.speeds[0]), profile.speeds[1]),
        config.seed,
        config.language,
        config.instructions,
        config.sample,
        config.max_frames,
        config.first_frames,
        config.whole_text,
        config.parameters,
    )
