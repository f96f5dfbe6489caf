"""A caller's leg over RTP: frames of 20 ms at the moment at which each is due, in both directions.

The other side plays what it gets when it gets it. So a frame that was sent counts as heard. See docs/design/sip.md.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import anyio
import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.line.line_codecs import LineCodec, rate_of_frame
from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.sip import rtp
from antiphon.protocols.telephony.sip.sdp import SUITES, Agreed, Crypto, Description
from antiphon.protocols.telephony.stream import Call
from antiphon.transports.leg import MAX_ARRIVED_ITEMS, TIMER_S, CallPlayer, Leg, LegOptions
from antiphon.transports.player import padded

if TYPE_CHECKING:
    from pylibsrtp import Session

log = logging.getLogger(__name__)
FRAME_S = 0.02
# If the event loop was busy for longer than this, the frames of that time are left out instead of sent in a burst.
MAX_LATE_S = 0.5
# Seconds without a packet after which the caller counts as silent: not every telephone sends its silence. And the
# seconds without a packet after which it counts as gone, except on hold.
SILENT_AFTER_S, GONE_AFTER_S = 0.2, 60.0
# Seconds from the last frame to the end of a call, in which it passes the network and the other side's jitter buffer.
TAIL_S = 0.3

Address = tuple[str, int]


class Signalling(Protocol):
    """The signalling of a call, as its leg uses it: `server/sip/call.py`."""

    async def hang_up(self, reason: str) -> None:
        """End the call for the other side. Does nothing for a call that has ended."""
        ...

    async def transfer(self, target: str) -> None:
        """Ask the other side to call `target`, a URI or a number, instead of us.

        Raises RemoteProtocolError (`carrier_refused`) if it does not.
        """
        ...


class RtpPort(asyncio.DatagramProtocol):
    """The UDP port of one call. `number` is the port. `received` is called with each datagram and its sender."""

    def __init__(self) -> None:
        self.received: Callable[[bytes, Address], None] = lambda data, sender: None
        self.number = 0
        self._transport: asyncio.DatagramTransport | None = None

    @classmethod
    async def open(cls, host: str, ports: Iterable[int]) -> RtpPort:
        """Bind the first of these ports that is free. Raises OSError if none is."""
        loop = asyncio.get_running_loop()
        for number in ports:
            try:
                transport, port = await loop.create_datagram_endpoint(cls, local_addr=(host, number))
            except OSError:
                continue
            port._transport, port.number = transport, number or transport.get_extra_info("sockname")[1]
            return port
        raise OSError("no port for RTP is free")

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.received(data, (addr[0], addr[1]))

    def error_received(self, exc: Exception) -> None:
        """The other side's port is closed, as before it is ready and after it has hung up."""

    def send(self, data: bytes, to: Address) -> None:
        """Send a datagram. Does not wait."""
        if self._transport and not self._transport.is_closing():
            self._transport.sendto(data, to)

    def close(self) -> None:
        """Close the port. A second call is a no-op."""
        if self._transport:
            self._transport.close()


class RtpLeg(Leg):
    """The leg over RTP. `agree` says where audio goes to, before the leg runs and whenever the other side changes it.

    - `port`: the port of the call. The code that opened it closes it.
    - `codec`: the codec of the call.
    - `sends_keys`: whether the other side takes keys as events; if not, they are played as tones.
    - `comedia`: send to where audio comes from, whatever address was agreed, for callers behind NAT.
    """

    def __init__(
        self,
        call: Call,
        codec: LineCodec,
        port: RtpPort,
        signalling: Signalling,
        options: LegOptions,
        *,
        sends_keys: bool,
        comedia: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(call, codec.heard_hz, options, transfer=signalling.transfer, clock=loop.time)
        self._signalling = signalling
        # Packets of other addresses, which were dropped.
        self.num_foreign = 0
        self._loop, self._codec, self._port, self._comedia = loop, codec, port, comedia
        self.playback = CallPlayer(codec.rate_hz, by_marks=False)
        self._sends_keys = sends_keys
        self._order, self._key_reader = rtp.RtpOrder(), rtp.KeyReader()
        self._stream = _Stream()
        self._remote: Address = "", 0
        self._agreed = Agreed(0, "", 8000, None)
        # Whether the other side does not listen, and whether its address was learned from its packets.
        self._holds = self._is_latched = False
        self._srtp_in: Session | None = None
        self._srtp_out: Session | None = None
        # The keys of SRTP of both directions: theirs, and ours.
        self._crypto: tuple[Crypto | None, Crypto | None] = None, None
        self._last_packet_s = self._next_s = 0.0
        self._num_samples = rate_of_frame(codec.heard_hz)
        # What is sent in place of audio, frame by frame: the payload of an event, or b"" for a pause.
        self._keys_out: deque[bytes] = deque()

    @property
    def num_lost(self) -> int:
        """Packets of the caller that never came, or too late."""
        return self._order.num_lost

    @property
    def num_late(self) -> int:
        """Packets of the caller that came twice or too late, and were dropped."""
        return self._order.num_late

    def agree(self, agreed: Agreed, theirs: Description, own: Crypto | None = None) -> None:
        """Send to where a description says, with these payload types. `own`: our keys, if SRTP is used."""
        changed = (theirs.host, theirs.port) != self._remote
        self._agreed, self._remote, self._holds = agreed, (theirs.host, theirs.port), theirs.holds
        self._is_latched = self._is_latched and not changed
        given = next((c for c in theirs.crypto if own and c.suite == own.suite), None)
        # A stream with known keys goes on: the packets that it has counted are part of its encryption.
        if own and given and given != self._crypto[0]:
            self._srtp_in = srtp_session(given, inbound=True)
        if own and own != self._crypto[1]:
            self._srtp_out = srtp_session(own, inbound=False)
        self._crypto = given, own
        self._last_packet_s = self._loop.time()

    # --- the session's transport

    async def close(self, code: int, reason: str) -> None:
        await super().close(code, reason)
        await self._signalling.hang_up(reason)

    def _work(self) -> Sequence[Callable[[], Awaitable[None]]]:
        return (self._pace,)

    # --- the functions of the model

    async def send_digits(self, digits: str) -> None:
        """Send keys as events if the other side takes them, when the words before them are sent."""
        if not self._sends_keys:
            await super().send_digits(digits)
            return
        for key in digits:
            self._keys_out += rtp.key_payloads(key, self._agreed.clock_hz)
            self._keys_out += [b""] * rtp.PAUSE_FRAMES

    async def _last_words(self) -> bool:
        if not await super()._last_words():
            return False
        await anyio.sleep(len(self._keys_out) * FRAME_S + TAIL_S)
        return True

    # --- the pace of both directions

    async def _pace(self) -> None:
        """Send a frame every 20 ms, and take what comes."""
        loop = self._loop
        self._next_s = self._last_packet_s = loop.time()
        self._port.received = self._receive
        try:
            while True:
                self._send_due()
                self._watch()
                # Cheaper than anyio's, which counts with many calls.
                await asyncio.sleep(self._next_s - loop.time())
        finally:
            self._port.received = lambda data, sender: None

    def _send_due(self) -> None:
        """Send the frames that are due now."""
        now_s = self._loop.time()
        if now_s - self._next_s > MAX_LATE_S:
            missed = int((now_s - self._next_s) / FRAME_S)
            self._stream.skip(missed * self._samples_per_frame)
            self._next_s += missed * FRAME_S
        while self._next_s <= now_s + TIMER_S:
            self._send_frame()
            self._next_s += FRAME_S

    def _watch(self) -> None:
        """Hear silence where nothing comes, and find out whether the caller is gone."""
        silent_s = self._loop.time() - self._last_packet_s
        if silent_s > SILENT_AFTER_S:
            self._hear_packet(np.zeros(self._num_samples, np.float32))
        if silent_s > GONE_AFTER_S and not self._holds:
            self.end("no_audio")
        self._finish_keys()

    # --- to the other side

    @property
    def _samples_per_frame(self) -> int:
        """What 20 ms add to the timestamp."""
        return rate_of_frame(self._agreed.clock_hz)

    def _send_frame(self) -> None:
        """Send 20 ms of sound, of silence, or of a key. Nothing is sent to a caller who has put the call on hold."""
        player, stream, agreed = self.playback, self._stream, self._agreed
        if self._holds:
            stream.skip(self._samples_per_frame)
            return
        event = b""
        if self._keys_out and not player.has_frame:
            event = self._keys_out.popleft()
            if not event:
                stream.end_event()
        elif player.has_frame:
            payload = self._codec.encode(padded(player.take(), player.frame_samples))
            self._send(stream.audio(agreed.payload, payload, self._samples_per_frame))
            return
        if event and agreed.events is not None:
            self._send(stream.event(agreed.events, event))
            stream.skip(self._samples_per_frame)
        else:
            payload = self._codec.silence or self._codec.encode(np.zeros(player.frame_samples, np.int16))
            self._send(stream.audio(agreed.payload, payload, self._samples_per_frame))

    def _send(self, packet: bytes) -> None:
        if self._srtp_out:
            packet = self._srtp_out.protect(packet)
        if self._remote[1]:
            self._port.send(packet, self._remote)

    # --- from the other side

    def press(self, key: str) -> None:
        """Take a key that the caller has pressed, which the signalling has brought (INFO)."""
        self._press(key)

    def _receive(self, data: bytes, sender: Address) -> None:
        if sender != self._remote and not (self._comedia and not self._is_latched):
            self.num_foreign += 1
            return
        try:
            if self._srtp_in:
                data = self._srtp_in.unprotect(data)
            packet = rtp.read(data)
        except RemoteProtocolError:
            # RTCP, mostly.
            return
        except Exception as error:
            # A packet without the right key, or a repeated one.
            log.debug("a packet of SRTP is dropped: %s", error)
            return
        if packet.payload_type not in (self._agreed.payload, self._agreed.events):
            # Comfort noise, mostly: the caller is silent.
            return
        self._remote, self._is_latched = sender, True
        self._last_packet_s = self._loop.time()
        for due in self._order.put(packet):
            self._take_packet(due)

    def _take_packet(self, packet: rtp.RtpPacket | None) -> None:
        """Hear a packet, or silence in the place of one that is lost or is of a key."""
        if packet is not None and packet.payload_type == self._agreed.payload:
            try:
                pcm = self._codec.decode(packet.payload)
            except RemoteProtocolError:
                pcm = np.zeros(self._num_samples, np.float32)
            self._num_samples = len(pcm) or self._num_samples
            self._hear_packet(pcm)
            return
        if packet is not None and (key := self._key_reader.read(packet)):
            self._press(key)
        self._hear_packet(np.zeros(self._num_samples, np.float32))

    def _hear_packet(self, pcm: Pcm) -> None:
        # A session that is so far behind is beyond help. Its audio stays bounded.
        if len(self._arrived) < MAX_ARRIVED_ITEMS:
            self._hear(pcm)


class _Stream:
    """The numbers of the packets that are sent: sequence, timestamp and source (RFC 3550, section 5.1)."""

    def __init__(self) -> None:
        self._ssrc, self._sequence = secrets.randbits(32), secrets.randbits(16)
        self._timestamp = secrets.randbits(32)
        # The timestamp of the key that is being sent.
        self._event_at: int | None = None
        # Whether the next packet is the first one after a gap.
        self._marks = True

    def audio(self, payload_type: int, payload: bytes, num_samples: int) -> bytes:
        """Return the next packet of audio."""
        packet = self._packet(payload_type, self._timestamp, payload, marker=self._marks)
        self.skip(num_samples)
        self._marks = False
        return packet

    def event(self, payload_type: int, payload: bytes) -> bytes:
        """Return the next packet of a key. All packets of a key have the timestamp of its first one."""
        begins = self._event_at is None
        at = self._timestamp if self._event_at is None else self._event_at
        self._event_at = at
        return self._packet(payload_type, at, payload, marker=begins)

    def end_event(self) -> None:
        """The next event is of another key."""
        self._event_at = None
        self._marks = True

    def skip(self, num_samples: int) -> None:
        """Let time pass without a packet."""
        self._timestamp = (self._timestamp + num_samples) % (1 << 32)

    def _packet(self, payload_type: int, timestamp: int, payload: bytes, *, marker: bool) -> bytes:
        self._sequence = (self._sequence + 1) % (1 << 16)
        return rtp.encode(rtp.RtpPacket(payload_type, self._sequence, timestamp, self._ssrc, payload, marker))


def srtp_session(crypto: Crypto, *, inbound: bool) -> Session:
    """Return what encrypts, or decrypts, the packets of one direction."""
    from pylibsrtp import Policy, Session

    profiles = Policy.SRTP_PROFILE_AES128_CM_SHA1_80, Policy.SRTP_PROFILE_AES128_CM_SHA1_32
    kind = Policy.SSRC_ANY_INBOUND if inbound else Policy.SSRC_ANY_OUTBOUND
    return Session(Policy(key=crypto.key, ssrc_type=kind, srtp_profile=profiles[SUITES.index(crypto.suite)]))
