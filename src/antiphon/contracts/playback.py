"""What knows how much of an answer has been heard."""

from __future__ import annotations

from typing import Protocol

from antiphon.events.conversation import (
    Place,
)


class Playback(Protocol):
    """Who plays what the session says, where it is not the client, and knows how much of it was heard."""

    def silence(self) -> list[tuple[Place, int]]:
        """Silence at once. What was not played to its end: each item's place, and the milliseconds of it that were heard."""
        ...
