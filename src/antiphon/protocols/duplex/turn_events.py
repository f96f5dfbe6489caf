"""What a full-duplex client is told of turns, overlap and playback: docs/wire/duplex.md."""

from __future__ import annotations

from dataclasses import asdict

from antiphon.events.duplex import (
    ListenStepTaken,
    OverlapReported,
    PlaybackAcknowledged,
    SpeakStepTaken,
    TurnStateChanged,
)
from antiphon.protocols.realtime.writer import EventWriter

TurnEvent = TurnStateChanged | OverlapReported | SpeakStepTaken | ListenStepTaken | PlaybackAcknowledged


def write_turn_event(writer: EventWriter, event: TurnEvent, session_id: str, epoch: int) -> None:
    """Write the message of an event. `epoch` is the one that the session is in."""
    match event:
        case TurnStateChanged(name, state, payload):
            more = {"payload": payload} if payload else {}
            writer.event("turn.event", session_id=session_id, epoch=epoch, event=name, turn_state=state, **more)
        case OverlapReported(policy, action, reason):
            writer.event(
                "overlap.decision",
                session_id=session_id,
                epoch=epoch,
                policy=policy,
                action=action,
                reason=reason,
                metadata={},
            )
        case SpeakStepTaken(response_id):
            writer.event("response.speak", session_id=session_id, epoch=epoch, response_id=response_id, metadata={})
        case ListenStepTaken(reason):
            response = {"object": "realtime.response", "status": "listening", "metadata": {"reason": reason}}
            writer.event("response.listen", session_id=session_id, epoch=epoch, response=response)
        case PlaybackAcknowledged():
            # The one event whose fields are nested.
            acknowledged = {
                "session_id": session_id,
                "epoch": epoch,
                "type": "playback.acknowledged",
                "response_id": event.response_id,
                "item_id": event.item_id,
                "played_ms": event.played_ms,
                "committed_ms": event.committed_ms,
                "playback": asdict(event.cursors),
                "history_committed": event.history_exact,
            }
            writer.event("playback.acknowledged", event=acknowledged)
