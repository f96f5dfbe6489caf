"""RTP packets (RFC 3550), the order of a stream's packets, and keys in them (RFC 4733)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from antiphon.audio.line.telephone import KEYS, JitterBuffer
from antiphon.errors import RemoteProtocolError

_HEADER = struct.Struct("!BBHII")
_EVENT = struct.Struct("!BBH")
# The codes of the keys in events (RFC 4733, section 3.2).
_CODES = "0123456789*#ABCD"
# Length of a key, and of the pause after it, in frames of 20 ms. The last packet of a key is sent three times.
KEY_FRAMES, PAUSE_FRAMES, NUM_LAST = 5, 3, 3
# Volume of a key, in -dBm0.
VOLUME = 10
_SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True)
class RtpPacket:
    """One packet, without its padding and extensions."""

    # What the payload is, as it was agreed.
    payload_type: int
    # The number of the packet, with 16 bits.
    sequence: int
    # When the payload is to be played, in steps of the codec's clock, with 32 bits.
    timestamp: int
    # The random number of the stream.
    ssrc: int
    # The encoded audio, or an event.
    payload: bytes
    # Whether a stretch of sound, or a key, begins.
    marker: bool = False


def read(data: bytes) -> RtpPacket:
    """Read a packet. Raises RemoteProtocolError (`bad_audio`) for anything else, as RTCP."""
    if len(data) < _HEADER.size:
        raise _bad()
    first, second, sequence, timestamp, ssrc = _HEADER.unpack_from(data)
    at, end = _HEADER.size + 4 * (first & 0x0F), len(data)
    # Payload types 64 to 95 are those that RTCP has at this place (RFC 5761, section 4).
    if first >> 6 != 2 or 64 <= second & 0x7F <= 95:
        raise _bad()
    if first & 0x10:
        if at + 4 > end:
            raise _bad()
        at += 4 + 4 * int.from_bytes(data[at + 2 : at + 4])
    if first & 0x20:
        end -= data[-1]
    if at > end:
        raise _bad()
    return RtpPacket(second & 0x7F, sequence, timestamp, ssrc, data[at:end], bool(second & 0x80))


def encode(packet: RtpPacket) -> bytes:
    """Return a packet as it is sent."""
    second = packet.payload_type | (0x80 if packet.marker else 0)
    return _HEADER.pack(0x80, second, packet.sequence, packet.timestamp, packet.ssrc) + packet.payload


def _bad() -> RemoteProtocolError:
    return RemoteProtocolError("bad_audio", "A packet is not RTP.")


class RtpOrder:
    """Puts the packets of one stream into their order: `JitterBuffer`, with sequence numbers of 16 bits.

    Counts the packets that were missing, and those that came twice or too late.
    """

    def __init__(self) -> None:
        self._buffer = JitterBuffer[RtpPacket]()
        self._ssrc: int | None = None
        self._last = 0
        self.num_lost = self.num_late = 0

    def put(self, packet: RtpPacket) -> list[RtpPacket | None]:
        """Add a packet, and return those that are due, in order; None for one that is missing."""
        if packet.ssrc != self._ssrc:
            self._ssrc, self._last = packet.ssrc, packet.sequence
            self._buffer = JitterBuffer()
        # The number nearest to the last one that has these 16 bits.
        ahead = (packet.sequence - self._last + _SEQUENCES // 2) % _SEQUENCES - _SEQUENCES // 2
        number = self._last + ahead
        due = self._buffer.put(number, packet)
        self._last = number
        self.num_lost += due.count(None)
        self.num_late += self._buffer.has_dropped
        return due


class KeyReader:
    """Finds the keys in event packets. Each key comes in many packets with one timestamp."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def read(self, packet: RtpPacket) -> str:
        """Return the key that begins with this packet; "" if it has begun before, and for another event."""
        if len(packet.payload) < _EVENT.size:
            return ""
        this = packet.ssrc, packet.timestamp
        if this == self._last:
            return ""
        self._last = this
        code = packet.payload[0]
        return _CODES[code] if code < len(_CODES) else ""


def key_payloads(key: str, clock_hz: int) -> list[bytes]:
    """Return the payloads of one key, one for each 20 ms, and then the last one twice more.

    Raises ValueError for a character that is no key.
    """
    if len(key) != 1 or key not in KEYS:
        raise ValueError(f"{key!r} is not a key of a telephone")
    step = clock_hz // 50
    out = [_EVENT.pack(_CODES.index(key), VOLUME, step * (n + 1)) for n in range(KEY_FRAMES)]
    last = _EVENT.pack(_CODES.index(key), 0x80 | VOLUME, step * (KEY_FRAMES + 1))
    return [*out, *([last] * NUM_LAST)]
