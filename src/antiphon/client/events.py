"""The events of a conversation, one class each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UserSpeaks:
    """The user has begun to speak."""


@dataclass(frozen=True, slots=True)
class UserWords:
    """The next words of the user's turn `item_id`. The server will not change them."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class UserSaid:
    """The user's turn is over; `text` is its whole transcript."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class NothingSaid:
    """The user's turn had no words, or none that could be understood. The model does not respond."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResponseBegins:
    """The model begins a response; its words and audio follow."""

    response_id: str


@dataclass(frozen=True, slots=True)
class ResponseWords:
    """The next piece of a response's text. Its audio may arrive later."""

    response_id: str
    text: str


@dataclass(frozen=True, slots=True)
class AudioToPlay:
    """The next piece of a response's audio: mono 16-bit PCM, little-endian, at `rate_hz`.

    `start_ms`: the total duration of the earlier pieces of the same item.
    """

    response_id: str
    item_id: str
    pcm: bytes
    rate_hz: int
    start_ms: float

    @property
    def end_ms(self) -> float:
        """The duration of the item's audio up to the end of this piece."""
        return self.start_ms + len(self.pcm) / 2 / self.rate_hz * 1000


@dataclass(frozen=True, slots=True)
class ResponseEnds:
    """A response has ended. Its audio may still be playing.

    `status`: `completed`, `cancelled` (cut off), `incomplete` or `failed`.
    """

    response_id: str
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user has taken the floor. The application drops all audio that waits to be played."""


@dataclass(frozen=True, slots=True)
class Ducked:
    """Play the response softly while `on`, because somebody speaks over it; otherwise at normal volume."""

    on: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """The item `item_id` was cut off. The history keeps only what was heard: `until_ms` of its audio."""

    item_id: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """The model has called a tool. `output` is what the model gets back."""

    name: str
    arguments: str
    output: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection broke, and the session continues on a new one; nothing was lost. `how`: see docs/wire/index.md."""

    how: str


@dataclass(frozen=True, slots=True)
class ServerError:
    """The server refused a message or failed to handle it; the session continues."""

    code: str
    message: str
    param: str = ""


ConversationEvent = (
    UserSpeaks
    | UserWords
    | UserSaid
    | NothingSaid
    | ResponseBegins
    | ResponseWords
    | AudioToPlay
    | ResponseEnds
    | Interrupted
    | Ducked
    | Heard
    | ToolCalled
    | Reconnected
    | ServerError
)
