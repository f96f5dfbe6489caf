"""What a live realtime session asks of the session that it carries, of whatever kind."""

from __future__ import annotations

from typing import Protocol

from antiphon.events.conversation import ConversationCommand
from antiphon.sessions.conversation.history import ConversationHistory


class RealtimeSession(Protocol):
    """What a LiveRealtime asks of its session, of whatever kind. Commands reach it through the inbox."""

    @property
    def audio_s(self) -> float:
        """Seconds of audio that it has listened to so far, silence included. What waits in the inbox does not count."""
        ...

    async def run(self) -> None:
        """Run until the inbox is closed and what was in it is worked off. Whatever it raises ends the live session with
        `server_error`, and no other session.
        """
        ...


class RealtimeConversation(RealtimeSession, Protocol):
    """What it asks besides of a session that holds a conversation."""

    @property
    def conversation(self) -> ConversationHistory:
        """The history: restored before `run` is called, and stored whenever an event says that it has changed."""
        ...

    @property
    def answering(self) -> bool:
        """Whether a response is being produced. Only then is a CancelResponse handled at once; else it may be about a
        response that a command in the inbox has still to begin.
        """
        ...

    async def handle(self, command: ConversationCommand) -> None:
        """Handle one command at once, before those that wait in the inbox. Waits until the events that it leads to are
        emitted; a command that cannot be carried out is answered, and raises nothing.
        """
        ...
