"""The contract of what plays a session's responses itself, and so knows how much of them was heard."""

from __future__ import annotations

from typing import Protocol

from antiphon.events.conversation import (
    ContentPosition,
)


class PlaybackTracker(Protocol):
    """Plays a session's responses in place of the client, or keeps the client's acknowledgements, and knows how much
    was heard.
    """

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """Stop playing at once. Returns, for each item that was not played to its end, its place and the milliseconds
        of it that were heard; the session truncates its history to that. Ends a hold.
        """
        ...

    def hold(self, held: bool) -> None:
        """Pause playing (`held`), because the user may be taking the floor, or go on from the very sample at which it
        was paused. Repeating the present state changes nothing.
        """
        ...
