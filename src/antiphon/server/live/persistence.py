"""What of a conversation is kept for a server to come, and how it is taken up again there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from antiphon.events.conversation import ContentPart, Item
from antiphon.protocols.bridges.base import Bridge
from antiphon.protocols.duplex.connection import DuplexConnection
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import Opening
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.server.live.open_wire import connection_for, duplex_for
from antiphon.server.state import ServerState
from antiphon.sessions.conversation.history import IMAGE_GONE
from antiphon.store.sessions import StoredSession

RestorableWire = RealtimeConnection | DuplexConnection


class _Snapshot(msgspec.Struct):
    """As it is stored."""

    wire: dict[str, Any]
    opening: dict[str, Any]
    items: list[Item]


def owner(caller: str) -> str:
    """Whose a kept conversation is, without the key that says so."""
    return hashlib.sha256(caller.encode()).hexdigest()


def kept(caller: str, wire: RestorableWire | Bridge, token: ResumeToken, items: Sequence[Item]) -> StoredSession | None:
    """The conversation as it is now, its images as the text that was read on them; None for what is none."""
    snapshot = wire.snapshot()
    if snapshot is None:
        return None
    opening = asdict(wire.opening) | {"session": None}
    state = msgspec.json.encode(_Snapshot(snapshot, opening, [_without_images(i) for i in items]))
    return StoredSession(wire.id, owner(caller), token.hash, state)


def _without_images(item: Item) -> Item:
    if not any(p.image or p.media for p in item.parts):
        return item
    return replace(item, parts=[_told(p) for p in item.parts])


def _told(part: ContentPart) -> ContentPart:
    """An image that was seen, not read, is known to have been there."""
    gone = part.kind == "input_image" and not part.text
    return replace(part, image="", media=None, text=IMAGE_GONE if gone else part.text)


def restored(state: ServerState, row: StoredSession) -> tuple[RestorableWire, list[Item]]:
    """The protocol of a kept conversation, and its items. Raises Refused while models load, RemoteProtocolError where nobody answers any more."""
    snapshot = msgspec.json.decode(row.snapshot, type=_Snapshot)
    opening = Opening(**snapshot.opening)
    wire: RestorableWire
    if snapshot.wire["dialect"] == "duplex":
        wire = duplex_for(state, opening)
        wire.open()
    else:
        wire = connection_for(state, opening)
        wire.open()
    wire.restore(snapshot.wire)
    return wire, snapshot.items
