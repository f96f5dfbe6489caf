"""The wire of the Wyoming protocol (Home Assistant's voice servers): events on a byte stream. Pure.

An event is one line of JSON with its type and two lengths, then JSON data and a payload of these lengths. The client of
other servers (`remote/`) and a server of the protocol both use this module; the meaning of the events is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

# Bounds of an event, in bytes: its first line, its data, and its payload. Nothing in the protocol bounds the last two.
MAX_LINE_BYTES, MAX_DATA_BYTES, MAX_PAYLOAD_BYTES = 1 << 16, 1 << 20, 1 << 20
# The version of the protocol that is sent with each event.
VERSION = "1.10.2"

T = TypeVar("T")
_Length = Annotated[int, msgspec.Meta(ge=0)]


class WyomingAudio(msgspec.Struct, frozen=True):
    """The data of `audio-start` and `audio-chunk`: PCM, signed and little endian, of `width` bytes a sample."""

    rate: int
    width: int
    channels: int


class _Head(msgspec.Struct):
    """The first line of an event. All fields but `type` may be missing; `data` has small data inline."""

    type: str
    data: dict[str, msgspec.Raw] | None = None
    data_length: _Length | None = None
    payload_length: _Length | None = None


class _SentHead(msgspec.Struct, omit_defaults=True):
    type: str
    version: str
    data_length: int = 0
    payload_length: int = 0


_head_decoder = msgspec.json.Decoder(_Head)
_data_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class WyomingEvent:
    """One event: its type, its data as a JSON object, and its payload. `data` is b"" if there is none."""

    kind: str
    data: bytes = b""
    payload: bytes = b""

    def read(self, shape: type[T]) -> T:
        """Return the data as a struct. Raises ValueError if they have another shape."""
        try:
            return msgspec.json.decode(self.data or b"{}", type=shape)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"no valid data of {self.kind[:40]}: {error}") from None


def encode(kind: str, data: msgspec.Struct | None = None, payload: bytes = b"") -> bytes:
    """Return an event as bytes. `data`: an object without the fields that are left out."""
    body = msgspec.json.encode(data) if data is not None else b""
    head = _SentHead(kind, VERSION, len(body), len(payload))
    return msgspec.json.encode(head) + b"\n" + body + payload


class WyomingDecoder:
    """Reads events from the bytes of one direction of a connection."""

    def __init__(self) -> None:
        self._held = bytearray()
        # The head of the event whose data and payload are awaited, and the bytes that both have.
        self._head: _Head | None = None

    @property
    def is_within_event(self) -> bool:
        """Whether the bytes so far end within an event, whose rest is awaited."""
        return bool(self._held) or self._head is not None

    def feed(self, data: bytes) -> Iterator[WyomingEvent]:
        """Take bytes, and yield the events that they complete. Raises ValueError."""
        self._held += data
        while (event := self._next()) is not None:
            yield event

    def _next(self) -> WyomingEvent | None:
        if self._head is None:
            end = self._held.find(b"\n", 0, MAX_LINE_BYTES)
            if end < 0:
                if len(self._held) >= MAX_LINE_BYTES:
                    raise ValueError("the first line of an event is too long")
                return None
            self._head = _decoded_head(bytes(self._held[:end]))
            del self._held[: end + 1]
        head = self._head
        num_data, num_payload = head.data_length or 0, head.payload_length or 0
        if num_data > MAX_DATA_BYTES or num_payload > MAX_PAYLOAD_BYTES:
            raise ValueError(f"an event has {max(num_data, num_payload)} bytes, which is too long")
        if len(self._held) < num_data + num_payload:
            return None
        data, payload = bytes(self._held[:num_data]), bytes(self._held[num_data : num_data + num_payload])
        del self._held[: num_data + num_payload]
        self._head = None
        return WyomingEvent(head.type, _merged(head.data, data), payload)


def _decoded_head(line: bytes) -> _Head:
    try:
        return _head_decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the first line of an event is not valid: {error}") from None


def _merged(inline: dict[str, msgspec.Raw] | None, data: bytes) -> bytes:
    """Return the data of both places as one object; those after the line replace those inline."""
    if not inline:
        return data
    try:
        return msgspec.json.encode(inline | (_data_decoder.decode(data) if data else {}))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the data of an event are not valid: {error}") from None
