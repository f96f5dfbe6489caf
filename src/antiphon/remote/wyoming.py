"""Connections to servers of the Wyoming protocol, without TLS and without a key, and what such a server has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from antiphon import wyoming
from antiphon.errors import RemoteError
from antiphon.remote.http import CONNECT_TIMEOUT_S, reason
from antiphon.remote.pool import Endpoint

T = TypeVar("T")

# The bytes that are read at a time, and the most events that are read while a result is awaited.
READ_BYTES, MAX_EVENTS = 1 << 16, 4096


class WyomingFailure(msgspec.Struct):
    """The data of `error`: why a server has not done what it was asked for."""

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
                    info = read(endpoint, event, _Info)
                    break
    models = {model.name: model.languages for program in info.asr for model in program.models}
    return models, [voice.name for program in info.tts for voice in program.voices]


def read(endpoint: Endpoint, event: wyoming.WyomingEvent, shape: type[T]) -> T:
    """Return the data of an event. Raises RemoteError if they have another shape."""
    try:
        return event.read(shape)
    except ValueError as error:
        raise RemoteError(f"{endpoint.host} sent {error}") from None
