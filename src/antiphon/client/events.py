"""What a conversation tells its user: one class for each thing that happens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UserSpeaks:
    """The user has begun to speak."""


@dataclass(frozen=True, slots=True)
class UserWords:
    """More words of the user's turn `item_id`, which will not change."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class UserSaid:
    """The user's turn is over; this is all of it."""

    item_id: str
    text: str


@dataclass(frozen=True, slots=True)
class NothingSaid:
    """The user's turn had no words, or none could be made out: there is no answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResponseBegins:
    """A response begins."""

    response_id: str


@dataclass(frozen=True, slots=True)
class ResponseWords:
    """More of a response's text. Its audio may come later."""

    response_id: str
    text: str


@dataclass(frozen=True, slots=True)
class AudioToPlay:
    """More of a response's audio: mono PCM of 16 bits, little-endian, at `rate_hz`.

    `start_ms`: how much audio of the same item came before.
    """

    response_id: str
    item_id: str
    pcm: bytes
    rate_hz: int
    start_ms: float

    @property
    def end_ms(self) -> float:
        """How much audio of the item there is with this."""
        return self.start_ms + len(self.pcm) / 2 / self.rate_hz * 1000


@dataclass(frozen=True, slots=True)
class ResponseEnds:
    """A response is complete (`completed`), or was cut off (`cancelled`), is `incomplete` or `failed`. Its audio may
    still be playing.
    """

    response_id: str
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user has taken the floor: what waits to be played of any response is to be dropped."""


@dataclass(frozen=True, slots=True)
class Ducked:
    """Somebody speaks over the response: it is to be played softly (`on`), or as before again."""

    on: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """Of the item `item_id`, which was cut off, the history keeps what was heard: `until_ms` of its audio."""

    item_id: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """The model has called a tool, and was told `output`."""

    name: str
    arguments: str
    output: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection broke, and the session goes on with another: nothing was lost. `how`: as docs/wire/index.md."""

    how: str


@dataclass(frozen=True, slots=True)
class ServerError:
    """The server has refused something, or failed at it; the session goes on."""

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
