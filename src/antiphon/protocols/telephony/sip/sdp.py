"""SDP (RFC 8866) of a telephone call: offers of audio, and the answers to them (RFC 3264, RFC 4568)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from antiphon.errors import RemoteProtocolError

# The codecs that have a payload type without a=rtpmap (RFC 3551), with their clock.
_STATIC = {0: ("PCMU", 8000), 8: ("PCMA", 8000), 9: ("G722", 8000)}
# The codecs that calls may have, in lower case, with the name and the clock that an offer of ours gives them. G.722 has
# the clock of 8 kHz by a mistake that became the standard (RFC 3551, section 4.5.2).
CLOCKS_HZ = {"pcmu": ("PCMU", 8000), "pcma": ("PCMA", 8000), "g722": ("G722", 8000), "opus": ("opus/48000/2", 48_000)}
_OWN_PAYLOADS = {"pcmu": 0, "pcma": 8, "g722": 9, "opus": 96}
EVENTS = "telephone-event"
_OWN_EVENTS = {8000: 101, 48_000: 100}
# The suites of SRTP that are understood, the best first, and the length of a key with its salt.
SUITES = ("AES_CM_128_HMAC_SHA1_80", "AES_CM_128_HMAC_SHA1_32")
KEY_BYTES = 30
# The direction in which the other side sees the audio of a direction.
_REVERSED = {"sendrecv": "sendrecv", "sendonly": "recvonly", "recvonly": "sendonly", "inactive": "inactive"}
MAX_LINES = 500
_PROTOCOLS = ("RTP/AVP", "RTP/SAVP", "RTP/AVPF", "RTP/SAVPF")
_MEDIA = re.compile(r"(\w+) (\d{1,5})(?:/\d+)? ([\w/]+)((?: [^\s]+)*)")
_RTPMAP = re.compile(r"rtpmap:(\d{1,3}) ([\w.+-]+)/(\d{1,6})(?:/(\d))?")
_CRYPTO = re.compile(r"crypto:(\d{1,9}) ([A-Za-z0-9_]+) inline:([A-Za-z0-9+/=]+)(\S*)(.*)")


def bad_sdp(message: str) -> RemoteProtocolError:
    """Return the error for a description that cannot be read, or cannot be answered."""
    return RemoteProtocolError("invalid_offer", message, "sdp")


@dataclass(frozen=True, slots=True)
class Crypto:
    """The keys of one direction of SRTP (a=crypto). `key`: the master key and the salt, KEY_BYTES bytes."""

    tag: int
    suite: str
    key: bytes

    def line(self) -> str:
        """Return the attribute a=crypto with these keys."""
        return f"a=crypto:{self.tag} {self.suite} inline:{base64.b64encode(self.key).decode()}"


@dataclass(slots=True)
class _Media:
    """One m= line and what follows it."""

    kind: str  # audio, video, …
    port: int  # 0 for media that are refused.
    protocol: str  # RTP/AVP, …
    formats: tuple[str, ...]  # The payload types, for RTP.
    host: str = ""  # That of its own c= line.
    attributes: list[str] = field(default_factory=list)  # Its a= lines.


@dataclass(frozen=True, slots=True)
class Description:
    """The audio of a description: where the other side receives, and what it may be sent."""

    # The address that RTP goes to.
    host: str
    # The port that RTP goes to.
    port: int
    # Payload type, name in lower case and clock of each codec, as the other side prefers them.
    codecs: tuple[tuple[int, str, int], ...]
    # The payload types of keys (RFC 4733), by clock.
    events: dict[int, int]
    # As the other side sees it: sendrecv, sendonly (it holds us), recvonly or inactive.
    direction: str
    # Its keys of SRTP that are understood.
    crypto: tuple[Crypto, ...]
    # Whether nothing but SRTP is accepted.
    is_secure: bool
    # Kind, protocol and formats of each m= line, in order, for the answer.
    media: tuple[tuple[str, str, str], ...]
    # The number of the m= line of this audio.
    at: int

    @property
    def holds(self) -> bool:
        """Whether the other side has put us on hold."""
        return self.direction in ("sendonly", "inactive") or self.host in ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Agreed:
    """The codec of a call: payload type, name in lower case and clock, and the payload type of keys; None without."""

    payload: int
    codec: str
    clock_hz: int
    events: int | None


def read(data: bytes) -> Description:
    """Read a description, and return its first audio that is not refused. Raises RemoteProtocolError."""
    lines = data.decode("utf-8", "replace").replace("\r", "").split("\n")
    if len(lines) > MAX_LINES or not lines[0].startswith("v=0"):
        raise bad_sdp("The body is no SDP.")
    host, own, found = "", list[str](), list[_Media]()
    for line in lines[1:]:
        kind, _, value = line.partition("=")
        if kind == "m":
            if not (matched := _MEDIA.fullmatch(value.strip())):
                raise bad_sdp("An m= line is not valid.")
            found.append(_Media(matched[1], int(matched[2]), matched[3], tuple(matched[4].split())))
        elif kind == "c":
            words = value.split()
            if len(words) != 3 or words[0] != "IN":
                raise bad_sdp("A c= line is not valid.")
            address = words[2].partition("/")[0]
            if found:
                found[-1].host = address
            else:
                host = address
        elif kind == "a":
            (found[-1].attributes if found else own).append(value.strip())
    at = next((i for i, m in enumerate(found) if _is_audio(m)), None)
    if at is None:
        raise bad_sdp("The description has no audio over RTP.")
    audio = found[at]
    if not _is_address(audio.host or host) or audio.port > 65535:
        raise bad_sdp("The audio has no address.")
    directions = [a for a in (*own, *audio.attributes) if a in _REVERSED]
    codecs, events = _formats(audio)
    shown = tuple((m.kind, m.protocol, " ".join(m.formats)) for m in found)
    secure = "SAVP" in audio.protocol
    crypto = tuple(filter(None, map(_crypto, audio.attributes))) if secure else ()
    direction = directions[-1] if directions else "sendrecv"
    return Description(audio.host or host, audio.port, codecs, events, direction, crypto, secure, shown, at)


def _is_address(host: str) -> bool:
    """Return whether a host is the address of one machine: a name would have to be looked up."""
    try:
        return not ip_address(host).is_multicast
    except ValueError:
        return False


def _is_audio(media: _Media) -> bool:
    return media.kind == "audio" and media.port > 0 and media.protocol in _PROTOCOLS


def _formats(audio: _Media) -> tuple[tuple[tuple[int, str, int], ...], dict[int, int]]:
    """Return the codecs and the payload types of keys."""
    named = {payload: (name.lower(), clock) for payload, (name, clock) in _STATIC.items()}
    for attribute in audio.attributes:
        if found := _RTPMAP.fullmatch(attribute):
            named[int(found[1])] = found[2].lower(), int(found[3])
    codecs, events = list[tuple[int, str, int]](), dict[int, int]()
    for text in audio.formats:
        payload = int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else -1
        if not 0 <= payload <= 127 or payload not in named:
            continue
        name, clock = named[payload]
        if name == EVENTS:
            events.setdefault(clock, payload)
        elif name in CLOCKS_HZ and CLOCKS_HZ[name][1] == clock:
            codecs.append((payload, name, clock))
    return tuple(codecs), events


def _crypto(attribute: str) -> Crypto | None:
    """Return the keys of an a=crypto that is understood: without an identifier of the key, and without parameters."""
    found = _CRYPTO.fullmatch(attribute)
    # After the key: `|2^31` (a lifetime, which no call reaches) and `|1:4` (an identifier in each packet).
    if not found or found[2] not in SUITES or ":" in found[4] or found[5].strip():
        return None
    try:
        key = base64.b64decode(found[3], validate=True)
    except binascii.Error:
        return None
    return Crypto(int(found[1]), found[2], key) if len(key) == KEY_BYTES else None


def agree(theirs: Description, wanted: Sequence[str]) -> Agreed | None:
    """Return the codec of a call: the first of `wanted` (names in lower case) that the other side has; None if none."""
    for name in wanted:
        for payload, known, clock_hz in theirs.codecs:
            if known == name:
                return Agreed(payload, name, clock_hz, theirs.events.get(clock_hz))
    return None


def answer(theirs: Description, agreed: Agreed, own: tuple[str, int], version: int, crypto: Crypto | None) -> bytes:
    """Return the answer to an offer. `own`: our address and port. `crypto`: our keys, with the tag of the offer's."""
    lines = _head(own[0], version)
    for at, (kind, protocol, formats) in enumerate(theirs.media):
        if at == theirs.at:
            lines += _audio(own[1], protocol, [agreed], _REVERSED[theirs.direction], crypto)
        else:
            lines.append(f"m={kind} 0 {protocol} {formats}")
    return _encoded(lines)


def offer(own: tuple[str, int], version: int, codecs: Sequence[str]) -> bytes:
    """Return an offer of these codecs (names in lower case), the best first."""
    clocks = [CLOCKS_HZ[name][1] for name in codecs]
    offered = [
        Agreed(_OWN_PAYLOADS[name], name, clock_hz, _OWN_EVENTS[clock_hz])
        for name, clock_hz in zip(codecs, clocks, strict=True)
    ]
    return _encoded(_head(own[0], version) + _audio(own[1], "RTP/AVP", offered, "sendrecv", None))


def _head(host: str, version: int) -> list[str]:
    address = f"IN {'IP6' if ':' in host else 'IP4'} {host}"
    return ["v=0", f"o=antiphon {version >> 8} {version} {address}", "s=-", f"c={address}", "t=0 0"]


def _audio(port: int, protocol: str, codecs: list[Agreed], direction: str, crypto: Crypto | None) -> list[str]:
    payloads = {a.payload: CLOCKS_HZ[a.codec][0] for a in codecs}
    events = {a.events: a.clock_hz for a in codecs if a.events is not None}
    lines = [f"m=audio {port} {protocol} {' '.join(map(str, (*payloads, *events)))}"]
    for payload, name in payloads.items():
        lines.append(f"a=rtpmap:{payload} {name if '/' in name else f'{name}/8000'}")
    for payload, clock_hz in events.items():
        lines += [f"a=rtpmap:{payload} {EVENTS}/{clock_hz}", f"a=fmtp:{payload} 0-15"]
    if crypto:
        lines.append(crypto.line())
    return [*lines, "a=ptime:20", f"a={direction}"]


def _encoded(lines: list[str]) -> bytes:
    return "".join(f"{line}\r\n" for line in lines).encode()
