"""The interface between the server and dialects that speak several texts over one WebSocket, each in a context.

A context is one stream of text that is spoken as one stream of audio. The commands are those of a speech session
(`events/speech.py`), addressed to a context. Dialects with a single text have one context. A context's name is made by
the dialect, and no other context of the connection has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from antiphon.audio.encode import StreamEncoding
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import AppendText, CancelSpeech, FlushText, SpeechConfig, SpeechEvent
from antiphon.protocols.wire import Frame, Received


@dataclass(frozen=True, slots=True)
class OpenContext:
    """Begin a context. Its audio is one stream in `encoding`. `config` asks for PCM of the same rate."""

    context: str
    config: SpeechConfig
    encoding: StreamEncoding


@dataclass(frozen=True, slots=True)
class SpeakInContext:
    """Pass a command to the speech session of an open context."""

    context: str
    command: AppendText | FlushText | CancelSpeech


@dataclass(frozen=True, slots=True)
class EndContext:
    """End the text of an open context. What was flushed is still spoken, then `ContextWire.ended` is called."""

    context: str


@dataclass(frozen=True, slots=True)
class CloseWhenSpoken:
    """Close the WebSocket with this code once all contexts have ended. The dialect ignores later messages."""

    code: int = 1000
    reason: str = ""


ContextCommand = OpenContext | SpeakInContext | EndContext | CloseWhenSpoken


class ContextWire(Protocol):
    """The wire side of one such connection, without I/O. No method raises for a client's input."""

    @property
    def name(self) -> str:
        """The dialect's name in metrics and logs."""
        ...

    @property
    def idle_s(self) -> float:
        """Idle timeout: seconds without a message and without speech after which the connection is closed."""
        ...

    def feed(self, data: str | bytes) -> Received[ContextCommand]:
        """Read one message. An invalid message returns an error for the client."""
        ...

    def send(self, context: str, event: SpeechEvent, audio: bytes) -> list[Frame]:
        """Return the frames of an event. `audio` is the event's audio in the context's encoding; it may be empty."""
        ...

    def ended(self, context: str, audio: bytes) -> list[Frame]:
        """Return the last frames of a context. `audio` is the rest of its stream."""
        ...

    def refuse(self, error: RemoteProtocolError, context: str) -> Received[ContextCommand]:
        """Return an error about a command for a context, or about the connection if `context` is empty.

        The commands close the connection if the service that the dialect is from would do so.
        """
        ...

    def idled(self) -> Received[ContextCommand]:
        """Return the frames that report the idle timeout, and the command that closes the connection."""
        ...
