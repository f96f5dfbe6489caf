"""What knows how much of an answer has been heard."""

from __future__ import annotations

from typing import Protocol

from antiphon.events.conversation import (
    ContentPosition,
)


class PlaybackTracker(Protocol):
    """Who plays what the session says, where it is not the client, and knows how much of it was heard."""

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """Silence at once. What was not played to its end: each item's place, and the milliseconds of it that were heard."""
        ...
