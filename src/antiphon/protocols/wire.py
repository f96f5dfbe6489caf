"""What the realtime dialects share: ids, frames, the decoding of JSON, and the two queues of a dialect.

A frame is one WebSocket message on its way to the client. Most are JSON text; which messages there are is known to the
dialects alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ConversationCommand
from antiphon.events.transcription import TranscriptionCommand
from antiphon.protocols.model_names import ModelNames

# Makes a fresh id that begins with the prefix it is given. Injected, so that recorded traces repeat.
NewId = Callable[[str], str]
# What msgspec raises for text that is not JSON, not UTF-8 or nested too deeply.
JSON_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError)
_encoder = msgspec.json.Encoder()


def random_id(prefix: str) -> str:
    """`prefix` and 20 random characters of [0-9a-f], which are 80 bits: ids of one server do not meet in practice."""
    return prefix + secrets.token_hex(10)


class MediaFrame(str):
    """A text frame with words or audio of a response. Once its epoch has passed it is not sent any more."""

    __slots__ = ("epoch",)

    def __new__(cls, text: str, epoch: int) -> MediaFrame:
        """A frame of the text, which is sent unchanged, and the epoch of the response that it belongs to."""
        made = str.__new__(cls, text)
        made.epoch = epoch
        return made

    epoch: int


class BinaryFrame(MediaFrame):
    """A frame that is sent as binary. It is a string like the other frames in a queue; each character is one byte."""

    __slots__ = ()

    @classmethod
    def of(cls, data: bytes, epoch: int = 0) -> BinaryFrame:
        """A frame of these bytes, which are copied. Its epoch can be set afterwards."""
        made = str.__new__(cls, data.decode("latin-1"))
        made.epoch = epoch
        return made

    @property
    def data(self) -> bytes:
        """The bytes to be sent, decoded anew at each call."""
        return self.encode("latin-1")


def frame(**fields: Any) -> str:
    """One JSON text frame, with the fields in the order in which they are given, and without spaces.

    The journal of resumable sessions relies on both: it recognizes frames by their beginning and appends a field.
    """
    return _encoder.encode(fields).decode()


def decode_json(data: str | bytes) -> Any:
    """The value that JSON text stands for: a dict, list, str, int, float, bool or None.

    Raises ValueError, with the reason in words, for text that is not JSON, not UTF-8 or nested too deeply.
    """
    try:
        return msgspec.json.decode(data)
    except JSON_ERRORS as error:
        raise ValueError(str(error)) from None


def decode_event(
    data: str | bytes,
    not_json: tuple[str, str] = ("invalid_json", "The event is not valid JSON."),
    no_object: tuple[str, str] = ("bad_event", "An event is a JSON object."),
) -> dict[str, Any]:
    """The fields of one JSON message from a client.

    Raises RemoteProtocolError with the code and the message of `not_json` or `no_object`, which are the dialect's own.
    """
    try:
        event = decode_json(data)
    except ValueError:
        raise RemoteProtocolError(*not_json) from None
    if not isinstance(event, dict):
        raise RemoteProtocolError(*no_object)
    return event


@dataclass(slots=True)
class Dialect:
    """The two queues of a dialect: commands for the session, and frames for the client. Both are drained by the server.

    The queues have no bound of their own: the server drains them after each frame and each event.
    """

    # The names that a client may use for a transcriber.
    models: ModelNames
    new_id: NewId = random_id
    # The most audio that one append may carry, in bytes after base64 is decoded.
    max_append_bytes: int = 15 << 20
    session_id: str = ""
    _commands: list[TranscriptionCommand | ConversationCommand] = field(default_factory=list)
    _frames: list[str] = field(default_factory=list)

    def commands(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Remove and return what the frames received so far ask of the session, in order; frames that are wrong ask
        nothing.
        """
        taken, self._commands = self._commands, []
        return taken

    def frames(self) -> list[str]:
        """Remove and return the frames that wait to be sent, oldest first; `receive` and `send` only queue them."""
        taken, self._frames = self._frames, []
        return taken

    def _add_commands(self, *commands: TranscriptionCommand | ConversationCommand) -> None:
        self._commands.extend(commands)

    def _add_frame(self, **fields: Any) -> None:
        self._frames.append(frame(**fields))
