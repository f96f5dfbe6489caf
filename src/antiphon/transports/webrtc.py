"""A WebRTC call as a transport: Opus audio in both directions, and events over a data channel.

Tasks of aiortc and of this module process the media, in the event loop that created the peer connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from aiortc import MediaStreamTrack, RTCConfiguration, RTCDataChannel, RTCIceServer, RTCPeerConnection
from aiortc import RTCSessionDescription as Description
from aiortc.exceptions import InvalidStateError
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.channels import ChannelMixer, channels_of
from antiphon.audio.pcm import Resampler
from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import AppendAudio
from antiphon.transports.player import ResponsePlayer, padded
from antiphon.transports.transport import TransportClosed

log = logging.getLogger(__name__)
# Opus in WebRTC always has this clock rate (RFC 7587, section 4.1).
RTC_HZ = 48_000
# Number of samples in one packet of 20 ms.
FRAME_SAMPLES = RTC_HZ // 50
# Maximum number of unread bytes in the data channel. Above it, the client counts as gone.
MAX_CHANNEL_BYTES = 8 << 20
# Maximum number of audio chunks and events that wait for the session. It corresponds to 10 s of frames.
MAX_ARRIVED_ITEMS = 1000
# `close` polls until the data channel is empty: the maximum number of polls, and their interval in seconds.
CLOSE_POLLS, CLOSE_POLL_S = 50, 0.02


class OutputTrack(MediaStreamTrack):
    """The track that plays the audio of responses in steps of 20 ms. It plays silence when `player` has no audio.

    `clock` is monotonic, in seconds.
    """

    kind = "audio"

    def __init__(self, player: ResponsePlayer, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._player = player
        self._clock = clock
        self._began_s: float | None = None
        self._num_samples = 0

    async def recv(self) -> AudioFrame:
        """Wait until the next 20 ms are due, and return them. aiortc's sender calls it, never concurrently.

        Raises MediaStreamError if the track was stopped.
        """
        if self.readyState != "live":
            raise MediaStreamError
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        await asyncio.sleep(max(0.0, self._began_s + self._num_samples / RTC_HZ - now_s))
        frame = AudioFrame(format="s16", layout="mono", samples=FRAME_SAMPLES)
        frame.planes[0].update(padded(self._player.take(), FRAME_SAMPLES).tobytes())
        frame.pts, frame.sample_rate, frame.time_base = self._num_samples, RTC_HZ, Fraction(1, RTC_HZ)
        self._num_samples += FRAME_SAMPLES
        return frame


class WebRtcCall:
    """A peer connection as a transport. Events are sent over the first data channel that the client opens.

    `opened` is set when that channel is open or the connection has failed. The creator of a call must end it with
    `hang_up`, even if the call was not answered.
    """

    def __init__(self, ice_servers: tuple[str, ...]) -> None:
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[RTCIceServer(urls=u) for u in ice_servers]))
        self.playback = ResponsePlayer(RTC_HZ)
        self.opened = asyncio.Event()
        self._channel: RTCDataChannel | None = None
        self._arrived: asyncio.Queue[str | bytes | AppendAudio | None] = asyncio.Queue(MAX_ARRIVED_ITEMS)
        self._audio_task: asyncio.Task[None] | None = None
        self._hung_up = False
        # Whether the end of the call has arrived (later items are dropped), and whether an item was dropped before.
        self._has_ended = self._has_dropped = False
        self.peer.on("datachannel", self._on_data_channel)
        self.peer.on("track", self._on_track)
        self.peer.on("connectionstatechange", self._on_state_change)

    async def answer(self, offer: str) -> str:
        """Answer an SDP offer with SDP. Waits until the ICE candidates are gathered.

        Raises RemoteProtocolError (`invalid_offer`) if the offer is not SDP, or if its media are not exactly one audio
        section.
        """
        try:
            await self.peer.setRemoteDescription(Description(sdp=offer, type="offer"))
            kinds = [t.kind for t in self.peer.getTransceivers()]
            if kinds != ["audio"]:
                # aiortc would decode any further track, although its media are not used.
                num_audio, num_video = kinds.count("audio"), kinds.count("video")
                raise ValueError(f"it has {num_audio} audio and {num_video} video sections; one of audio is taken")
            self.peer.addTrack(OutputTrack(self.playback))
            await self.peer.setLocalDescription(await self.peer.createAnswer())
        except Exception as error:
            # The parser handles untrusted input, so any exception means that the offer is invalid.
            raise RemoteProtocolError("invalid_offer", f"The SDP offer cannot be answered: {error}", "sdp") from error
        return str(self.peer.localDescription.sdp)

    async def receive(self) -> str | bytes | AppendAudio | None:
        """Wait for the data channel's next event, or for the microphone's next audio (mono at 16 kHz).

        Returns None if the channel was closed or the connection has failed. If more than MAX_ARRIVED_ITEMS wait for the
        session, the oldest are dropped.
        """
        return await self._arrived.get()

    async def send(self, data: str | bytes) -> None:
        """Queue an event in the data channel. See `send_now`."""
        self.send_now(data)

    def send_now(self, data: str | bytes) -> None:
        """Queue an event in the data channel. Does not wait: the channel buffers up to `MAX_CHANNEL_BYTES`.

        Raises TransportClosed if the channel is not open, is full, or cannot send an event of this size.
        """
        channel = self._channel
        if channel is None or channel.readyState != "open" or channel.bufferedAmount > MAX_CHANNEL_BYTES:
            raise TransportClosed
        try:
            channel.send(data)
        except (ValueError, InvalidStateError) as error:
            # The peer does not accept a message of this size, or the channel was just closed.
            log.info("a frame of %d characters could not be sent: %s", len(data), error)
            raise TransportClosed from error

    async def close(self, code: int, reason: str) -> None:
        """Wait up to a second until the channel's last events are sent, then hang up. WebRTC has no close codes."""
        for _ in range(CLOSE_POLLS):
            if not self._channel or not self._channel.bufferedAmount:
                break
            await asyncio.sleep(CLOSE_POLL_S)
        await self.hang_up()

    async def hang_up(self) -> None:
        """Close the peer connection in any state. A second call is a no-op. Does not raise."""
        if self._hung_up:
            return
        self._hung_up = True
        if self._audio_task:
            self._audio_task.cancel()
        try:
            await self.peer.close()
        except Exception as error:
            # If an offer was refused half-way, aiortc fails when it stops transports that were not created yet. No
            # socket is open then.
            log.info("a peer connection did not close cleanly: %r", error)
            self.peer.remove_all_listeners()

    def _on_data_channel(self, channel: RTCDataChannel) -> None:
        if self._channel is None:
            self._channel = channel
            channel.on("message", self.arrive)
            channel.on("close", lambda: self.arrive(None))
            self.opened.set()

    def arrive(self, item: str | bytes | AppendAudio | None) -> None:
        """Queue an item for `receive`. None marks the end. Does not wait."""
        if self._has_ended:
            return
        self._has_ended = item is None
        if self._arrived.full():
            # A live microphone is never this far ahead, so this client does not take part in a conversation.
            self._arrived.get_nowait()
            if not self._has_dropped:
                self._has_dropped = True
                log.warning("a call sends faster than it is served: its oldest items are dropped")
        self._arrived.put_nowait(item)

    def _on_track(self, track: MediaStreamTrack) -> None:
        if track.kind == "audio" and self._audio_task is None:
            self._audio_task = asyncio.create_task(self._read_audio(track))

    async def _read_audio(self, track: MediaStreamTrack) -> None:
        resampler, mixer, kind = None, None, (0, 0)
        try:
            while True:
                frame: Any = await track.recv()
                if resampler is None or mixer is None or kind != (frame.sample_rate, frame.layout.nb_channels):
                    kind = frame.sample_rate, frame.layout.nb_channels
                    resampler, mixer = Resampler(kind[0], SAMPLE_RATE_HZ), ChannelMixer(*kind)
                pcm = resampler.feed(mixer.feed(channels_of(frame)))
                if len(pcm):
                    self.arrive(AppendAudio(pcm))
        except MediaStreamError:
            self.arrive(None)
        except Exception:
            # The decoder handles untrusted input, so it may fail. Without a microphone, the call has no purpose.
            log.exception("the microphone of a call cannot be read")
            self.arrive(None)

    def _on_state_change(self) -> None:
        if self.peer.connectionState in ("failed", "closed"):
            self.arrive(None)
            self.opened.set()
