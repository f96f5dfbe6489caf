"""The contracts of what carries a connection, and of what plays a response's audio beside its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.contracts.playback import PlaybackTracker
from antiphon.events.conversation import (
    ConversationEvent,
)
from antiphon.events.playback import PlaybackStarted, PlaybackStopped
from antiphon.events.transcription import AppendAudio, TranscriptionEvent

# A client that has not read anything for this long is taken to be gone.
STALL_S = 30.0
# What a client sends: a frame, or audio that came beside the frames.
ClientData = str | bytes | AppendAudio
ReportPlayback = Callable[[PlaybackStarted | PlaybackStopped], object]


class TransportClosed(Exception):
    """The client's end of the connection is closed, so that nothing can be sent on it any more."""


class AudioPlayer(PlaybackTracker, Protocol):
    """Plays the responses' audio to the client in real time, so that no event has to carry it (WebRTC)."""

    def attach(self, report: ReportPlayback) -> None:
        """Have `report` called, in the event loop, when a response starts and stops being heard. It must not wait."""
        ...

    def send(self, event: TranscriptionEvent | ConversationEvent) -> None:
        """Take one event of the session, in order. Audio is queued for playing, other events may be ignored.

        Does not wait.
        """
        ...


class Transport(Protocol):
    """What carries one connection: a WebSocket, a WebRTC call, or a recording that is replayed.

    One task receives and one task sends. Whoever opened the connection also releases it after the last use.
    """

    @property
    def playback(self) -> AudioPlayer | None:
        """The player of the responses' audio; None where audio is sent within the events."""
        ...

    async def receive(self) -> ClientData | None:
        """Wait for the next frame, or for audio that came beside the frames. None: the client has left."""
        ...

    async def send(self, data: str | bytes) -> None:
        """Send one frame, waiting while the client does not read. Raises TransportClosed if the client has left.

        Bytes are sent as a binary frame.
        """
        ...

    async def close(self, code: int, reason: str) -> None:
        """Close the connection, in WebSocket's codes. Raises TransportClosed if the client has closed it first."""
        ...
