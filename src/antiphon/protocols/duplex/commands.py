"""Converts a full-duplex client's messages about overlap, items and playback into commands: docs/wire/duplex.md."""

from __future__ import annotations

from msgspec import UNSET

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import DeleteItem, RetrieveItem, TruncateItem
from antiphon.events.duplex import AcknowledgePlayback, BargeIn, HoldFloor
from antiphon.protocols.duplex.messages import (
    DuplexAppend,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    NamedItemMessage,
    PlaybackAck,
)
from antiphon.protocols.fields import number
from antiphon.protocols.realtime.commands import MAX_AUDIO_MS
from antiphon.turns.overlap import is_backchannel

INTERRUPT_ACTIONS = ("barge_in", "interrupt", "cancel")
LISTEN_ACTIONS = ("listen", "continue", "continue_output", "ack")
DROP_ACTIONS = ("drop", "ignore", "silence")


def overlap_action(message: DuplexAppend) -> str | None:
    """Return the requested action for audio that overlaps a response, in lower case; None if there is none."""
    action = message.overlap if message.overlap_action is UNSET else message.overlap_action
    return action.strip().lower() if isinstance(action, str) else None


def overlap_command(message: DuplexAppend, *, silent: bool) -> BargeIn | HoldFloor | None:
    """Return the command for an append that overlaps a response; None if the append requests no action.

    Fields are checked in this order: the action, `force_barge_in`, `force_listen`, and a `transcript` that is a
    backchannel. The first that applies decides. If the audio is `silent`, its transcript is ignored.
    """
    action, event_id = overlap_action(message), message.own_id
    if action in INTERRUPT_ACTIONS:
        return BargeIn("client_overlap_action", event_id)
    if action in LISTEN_ACTIONS:
        return HoldFloor("client_overlap_action", event_id)
    if message.force_barge_in is True:
        return BargeIn("client_force_barge_in", event_id)
    if message.force_listen is True:
        return HoldFloor("client_force_listen", event_id)
    transcript = message.transcript
    if not silent and isinstance(transcript, str) and transcript and is_backchannel(transcript):
        return HoldFloor("short_ack_transcript", event_id)
    return None


def named_item_command(message: NamedItemMessage) -> RetrieveItem | TruncateItem | DeleteItem:
    """Return the command for a message about one item. Raises RemoteProtocolError (`missing_item_id`) without an id."""
    item_id, event_id = message.item_id, message.own_id
    if not item_id:
        raise RemoteProtocolError("missing_item_id", f"{message.__struct_config__.tag} needs an item_id.", "item_id")
    match message:
        case ItemRetrieve():
            return RetrieveItem(item_id, event_id)
        case ItemDelete():
            return DeleteItem(item_id, event_id)
        case ItemTruncate(audio_end_ms=end_ms, content_index=index):
            number(end_ms, "audio_end_ms", 0, MAX_AUDIO_MS)
            return TruncateItem(item_id, index, end_ms, event_id)


def text_or_none(value: object, param: str = "response_id") -> str | None:
    """Return `value` if it is a string or null. Otherwise raise RemoteProtocolError with `param`."""
    if value is None or isinstance(value, str):
        return value
    raise RemoteProtocolError("invalid_type", f"Invalid type for '{param}': expected str or null.", param)


def acknowledgement(message: PlaybackAck) -> AcknowledgePlayback:
    """Convert a `playback.ack` into a command.

    If `committed_ms` is missing, all played audio counts as heard. Raises RemoteProtocolError for an invalid time.
    """
    played_ms = milliseconds(message.played_ms, "played_ms")
    committed = message.committed_ms
    committed_ms = played_ms if committed is None else milliseconds(committed, "committed_ms")
    return AcknowledgePlayback(
        played_ms, committed_ms, message.response_id or None, message.item_id or None, message.own_id
    )


def milliseconds(value: float, param: str) -> int:
    """Return a duration rounded down to whole ms. Raises RemoteProtocolError with `param` if it is not in [0, 1e9)."""
    if not 0 <= value < 1e9:
        raise RemoteProtocolError("bad_event", f"'{param}' is a number of milliseconds from 0 on.", param)
    return int(value)
