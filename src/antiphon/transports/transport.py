"""What carries a connection, and who plays its sound where that does not go in events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.contracts.playback import PlaybackTracker
from antiphon.events.conversation import ConversationEvent, PlaybackStarted, PlaybackStopped
from antiphon.events.transcription import AppendAudio, TranscriptionEvent

# A client that has not read for so long is taken to be gone.
STALL_S = 30.0


class TransportClosed(Exception):
    """The client is not there any more."""


class AudioPlayer(PlaybackTracker, Protocol):
    """Sound goes to the client by itself, not in events."""

    def attach(self, tell: Callable[[PlaybackStarted | PlaybackStopped], object]) -> None:
        """`tell` what begins and ends to be heard."""
        ...

    def take(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Everything the session says, in order: sound is to be played."""
        ...


class Transport(Protocol):
    """What carries a connection."""

    @property
    def playback(self) -> AudioPlayer | None: ...

    async def receive(self) -> str | bytes | AppendAudio | None:
        """The next frame, or sound that came beside the frames; None: the client left."""
        ...

    async def send(self, frame: str) -> None:
        """Raises Gone."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """Raises Gone."""
        ...
