"""What the realtime dialects share: ids, JSON frames, base64 sound, and the models a client may name."""

from __future__ import annotations

import binascii
import secrets
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from antiphon.events.conversation import ConversationCommand
from antiphon.events.transcription import TranscriptionCommand
from antiphon.protocols.model_names import ModelNames

# prefix -> a fresh id; injected so that golden traces repeat.
NewId = Callable[[str], str]
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


def decode_base64(text: str) -> bytes:
    """Strict base64 (padding needed, no foreign characters). Raises ValueError."""
    try:
        return b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


@dataclass(slots=True)
class Dialect:
    """The two drains every dialect has, and its ids. `max_append_bytes`: most audio one append may carry."""

    models: ModelNames
    new_id: NewId = random_id
    max_append_bytes: int = 15 << 20
    session_id: str = ""
    _inputs: list[TranscriptionCommand | ConversationCommand] = field(default_factory=list)
    _frames: list[str] = field(default_factory=list)

    def inputs(self) -> list[TranscriptionCommand | ConversationCommand]:
        """Take the inputs that frames received so far amount to."""
        taken, self._inputs = self._inputs, []
        return taken

    def frames(self) -> list[str]:
        """Take the frames to be sent, in order."""
        taken, self._frames = self._frames, []
        return taken

    def _queue(self, *inputs: TranscriptionCommand | ConversationCommand) -> None:
        self._inputs.extend(inputs)

    def _say(self, **fields: Any) -> None:
        self._frames.append(frame(**fields))
