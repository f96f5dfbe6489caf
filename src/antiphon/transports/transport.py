"""The protocols of transports, which carry a connection, and of players, which play a response's audio separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.contracts.playback import PlaybackTracker
from antiphon.events.conversation import (
    ConversationEvent,
)
from antiphon.events.playback import PlaybackStarted, PlaybackStopped
from antiphon.events.transcription import AppendAudio, TranscriptionEvent

# A client that has not read for this time counts as gone.
STALL_S = 30.0
# Input from a client: a frame, or audio that arrived outside of the frames.
ClientData = str | bytes | AppendAudio
ReportPlayback = Callable[[PlaybackStarted | PlaybackStopped], object]


class TransportClosed(Exception):
    """The client has closed the connection, so nothing more can be sent on it."""


class AudioPlayer(PlaybackTracker, Protocol):
    """Plays the responses' audio to the client in real time, so that events need not carry it (WebRTC)."""

    def attach(self, report: ReportPlayback) -> None:
        """Set `report`, called in the event loop when a response starts or stops being heard. It must not wait."""
        ...

    def send(self, event: TranscriptionEvent | ConversationEvent) -> None:
        """Take one event of the session, in order. Audio is queued for playback; other events may be ignored.

        Does not wait.
        """
        ...


class Transport(Protocol):
    """Carries one connection: a WebSocket, a WebRTC call, or a recording that is replayed.

    One task receives and one task sends. The code that opened the connection also releases it after the last use.
    """

    @property
    def playback(self) -> AudioPlayer | None:
        """The player of the responses' audio; None if events carry the audio."""
        ...

    async def receive(self) -> ClientData | None:
        """Wait for the next frame, or for audio that arrived outside of the frames. None: the client has left."""
        ...

    async def send(self, data: str | bytes) -> None:
        """Send one frame. Waits while the client does not read. Raises TransportClosed if the client has left.

        Bytes are sent as a binary frame.
        """
        ...

    async def close(self, code: int, reason: str) -> None:
        """Close the connection with a WebSocket close code. Raises TransportClosed if the client closed it first."""
        ...
