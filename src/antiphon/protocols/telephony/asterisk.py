"""Asterisk's media streams: `chan_websocket` over a WebSocket, and AudioSocket over TCP. See docs/wire/telephone.md.

Written from Asterisk's sources (`channels/chan_websocket.c`, `res/res_audiosocket.c`). No Asterisk was run.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import any_value
from antiphon.protocols.telephony.stream import (
    Arrived,
    Call,
    CallerAudio,
    Codec,
    MarkReturned,
    Pressed,
    Started,
    Stopped,
    facts,
)
from antiphon.protocols.wire import message

# The WebSocket subprotocol of chan_websocket.
SUBPROTOCOL = "media"
MEDIA_START = "MEDIA_START"
# Asterisk's names of formats, the encoding and the rate of each. `slin` is 16-bit PCM in the byte order of the machine,
# which is little-endian on all that Asterisk is built for today.
_FORMATS = {
    "ulaw": Codec("ulaw", 8000),
    "alaw": Codec("alaw", 8000),
    "slin": Codec("pcm16", 8000),
    "slin16": Codec("pcm16", 16_000),
    "slin24": Codec("pcm16", 24_000),
}
# Most words of a control message. The longest, `STATUS`, has eight.
_MAX_WORDS = 32


class WebSocketChannel:
    """The stream of one channel of `chan_websocket`, with control messages as plain text or as JSON.

    The form of `MEDIA_START` decides the form of the messages to Asterisk. A `MEDIA_START` that comes again, and audio
    before it, raise RemoteProtocolError (`bad_event`).
    """

    message_frames = 5
    returns_marks = True

    def __init__(self) -> None:
        self._codec: Codec | None = None
        self._is_json = False
        # Bytes of which a message of audio is a multiple: Asterisk drops a rest.
        self._frame_bytes = 1

    def read(self, data: str | bytes) -> list[Arrived]:
        """Return what one message says; [] for an unknown event. Raises as `MediaStream.read` does."""
        if isinstance(data, bytes):
            if self._codec is None:
                raise RemoteProtocolError("bad_event", f"Audio came before '{MEDIA_START}'.")
            return [CallerAudio(self._codec.decode(data))]
        given, variables = _control(data)
        event = given.get("event", "")
        if event == MEDIA_START:
            return [self._start(given, variables, is_json=data.lstrip().startswith("{"))]
        if self._codec is None:
            raise RemoteProtocolError("bad_event", f"The event '{event[:40]}' came before '{MEDIA_START}'.", "event")
        match event:
            case "DTMF_END":
                return [Pressed(given.get("digit", ""))]
            case "MEDIA_MARK_PROCESSED":
                return [MarkReturned(given.get("correlation_id", ""))]
            case _:
                return []

    def _start(self, given: dict[str, str], variables: dict[str, str], *, is_json: bool) -> Started:
        if self._codec:
            raise RemoteProtocolError("bad_event", f"The event '{MEDIA_START}' came twice.", "event")
        name, size = given.get("format", ""), given.get("optimal_frame_size", "")
        if name not in _FORMATS:
            known = ", ".join(_FORMATS)
            raise RemoteProtocolError("unsupported_format", f"The format '{name[:40]}' is none of {known}.", "format")
        self._codec, self._is_json = _FORMATS[name], is_json
        self._frame_bytes = int(size) if size.isdecimal() and 0 < len(size) < 6 else 1
        call = Call(
            "asterisk",
            id=given.get("channel_id", ""),
            caller=variables.pop("CALLERID(num)", ""),
            parameters={"channel": given.get("channel", ""), **variables},
        )
        return Started(call, self._codec)

    # --- to Asterisk

    def audio(self, pcm: npt.NDArray[np.int16]) -> list[str | bytes]:
        """Return one binary message, filled with silence up to a multiple of Asterisk's frame."""
        assert self._codec, "nothing is sent before the stream has started"
        width = 2 if self._codec.name == "pcm16" else 1
        missing = -len(pcm) % max(1, self._frame_bytes // width)
        return [self._codec.encode(np.concatenate((pcm, np.zeros(missing, np.int16))))]

    def mark(self, name: str) -> str:
        """Return the message that sets a mark. Asterisk drops a text of more than 128 bytes, so names are short."""
        return self._command("MARK_MEDIA", name)

    def clear(self) -> str:
        """Return the message that empties Asterisk's queue. It drops the marks in it, and does not return them."""
        return self._command("FLUSH_MEDIA")

    def _command(self, name: str, id: str = "") -> str:
        if self._is_json:
            return str(message(command=name, **({"correlation_id": id} if id else {})).encode())
        return f"{name} {id}".rstrip()


def _control(data: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the fields of a control message, with its name as `event`, and the variables of the channel.

    Raises RemoteProtocolError for a text that is neither JSON nor words.
    """
    if data.lstrip().startswith("{"):
        given = any_value(data)
        return facts(given), facts(given.get("channel_variables"))
    words = data.split(maxsplit=_MAX_WORDS)
    if not words or not words[0].replace("_", "").isalpha():
        raise RemoteProtocolError("bad_event", "A control message begins with its name.", "event")
    fields = {key: value for key, _, value in (word.partition(":") for word in words[1:]) if value}
    # The id of a mark has no name.
    id = {"correlation_id": words[1]} if len(words) == 2 and ":" not in words[1] else {}
    return facts({**fields, **id, "event": words[0]}), {}


# --- AudioSocket

# A frame: its kind, the length of its payload in two bytes, big-endian, and the payload.
HEADER_BYTES = 3
HANG_UP, UUID, DTMF, ERROR = 0x00, 0x01, 0x03, 0xFF
# The kinds of audio, and their rates in Hz. It is 16-bit PCM, little-endian.
RATES_HZ = {
    0x10: 8000, 0x11: 12_000, 0x12: 16_000, 0x13: 24_000, 0x14: 32_000, 0x15: 44_100, 0x16: 48_000, 0x17: 96_000,
    0x18: 192_000,
}  # fmt: skip


def framed(kind: int, payload: bytes = b"") -> bytes:
    """Return a frame of AudioSocket with this kind and payload."""
    return bytes((kind, *divmod(len(payload), 256))) + payload


class AudioSocketStream:
    """The frames of one connection. The first has the UUID of the call, and the first with audio tells the rate.

    Asterisk has no play buffer that can be emptied, and no marks: it plays each frame when it gets it.
    """

    message_frames = 1
    returns_marks = False

    def __init__(self) -> None:
        self._id = ""
        self._kind = 0
        self._codec: Codec | None = None

    def read(self, data: str | bytes) -> list[Arrived]:
        """Return what one frame says; [] for the UUID. Raises as `MediaStream.read` does."""
        kind, payload = (data[0], data[HEADER_BYTES:]) if isinstance(data, bytes) and data else (ERROR, b"")
        if kind == UUID:
            return self._identify(payload)
        if not self._id:
            raise RemoteProtocolError("bad_event", "The first frame has to be the UUID of the call.")
        if kind in RATES_HZ:
            return self._audio(kind, payload)
        if kind == DTMF:
            return [Pressed(payload.decode("latin-1"))]
        if kind in (HANG_UP, ERROR):
            return [Stopped()]
        raise RemoteProtocolError("bad_event", f"A frame has the unknown kind {kind:#04x}.")

    def _identify(self, payload: bytes) -> list[Arrived]:
        if self._id:
            raise RemoteProtocolError("bad_event", "The UUID came twice.")
        if len(payload) != 16:
            raise RemoteProtocolError("bad_event", f"A UUID has 16 bytes, not {len(payload)}.")
        self._id = str(uuid.UUID(bytes=payload))
        return []

    def _audio(self, kind: int, payload: bytes) -> list[Arrived]:
        started: Sequence[Arrived] = ()
        if self._codec is None:
            self._kind, self._codec = kind, Codec("pcm16", RATES_HZ[kind])
            started = [Started(Call("audiosocket", id=self._id), self._codec)]
        elif kind != self._kind:
            raise RemoteProtocolError("bad_event", "The rate of the audio has changed.")
        return [*started, CallerAudio(self._codec.decode(payload))]

    # --- to Asterisk

    def audio(self, pcm: npt.NDArray[np.int16]) -> list[str | bytes]:
        """Return a frame of audio for each 20 ms."""
        assert self._codec, "nothing is sent before the stream has started"
        size = self._codec.rate_hz // 50
        return [framed(self._kind, self._codec.encode(pcm[at : at + size])) for at in range(0, len(pcm), size)]

    def mark(self, name: str) -> str:
        """Return "": there are no marks."""
        return ""

    def clear(self) -> str:
        """Return "": what was sent cannot be taken back."""
        return ""
