"""What a full-duplex client says about overlap and playback, read into commands: docs/wire/duplex.md."""

from __future__ import annotations

from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.events.duplex import AcknowledgePlayback, BargeIn, HoldFloor
from antiphon.protocols.fields import require, typed
from antiphon.turns.backchannel import is_backchannel

INTERRUPT_ACTIONS = ("barge_in", "interrupt", "cancel")
LISTEN_ACTIONS = ("listen", "continue", "continue_output", "ack")
DROP_ACTIONS = ("drop", "ignore", "silence")


def overlap_action(event: dict[str, Any]) -> str | None:
    """The action that an append names for audio over a response, in lower case; None where it names none."""
    action = event.get("overlap_action", event.get("overlap"))
    return action.strip().lower() if isinstance(action, str) else None


def overlap_command(event: dict[str, Any], event_id: str | None, *, silent: bool) -> BargeIn | HoldFloor | None:
    """What an append says about audio over a response.

    Where it says several things, the first of these counts: its action, `force_barge_in`, `force_listen`, and a
    `transcript` that is a backchannel. The transcript of audio that is `silent` does not count.
    """
    action = overlap_action(event)
    if action in INTERRUPT_ACTIONS:
        return BargeIn("client_overlap_action", event_id)
    if action in LISTEN_ACTIONS:
        return HoldFloor("client_overlap_action", event_id)
    if event.get("force_barge_in") is True:
        return BargeIn("client_force_barge_in", event_id)
    if event.get("force_listen") is True:
        return HoldFloor("client_force_listen", event_id)
    transcript = event.get("transcript")
    if not silent and isinstance(transcript, str) and transcript and is_backchannel(transcript):
        return HoldFloor("short_ack_transcript", event_id)
    return None


def acknowledgement(event: dict[str, Any], event_id: str | None) -> AcknowledgePlayback:
    """Read a `playback.ack`.

    Without `committed_ms`, what was played was heard. Raises RemoteProtocolError for a missing or wrong field.
    """
    played_ms = milliseconds(require(event, "played_ms", (int, float), "played_ms"), "played_ms")
    committed = event.get("committed_ms")
    response_id, item_id = (typed(event.get(k), (str, type(None)), k) or None for k in ("response_id", "item_id"))
    committed_ms = played_ms if committed is None else milliseconds(committed, "committed_ms")
    return AcknowledgePlayback(played_ms, committed_ms, response_id, item_id, event_id)


def milliseconds(value: Any, param: str) -> int:
    """A duration of 0 to 1e9 ms, rounded down. Raises RemoteProtocolError that names `param`."""
    typed(value, (int, float), param)
    if not 0 <= value < 1e9:
        raise RemoteProtocolError("bad_event", f"'{param}' is a number of milliseconds from 0 on.", param)
    return int(value)
