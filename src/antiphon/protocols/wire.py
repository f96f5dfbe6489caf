"""What the realtime dialects share: ids, JSON frames, base64 sound, and the models a client may name."""

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

# prefix -> a fresh id; injected so that golden traces repeat.
NewId = Callable[[str], str]
# What msgspec raises for text that is not JSON, not UTF-8 or nested too deeply.
JSON_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError)
_encoder = msgspec.json.Encoder()


def random_id(prefix: str) -> str:
    """`prefix` and 20 random characters of [0-9a-f]."""
    return prefix + secrets.token_hex(10)


class MediaFrame(str):
    """A frame with an answer's words or sound, which is worth nothing once its epoch has passed."""

    __slots__ = ("epoch",)

    def __new__(cls, text: str, epoch: int) -> MediaFrame:
        """`text` as it is sent."""
        made = str.__new__(cls, text)
        made.epoch = epoch
        return made

    epoch: int


class BinaryFrame(MediaFrame):
    """Bytes that are sent as they are, in the company of text frames: each character is a byte."""

    __slots__ = ()

    @classmethod
    def of(cls, data: bytes, epoch: int = 0) -> BinaryFrame:
        """A frame of these bytes."""
        made = str.__new__(cls, data.decode("latin-1"))
        made.epoch = epoch
        return made

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return self.encode("latin-1")


def frame(**fields: Any) -> str:
    """One JSON text frame."""
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
    """The two drains every dialect has, and its ids. `max_append_bytes`: most audio one append may carry."""

    models: ModelNames
    new_id: NewId = random_id
    max_append_bytes: int = 15 << 20
    session_id: str = ""
    _commands: list[TranscriptionCommand | ConversationCommand] = field(default_factory=list)
    _frames: list[str] = field(default_factory=list)

    def commands(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Take the inputs that frames received so far amount to."""
        taken, self._commands = self._commands, []
        return taken

    def frames(self) -> list[str]:
        """Take the frames to be sent, in order."""
        taken, self._frames = self._frames, []
        return taken

    def _queue(self, *commands: TranscriptionCommand | ConversationCommand) -> None:
        self._commands.extend(commands)

    def _say(self, **fields: Any) -> None:
        self._frames.append(frame(**fields))
