"""The messages that clients of a realtime session send, as docs/wire/openai-realtime.md describes them.

A class stands for one `type`. A dialect puts those that it knows into a union, and decodes a frame into it once.
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

# How far from its ends the name of a message is looked for that is too complex to be read.
MAX_HEAD = 512
_EVENT_ID = re.compile(r'"event_id"\s*:\s*"([^"\\]*)"')
T = TypeVar("T", bound=msgspec.Struct)


class ClientMessage(msgspec.Struct, tag_field="type", kw_only=True):
    """Any message. `event_id` may be of any type; only text is given back with an error."""

    event_id: object = None

    @property
    def own_id(self) -> str | None:
        """The client's name for this message; None where it has none."""
        return self.event_id if isinstance(self.event_id, str) else None


class SessionUpdate(ClientMessage, tag="session.update", kw_only=True):
    """`session` holds the fields to change, in a dialect's own names."""

    session: msgspec.Raw


class InputAudioBufferAppend(ClientMessage, tag="input_audio_buffer.append", kw_only=True):
    """`audio`: base64 in the session's format."""

    audio: str


class InputAudioBufferCommit(ClientMessage, tag="input_audio_buffer.commit"):
    """The client's turn ends here."""


class InputAudioBufferClear(ClientMessage, tag="input_audio_buffer.clear"):
    """The audio since the last commit is to be dropped."""


class ConversationItemCreate(ClientMessage, tag="conversation.item.create", kw_only=True):
    """`item`: read by items.item_from. `previous_item_id`: the item before it, `root` for the front, None for the
    end.
    """

    item: msgspec.Raw
    previous_item_id: Text | None = None


class ConversationItemRetrieve(ClientMessage, tag="conversation.item.retrieve", kw_only=True):
    """The item as it is now is asked for."""

    item_id: Text


class ConversationItemTruncate(ClientMessage, tag="conversation.item.truncate", kw_only=True):
    """Of the item's audio, only the first `audio_end_ms` milliseconds were heard."""

    item_id: Text
    content_index: int
    audio_end_ms: int


class ConversationItemDelete(ClientMessage, tag="conversation.item.delete", kw_only=True):
    """The item is to be removed."""

    item_id: Text


class ResponseCreate(ClientMessage, tag="response.create", kw_only=True):
    """`response`: read by items.response_from; missing or null, the response is as the session says."""

    response: msgspec.Raw = NULL


class ResponseCancel(ClientMessage, tag="response.cancel", kw_only=True):
    """Without an id, the conversation's response that is under way is meant."""

    response_id: Text | None = None


class OutputAudioBufferClear(ClientMessage, tag="output_audio_buffer.clear"):
    """What the server itself plays is to be silent."""


ItemMessage = ConversationItemCreate | ConversationItemRetrieve | ConversationItemTruncate | ConversationItemDelete
# What is the same in every conversation: `commands.command_of` reads it.
ConversationMessage = ItemMessage | ResponseCreate | ResponseCancel | OutputAudioBufferClear


class _Envelope(msgspec.Struct):
    type: object = None
    event_id: object = None


def read_message(data: str | bytes, reader: Reader[T], supported: Sequence[str]) -> T:
    """The message as a member of the union that `reader` reads.

    Raises RemoteProtocolError as `decode` does, and for a field that the message does not know; for a `type` that is in
    no member, the message lists the `supported` ones, and for a frame that is no JSON object the code is
    `invalid_event`.
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
            told = f"Invalid value: '{type_in(data)}'. Supported values are: {names}."
            raise RemoteProtocolError("invalid_value", told, "type") from None
        raise


def event_id_in(data: str | bytes) -> str | None:
    """The client's name for a message that could not be read; None where it has none."""
    found = _envelope(data).event_id
    if found is None and len(data) > SMALL_JSON:
        # It may be too complex to be read as a whole.
        return event_id_at_ends(data)
    return found if isinstance(found, str) else None


def event_id_at_ends(data: str | bytes) -> str | None:
    """The client's name for a message that is not read, by its beginning and end: clients write it first or last."""
    for end in (data[:MAX_HEAD], data[-MAX_HEAD:]):
        if named := _EVENT_ID.search(end if isinstance(end, str) else end.decode(errors="replace")):
            return named[1]
    return None


def type_in(data: str | bytes) -> object:
    """The `type` of a message that could not be read, whatever it is; None where it has none."""
    return _envelope(data).type


def _envelope(data: str | bytes) -> _Envelope:
    try:
        return decode(data, _Envelope)
    except RemoteProtocolError:
        return _Envelope()
