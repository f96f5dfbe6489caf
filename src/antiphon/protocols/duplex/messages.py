"""The messages of full-duplex clients: docs/wire/duplex.md.

A subclass that only has another `type` is an alias of its base class.
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
    """Changes the session. The changed fields are in `session`, or at the top level if `session` is not an object."""

    session: msgspec.Raw | UnsetType = UNSET


class SessionCreate(DuplexUpdate, tag="session.create"):
    """The older name of `session.update`, with the same fields."""


class Heartbeat(ClientMessage, tag="session.heartbeat"):
    """Restarts the idle timeout. The server acknowledges it."""


class SessionClose(ClientMessage, tag="session.close", kw_only=True):
    """Requests the end of the session. `reason` may be any value, but the answer repeats only a string."""

    reason: object = None


class CloseSession(SessionClose, tag="close_session"):
    """Alias of `session.close`, with the same fields."""


class Close(SessionClose, tag="close"):
    """Alias of `session.close`, with the same fields."""


class DuplexAppend(ClientMessage, tag="input_audio_buffer.append", kw_only=True):
    """Audio of the user, with the client's information about it.

    The fields about overlap (docs/wire/duplex.md) are checked only when they are used. A value of a wrong type counts
    as missing.
    """

    # Base64 in the session's input format.
    audio: str
    # Name of the input format, or an object with `type` and `rate`. It applies from this append on.
    format: object = None
    # Sample rate in Hz. It applies from this append on.
    sample_rate_hz: object = None
    # Images from the user's camera, in base64.
    video_frames: object = None
    # How to treat audio that overlaps a response: for example `barge_in`, `listen` or `drop`.
    overlap_action: object = UNSET
    # Older name of `overlap_action`.
    overlap: object = None
    # If true, the audio interrupts the response.
    force_barge_in: object = None
    # If true, the response continues in spite of the audio.
    force_listen: object = None
    # The client's own transcript of the audio. If it is a backchannel, the response continues.
    transcript: object = None
    # If false, audio that overlaps a response counts as silence.
    is_speech: object = None


class InputAudioAppend(DuplexAppend, tag="input.audio.append"):
    """Alias of `input_audio_buffer.append`, with the same fields."""


class PushChunk(DuplexAppend, tag="push_chunk"):
    """Alias of `input_audio_buffer.append`, with the same fields."""


class DuplexCommit(ClientMessage, tag="input_audio_buffer.commit", kw_only=True):
    """Commits audio. It also ends the turn, unless `final` is false. A flag that is not a bool counts as missing."""

    final: object = True
    response_create: object = UNSET
    create_response: object = None

    @property
    def wants_response(self) -> object:
        """Whether the model responds to the turn; None if the session's configuration decides."""
        return self.create_response if self.response_create is UNSET else self.response_create


class InputCommit(DuplexCommit, tag="input.commit", kw_only=True):
    """A commit to whose turn the model responds by default."""

    create_response: object = True


class PushText(ClientMessage, tag="push_text", kw_only=True):
    """A turn that the user typed."""

    text: Text


class InputTextAppend(PushText, tag="input.text.append"):
    """Alias of `push_text`, with the same fields."""


class AppendInputText(PushText, tag="input_text.append"):
    """Alias of `push_text`, with the same fields."""


class InputCancel(ClientMessage, tag="input.cancel"):
    """Discards the user's current speech and ends the response."""


class DuplexBargeIn(ClientMessage, tag="barge_in"):
    """Gives the floor to the user and cuts off the response."""


class PlaybackAck(ClientMessage, tag="playback.ack", kw_only=True):
    """Reports that the first `played_ms` of a response were played. The first `committed_ms` of them count as heard. If
    `committed_ms` is missing, all of them do.
    """

    played_ms: float
    committed_ms: float | None = None
    response_id: Text | None = None
    item_id: Text | None = None


class AudioPlaybackAck(PlaybackAck, tag="audio.playback_ack"):
    """Alias of `playback.ack`, with the same fields."""


class TurnSignal(ClientMessage, tag="turn.signal", kw_only=True):
    """Wraps another message, by its name and with its fields in `payload`. May also report the client's turn events."""

    event: Text
    payload: msgspec.Raw = NULL
    response_id: Text | None = None


class SignalTurnAlias(TurnSignal, tag="signal_turn"):
    """Alias of `turn.signal`, with the same fields."""


class ItemRetrieve(ClientMessage, tag="conversation.item.retrieve", kw_only=True):
    """Requests the current state of an item."""

    item_id: Text | None = None


class ItemTruncate(ClientMessage, tag="conversation.item.truncate", kw_only=True):
    """Truncates an item to the part that was heard: the first `audio_end_ms` milliseconds of its audio."""

    audio_end_ms: int
    item_id: Text | None = None
    content_index: int = 0


class ItemDelete(ClientMessage, tag="conversation.item.delete", kw_only=True):
    """Removes an item from the conversation."""

    item_id: Text | None = None


NamedItemMessage = ItemRetrieve | ItemTruncate | ItemDelete
# The messages that a TurnSignal may wrap, by name.
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
    """Decode one frame. Raises RemoteProtocolError. Its code is the dialect's own if the message is unknown."""
    try:
        message = _MESSAGE.read(data)
        if not isinstance(message, DuplexUpdate):
            # Updates are not checked here: their answer reports unknown fields.
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
