"""What a full-duplex client is told of turns, overlap and playback, as fields of its events: docs/wire/duplex.md."""

from __future__ import annotations

from dataclasses import asdict

from antiphon.events.duplex import (
    ListenStepTaken,
    OverlapReported,
    PlaybackAcknowledged,
    SpeakStepTaken,
    TurnStateChanged,
)
from antiphon.protocols.wire import Payload

TurnEvent = TurnStateChanged | OverlapReported | SpeakStepTaken | ListenStepTaken | PlaybackAcknowledged


def turn_event(output: TurnEvent, session_id: str, epoch: int) -> tuple[str, Payload]:
    """The type and the further fields of the event, JSON values. `epoch` is the one that the session is in."""
    here: dict[str, object] = {"session_id": session_id, "epoch": epoch}
    match output:
        case TurnStateChanged(event, state, payload):
            more = {"payload": payload} if payload else {}
            return "turn.event", here | {"event": event, "turn_state": state} | more
        case OverlapReported(policy, action, reason, facts):
            return "overlap.decision", overlap_fields(session_id, epoch, policy, action, reason, dict(facts))
        case SpeakStepTaken(response_id):
            return "response.speak", here | {"response_id": response_id, "metadata": {}}
        case ListenStepTaken(reason):
            response = {"object": "realtime.response", "status": "listening", "metadata": {"reason": reason}}
            return "response.listen", here | {"response": response}
        case PlaybackAcknowledged():
            # The one event whose fields are nested.
            return "playback.acknowledged", {"event": {**here, **_acknowledged_fields(output)}}


def overlap_fields(session_id: str, epoch: int, policy: str, action: str, reason: str, metadata: Payload) -> Payload:
    """The fields of an `overlap.decision`: what was done about speech over a response, and why."""
    return {
        "session_id": session_id,
        "epoch": epoch,
        "policy": policy,
        "action": action,
        "reason": reason,
        "metadata": metadata,
    }


def _acknowledged_fields(acknowledged: PlaybackAcknowledged) -> Payload:
    return {
        "type": "playback.acknowledged",
        "response_id": acknowledged.response_id,
        "item_id": acknowledged.item_id,
        "played_ms": acknowledged.played_ms,
        "committed_ms": acknowledged.committed_ms,
        "playback": asdict(acknowledged.cursors),
        "history_committed": acknowledged.history_exact,
    }
