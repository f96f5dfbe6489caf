"""The interfaces of transports, which carry a connection, and of players, which play the audio of responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.contracts.playback import PlaybackTracker
from antiphon.events.conversation import (
    ConversationEvent,
)
from antiphon.events.playback import PlaybackStarted, PlaybackStopped
from antiphon.events.transcription import AppendAudio, TranscriptionEvent

# A client that has not read any data for STALL_S seconds counts as gone.
STALL_S = 30.0
# Input from a client: a frame, or audio that arrived outside of the frames.
ClientData = str | bytes | AppendAudio
ReportPlayback = Callable[[PlaybackStarted | PlaybackStopped], object]


class TransportClosed(Exception):
    """The client has closed the connection, so nothing more can be sent on it."""


class AudioPlayer(PlaybackTracker, Protocol):
    """Plays the audio of responses to the client in real time (WebRTC). Events then need not carry the audio."""

    def attach(self, report: ReportPlayback) -> None:
        """Set the callback `report`. It is called in the event loop when a response becomes audible or falls silent. It
        must not wait.
        """
        ...

    def send(self, event: TranscriptionEvent | ConversationEvent) -> None:
        """Receive one event of the session, in order. Queues audio for playback, and may ignore other events.

        Does not wait.
        """
        ...


class Transport(Protocol):
    """Carries one connection: a WebSocket, a WebRTC call, or a recording that is replayed.

    One task receives and another task sends. The code that opened the connection also releases it after its last use.
    """

    @property
    def playback(self) -> AudioPlayer | None:
        """The player for the audio of responses; None if events carry the audio."""
        ...

    async def receive(self) -> ClientData | None:
        """Wait for the next frame, or for audio outside of the frames. Returns None after the client has left."""
        ...

    async def send(self, data: str | bytes) -> None:
        """Send one frame. Waits if the client is slow to read. Raises TransportClosed if the client has left.

        Bytes are sent as a binary frame.
        """
        ...

    async def close(self, code: int, reason: str) -> None:
        """Close the connection with a WebSocket close code. Raises TransportClosed if the client closed it first."""
        ...
