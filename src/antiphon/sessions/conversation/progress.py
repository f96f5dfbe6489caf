"""Reports the progress of a conversation: how much was heard, transcribed and answered, and what is still under way."""

from __future__ import annotations

from collections.abc import Mapping

from antiphon.events.conversation import CreateResponse
from antiphon.sessions.conversation.responses.heard import HeardResponses
from antiphon.sessions.conversation.responses.queue import ResponseQueue, Unstored
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.floor import Floor, TurnStage

# The most audio that a native model hears again at another host, in seconds.
MAX_AGAIN_S = 30.0


class ConversationProgress:
    """The progress of one conversation, at any time, even before the session runs. Only `num_labels` may be set."""

    def __init__(
        self, listener: TranscriptionSession, floor: Floor, queue: ResponseQueue, heard: HeardResponses
    ) -> None:
        self._listener = listener
        self._floor = floor
        self._queue = queue
        self._heard = heard

    @property
    def audio_s(self) -> float:
        """Seconds of audio that the session has processed. Audio that waits in the inbox does not count."""
        return self._listener.audio_s

    @property
    def settled_ms(self) -> float:
        """The millisecond of audio before which all speech is in the history. With a native model, whose user may speak
        without turns, it is at most MAX_AGAIN_S before the end: another host lets its model hear that audio again.
        """
        settled_ms = self._listener.settled_ms
        return max(settled_ms, (self.audio_s - MAX_AGAIN_S) * 1000) if self._queue.native else settled_ms

    @property
    def native_model(self) -> str:
        """The name of the native model that the conversation is with; "" if the conversation model is none."""
        return self._queue.native.model_id if self._queue.native else ""

    @property
    def unstored(self) -> list[Unstored]:
        """What the model has got and the items do not contain as text, so that another host does not have it."""
        return self._queue.unstored

    @property
    def num_labels(self) -> int:
        """The number of labels that voices have. Set it to that of the conversation that this one continues."""
        labels = self._listener.speakers.labels
        return labels.num_labels if labels else 0

    @num_labels.setter
    def num_labels(self, num_labels: int) -> None:
        if labels := self._listener.speakers.labels:
            labels.num_labels = num_labels

    @property
    def unread_items(self) -> list[str]:
        """Ids of the history's items that have no transcript yet."""
        return [turn.item.id for turn in self._floor.turns.values() if turn.stage is TurnStage.COMMITTED]

    @property
    def closing_responses(self) -> list[CreateResponse]:
        """The request of a response that has ended, while its last events are being emitted."""
        return self._queue.closing

    @property
    def owed_responses(self) -> list[CreateResponse]:
        """The conversation's responses that are under way or due to turns, and all that wait, in order."""
        return self._queue.owed

    @property
    def out_of_band(self) -> Mapping[str, CreateResponse]:
        """The requests for the out-of-band responses under way that the client has not cancelled, by response id."""
        return self._queue.responder.out_of_band

    @property
    def user_speaks(self) -> bool:
        """Whether the user speaks, according to the events reported so far."""
        return self._floor.user_speaks

    @property
    def is_responding(self) -> bool:
        """Whether a response of the conversation is being produced. Out-of-band responses and playback do not count."""
        return self._queue.responder.active is not None

    @property
    def can_cancel(self) -> bool:
        """Whether a response of the conversation is being produced and was not cancelled yet. Only then is a
        CancelResponse handled at once. Otherwise it waits in the inbox, because it may be for a response that an
        earlier command in the inbox will begin.
        """
        active = self._queue.responder.active
        return active is not None and not active.cancelled

    @property
    def is_heard(self) -> bool:
        """Whether audio that was sent is still being played."""
        return self._heard.left_s > 0

    @property
    def is_silent(self) -> bool:
        """True if neither side speaks, and nothing waits to be transcribed, answered or approved."""
        return self._listener.is_silent and self.is_quiet

    @property
    def is_quiet(self) -> bool:
        """As `is_silent`, but by the audio and the commands that were handled so far. More may wait in the inbox."""
        is_owed = self.user_speaks or self.unread_items or self.owed_responses or self._queue.calls.awaits_approval
        return self._listener.is_quiet and not (is_owed or self.is_responding or self.is_heard)
