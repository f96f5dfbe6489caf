"""Stores a conversation so that another host can continue it, and restores it there.

The store (`store/sessions/`) writes the rows and knows their owners. The protocol decides what its wire stores
(`WireConnection.snapshot`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from antiphon.errors import RemoteProtocolError, StoreError
from antiphon.events.conversation import ContentPart, CreateResponse, Item
from antiphon.protocols.connection import WireConnection, WireSnapshot
from antiphon.protocols.dialects import dialect_named
from antiphon.protocols.opening import NULL, Opening
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.resume_point import AskedResponse, ResumePoint, check_counts
from antiphon.server.live.moving.stored_row import Kept, StoredRow
from antiphon.server.live.moving.tail import SpeechTail
from antiphon.server.live.open_wire import context_of
from antiphon.server.state import ServerState
from antiphon.sessions.conversation.history import IMAGE_GONE
from antiphon.store.sessions import StoredSession
from antiphon.transports.journal import ResumeToken


class _Snapshot(msgspec.Struct):
    """The stored JSON: the wire's snapshot, the fields of its Opening, the history, and the resume point.

    Rows of earlier versions have no `continued`, so it is unknown which of the client's messages they cover.
    """

    wire: WireSnapshot
    opening: Opening
    items: list[Item]
    continued: ResumePoint | None = None


# Made once: msgspec's description of a type must not be built by two threads at the same time.
_SNAPSHOTS = msgspec.json.Decoder(_Snapshot)


def caller_hash(caller: Caller) -> str:
    """Return the SHA-256 of a caller in hex. Only a caller with the hash that is stored with a session may resume it.

    It covers the API key and, for a client secret, also the session that the secret opens.
    """
    granted = b"" if caller.granted is None else b"\0" + bytes(caller.granted)
    return hashlib.sha256(caller.key.encode() + granted).hexdigest()


def stored_session(
    caller: Caller, wire: WireConnection, token: ResumeToken, items: Sequence[Item], continued: ResumePoint
) -> StoredSession | None:
    """Return the row of a conversation as it is now; None for a wire without a conversation, or without a snapshot.

    Images are stored as the text read from them, audio as its transcript (`without_media`).
    """
    snapshot = wire.snapshot()
    if snapshot is None:
        return None
    opening = msgspec.structs.replace(wire.opening, session=NULL)
    continued = msgspec.structs.replace(
        continued,
        owed=[_without_media(request) for request in continued.owed],
        finished=_text_only(continued.finished) if continued.finished else None,
        beside=[_text_only(response) for response in continued.beside],
        finished_beside=[_text_only(response) for response in continued.finished_beside],
    )
    encoded = msgspec.json.encode(_Snapshot(snapshot, opening, [without_media(i) for i in items], continued))
    return StoredSession(wire.id, caller_hash(caller), token.hash, encoded)


def without_media(item: Item) -> Item:
    """Return a copy of the item with its images and audio reduced to their text.

    An image from which no text was read becomes the words `IMAGE_GONE`, so the model still knows that it was there.
    """
    if not any(p.image or p.media for p in item.parts):
        return item
    return replace(item, parts=[_as_text(p) for p in item.parts])


def _without_media(request: CreateResponse) -> CreateResponse:
    """Return the request without the images and audio of its items."""
    if request.items is None:
        return request
    return replace(request, items=tuple(without_media(i) if isinstance(i, Item) else i for i in request.items))


def _text_only(response: AskedResponse) -> AskedResponse:
    return msgspec.structs.replace(response, request=_without_media(response.request))


def _as_text(part: ContentPart) -> ContentPart:
    unread = part.kind == "input_image" and not part.text
    return replace(part, image="", media=None, text=IMAGE_GONE if unread else part.text)


def restored(
    state: ServerState, caller: Caller, row: StoredSession
) -> tuple[WireConnection, list[Item], ResumePoint | None]:
    """Make an open wire from a caller's stored conversation; return it with the history and the resume point.

    Call `prepare_voices` first, to look up the voice that is enrolled in the conversation. Raises Refused while models
    load, RemoteProtocolError if the loaded models can no longer hold this conversation, and StoreError for a row that
    is damaged or was written in another format.
    """
    context = context_of(state, caller)
    try:
        snapshot = _SNAPSHOTS.decode(row.snapshot)
        wire = dialect_named(snapshot.wire.dialect).connect(snapshot.opening, context)
        wire.open()
        wire.restore(snapshot.wire)
        if snapshot.continued:
            check_counts(snapshot.continued)
    except RemoteProtocolError:
        raise
    except Exception as error:
        # A damaged row may violate any invariant of the objects that are made from it.
        raise StoreError(f"the stored session {row.id} cannot be read: {type(error).__name__}: {error}") from error
    return wire, snapshot.items, snapshot.continued


class Persistence(StoredRow):
    """The row of one live session of a wire, which is written after each change.

    Nothing is stored if the session has no token. For `row` see StoredRow.
    """

    def __init__(self, state: ServerState, caller: Caller, wire: WireConnection, row: StoredSession | None) -> None:
        super().__init__(state, row)
        self._caller = caller
        self._wire = wire
        # Collects the client's audio for the tail of a conversation, with `--store-speech`.
        self.speech = SpeechTail() if state.settings.resume.store_speech else None

    def put(
        self,
        token: ResumeToken | None,
        items: Sequence[Item],
        continued: ResumePoint,
        audio_ms: int,
        *,
        turn_kept: bool = False,
        clears_tail: bool | None = None,
    ) -> Future[None] | None:
        """Write the session as it is now. Does not wait. Returns None if the session is not stored.

        `audio_ms` is the duration of the client's audio that this host has received. `turn_kept` is true if a turn has
        ended and is in `items`. The tail is deleted if `clears_tail` is true; by default, with `turn_kept`.
        """
        if not self.is_on or token is None or self.kept is Kept.SUPERSEDED:
            return None
        row = stored_session(self._caller, self._wire, token, items, continued)
        clears_tail = turn_kept if clears_tail is None else clears_tail
        if row is None:
            return None
        return self.put_row(row, continued.received, audio_ms, turn_kept=turn_kept, clears_tail=clears_tail)

    def append_speech(self) -> None:
        """Write the audio that is in no chunk of the tail yet. Does not wait."""
        if self.speech and self.is_stored and (chunk := self.speech.chunk(self._before.audio_ms)):
            self.append(chunk)

    async def release(self) -> bool:
        """Release the session, as `StoredRow.release` does."""
        if self.can_move:
            # The last snapshot emptied the tail, so the audio of the open turn has to be stored again.
            self.append_speech()
        return await super().release()

    @property
    def keeps_captions(self) -> bool:
        """True if transcription sessions are stored, too (`--store-captions`)."""
        return self.is_on and self._state.settings.resume.store_captions
