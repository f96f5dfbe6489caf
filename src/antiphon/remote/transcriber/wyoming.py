"""Window servers of the Wyoming protocol: one connection for each window, without TLS and without a key.

A server transcribes when all audio has arrived, so a partial is a connection of its own. It reports neither times nor
probabilities.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from antiphon import wyoming
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import to_pcm16
from antiphon.contracts import TranscriptionTask, Window
from antiphon.errors import RemoteError
from antiphon.events.languages import language_code
from antiphon.remote.http import CONNECT_TIMEOUT_S, reason
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.transcriber.heard import HeardText, words_of
from antiphon.remote.transcriber.pace import Pace

# Samples of one `audio-chunk`, and the bytes that are read at a time.
CHUNK_SAMPLES, READ_BYTES = SAMPLE_RATE_HZ // 4, 1 << 16
# The most events that are read while a result is awaited.
MAX_EVENTS = 4096
FORMAT = wyoming.WyomingAudio(SAMPLE_RATE_HZ, 2, 1)


class _Transcribe(msgspec.Struct, omit_defaults=True):
    name: str = ""
    language: str = ""


class _Transcript(msgspec.Struct):
    text: str
    language: str | None = None


class _Failure(msgspec.Struct):
    text: str = ""


class _Model(msgspec.Struct):
    name: str
    languages: list[str] = []


class _Program(msgspec.Struct):
    name: str
    models: list[_Model] = []
    voices: list[_Model] = []


class _Info(msgspec.Struct):
    asr: list[_Program] = []
    tts: list[_Program] = []


class WyomingConnection:
    """One connection to a server. `events` yields what arrives."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host, self._reader, self._writer = host, reader, writer

    async def send(self, kind: str, data: msgspec.Struct | None = None, payload: bytes = b"") -> None:
        """Send one event. Waits while the server does not read."""
        self._writer.write(wyoming.encode(kind, data, payload))
        await self._writer.drain()

    async def events(self) -> AsyncGenerator[wyoming.WyomingEvent, None]:
        """Yield the events of the server. Raises RemoteError if it closes the connection or sends anything else."""
        decoder, num_events = wyoming.WyomingDecoder(), 0
        while data := await self._reader.read(READ_BYTES):
            try:
                for event in decoder.feed(data):
                    num_events += 1
                    if num_events > MAX_EVENTS:
                        raise RemoteError(f"{self._host} sent more than {MAX_EVENTS} events")
                    yield event
            except ValueError as error:
                raise RemoteError(f"{self._host} does not speak the Wyoming protocol: {error}") from None
        raise RemoteError(f"{self._host} closed the connection")


@asynccontextmanager
async def connected(endpoint: Endpoint) -> AsyncGenerator[WyomingConnection, None]:
    """Connect to a server while the block runs. Raises RemoteError, also for errors of the connection in the block."""
    parts = urlsplit(endpoint.url)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        yield WyomingConnection(endpoint.host, reader, writer)
    except (OSError, TimeoutError) as error:
        raise RemoteError(f"{endpoint.host}: {reason(error)}") from None
    finally:
        if writer:
            writer.close()


async def described(endpoint: Endpoint) -> tuple[dict[str, list[str]], list[str]]:
    """Return the languages of each ASR model of a server, and its TTS voices. Raises RemoteError."""
    async with connected(endpoint) as connection:
        await connection.send("describe")
        async with aclosing(connection.events()) as events:
            async for event in events:
                if event.kind == "info":
                    info = _read(endpoint, event, _Info)
                    break
    models = {model.name: model.languages for program in info.asr for model in program.models}
    return models, [voice.name for program in info.tts for voice in program.voices]


def _read(endpoint: Endpoint, event: wyoming.WyomingEvent, shape: type[Any]) -> Any:
    try:
        return event.read(shape)
    except ValueError as error:
        raise RemoteError(f"{endpoint.host} sent {error}") from None


class WyomingServer:
    """A server of a pool that transcribes over the Wyoming protocol."""

    name = "Wyoming"

    def __init__(self, pool: Pool[Any], endpoint: Endpoint, model: str) -> None:
        self.pace = Pace()
        self._endpoint, self._model = endpoint, model

    async def hear(self, window: Window, task: TranscriptionTask = "transcribe", temperature: float = 0.0) -> HeardText:
        """Transcribe a window. Raises RemoteError. The protocol has neither translations nor a temperature."""
        endpoint = self._endpoint
        async with connected(endpoint) as connection:
            await connection.send("transcribe", _Transcribe(self._model, window.language or ""))
            await connection.send("audio-start", FORMAT)
            for at in range(0, len(window.pcm), CHUNK_SAMPLES):
                await connection.send("audio-chunk", FORMAT, to_pcm16(window.pcm[at : at + CHUNK_SAMPLES]))
            await connection.send("audio-stop")
            async with aclosing(connection.events()) as events:
                async for event in events:
                    if event.kind == "transcript":
                        found: _Transcript = _read(endpoint, event, _Transcript)
                        return HeardText(words_of(found.text), language_code(found.language) if found.language else "")
                    if event.kind == "error":
                        raise RemoteError(f"{endpoint.host} failed: {_read(endpoint, event, _Failure).text[:300]}")
        raise RemoteError(f"{endpoint.host} sent no transcript")
