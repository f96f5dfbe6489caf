"""Speech over the WebSocket `/v1/audio/speech/stream`, which antiphon and vLLM-Omni serve.

Each text is one utterance. A connection is kept for the next text. It is closed if a text ends early, which ends the
work at the server, and a new one is then opened in advance.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from collections.abc import AsyncGenerator
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
from antiphon.remote.pool import Endpoint, Pool
from antiphon.remote.synthesizer.sound import SampleFormat, SoundReader
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

    # The name of the message.
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
class _Kept:
    """The idle connections to one server in one event loop, and the tasks that open further ones."""

    idle: list[_Connection] = field(default_factory=list)
    opening: set[asyncio.Task[None]] = field(default_factory=set)


async def _keep() -> AsyncGenerator[dict[str, _Kept], None]:
    """Yield a place for connections, by URL. They are closed with the generator, at the latest when its loop ends."""
    kept: dict[str, _Kept] = {}
    try:
        yield kept
    finally:
        for one in kept.values():
            for task in one.opening:
                task.cancel()
            for connection in one.idle:
                abort(connection.socket)
        # A connection is closed in the next turn of the event loop.
        await asyncio.sleep(0)


class StreamSpeech:
    """Speech by WebSockets. `raw`: the format of samples for which a server does not tell it."""

    # Streamed audio has the voice's own tempo.
    speeds = (1.0, 1.0)

    def __init__(self, pool: Pool[Endpoint], model: str, raw: SampleFormat) -> None:
        self._pool, self._model, self._raw = pool, model, raw
        # The connections of each event loop, by URL, and the generator that closes them with the loop.
        self._loops: WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[dict[str, _Kept], AsyncGenerator[dict[str, _Kept], None]]
        ] = WeakKeyDictionary()

    async def speak(
        self, endpoint: Endpoint, text: str, options: VoiceOptions, to_hz: int
    ) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a text: float32 [num_samples], mono, at `to_hz`. Closing the generator ends the work.

        Raises RemoteError if the server fails or its answer is not audio, Refused if it has no room, and ModelError if
        it does not accept the key.
        """
        kept = await self._kept(endpoint)
        connection = await self._take(endpoint, kept)
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
            if is_whole and len(kept.idle) < MAX_IDLE:
                kept.idle.append(connection)
            else:
                abort(connection.socket)
                self._open_ahead(endpoint, kept)

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

    async def _kept(self, endpoint: Endpoint) -> _Kept:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            keeper = _keep()
            self._loops[loop] = (await anext(keeper), keeper)
        return self._loops[loop][0].setdefault(endpoint.url, _Kept())

    async def _take(self, endpoint: Endpoint, kept: _Kept) -> _Connection:
        while kept.idle or kept.opening:
            if not kept.idle:
                await asyncio.wait(kept.opening)
                continue
            connection = kept.idle.pop()
            if connection.socket.state is State.OPEN:
                return connection
        return await self._open(endpoint)

    async def _open(self, endpoint: Endpoint) -> _Connection:
        url = "ws" + endpoint.url.removeprefix("http") + "/audio/speech/stream"
        return _Connection(await open_websocket(SERVER, url, self._pool.headers(), self._pool.tls))

    def _open_ahead(self, endpoint: Endpoint, kept: _Kept) -> None:
        """Open a connection for the next text. Returns at once."""

        async def open_one() -> None:
            # The next text tries again, and reports the failure.
            with suppress(AntiphonError):
                kept.idle.append(await self._open(endpoint))

        if not kept.idle and not kept.opening:
            task = asyncio.create_task(open_one())
            kept.opening.add(task)
            task.add_done_callback(kept.opening.discard)

    async def _sound(self, socket: ClientConnection, to_hz: int) -> AsyncGenerator[Pcm, None]:
        reader = SoundReader(to_hz, self._raw, sniffs=False)
        while True:
            found = await socket.recv()
            if isinstance(found, bytes):
                data = found
            else:
                message = decoded(_decoder, without_key(found.encode(), self._pool.key), "message of speech")
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
