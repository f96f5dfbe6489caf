"""The contract of playback trackers, which play a session's responses or follow the client that plays them."""

from __future__ import annotations

from typing import Protocol

from antiphon.events.conversation import (
    ContentPosition,
)


class PlaybackTracker(Protocol):
    """Tracks how much of each response was heard, by playing the responses itself or by the client's
    acknowledgements.
    """

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """Stop playing at once, and end a hold.

        Returns:
            The position of each item that was not played to its end, and how many milliseconds of the item were heard.
                The session truncates its history to the part that was heard.
        """
        ...

    def hold(self, held: bool) -> None:
        """Pause playing because the user may be taking the floor, or continue at the sample where it was paused.

        Repeating the current state is a no-op.

        Args:
            held: True pauses, False continues.
        """
        ...
