"""Renders one text as audio in one format: synthesizes it, changes its tempo and encodes it. Independent of sessions
and protocols.
"""

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

# Maximum length, in seconds, of audio that is sent as one file. A file is kept in memory until it is complete.
MAX_FILE_S = 1200.0
# Length, in seconds, of the silence that stands for a text without words. It makes the file valid in every format.
SILENCE_S = 0.08
# The next chunk is urgent if fewer than URGENT_S seconds of audio are unplayed, and due soon if fewer than SOON_DUE_S.
URGENT_S, SOON_DUE_S = 0.3, 2.0


@dataclass(frozen=True, slots=True)
class EncodedSpeech:
    """A part of a text's audio in its format."""

    # Encoded audio from `start_s` to `end_s`. Empty if the encoder has not filled a frame yet. For a file, empty until
    # the audio is complete.
    data: bytes
    # The start of this part, in seconds from the start of the text.
    start_s: float
    # The end of this part, in seconds from the start of the text.
    end_s: float
    # Words with their times at the requested tempo, see `SpeechChunk`.
    words: tuple[Word, ...] = ()
    # Characters of the text that the voice cannot speak.
    skipped: str = ""
    # The amount of text that the model read, in its own units, see `SpeechChunk`.
    num_symbols: int = 0
    # The amount of audio that the model generated, in its own units, see `SpeechChunk`.
    num_frames: int = 0


def urgency(listener: PlaybackClock) -> Urgency:
    """Return the urgency of the next chunk: FINAL below URGENT_S of unplayed audio, PARTIAL below SOON_DUE_S, else
    BULK.
    """
    left_s = listener.left_s
    return Urgency.FINAL if left_s < URGENT_S else Urgency.PARTIAL if left_s < SOON_DUE_S else Urgency.BULK


async def speak(
    synthesizer: Synthesizer,
    text: str | AsyncIterator[str],
    config: SpeechConfig,
    listener: PlaybackClock | None = None,
) -> AsyncGenerator[EncodedSpeech, None]:
    """Speak a text in the format of `config`. Yields each part when it is made.

    `text` may be an iterator over a text that is still being written, if the synthesizer's profile has `streams_text`.
    `listener` determines how urgent the next chunk is. Texts that are played one after another share it. If the voice
    does not support a speed, its audio is stretched. A text without words becomes a short silence. Slow encoders, which
    take milliseconds, run in a thread.

    Closing the generator ends the synthesis within a chunk. Raises RemoteProtocolError if no part of the text can be
    spoken, or if a file would be longer than MAX_FILE_S. Also raises Refused and ModelError.
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
    """Return a new Stretch. Its import loads FFmpeg at the first call."""
    from antiphon.audio.stretch import Stretch

    return Stretch(rate_hz, tempo)


def _voice_options(config: SpeechConfig, profile: SynthesizerProfile) -> VoiceOptions:
    """Return the synthesizer's options, with the speed limited to the range of the voice."""
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
