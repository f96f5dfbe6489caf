"""Speech over the Wyoming protocol: one connection for each text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from antiphon.audio import Pcm
from antiphon.contracts import VoiceOptions
from antiphon.errors import RemoteError
from antiphon.remote.pool import Endpoint
from antiphon.remote.synthesizer.sound import SampleFormat, SoundReader
from antiphon.remote.wyoming import WyomingFailure, connected
from antiphon.wyoming import WyomingAudio


class _Voice(msgspec.Struct, omit_defaults=True):
    """The voice of a text: its name, or the language that it has to speak."""

    name: str = ""
    language: str = ""


class _Synthesize(msgspec.Struct, omit_defaults=True):
    """The request to speak a text."""

    text: str
    voice: _Voice | None = None


class WyomingSpeech:
    """Speech from servers of the Wyoming protocol, such as wyoming-piper. `speeds`: they speak at their own tempo."""

    speeds = (1.0, 1.0)

    async def speak(
        self, endpoint: Endpoint, text: str, options: VoiceOptions, to_hz: int
    ) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a text: float32 [num_samples], mono, at `to_hz`. Closing the generator ends the work.

        Raises RemoteError if the server fails or its answer is not audio.
        """
        voice = _Voice(options.voice, options.language or "") if options.voice or options.language else None
        reader: SoundReader | None = None
        async with connected(endpoint) as connection:
            await connection.send("synthesize", _Synthesize(text, voice))
            async with aclosing(connection.events()) as events:
                async for event in events:
                    try:
                        match event.kind:
                            case "audio-start" if reader is None:
                                reader = _reader(event.read(WyomingAudio), to_hz)
                            case "audio-chunk":
                                reader = reader or _reader(event.read(WyomingAudio), to_hz)
                                if len(pcm := reader.feed(event.payload)):
                                    yield pcm
                            case "audio-stop":
                                break
                            case "error":
                                raise RemoteError(f"the voice's server failed: {event.read(WyomingFailure).text[:300]}")
                    except ValueError as error:
                        raise RemoteError(f"the voice's server sent {error}") from None
        if reader and len(pcm := reader.finish()):
            yield pcm


def _reader(audio: WyomingAudio, to_hz: int) -> SoundReader:
    return SoundReader(to_hz, SampleFormat(audio.rate, audio.channels, 8 * audio.width), sniffs=False)
