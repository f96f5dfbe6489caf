"""Reads the messages that are the same in every conversation into commands for the session."""

from __future__ import annotations

from antiphon.events.conversation import (
    CancelResponse,
    ClearOutputAudio,
    ConversationCommand,
    CreateItem,
    DeleteItem,
    RetrieveItem,
    TruncateItem,
)
from antiphon.protocols.fields import number
from antiphon.protocols.realtime.items import ItemContext, item_from, response_from
from antiphon.protocols.realtime.messages import (
    ConversationItemCreate,
    ConversationItemDelete,
    ConversationItemRetrieve,
    ConversationItemTruncate,
    ConversationMessage,
    OutputAudioBufferClear,
    ResponseCancel,
    ResponseCreate,
)

# What `audio_end_ms` may be at most.
MAX_AUDIO_MS = 2**31


def command_of(message: ConversationMessage, context: ItemContext) -> ConversationCommand:
    """The command that a message stands for. Raises RemoteProtocolError for an object in it that is wrong."""
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
