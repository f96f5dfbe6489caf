"""A caller's leg over a media stream: that of a carrier or of a switch. See docs/design/telephone.md."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import anyio
import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.line.telephone import JitterBuffer
from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.stream import (
    Arrived,
    CallerAudio,
    MarkReturned,
    MediaStream,
    Pressed,
    Started,
    Stopped,
)
from antiphon.transports.leg import TIMER_S, CallPlayer, Leg, LegOptions, LegSocket
from antiphon.transports.player import padded

log = logging.getLogger(__name__)
# Seconds of audio that the carrier has in its buffer. A stall of the event loop up to that length is not heard; speech
# that pauses a response pauses it after this time at the latest.
LEAD_S = 0.3
# The same for a peer that has no buffer, and plays what it gets.
UNBUFFERED_LEAD_S = 0.04
# A mark that the carrier does not return within this time after it was due counts as reached: not every carrier returns
# every mark.
MARK_LATE_S = 2.0
# The largest message of a carrier. Audio of 30 s has 1.9 MB at the highest rate.
MAX_MESSAGE_BYTES = 2 << 20


class CallerLeg(Leg):
    """The leg over a media stream.

    `socket`, `stream`: the socket of the carrier or switch, and its messages from `started` on. The rest is as in
    `Leg`. `is_refused`: its messages violated the protocol.
    """

    def __init__(
        self,
        socket: LegSocket,
        stream: MediaStream,
        started: Started,
        options: LegOptions,
        *,
        transfer: Callable[[str], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(started.call, started.codec.rate_hz, options, transfer=transfer, clock=clock)
        self.is_refused = False
        self._socket, self._stream, self._rate_hz = socket, stream, started.codec.rate_hz
        self._jitter = JitterBuffer[Pcm]()
        self.playback = CallPlayer(self._rate_hz, by_marks=stream.returns_marks)
        self._lead_s = LEAD_S if stream.returns_marks else UNBUFFERED_LEAD_S
        # When the carrier's buffer will be empty, by the clock.
        self._buffered_until_s = 0.0
        # The marks that were sent, oldest first, and the times at which each counts as reached.
        self._marks: deque[tuple[float, str]] = deque()
        self._num_bad = 0

    def _work(self) -> Sequence[Callable[[], Awaitable[None]]]:
        return self._read, self._play

    async def close(self, code: int, reason: str) -> None:
        """End the call with a WebSocket close code. Raises TransportClosed if the carrier closed it first."""
        await super().close(code, reason)
        await self._socket.close(code, reason)

    # --- from the carrier

    async def _read(self) -> None:
        while (data := await self._socket.receive()) is not None:
            try:
                if len(data) > MAX_MESSAGE_BYTES:
                    raise RemoteProtocolError("event_too_large", f"A message exceeds {MAX_MESSAGE_BYTES} bytes.")
                arrived = self._stream.read(data)
            except RemoteProtocolError as error:
                if error.code != "bad_audio":
                    log.warning("a call of %s is ended: %s", self.call.carrier, error.message)
                    self.is_refused = True
                    self.end(error.code)
                    return
                self._num_bad += 1
                if self._num_bad == 1:
                    log.warning("audio of a call of %s is dropped: %s", self.call.carrier, error.message)
                continue
            for item in arrived:
                self._take(item)
            self._finish_keys()
            # The carrier is not read while the session does not take what has arrived.
            await self._for_room()
        self.end("caller_hung_up")

    def _take(self, item: Arrived) -> None:
        match item:
            case CallerAudio(pcm, number):
                for packet in [pcm] if number is None else self._jitter.put(number, pcm):
                    self._hear(np.zeros(len(pcm), np.float32) if packet is None else packet)
            case Pressed(key):
                self._press(key)
            case MarkReturned(name):
                self.playback.reached(name)
            case Stopped():
                self.end("caller_hung_up")
            case Started():
                return

    # --- to the carrier

    async def _play(self) -> None:
        player = self.playback
        while True:
            while self._marks and self._marks[0][0] <= self._clock() + TIMER_S:
                player.reached(self._marks.popleft()[1])
            if player.must_clear:
                # Only a peer that returns marks has something to clear.
                player.must_clear = False
                self._buffered_until_s = self._clock()
                await self._socket.send(self._stream.clear())
            elif not player.has_frame:
                with anyio.move_on_after(self._marks[0][0] - self._clock() if self._marks else math.inf):
                    await player.changed.wait()
            elif (early_s := self._buffered_until_s - self._clock() - self._lead_s) > TIMER_S:
                with anyio.move_on_after(early_s):
                    await player.changed.wait()
            else:
                await self._send_audio()

    async def _send_audio(self) -> None:
        """Send the audio of one message, and a mark after it."""
        player, parts = self.playback, [np.zeros(0, np.int16)]
        for _ in range(self._stream.message_frames):
            if player.has_frame:
                parts.append(player.take())
        pcm = np.concatenate(parts)
        pcm = padded(pcm, -(-len(pcm) // player.frame_samples) * player.frame_samples)
        name = player.mark() if self._stream.returns_marks else ""
        self._buffered_until_s = max(self._clock(), self._buffered_until_s) + len(pcm) / self._rate_hz
        for data in self._stream.audio(pcm) if len(pcm) else ():
            await self._socket.send(data)
        if name:
            await self._socket.send(self._stream.mark(name))
            self._marks.append((self._buffered_until_s + MARK_LATE_S, name))
