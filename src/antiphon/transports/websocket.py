"""A WebSocket as a transport of frames, also one over which the server plays the audio of responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import anyio
import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.audio import Pcm
from antiphon.protocols.wire import Frame
from antiphon.transports.player import FRAMES_PER_S, ResponsePlayer, padded
from antiphon.transports.transport import AudioPlayer, TransportClosed

# Sample rate of what is played, in Hz; the most frames of the player in one message; and how much silence has one.
PLAYED_HZ, MAX_FRAMES, SILENCE_S = 24_000, 2, 0.1
# How often a paused session is asked whether silence is due again.
RESTING_S = 1.0


class WebSocketTransport:
    """An accepted WebSocket as a transport.

    `first`: a frame that was already read, for example to detect the dialect. `receive` returns it again. The route
    that accepted the WebSocket owns it.
    """

    playback: AudioPlayer | None = None

    def __init__(self, websocket: WebSocket, first: str | bytes | None = None) -> None:
        self._websocket = websocket
        self._first = first

    async def receive(self) -> str | bytes | None:
        """Wait for the next frame: str for text, bytes for binary. Returns None after the client has disconnected."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def has_left(self, within_s: float) -> bool:
        """Return whether the client disconnects within `within_s` seconds. Keeps a frame that arrives for `receive`."""
        with anyio.move_on_after(within_s):
            if self._first is None:
                self._first = await self.receive()
                return self._first is None
        return False

    async def send(self, data: str | bytes) -> None:
        """Send a text frame for str, or a binary frame for bytes. Waits while the socket's send buffer is full.

        Raises TransportClosed if the client has left.
        """
        try:
            if isinstance(data, bytes):
                await self._websocket.send_bytes(data)
            else:
                await self._websocket.send_text(data)
        except (WebSocketDisconnect, RuntimeError, OSError):
            # Starlette raises RuntimeError for a socket that was already closed.
            raise TransportClosed from None

    async def close(self, code: int, reason: str) -> None:
        """Send a close frame, without waiting for the client's. Raises TransportClosed."""
        try:
            await self._websocket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError, OSError):
            raise TransportClosed from None


@runtime_checkable
class PlayedWire(Protocol):
    """The wire side of a connection to whose client the server plays the audio of responses."""

    def spoken(self, pcm: Pcm, num_spoken: int) -> Sequence[Frame]:
        """Return the frames for audio that is due: float32 at PLAYED_HZ, of which `num_spoken` samples at the beginning
        are of responses, and the others silence.
        """
        ...


class PlayingWebSocket(WebSocketTransport):
    """A WebSocket over which the server plays the audio of responses, each part when it is due, and silence in between.

    Call `play` once, beside the session. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        websocket: WebSocket,
        wire: PlayedWire,
        first: str | bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(websocket, first)
        self._wire, self._clock = wire, clock
        self.playback = self._player = ResponsePlayer(PLAYED_HZ)

    async def play(self) -> None:
        """Send audio until the client has left, or until it is cancelled."""
        player, due_s, wait_s = self._player, self._clock(), SILENCE_S
        try:
            while True:
                if player.has_frame:
                    due_s = max(due_s, self._clock() - SILENCE_S)
                    await anyio.sleep(max(0.0, due_s - self._clock()))
                    pcm = np.concatenate([player.take() for _ in range(MAX_FRAMES)])
                    num_samples = MAX_FRAMES * PLAYED_HZ // FRAMES_PER_S
                else:
                    # Silence is sent when it has passed, so that speech need not wait for its end.
                    with anyio.move_on_after(due_s + wait_s - self._clock()) as waiting:
                        await player.changed.wait()
                    if not waiting.cancelled_caught:
                        continue
                    pcm, num_samples = np.zeros(0, np.int16), int(SILENCE_S * PLAYED_HZ)
                samples = padded(pcm, num_samples).astype(np.float32) / np.float32(32768)
                frames = self._wire.spoken(samples, len(pcm))
                # Without frames, the session is paused. Then no silence is due, and the wait costs less.
                due_s = due_s + num_samples / PLAYED_HZ if frames and wait_s == SILENCE_S else self._clock()
                wait_s = SILENCE_S if frames else RESTING_S
                for frame in frames:
                    await self.send(frame.encode())
        except TransportClosed:
            return
