"""How far a conversation has come: what was heard, transcribed and answered, and what is still under way. Read only."""

from __future__ import annotations

from antiphon.events.conversation import CreateResponse
from antiphon.sessions.conversation.responses.heard import HeardResponses
from antiphon.sessions.conversation.responses.queue import ResponseQueue
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.floor import Floor, TurnStage


class ConversationProgress:
    """Where one conversation stands. It changes nothing, and is read at any time, also before the session runs."""

    def __init__(
        self, listener: TranscriptionSession, floor: Floor, queue: ResponseQueue, heard: HeardResponses
    ) -> None:
        self._listener = listener
        self._floor = floor
        self._queue = queue
        self._heard = heard

    @property
    def audio_s(self) -> float:
        """Seconds of audio that the session has listened to so far. Audio that waits in the inbox does not count."""
        return self._listener.audio_s

    @property
    def settled_ms(self) -> float:
        """The millisecond of audio before which everything is in the history, or nobody spoke. With a model that takes
        turns by itself that is all it was given.
        """
        return self.audio_s * 1000 if self._queue.native else self._listener.settled_ms

    @property
    def unread_items(self) -> list[str]:
        """The items of the history that have no transcript yet, by their ids."""
        return [turn.item.id for turn in self._floor.turns.values() if turn.stage is TurnStage.COMMITTED]

    @property
    def owed_responses(self) -> list[CreateResponse]:
        """The responses that are under way, due to the user's turns, or waiting, in their order. A model that takes
        turns by itself owes none.
        """
        return self._queue.owed

    @property
    def user_speaks(self) -> bool:
        """Whether the user speaks, as far as it was reported."""
        return self._floor.user_speaks

    @property
    def is_responding(self) -> bool:
        """Whether a response of the conversation is being produced. One out of band, or one still heard, is not."""
        return self._queue.responder.active is not None

    @property
    def can_cancel(self) -> bool:
        """Whether a response of the conversation is being produced that was not cancelled yet. Only then is a
        CancelResponse handled at once; else it may be about a response that a command in the inbox has still to begin.
        """
        active = self._queue.responder.active
        return active is not None and not active.cancelled

    @property
    def is_heard(self) -> bool:
        """Whether audio that was sent is still being played."""
        return self._heard.left_s > 0

    @property
    def is_silent(self) -> bool:
        """Whether neither side speaks, and nothing that was said or asked for waits to be transcribed or answered."""
        is_owed = self.user_speaks or self.unread_items or self.owed_responses
        return self._listener.is_silent and not (is_owed or self.is_responding or self.is_heard)
