"""What the realtime dialects share: ids, JSON frames, base64 sound, and the models a client may name."""

from __future__ import annotations

import binascii
import secrets
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import TalkInput
from antiphon.events.transcription import Input

# prefix -> a fresh id; injected so that golden traces repeat.
NewId = Callable[[str], str]

# What clients ask for when nobody told them a model: gpt-realtime, gpt-4o-mini-transcribe, whisper-1 ...
HOSTED = ("gpt-", "whisper-1", "tts-1")

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


@dataclass(frozen=True, slots=True)
class Models:
    """The names a client may use for a model. `loaded`: ids as /v1/models lists them, the first is `default`.

    In the OpenAI dialects the hosted service's own names are served by the loaded model, unless `strict`. `unit_ms`: it takes turns by itself, once
    in so many milliseconds; 0: turns are taken for it.
    """

    loaded: tuple[str, ...]
    strict: bool = False
    unit_ms: int = 0

    def exact(self, name: str) -> str | None:
        """The loaded model of that name (`default` is always one), or None."""
        return self.loaded[0] if name == "default" else name if name in self.loaded else None

    def lenient(self, name: str) -> str | None:
        """As `exact`, and the loaded model for a client's own default name."""
        found = self.exact(name)
        if found or self.strict:
            return found
        return self.loaded[0] if name.startswith(HOSTED) else None


@dataclass(slots=True)
class Dialect:
    """The two drains every dialect has, and its ids. `max_append_bytes`: most audio one append may carry."""

    models: Models
    new_id: NewId = random_id
    max_append_bytes: int = 15 << 20
    session_id: str = ""
    _inputs: list[Input | TalkInput] = field(default_factory=list)
    _frames: list[str] = field(default_factory=list)

    def inputs(self) -> list[Input | TalkInput]:
        """Take the inputs that frames received so far amount to."""
        taken, self._inputs = self._inputs, []
        return taken

    def frames(self) -> list[str]:
        """Take the frames to be sent, in order."""
        taken, self._frames = self._frames, []
        return taken

    def _queue(self, *inputs: Input | TalkInput) -> None:
        self._inputs.extend(inputs)

    def _say(self, **fields: Any) -> None:
        self._frames.append(frame(**fields))


def sound_file(given: str, param: str, most: int) -> bytes:
    """A sound file that a client brings along, base64 or a data: URI. Raises RemoteProtocolError: nothing is fetched."""
    body = given.partition(",")[2] if given.startswith("data:") else given
    if "://" in body[:16]:
        expected = "expected base64, or data:audio/...;base64,...: nothing is fetched"
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {expected}.", param)
    try:
        sound = decode_base64(body)
    except ValueError:
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for '{param}': expected valid base64.", param
        ) from None
    if len(sound) > most:
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': at most {most >> 20} MiB.", param)
    return sound


def require(fields: dict[str, Any], key: str, kinds: type | tuple[type, ...], param: str) -> Any:
    """`fields[key]` if it is there and of one of `kinds`. Raises RemoteProtocolError."""
    if key not in fields:
        raise RemoteProtocolError("missing_required_parameter", f"Missing required parameter: '{param}'.", param)
    return typed(fields[key], kinds, param)


def typed(value: Any, kinds: type | tuple[type, ...], param: str) -> Any:
    """`value` if it is of one of `kinds` (a bool is no number). Raises RemoteProtocolError."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if k is type(None) else k.__name__ for k in allowed)
        raise RemoteProtocolError("invalid_type", f"Invalid type for '{param}': expected {names}.", param)
    return value


def known(fields: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raises RemoteProtocolError for the first field that is not allowed."""
    for name in fields:
        if name not in allowed:
            param = f"{where}.{name}" if where else name
            raise RemoteProtocolError("unknown_parameter", f"Unknown parameter: '{param}'.", param)


def number(value: Any, param: str, low: float, high: float) -> float:
    """A number in [low, high]. Raises RemoteProtocolError."""
    typed(value, (int, float), param)
    if not low <= value <= high:
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': expected {low:g} to {high:g}.", param)
    return float(value)
