"""What the realtime dialects share: ids, frames, the decoding of JSON, and the two queues of a dialect.

Which messages there are is known to the dialects alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

C = TypeVar("C")
# What a message says, by its fields: values of JSON. Messages to a client are written and never read again, so nothing
# but the encoder looks into them.
Payload = Mapping[str, Any]
# Makes a fresh id that begins with the prefix it is given. Injected, so that recorded traces repeat.
NewId = Callable[[str], str]
# What msgspec raises for text that is not JSON, not UTF-8 or nested too deeply.
JSON_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError)
# The decoder keeps the interpreter's lock, so that no thread of the process runs while it decodes. Measured: 100,000
# values take 10 to 20 ms, a million escapes 5 ms. Text of fewer than SMALL_JSON characters is not counted.
SMALL_JSON, MAX_JSON_VALUES, MAX_JSON_ESCAPES = 64 << 10, 100_000, 1_000_000
_encoder = msgspec.json.Encoder()


def random_id(prefix: str) -> str:
    """`prefix` and 20 random characters of [0-9a-f], which are 80 bits: ids of one server do not meet in practice."""
    return prefix + secrets.token_hex(10)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on its way to a client, not yet encoded: the journal of a resumable session may still number it.

    `payload`: the fields of a JSON message, in the order in which they are sent, or the bytes of a binary one.
    `epoch`: of words or audio of a response, the epoch it belongs to: once that has passed, it is not sent any more.
    None for every other message. `numbered`: False for a message about the connection itself, which a client that
    resumes does not count.
    """

    payload: Payload | bytes
    epoch: int | None = None
    numbered: bool = True

    @property
    def is_piece(self) -> bool:
        """Whether it is a piece of a response's words or audio, which later pieces go on with."""
        if isinstance(self.payload, bytes):
            return True
        kind = self.payload.get("type")
        return isinstance(kind, str) and kind.startswith("response.") and kind.endswith(".delta")

    def encode(self, seq: int | None = None) -> str | bytes:
        """The message as it is sent: JSON without spaces, or the bytes. JSON gets `seq` as its `server_event_seq`.

        Binary messages have no field for their number: the client counts them.
        """
        if isinstance(self.payload, bytes):
            return self.payload
        fields = self.payload if seq is None else {**self.payload, "server_event_seq": seq}
        return _encoder.encode(fields).decode()


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """An error in OpenAI's shape. `param`: the path of the field at fault. `event_id`: the client's name for the
    message at fault.
    """

    type: str
    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    event_id: str | None = None


def message(**fields: Any) -> Frame:
    """A JSON message of these fields, in the order in which they are given."""
    return Frame(fields)


class Received(msgspec.Struct, Generic[C], frozen=True):
    """What one message of a client came to: `commands` for the session, and `answers` to the client.

    The answers are sent at once, before whatever the commands lead to.
    """

    commands: Sequence[C] = []
    answers: Sequence[Frame] = []


def is_too_complex(data: str | bytes) -> bool:
    """Whether JSON text would take longer to decode than the server can stand still.

    Commas and brackets outside of strings are counted: more than MAX_JSON_VALUES are too many, and so are more than
    MAX_JSON_ESCAPES backslashes. Takes about 1 ms for each MiB, and some 10 ms where strings have to be told apart.
    """
    if len(data) <= SMALL_JSON:
        return False
    text = data if isinstance(data, bytes) else data.encode(errors="replace")
    if text.count(b"\\") > MAX_JSON_ESCAPES:
        return True
    if _num_marks(text) <= MAX_JSON_VALUES:
        return False
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A value has at most two strings: its own, and its name.
    return text.count(b'"') > 4 * MAX_JSON_VALUES or _num_marks(b"".join(text.split(b'"')[::2])) > MAX_JSON_VALUES


def _num_marks(text: bytes) -> int:
    return sum(text.count(mark) for mark in b",[{")


def decode_json(data: str | bytes) -> Any:
    """The value that JSON text stands for: a dict, list, str, int, float, bool or None.

    Raises ValueError, with the reason in words, for text that is not JSON, not UTF-8, nested too deeply or too complex.
    """
    if is_too_complex(data):
        raise ValueError(f"it has more than {MAX_JSON_VALUES} values")
    try:
        return msgspec.json.decode(data)
    except JSON_ERRORS as error:
        raise ValueError(str(error)) from None
