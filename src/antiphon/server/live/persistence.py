"""What of a conversation is stored for a later process of the server, and how it is restored there.

How rows are written is the store's (`store/sessions.py`); what a wire keeps of itself is the protocol's (`snapshot`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from antiphon.errors import RemoteProtocolError, StoreError
from antiphon.events.conversation import ContentPart, Item
from antiphon.protocols.connection import WireConnection, WireSnapshot
from antiphon.protocols.dialects import dialect_named
from antiphon.protocols.opening import NULL, Opening
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.server.live.open_wire import context_of
from antiphon.server.state import Caller, ServerState
from antiphon.sessions.conversation.history import IMAGE_GONE
from antiphon.store.sessions import StoredSession


class _Snapshot(msgspec.Struct):
    """The JSON that is stored: the wire's own snapshot, the fields of its Opening, and the history."""

    wire: WireSnapshot
    opening: Opening
    items: list[Item]


def caller_hash(caller: Caller) -> str:
    """Return the SHA-256 of a caller in hex: what is stored of it, to know who may resume a session.

    It is that of the API key, and for a client secret that of the key and of the session that the secret opens.
    """
    granted = b"" if caller.granted is None else b"\0" + bytes(caller.granted)
    return hashlib.sha256(caller.key.encode() + granted).hexdigest()


def stored_session(
    caller: Caller, wire: WireConnection, token: ResumeToken, items: Sequence[Item]
) -> StoredSession | None:
    """Return a conversation as it is stored now; None for a wire that holds no conversation, or no snapshot of it.

    Images are stored as the text that was read on them, audio as its transcript (`without_media`).
    """
    snapshot = wire.snapshot()
    if snapshot is None:
        return None
    opening = msgspec.structs.replace(wire.opening, session=NULL)
    encoded = msgspec.json.encode(_Snapshot(snapshot, opening, [without_media(i) for i in items]))
    return StoredSession(wire.id, caller_hash(caller), token.hash, encoded)


def without_media(item: Item) -> Item:
    """Return the item without its images and audio, of which the text remains. The item itself is not changed.

    An image on which no text was read becomes the words `IMAGE_GONE`, so the model still knows that there was one.
    """
    if not any(p.image or p.media for p in item.parts):
        return item
    return replace(item, parts=[_as_text(p) for p in item.parts])


def _as_text(part: ContentPart) -> ContentPart:
    unread = part.kind == "input_image" and not part.text
    return replace(part, image="", media=None, text=IMAGE_GONE if unread else part.text)


def restored(state: ServerState, row: StoredSession) -> tuple[WireConnection, list[Item]]:
    """Make an open wire from a stored conversation, and return it with the history.

    Raises Refused while models load, RemoteProtocolError if the loaded models cannot hold this conversation any more,
    StoreError for a row that is damaged, or was written by a version of the server that stored something else.
    """
    context = context_of(state)
    try:
        snapshot = msgspec.json.decode(row.snapshot, type=_Snapshot)
        wire = dialect_named(snapshot.wire.dialect).connect(snapshot.opening, context)
        wire.open()
        wire.restore(snapshot.wire)
    except RemoteProtocolError:
        raise
    except Exception as error:
        # A damaged row may break any invariant of what it is read into.
        raise StoreError(f"the stored session {row.id} cannot be read: {type(error).__name__}: {error}") from error
    return wire, snapshot.items
