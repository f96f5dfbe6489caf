"""Stores a conversation so that another host can continue it, and restores it there.

The store (`store/sessions/`) writes the rows and knows their owners. The protocol decides what its wire stores
(`WireConnection.snapshot`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial

import anyio
import msgspec

from antiphon.errors import RemoteProtocolError, StoreError, SupersededError
from antiphon.events.conversation import ContentPart, CreateResponse, Item
from antiphon.protocols.connection import WireConnection, WireSnapshot
from antiphon.protocols.dialects import dialect_named
from antiphon.protocols.opening import NULL, Opening
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.resume_point import ResumePoint, check_counts
from antiphon.server.live.moving.tail import SpeechTail
from antiphon.server.live.open_wire import context_of
from antiphon.server.state import ServerState
from antiphon.sessions.conversation.history import IMAGE_GONE
from antiphon.store.sessions import ReceivedCounts, StoredSession, TailChunk
from antiphon.transports.journal import ResumeToken

# Maximum time, in seconds, for which a session's frames wait for a write to the store: normally, and after a failed
# write was reported to the client.
STORE_S, STORE_DEGRADED_S = 3.0, 0.1
# After a host has served a session for this time, in seconds, the session is not suspected of crashing hosts.
HARMLESS_S = 60.0


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
    continued = msgspec.structs.replace(continued, owed=[_without_media(request) for request in continued.owed])
    if finished := continued.finished:
        continued.finished = msgspec.structs.replace(finished, request=_without_media(finished.request))
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


class Kept(Enum):
    """The outcome of a conversation's last write to the store.

    - STORED: the conversation is stored, or there was nothing to store.
    - DEGRADED: the write failed, or took too long.
    - SUPERSEDED: another host owns the session. This is final.
    """

    STORED = "stored"
    DEGRADED = "degraded"
    SUPERSEDED = "superseded"


class Persistence:
    """Stores one live conversation after each change, as the host that owns it.

    `row` is the row that the conversation was restored from, as this host has claimed it; None for a new conversation.
    Stores nothing if the server has no store, or the session has no token.
    """

    def __init__(self, state: ServerState, caller: Caller, wire: WireConnection, row: StoredSession | None) -> None:
        self._state = state
        self._caller = caller
        self._wire = wire
        self._hold = row.hold if row else None
        self._before = row.received if row else ReceivedCounts()
        self._restores = row.restores if row else 0
        self._since_s = time.monotonic()
        self._is_stored = row is not None
        # Number of the client's messages that the last written snapshot covers.
        self._stored_events = row.received.events if row else 0
        # Collects the client's audio for the tail of a conversation, with `--store-speech`.
        self.speech = SpeechTail() if state.settings.resume.store_speech else None
        # The store's state as it was last reported to the client, or as it will be reported next.
        self.kept = Kept.STORED

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
        """Write the conversation as it is now. Does not wait. Returns None if the conversation is not stored.

        `audio_ms` is the duration of the client's audio that this host has received. `turn_kept` is true if a turn has
        ended and is in `items`; the session is then not suspected of crashing hosts. The tail is deleted if
        `clears_tail` is true; by default, with `turn_kept`.
        """
        store = self._state.sessions.store
        if store is None or token is None or self.kept is Kept.SUPERSEDED:
            return None
        row = stored_session(self._caller, self._wire, token, items, continued)
        if row is None:
            return None
        if turn_kept or time.monotonic() - self._since_s >= HARMLESS_S:
            self._restores = 0
        counts = ReceivedCounts(continued.received, self._before.audio_ms + audio_ms)
        owner, fence = (self._hold.owner, self._hold.fence) if self._hold else (self._state.sessions.host_name, 1)
        row = replace(row, owner=owner, fence=fence, received=counts, restores=self._restores)
        self._hold, self._is_stored = row.hold, True
        written = store.put(row, turn_kept=turn_kept if clears_tail is None else clears_tail)
        written.add_done_callback(partial(self._note_written, counts.events))
        return written

    def append(self, chunk: TailChunk) -> None:
        """Add a chunk to the tail of a transcription session. Does not wait."""
        store = self._state.sessions.store
        if store and self._hold and self.is_stored:
            store.append_tail(self._hold, chunk)

    def append_speech(self) -> None:
        """Write the audio that is in no chunk of the tail yet. Does not wait."""
        store, speech = self._state.sessions.store, self.speech
        if store and speech and self._hold and self.is_stored and (chunk := speech.chunk(self._before.audio_ms)):
            store.append_tail(self._hold, chunk)

    def _note_written(self, num_events: int, written: Future[None]) -> None:
        if not written.cancelled() and written.exception() is None:
            self._stored_events = max(self._stored_events, num_events)

    @property
    def stored_events(self) -> int | None:
        """Number of messages that the client need not send again, even if this host dies; None if the session is not
        stored.
        """
        return self._stored_events if self._hold else None

    async def wait(self, written: Future[None] | None) -> bool:
        """Wait for a write of `put`, for at most STORE_S, and return whether `kept` has changed.

        Waits for at most STORE_DEGRADED_S while the store is degraded.
        """
        if written is None:
            return False
        before = self.kept
        now = Kept.DEGRADED
        try:
            with anyio.move_on_after(STORE_DEGRADED_S if before is Kept.DEGRADED else STORE_S):
                await asyncio.wrap_future(written)
                now = Kept.STORED
        except SupersededError:
            now = Kept.SUPERSEDED
        except StoreError:
            pass
        if self.kept is not Kept.SUPERSEDED:
            self.kept = now
        return self.kept is not before

    @property
    def is_on(self) -> bool:
        """True if the server has a store."""
        return self._state.sessions.store is not None

    @property
    def keeps_captions(self) -> bool:
        """True if transcription sessions are stored, too (`--store-captions`)."""
        return self.is_on and self._state.settings.resume.store_captions

    @property
    def is_stored(self) -> bool:
        """True if this host owns the session in the store, or will own it after the store recovers."""
        return self._hold is not None and self._is_stored and self.kept is not Kept.SUPERSEDED

    @property
    def can_move(self) -> bool:
        """True if another host can continue the session, because the last write was successful."""
        return self.is_stored and self.kept is Kept.STORED

    async def release(self) -> bool:
        """Release the session, and wait until any host may claim it. Returns False if that was not written in time."""
        store = self._state.sessions.store
        if store is None or self._hold is None or not self.can_move:
            return False
        # The last snapshot emptied the tail, so the audio of the open turn has to be stored again.
        self.append_speech()
        released = store.release(self._hold)
        self._is_stored = False
        with anyio.move_on_after(STORE_S), suppress(StoreError):
            await asyncio.wrap_future(released)
            return True
        return False

    def end(self) -> None:
        """Delete the stored session, because it is over; while the server drains, release it instead. Does not wait."""
        store = self._state.sessions.store
        if store and self._hold and self.is_stored:
            if self._state.admission.draining:
                store.release(self._hold)
            else:
                store.forget(self._hold)
