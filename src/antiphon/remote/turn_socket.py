"""A turn detector on another server that takes a turn while it is said: one WebSocket for each session.

The client sends text messages, which are JSON, and binary messages, which are audio (PCM16, 16 kHz). The server answers
`predict` only (docs/turn-models.md):

    {"type": "start", "sample_rate": 16000, "encoding": "pcm_s16le"}     once
    {"type": "turn"}                                                     the audio after it is of another turn
    {"type": "predict", "id": 1}    ->    {"type": "prediction", "id": 1, "probability": 0.83}

After a failure, and after IDLE_S without a message, the connection is closed. The next message opens another, which
begins with the last INPUT_S seconds of the turn.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import anyio
import msgspec
import numpy as np
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.contracts import LearnEarly
from antiphon.errors import RemoteError
from antiphon.remote.turn_detector import ANSWER_S, INPUT_S, MAX_ANSWER_BYTES
from antiphon.remote.websocket import open_websocket

# Seconds after the last message until the connection of a session is closed. A session has no other end here.
IDLE_S = 30.0
# The name of the server in errors.
SERVER = "the turn detector's server"
START = b'{"type":"start","sample_rate":16000,"encoding":"pcm_s16le"}'
NEW_TURN = '{"type":"turn"}'


class _Prediction(msgspec.Struct):
    type: Literal["prediction"]
    id: int
    probability: float


class RemoteTurnSocket:
    """A StreamingTurnDetector behind a WebSocket URL, for all sessions of a process."""

    def __init__(self, url: str, key: str = "") -> None:
        """`key` is sent as a bearer token when connecting; "": none. No connection is opened before the first turn."""
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def open(self) -> RemoteTurn:
        """Return the stream of a new session."""
        return RemoteTurn(self)

    async def complete(self, pcm: Pcm) -> float:
        """Return the server's probability that the turn is complete, over a connection of its own.

        `pcm`: float32 [num_samples], 16 kHz. Raises RemoteError.
        """
        stream = self.open()
        try:
            return await stream.complete(0, pcm)
        finally:
            await stream.close()


class RemoteTurn:
    """A TurnStream over one connection. Its calls run one after the other."""

    def __init__(self, detector: RemoteTurnSocket) -> None:
        self._detector = detector
        self._lock = anyio.Lock()
        self._socket: ClientConnection | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._closed: asyncio.Task[None] | None = None
        # The turn's first sample, the number of its samples that the server has, and the number of the last request.
        self._start: int | None = None
        self._num_sent = 0
        self._request = 0

    async def follow(self, start: int, pcm: Pcm) -> None:
        """Send what the server does not have yet. Raises RemoteError."""
        await self._call(start, pcm, is_judged=False)

    async def complete(self, start: int, pcm: Pcm, early: LearnEarly | None = None) -> float:
        """Return the server's probability, in [0, 1], that the turn is complete. See `TurnStream.complete`.

        Raises RemoteError if the server does not answer within ANSWER_S, or not with a probability.
        """
        return await self._call(start, pcm, is_judged=True)

    async def close(self) -> None:
        """Close the connection, if there is one."""
        socket, self._socket, self._start = self._socket, None, None
        if self._closing:
            self._closing.cancel()
        if socket:
            await socket.close()

    async def _call(self, start: int, pcm: Pcm, *, is_judged: bool) -> float:
        async with self._lock:
            try:
                async with asyncio.timeout(ANSWER_S):
                    socket = await self._connected()
                    await self._send(socket, start, pcm)
                    return await self._judged(socket) if is_judged else 0.0
            except BaseException as error:
                # The server's part of the turn is unknown now, also after a cancellation.
                self._drop()
                if isinstance(error, OSError | TimeoutError | WebSocketException | msgspec.MsgspecError):
                    what = type(error).__name__
                    raise RemoteError(f"{SERVER} gave no judgement ({what})") from None
                raise

    async def _connected(self) -> ClientConnection:
        """Return the open connection, which is closed IDLE_S from now if nothing else is sent."""
        if self._socket is None:
            self._socket = await open_websocket(
                SERVER, self._detector.url, self._detector.headers, max_bytes=MAX_ANSWER_BYTES
            )
            self._start = None
            await self._socket.send(START, text=True)
        if self._closing:
            self._closing.cancel()
        self._closing = asyncio.get_running_loop().call_later(IDLE_S, self._drop)
        return self._socket

    async def _send(self, socket: ClientConnection, start: int, pcm: Pcm) -> None:
        if start != self._start or len(pcm) < self._num_sent:
            await socket.send(NEW_TURN)
            self._start, self._num_sent = start, max(0, len(pcm) - INPUT_S * SAMPLE_RATE_HZ)
        if self._num_sent < len(pcm):
            await socket.send(to_pcm16(np.asarray(pcm[self._num_sent :], np.float32)))
            self._num_sent = len(pcm)

    async def _judged(self, socket: ClientConnection) -> float:
        self._request += 1
        await socket.send(f'{{"type":"predict","id":{self._request}}}')
        while True:
            answer = msgspec.json.decode(await socket.recv(), type=_Prediction)
            # An answer to a request that was given up has a lower number.
            if answer.id == self._request:
                return answer.probability

    def _drop(self) -> None:
        """Close the connection in a task of its own, if there is one."""
        if self._socket:
            self._closed = asyncio.get_running_loop().create_task(self._socket.close())
        if self._closing:
            self._closing.cancel()
        self._socket, self._closing, self._start = None, None, None
