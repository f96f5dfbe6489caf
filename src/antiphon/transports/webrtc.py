"""A WebRTC call as a transport: Opus both ways, events over a data channel."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from aiortc import MediaStreamTrack, RTCConfiguration, RTCDataChannel, RTCIceServer, RTCPeerConnection
from aiortc import RTCSessionDescription as Description
from aiortc.exceptions import InvalidStateError
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPartDone,
    ContentPosition,
    ConversationEvent,
    PlaybackStarted,
    PlaybackStopped,
    ResponseAudioDelta,
)
from antiphon.events.transcription import AppendAudio, TranscriptionEvent
from antiphon.transports.transport import TransportClosed

log = logging.getLogger(__name__)
RTC_HZ = 48_000
FRAME_SAMPLES = RTC_HZ // 50
# What a client may leave unread in its channel before it is taken to be gone.
MAX_CHANNEL_BYTES = 8 << 20
# Sound and events that came and wait for the session: 10 s of frames.
MAX_ARRIVED = 1000
TellPlayback = Callable[[PlaybackStarted | PlaybackStopped], object]


@dataclass(slots=True)
class _Piece:
    """Sound of one item, int16 at 48 kHz; `last`: nothing of the item follows."""

    at: ContentPosition
    pcm: npt.NDArray[np.int16]
    last: bool = False


class OutputTrack(MediaStreamTrack):
    """The track that plays what the session says, 20 ms at a time, silence between; see transport.Player."""

    kind = "audio"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Bound: an answer's sound; its tokens are limited, and the next answer begins when this one is cut or done.
        self._queue: deque[_Piece] = deque()
        self._resamplers: dict[str, Resampler] = {}
        # Items that were begun and not played to their end, with the samples of each that were heard.
        self._open: dict[str, ContentPosition] = {}
        self._heard: dict[str, int] = {}
        # Items of which no more is to be played.
        self._cut: set[str] = set()
        self._sounding: str | None = None
        self._tell: TellPlayback = lambda _: None
        self._begun_s: float | None = None
        self._sent = 0

    def attach(self, tell: TellPlayback) -> None:
        """See Player."""
        self._tell = tell

    def take(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """See Player."""
        match output:
            case ResponseAudioDelta(at, pcm, rate_hz) if at.item_id not in self._cut:
                if at.item_id not in self._resamplers:
                    self._resamplers[at.item_id] = Resampler(rate_hz, RTC_HZ)
                    self._open[at.item_id] = at
                self._queue.append(_Piece(at, _int16(self._resamplers[at.item_id].feed(pcm))))
            case ContentPartDone(at, part) if part.kind == "output_audio":
                self._cut.discard(at.item_id)
                if resampler := self._resamplers.pop(at.item_id, None):
                    self._queue.append(_Piece(at, _int16(resampler.flush()), last=True))
            case _:
                return

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """See Playback."""
        cut = [(at, self._heard.get(item_id, 0) * 1000 // RTC_HZ) for item_id, at in self._open.items()]
        # Those still being made have a resampler.
        self._cut |= self._resamplers.keys()
        self._queue.clear()
        self._resamplers.clear()
        self._open.clear()
        self._heard.clear()
        self._sounding = None
        return cut

    async def recv(self) -> AudioFrame:
        """The next 20 ms, when they are due."""
        if self.readyState != "live":
            raise MediaStreamError
        now_s = self._clock()
        if self._begun_s is None:
            self._begun_s = now_s
        await asyncio.sleep(max(0.0, self._begun_s + self._sent / RTC_HZ - now_s))
        frame = AudioFrame(format="s16", layout="mono", samples=FRAME_SAMPLES)
        frame.planes[0].update(self.next().tobytes())
        frame.pts, frame.sample_rate, frame.time_base = self._sent, RTC_HZ, Fraction(1, RTC_HZ)
        self._sent += FRAME_SAMPLES
        return frame

    def next(self) -> npt.NDArray[np.int16]:
        """The sound of 20 ms, int16 [960], and what begins and ends in it is told."""
        out, filled = np.zeros(FRAME_SAMPLES, np.int16), 0
        while self._queue and filled < FRAME_SAMPLES:
            piece = self._queue[0]
            count = min(len(piece.pcm), FRAME_SAMPLES - filled)
            if count:
                if self._sounding != piece.at.response_id:
                    self._sounding = piece.at.response_id
                    self._tell(PlaybackStarted(piece.at.response_id))
                out[filled : filled + count] = piece.pcm[:count]
                self._heard[piece.at.item_id] = self._heard.get(piece.at.item_id, 0) + count
                filled += count
                piece.pcm = piece.pcm[count:]
            if not len(piece.pcm):
                self._queue.popleft()
                if piece.last:
                    self._open.pop(piece.at.item_id, None)
                    self._heard.pop(piece.at.item_id, None)
                    if self._sounding == piece.at.response_id:
                        self._sounding = None
                        self._tell(PlaybackStopped(piece.at.response_id))
        return out


def _int16(pcm: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    return (np.clip(pcm, -1.0, 1.0) * 32767).astype(np.int16)


class WebRtcCall:
    """A peer connection as a transport; see server/transport.py."""

    def __init__(self, ice_servers: tuple[str, ...]) -> None:
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[RTCIceServer(urls=u) for u in ice_servers]))
        self.playback = OutputTrack()
        self.opened = asyncio.Event()
        self._channel: RTCDataChannel | None = None
        self._arrived: asyncio.Queue[str | bytes | AppendAudio | None] = asyncio.Queue(MAX_ARRIVED)
        self._listening: asyncio.Task[None] | None = None
        self.peer.on("datachannel", self._open)
        self.peer.on("track", self._listen)
        self.peer.on("connectionstatechange", self._changed)

    async def answer(self, offer: str) -> str:
        """The SDP answer. Raises RemoteProtocolError for an offer that cannot be."""
        try:
            await self.peer.setRemoteDescription(Description(sdp=offer, type="offer"))
            kinds = [t.kind for t in self.peer.getTransceivers()]
            if kinds != ["audio"]:
                # Every further track would be decoded, and nobody would take what comes out.
                raise ValueError(
                    f"it has {kinds.count('audio')} audio and {kinds.count('video')} video sections; one of audio is taken"
                )
            self.peer.addTrack(self.playback)
            await self.peer.setLocalDescription(await self.peer.createAnswer())
        except Exception as error:
            # The edge of a parser of what strangers send: whatever it raises is about the offer.
            raise RemoteProtocolError("invalid_offer", f"The SDP offer cannot be answered: {error}", "sdp") from error
        return str(self.peer.localDescription.sdp)

    async def receive(self) -> str | bytes | AppendAudio | None:
        """See Transport."""
        return await self._arrived.get()

    async def send(self, frame: str) -> None:
        """See Transport."""
        channel = self._channel
        if channel is None or channel.readyState != "open" or channel.bufferedAmount > MAX_CHANNEL_BYTES:
            raise TransportClosed
        try:
            channel.send(frame)
        except (ValueError, InvalidStateError) as error:
            # More than the peer takes in one message, or it has just closed.
            log.info("a frame of %d characters could not be sent: %s", len(frame), error)
            raise TransportClosed from error

    async def close(self, code: int, reason: str) -> None:
        """See Transport."""
        # What was sent last is still on its way.
        for _ in range(50):
            if not self._channel or not self._channel.bufferedAmount:
                break
            await asyncio.sleep(0.02)
        await self.hang_up()

    async def hang_up(self) -> None:
        """Close the peer connection, in whatever state it is."""
        if self._listening:
            self._listening.cancel()
        await self.peer.close()

    def _open(self, channel: RTCDataChannel) -> None:
        if self._channel is None:
            self._channel = channel
            channel.on("message", self._arrive)
            channel.on("close", lambda: self._arrive(None))
            self.opened.set()

    def _arrive(self, item: str | bytes | AppendAudio | None) -> None:
        if self._arrived.full():
            # Who sends faster than the session takes for so long is not talking.
            self._arrived.get_nowait()
        self._arrived.put_nowait(item)

    def _listen(self, track: MediaStreamTrack) -> None:
        if track.kind == "audio" and self._listening is None:
            self._listening = asyncio.create_task(self._hear(track))

    async def _hear(self, track: MediaStreamTrack) -> None:
        resampler, rate_hz = None, 0
        try:
            while True:
                frame: Any = await track.recv()
                if resampler is None or frame.sample_rate != rate_hz:
                    rate_hz = frame.sample_rate
                    resampler = Resampler(rate_hz, SAMPLE_RATE_HZ)
                sound = frame.to_ndarray().reshape(-1, len(frame.layout.channels)).mean(axis=1, dtype=np.float32)
                pcm = resampler.feed(sound / np.float32(32768))
                if len(pcm):
                    self._arrive(AppendAudio(pcm))
        except MediaStreamError:
            self._arrive(None)

    def _changed(self) -> None:
        if self.peer.connectionState in ("failed", "closed"):
            self._arrive(None)
            self.opened.set()
