"""The messages that clients of a realtime session send, as described in docs/wire/openai-realtime.md.

Each class is the message with one `type`. A dialect has a union of its messages, into which it decodes each frame.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import Reader, Text, check_names, decode
from antiphon.protocols.opening import NULL
from antiphon.protocols.wire import SMALL_JSON

# In a message that is too large or complex, `event_id` is searched for in the first and last MAX_HEAD characters.
MAX_HEAD = 512
_EVENT_ID = re.compile(r'"event_id"\s*:\s*"([^"\\]*)"')
T = TypeVar("T", bound=msgspec.Struct)


class ClientMessage(msgspec.Struct, tag_field="type", kw_only=True):
    """The base of all messages. `event_id` may have any type, but errors only quote a string."""

    event_id: object = None

    @property
    def own_id(self) -> str | None:
        """The id that the client gave to this message, or None."""
        return self.event_id if isinstance(self.event_id, str) else None


class SessionUpdate(ClientMessage, tag="session.update", kw_only=True):
    """Changes the session. `session` has the fields to change. Their names depend on the dialect."""

    session: msgspec.Raw


class InputAudioBufferAppend(ClientMessage, tag="input_audio_buffer.append", kw_only=True):
    """Appends audio. `audio`: base64 in the session's format."""

    audio: str


class InputAudioBufferCommit(ClientMessage, tag="input_audio_buffer.commit"):
    """Commits the user's audio and ends the turn."""


class InputAudioBufferClear(ClientMessage, tag="input_audio_buffer.clear"):
    """Discards the audio that was appended since the last commit."""


class ConversationItemCreate(ClientMessage, tag="conversation.item.create", kw_only=True):
    """Adds an item. `items.item_from` reads `item`.

    `previous_item_id`: the item after which to insert it; `root` for the front, None for the end.
    """

    item: msgspec.Raw
    previous_item_id: Text | None = None


class ConversationItemRetrieve(ClientMessage, tag="conversation.item.retrieve", kw_only=True):
    """Requests the current state of an item."""

    item_id: Text


class ConversationItemTruncate(ClientMessage, tag="conversation.item.truncate", kw_only=True):
    """Truncates an item to the part that was heard: the first `audio_end_ms` milliseconds of its audio."""

    item_id: Text
    content_index: int
    audio_end_ms: int


class ConversationItemDelete(ClientMessage, tag="conversation.item.delete", kw_only=True):
    """Removes an item from the conversation."""

    item_id: Text


class ResponseCreate(ClientMessage, tag="response.create", kw_only=True):
    """Requests a response. `items.response_from` reads `response`. Without it, the session's values apply."""

    response: msgspec.Raw = NULL


class ResponseCancel(ClientMessage, tag="response.cancel", kw_only=True):
    """Cancels the response with this id, or by default the conversation's response in progress."""

    response_id: Text | None = None


class OutputAudioBufferClear(ClientMessage, tag="output_audio_buffer.clear"):
    """Stops the audio that the server itself plays."""


ItemMessage = ConversationItemCreate | ConversationItemRetrieve | ConversationItemTruncate | ConversationItemDelete
# The messages that are the same in all dialects with conversations. `commands.command_of` converts them.
ConversationMessage = ItemMessage | ResponseCreate | ResponseCancel | OutputAudioBufferClear


class _Envelope(msgspec.Struct):
    type: object = None
    event_id: object = None


def read_message(data: str | bytes, reader: Reader[T], supported: Sequence[str]) -> T:
    """Decode a frame into a member of the union that `reader` reads.

    Raises the same errors as `decode`, and RemoteProtocolError for an unknown field. If the `type` is unknown, the
    error lists the `supported` types. If the frame is not a JSON object, the code is `invalid_event`.
    """
    try:
        message = reader.read(data)
        check_names(data, message, strict=True)
        return message
    except RemoteProtocolError as error:
        if error.code == "invalid_json":
            raise RemoteProtocolError("invalid_event", "The event is not valid JSON.") from None
        if error.code == "invalid_type" and error.param is None:
            raise RemoteProtocolError("invalid_event", "An event is a JSON object.") from None
        if error.code == "invalid_value" and error.param == "type":
            names = ", ".join(f"'{name}'" for name in supported)
            text = f"Invalid value: '{type_in(data)}'. Supported values are: {names}."
            raise RemoteProtocolError("invalid_value", text, "type") from None
        raise


def event_id_in(data: str | bytes) -> str | None:
    """Return the `event_id` of a message that could not be read, or None."""
    found = _envelope(data).event_id
    if found is None and len(data) > SMALL_JSON:
        # The message may be too complex to decode as a whole.
        return event_id_at_ends(data)
    return found if isinstance(found, str) else None


def event_id_at_ends(data: str | bytes) -> str | None:
    """Return the `event_id` of an undecoded message if it is near the message's beginning or end, else None."""
    for end in (data[:MAX_HEAD], data[-MAX_HEAD:]):
        if named := _EVENT_ID.search(end if isinstance(end, str) else end.decode(errors="replace")):
            return named[1]
    return None


def type_in(data: str | bytes) -> object:
    """Return the `type` of a message that could not be read: any JSON value, or None if it is missing."""
    return _envelope(data).type


def _envelope(data: str | bytes) -> _Envelope:
    try:
        return decode(data, _Envelope)
    except RemoteProtocolError:
        return _Envelope()
