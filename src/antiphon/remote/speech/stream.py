"""Speech over the WebSocket `/v1/audio/speech/stream`, which antiphon and vLLM-Omni serve.

Each text is one utterance. A connection is kept for the next text. It is closed if a text ends early, which ends the
work at the server, and a new one is then opened in advance.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException
from websockets.protocol import State

from antiphon.audio import Pcm
from antiphon.contracts import VoiceOptions
from antiphon.errors import AntiphonError, RemoteError
from antiphon.remote.http import decoded, error_text, without_key
from antiphon.remote.speech.sound import SampleFormat, SoundReader
from antiphon.remote.trace_context import trace_headers
from antiphon.remote.websocket import abort, broken, open_websocket

log = logging.getLogger(__name__)

SERVER = "the voice's server"
# Bound: connections that wait for the next text. Servers close them after half a minute without one.
MAX_IDLE = 8


class _Config(msgspec.Struct, tag="session.config", kw_only=True, omit_defaults=True):
    """The configuration of the next texts. Fields that are None are not sent."""

    # The model's name at the server.
    model: str
    # The name of the voice; None: the server's default.
    voice: str | None = None
    # Always samples, sent while they are made.
    response_format: str = msgspec.field(default="")
    # See `response_format`.
    stream_audio: bool = False
    # "none": the text is spoken as a whole.
    split_granularity: str = ""
    # The language of the text as ISO-639-1.
    language: str | None = None
    # How to speak, in words.
    instructions: str | None = None
    # Seed of the random numbers.
    seed: int | None = None


class _Text(msgspec.Struct, tag="input.text"):
    text: str


class _Done(msgspec.Struct, tag="input.done"):
    pass


class _Message(msgspec.Struct):
    """Any message of the server."""

    type: str = ""
    # Of a text that begins: the format of its samples. Missing: 24 kHz, mono.
    sample_rate: int | None = None
    # See `sample_rate`.
    channels: int | None = None
    # Whether a text has failed.
    error: bool = False
    # Of an error: why.
    message: str = ""
    # The samples, if they are not sent as binary messages.
    audio_b64: str = ""


_decoder, _encoder = msgspec.json.Decoder(_Message), msgspec.json.Encoder()


@dataclass(slots=True)
class _Connection:
    """One WebSocket, and the configuration that the server has for it; b"" for none."""

    socket: ClientConnection
    config: bytes = b""


@dataclass(slots=True)
class _Loop:
    """The idle connections of one event loop, and the tasks that open further ones."""

    idle: list[_Connection] = field(default_factory=list)
    opening: set[asyncio.Task[None]] = field(default_factory=set)


class StreamSpeech:
    """Speech from one server by WebSockets. `url`: ws:// or wss://. The other arguments are those of RestSpeech."""

    # Streamed audio has the voice's own tempo.
    speeds = (1.0, 1.0)

    def __init__(self, url: str, key: str, model: str, raw: SampleFormat) -> None:
        self._url, self._key, self._model, self._raw = url, key, model, raw
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()

    async def speak(self, text: str, options: VoiceOptions, to_hz: int) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a text: float32 [num_samples], mono, at `to_hz`. Closing the generator ends the work.

        Raises RemoteError if the server fails or its answer is not audio, Refused if it has no room, and ModelError if
        it does not accept the key.
        """
        loop = self._loops.setdefault(asyncio.get_running_loop(), _Loop())
        connection = await self._take(loop)
        is_whole = False
        try:
            config = _encoder.encode(self._config(options))
            if config != connection.config:
                await connection.socket.send(config, text=True)
                connection.config = config
            await connection.socket.send(_encoder.encode(_Text(text)), text=True)
            await connection.socket.send(_encoder.encode(_Done()), text=True)
            async for pcm in self._sound(connection.socket, to_hz):
                yield pcm
            is_whole = True
        except WebSocketException as error:
            raise broken(SERVER, error) from None
        finally:
            if is_whole and len(loop.idle) < MAX_IDLE:
                loop.idle.append(connection)
            else:
                abort(connection.socket)
                self._open_ahead(loop)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        if loop := self._loops.pop(asyncio.get_running_loop(), None):
            for task in loop.opening:
                task.cancel()
            for connection in loop.idle:
                abort(connection.socket)

    def _config(self, options: VoiceOptions) -> _Config:
        return _Config(
            model=self._model,
            voice=options.voice or None,
            response_format="pcm",
            stream_audio=True,
            split_granularity="none",
            language=options.language,
            instructions=options.instructions or None,
            seed=options.seed,
        )

    async def _take(self, loop: _Loop) -> _Connection:
        while loop.idle:
            connection = loop.idle.pop()
            if connection.socket.state is State.OPEN:
                return connection
        return await self._open()

    async def _open(self) -> _Connection:
        headers: Mapping[str, str] = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return _Connection(await open_websocket(SERVER, self._url, {**headers, **trace_headers()}))

    def _open_ahead(self, loop: _Loop) -> None:
        """Open a connection for the next text. Returns at once."""

        async def open_one() -> None:
            # The next text tries again, and reports the failure.
            with suppress(AntiphonError):
                loop.idle.append(await self._open())

        if not loop.idle and not loop.opening:
            task = asyncio.create_task(open_one())
            loop.opening.add(task)
            task.add_done_callback(loop.opening.discard)

    async def _sound(self, socket: ClientConnection, to_hz: int) -> AsyncGenerator[Pcm, None]:
        reader = SoundReader(to_hz, self._raw, sniffs=False)
        while True:
            found = await socket.recv()
            if isinstance(found, bytes):
                data = found
            else:
                message = decoded(_decoder, without_key(found.encode(), self._key), "message of speech")
                if message.type == "error" or message.error:
                    raise RemoteError(f"{SERVER} failed in its answer: {error_text(message.message or message.type)}")
                if message.type == "session.done":
                    break
                if message.type == "audio.start" and message.sample_rate and not reader.num_samples:
                    reader = SoundReader(to_hz, SampleFormat(message.sample_rate, message.channels or 1), sniffs=False)
                data = _bytes_of(message.audio_b64)
            if len(pcm := reader.feed(data)):
                yield pcm
        if len(pcm := reader.finish()):
            yield pcm


def _bytes_of(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True) if text else b""
    except binascii.Error as error:
        raise RemoteError(f"{SERVER} sent no valid base64: {error}") from None
