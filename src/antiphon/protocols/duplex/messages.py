"""What full-duplex clients send: docs/wire/duplex.md.

A subclass with another `type` is another name of the same message.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import Reader, Text, check_names
from antiphon.protocols.opening import NULL
from antiphon.protocols.realtime.messages import (
    ClientMessage,
    ConversationItemCreate,
    InputAudioBufferClear,
    ResponseCancel,
    ResponseCreate,
    type_in,
)

T = TypeVar("T")


class DuplexUpdate(ClientMessage, tag="session.update", kw_only=True):
    """An update. Its fields are in `session`, or where that is no object, beside the `type`."""

    session: msgspec.Raw | UnsetType = UNSET


class SessionCreate(DuplexUpdate, tag="session.create"):
    """An older name of an update."""


class Heartbeat(ClientMessage, tag="session.heartbeat"):
    """The client is there; it is answered."""


class SessionClose(ClientMessage, tag="session.close", kw_only=True):
    """The end of the session is asked for. `reason` is any value; only text is given back."""

    reason: object = None


class CloseSession(SessionClose, tag="close_session"):
    """Another name of SessionClose."""


class Close(SessionClose, tag="close"):
    """Another name of SessionClose."""


class DuplexAppend(ClientMessage, tag="input_audio_buffer.append", kw_only=True):
    """Audio, and what the client knows of it. `format` and `sample_rate_hz` hold from here on.

    The fields about overlap (docs/wire/duplex.md) are checked where they are used: a wrong type counts as missing.
    """

    audio: str
    format: object = None
    sample_rate_hz: object = None
    video_frames: object = None
    overlap_action: object = UNSET
    overlap: object = None
    force_barge_in: object = None
    force_listen: object = None
    transcript: object = None
    is_speech: object = None


class InputAudioAppend(DuplexAppend, tag="input.audio.append"):
    """Another name of DuplexAppend."""


class PushChunk(DuplexAppend, tag="push_chunk"):
    """Another name of DuplexAppend."""


class DuplexCommit(ClientMessage, tag="input_audio_buffer.commit", kw_only=True):
    """The client's turn ends here, unless `final` is false. A flag that is no bool is as if it were missing."""

    final: object = True
    response_create: object = UNSET
    create_response: object = None

    @property
    def wants_response(self) -> object:
        """Whether the turn is to be answered; None: as the session is configured."""
        return self.create_response if self.response_create is UNSET else self.response_create


class InputCommit(DuplexCommit, tag="input.commit", kw_only=True):
    """A commit that is answered unless it says otherwise."""

    create_response: object = True


class PushText(ClientMessage, tag="push_text", kw_only=True):
    """The user's turn, in writing."""

    text: Text


class InputTextAppend(PushText, tag="input.text.append"):
    """Another name of PushText."""


class AppendInputText(PushText, tag="input_text.append"):
    """Another name of PushText."""


class InputCancel(ClientMessage, tag="input.cancel"):
    """The user's present speech does not count."""


class DuplexBargeIn(ClientMessage, tag="barge_in"):
    """The user takes the floor."""


class PlaybackAck(ClientMessage, tag="playback.ack", kw_only=True):
    """So many milliseconds of a response were played, and `committed_ms` of them count as heard (missing: all)."""

    played_ms: float
    committed_ms: float | None = None
    response_id: Text | None = None
    item_id: Text | None = None


class AudioPlaybackAck(PlaybackAck, tag="audio.playback_ack"):
    """Another name of PlaybackAck."""


class TurnSignal(ClientMessage, tag="turn.signal", kw_only=True):
    """Another message by its name, with its fields in `payload`; or the client's own event about turns."""

    event: Text
    payload: msgspec.Raw = NULL
    response_id: Text | None = None


class SignalTurnAlias(TurnSignal, tag="signal_turn"):
    """Another name of TurnSignal."""


class ItemRetrieve(ClientMessage, tag="conversation.item.retrieve", kw_only=True):
    """The item as it is now is asked for."""

    item_id: Text | None = None


class ItemTruncate(ClientMessage, tag="conversation.item.truncate", kw_only=True):
    """Of the item's audio, only the first `audio_end_ms` milliseconds were heard."""

    audio_end_ms: int
    item_id: Text | None = None
    content_index: int = 0


class ItemDelete(ClientMessage, tag="conversation.item.delete", kw_only=True):
    """The item is to be removed."""

    item_id: Text | None = None


NamedItemMessage = ItemRetrieve | ItemTruncate | ItemDelete
# What another message may be that comes inside a TurnSignal, by its name.
SIGNALLED: dict[str, type[ClientMessage]] = {
    "barge_in": DuplexBargeIn,
    "input.cancel": InputCancel,
    "session.update": DuplexUpdate,
    "conversation.item.create": ConversationItemCreate,
    "conversation.item.delete": ItemDelete,
    "conversation.item.truncate": ItemTruncate,
    "conversation.item.retrieve": ItemRetrieve,
}
DuplexMessage = (
    DuplexUpdate
    | SessionCreate
    | Heartbeat
    | SessionClose
    | CloseSession
    | Close
    | DuplexAppend
    | InputAudioAppend
    | PushChunk
    | DuplexCommit
    | InputCommit
    | PushText
    | InputTextAppend
    | AppendInputText
    | InputCancel
    | DuplexBargeIn
    | PlaybackAck
    | AudioPlaybackAck
    | TurnSignal
    | SignalTurnAlias
    | NamedItemMessage
    | InputAudioBufferClear
    | ConversationItemCreate
    | ResponseCreate
    | ResponseCancel
)
_MESSAGE: Reader[DuplexMessage] = Reader(DuplexMessage)


def read_duplex(data: str | bytes) -> DuplexMessage:
    """The message of one frame. Raises RemoteProtocolError, in the dialect's own words for what is no message of it."""
    try:
        message = _MESSAGE.read(data)
        if not isinstance(message, DuplexUpdate):
            # An update tells what it does not know in its answer.
            check_names(data, message)
        return message
    except RemoteProtocolError as error:
        if error.code == "invalid_json":
            raise RemoteProtocolError("invalid_json", "The event is not valid JSON.") from None
        if error.code == "invalid_type" and error.param is None:
            raise RemoteProtocolError("bad_event", "An event is a JSON object.") from None
        if error.code == "invalid_value" and error.param == "type":
            raise RemoteProtocolError("unknown_event", f"There is no event '{type_in(data)}'.", "type") from None
        raise
