"""Converts frames with OpenAI's messages into commands, and answers invalid frames. Used by several dialects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    ClearOutputAudio,
    ConversationCommand,
    CreateItem,
    DeleteItem,
    RetrieveItem,
    TruncateItem,
)
from antiphon.protocols.connection import Command
from antiphon.protocols.fields import number
from antiphon.protocols.realtime.items import ItemContext, item_from, response_from
from antiphon.protocols.realtime.messages import (
    ClientMessage,
    ConversationItemCreate,
    ConversationItemDelete,
    ConversationItemRetrieve,
    ConversationItemTruncate,
    ConversationMessage,
    OutputAudioBufferClear,
    ResponseCancel,
    ResponseCreate,
    event_id_at_ends,
    event_id_in,
)
from antiphon.protocols.realtime.writer import EventWriter
from antiphon.protocols.wire import Frame, Received

# Maximum of `audio_end_ms`.
MAX_AUDIO_MS = 2**31
M = TypeVar("M", bound=ClientMessage)


class FrameReader(ABC, Generic[M]):
    """Reads the frames of one client. An invalid frame is answered with an error and has no other effect."""

    # Error code for a frame that was not read because it is too large.
    too_large_code = "invalid_event"

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        # The id of a message that is wrapped in the current message. Errors quote it instead of the outer message's id.
        self._event_id: str | None = None

    def feed(self, data: str | bytes) -> Received[Command]:
        """Read one frame from the client. Does not raise for an invalid frame."""
        return Received(self._asked(data), self._writer.take())

    def _asked(self, data: str | bytes) -> list[Command]:
        """Return the commands in a frame. For an invalid frame, write an error and return []."""
        self._event_id = None
        try:
            return self._commands(self._read(data), data)
        except RemoteProtocolError as error:
            self._writer.error(error, self._event_id or event_id_in(data))
            return []

    @abstractmethod
    def _read(self, data: str | bytes) -> M:
        """Decode the message in a frame. Raises RemoteProtocolError for an invalid message."""

    @abstractmethod
    def _commands(self, message: M, data: str | bytes | msgspec.Raw) -> list[Command]:
        """Return the commands for a message. `data` is its JSON text. Raises RemoteProtocolError."""

    def too_large(self, data: str | bytes, max_bytes: int) -> list[Frame]:
        """Return the answer to a frame that was not read because it exceeds `max_bytes`. The session continues."""
        error = RemoteProtocolError(self.too_large_code, f"The event is larger than {max_bytes} bytes.")
        return self.refuse(error, event_id_at_ends(data))

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client. `event_id` is the id of the client's message. The session continues."""
        self._writer.error(error, event_id)
        return self._writer.take()


def command_of(message: ConversationMessage, context: ItemContext) -> ConversationCommand:
    """Convert a message into a command. Raises RemoteProtocolError if the message contains an invalid object."""
    event_id = message.own_id
    match message:
        case ConversationItemCreate(item=item, previous_item_id=previous_id):
            return CreateItem(item_from(item, "item", context), previous_id, event_id)
        case ConversationItemRetrieve(item_id=item_id):
            return RetrieveItem(item_id, event_id)
        case ConversationItemTruncate(item_id=item_id, content_index=index, audio_end_ms=end_ms):
            number(end_ms, "audio_end_ms", 0, MAX_AUDIO_MS)
            return TruncateItem(item_id, index, end_ms, event_id)
        case ConversationItemDelete(item_id=item_id):
            return DeleteItem(item_id, event_id)
        case ResponseCreate(response=response):
            return response_from(response, context, event_id)
        case ResponseCancel(response_id=response_id):
            return CancelResponse(response_id, event_id)
        case OutputAudioBufferClear():
            return ClearOutputAudio(event_id)
