"""What of a conversation is kept for a server to come, and how it is taken up again there."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from antiphon.conversation import Conversation
from antiphon.protocols.bridge import Bridge
from antiphon.protocols.duplex_connection import DuplexConnection
from antiphon.protocols.journal import ResumeToken
from antiphon.protocols.realtime import Opening, RealtimeConnection
from antiphon.server.secrets import connection_for, duplex_for
from antiphon.server.state import ServerState
from antiphon.store.sessions import Kept
from antiphon.talk_events import Item

Wire = RealtimeConnection | DuplexConnection


class _Snapshot(msgspec.Struct):
    """As it is stored."""

    wire: dict[str, Any]
    opening: dict[str, Any]
    items: list[Item]


def kept(who: str, wire: Wire | Bridge, token: ResumeToken, conversation: Conversation) -> Kept | None:
    """The conversation as it is now; None for what is none."""
    snapshot = wire.snapshot()
    if snapshot is None:
        return None
    opening = asdict(wire.opening) | {"session": None}
    return Kept(wire.id, who, token.hash, msgspec.json.encode(_Snapshot(snapshot, opening, list(conversation.items))))


def restored(state: ServerState, row: Kept) -> tuple[Wire, list[Item]]:
    """The protocol of a kept conversation, and its items. Raises Refused while models load, RemoteProtocolError where nobody answers any more."""
    snapshot = msgspec.json.decode(row.kept, type=_Snapshot)
    opening = Opening(**snapshot.opening)
    wire: Wire
    if snapshot.wire["dialect"] == "duplex":
        wire = duplex_for(state, opening)
        wire.open()
    else:
        wire = connection_for(state, opening)
        wire.open()
    wire.restore(snapshot.wire)
    return wire, snapshot.items
