"""Parts shared by the realtime dialects: ids, frames, JSON decoding, and the result of reading a message.

Which messages exist is up to each dialect.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

C = TypeVar("C")
# The fields of a message, as JSON values. Messages to a client are only encoded and never read again.
Payload = Mapping[str, Any]
# Makes a new id with the given prefix. It is injected, so that recorded traces are reproducible.
NewId = Callable[[str], str]
# Errors that msgspec raises for text that is not JSON, not UTF-8, or nested too deeply.
JSON_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError)
# Limits of JSON text. The decoder holds the GIL, so no other thread runs while it decodes. Measured: 100,000 values
# take 10 to 20 ms, and a million escapes take 5 ms. Text of at most SMALL_JSON characters is not checked.
SMALL_JSON, MAX_JSON_VALUES, MAX_JSON_ESCAPES = 64 << 10, 100_000, 1_000_000
_encoder = msgspec.json.Encoder()


def random_id(prefix: str) -> str:
    """Return `prefix` and 20 random hexadecimal digits (80 bits), enough to make collisions negligible."""
    return prefix + secrets.token_hex(10)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message to a client. It is not encoded yet, because the journal of a resumable session may add a number.

    `payload` has the fields of a JSON message in order, or the bytes of a binary message. `epoch` is the epoch of a
    response's text or audio; None for other messages. After that epoch has passed, the frame is dropped. `numbered` is
    False for a message about the connection itself, because a client that resumes does not count it. With `binary`, the
    JSON is sent in a binary frame, as Google's server does.
    """

    payload: Payload | bytes
    epoch: int | None = None
    numbered: bool = True
    binary: bool = False

    @property
    def is_piece(self) -> bool:
        """Whether the frame is one piece of a response's text or audio. The client appends later pieces to it."""
        if isinstance(self.payload, bytes):
            return True
        kind = self.payload.get("type")
        return isinstance(kind, str) and kind.startswith("response.") and kind.endswith(".delta")

    def encode(self, seq: int | None = None) -> str | bytes:
        """Encode the message as compact JSON or as bytes. In JSON, `seq` is added as `server_event_seq`.

        Binary messages have no field for `seq`: the client counts them.
        """
        if isinstance(self.payload, bytes):
            return self.payload
        fields = self.payload if seq is None else {**self.payload, "server_event_seq": seq}
        data = _encoder.encode(fields)
        return data if self.binary else data.decode()


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """An error about a request, in OpenAI's format."""

    # OpenAI's error type, such as `invalid_request_error`.
    type: str
    # Machine-readable reason.
    code: str
    # Human-readable reason.
    message: str
    # Whether the same message may succeed if it is sent again later.
    retryable: bool = False
    # Path of the field at fault; None if no single field is at fault.
    param: str | None = None
    # The id that the client gave to the message at fault.
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class ShapedError:
    """The answer to a refused request in the shape of a vendor: its JSON body, and headers to add."""

    body: Mapping[str, str | int | Mapping[str, str]]
    headers: Mapping[str, str]


def message(**fields: Any) -> Frame:
    """Return a JSON message with these fields, in the given order."""
    return Frame(fields)


class Received(msgspec.Struct, Generic[C], frozen=True):
    """The result of reading one message of a client: `commands` for the session, and `answers` for the client.

    The answers are sent at once, before the results of the commands.
    """

    commands: Sequence[C] = []
    answers: Sequence[Frame] = []


def is_too_complex(data: str | bytes) -> bool:
    """Whether decoding the JSON text would block the event loop for too long.

    Allows up to MAX_JSON_VALUES commas and brackets outside of strings, and up to MAX_JSON_ESCAPES backslashes. The
    check takes about 1 ms per MiB, or about 10 ms if the contents of strings have to be excluded.
    """
    if len(data) <= SMALL_JSON:
        return False
    text = data if isinstance(data, bytes) else data.encode(errors="replace")
    if text.count(b"\\") > MAX_JSON_ESCAPES:
        return True
    if _num_marks(text) <= MAX_JSON_VALUES:
        return False
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each value has at most two strings: its name and the value itself.
    return text.count(b'"') > 4 * MAX_JSON_VALUES or _num_marks(b"".join(text.split(b'"')[::2])) > MAX_JSON_VALUES


def _num_marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in b",[{")


def decode_json(data: str | bytes) -> Any:
    """Decode JSON text into a dict, list, str, int, float, bool or None.

    Raises ValueError with the reason if the text is not JSON, not UTF-8, nested too deeply or too complex.
    """
    if is_too_complex(data):
        raise ValueError(f"it has more than {MAX_JSON_VALUES} values")
    try:
        return msgspec.json.decode(data)
    except JSON_ERRORS as error:
        raise ValueError(str(error)) from None
