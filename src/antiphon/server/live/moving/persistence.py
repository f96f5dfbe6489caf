"""What of a conversation is stored for a host that goes on with it, and how it is restored there.

How rows are written, and who owns them, is the store's (`store/sessions/`); what a wire keeps of itself is the
protocol's (`snapshot`).
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
from antiphon.store.sessions import ReceivedCounts, StoredSession
from antiphon.transports.journal import ResumeToken

# How long a write to the store may hold a session's frames back, and how long once its client is told of the failure.
STORE_S, STORE_DEGRADED_S = 3.0, 0.1
# A host that has held a session for so many seconds is not ended by it.
HARMLESS_S = 60.0


class _Snapshot(msgspec.Struct):
    """The JSON that is stored: the wire's own snapshot, the fields of its Opening, the history, and where they stand.
    Earlier versions of the server stored no `continued`: nobody knows which of the client's messages are in those.
    """

    wire: WireSnapshot
    opening: Opening
    items: list[Item]
    continued: ResumePoint | None = None


def caller_hash(caller: Caller) -> str:
    """Return the SHA-256 of a caller in hex: what is stored of it, to know who may resume a session.

    It is that of the API key, and for a client secret that of the key and of the session that the secret opens.
    """
    granted = b"" if caller.granted is None else b"\0" + bytes(caller.granted)
    return hashlib.sha256(caller.key.encode() + granted).hexdigest()


def stored_session(
    caller: Caller, wire: WireConnection, token: ResumeToken, items: Sequence[Item], continued: ResumePoint
) -> StoredSession | None:
    """Return a conversation as it is stored now; None for a wire that holds no conversation, or no snapshot of it.

    Images are stored as the text that was read on them, audio as its transcript (`without_media`).
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
    """Return the item without its images and audio, of which the text remains. The item itself is not changed.

    An image on which no text was read becomes the words `IMAGE_GONE`, so the model still knows that there was one.
    """
    if not any(p.image or p.media for p in item.parts):
        return item
    return replace(item, parts=[_as_text(p) for p in item.parts])


def _without_media(request: CreateResponse) -> CreateResponse:
    """The request without the images and audio of the items that it brings."""
    if request.items is None:
        return request
    return replace(request, items=tuple(without_media(i) if isinstance(i, Item) else i for i in request.items))


def _as_text(part: ContentPart) -> ContentPart:
    unread = part.kind == "input_image" and not part.text
    return replace(part, image="", media=None, text=IMAGE_GONE if unread else part.text)


def restored(
    state: ServerState, caller: Caller, row: StoredSession
) -> tuple[WireConnection, list[Item], ResumePoint | None]:
    """Make an open wire from a stored conversation of a caller, and return it with the history and where both stand.
    The voice that is enrolled in it has to be looked up before (`prepare_voices`).

    Raises Refused while models load, RemoteProtocolError if the loaded models cannot hold this conversation any more,
    StoreError for a row that is damaged, or was written by a version of the server that stored something else.
    """
    context = context_of(state, caller)
    try:
        snapshot = msgspec.json.decode(row.snapshot, type=_Snapshot)
        wire = dialect_named(snapshot.wire.dialect).connect(snapshot.opening, context)
        wire.open()
        wire.restore(snapshot.wire)
        if snapshot.continued:
            check_counts(snapshot.continued)
    except RemoteProtocolError:
        raise
    except Exception as error:
        # A damaged row may break any invariant of what it is read into.
        raise StoreError(f"the stored session {row.id} cannot be read: {type(error).__name__}: {error}") from error
    return wire, snapshot.items, snapshot.continued


class Kept(Enum):
    """What became of a conversation's last write to the store.

    - STORED: it is there, or there is nothing to be stored.
    - DEGRADED: it could not be written, or was not in time.
    - SUPERSEDED: another host owns the session by now. It is for good.
    """

    STORED = "stored"
    DEGRADED = "degraded"
    SUPERSEDED = "superseded"


class Persistence:
    """Stores one live conversation after each change, as the host that owns it.

    `row`: what the conversation was restored from, as this host has claimed it; None for a new one. Nothing is stored
    where the server has no store, or the session has no token.
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
        # How many of the client's messages are in the last snapshot that was written.
        self._stored_events = row.received.events if row else 0
        # Takes the client's audio for the tail, where that is asked for.
        self.speech = SpeechTail() if state.settings.resume.store_speech else None
        # What the client was told of the store, or will be told next.
        self.kept = Kept.STORED

    def put(
        self,
        token: ResumeToken | None,
        items: Sequence[Item],
        continued: ResumePoint,
        audio_ms: int,
        *,
        turn_kept: bool = False,
    ) -> Future[None] | None:
        """Write the conversation as it is now. Does not wait; None where it is not stored.

        `audio_ms`: what this host has taken of the client's audio. `turn_kept`: a turn has ended, and `items` have it,
        so that the session has ended no host.
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
        written = store.put(row, turn_kept=turn_kept)
        written.add_done_callback(partial(self._note_written, counts.events))
        return written

    def append_speech(self) -> None:
        """Write what no chunk of the tail has yet. Does not wait."""
        store, speech = self._state.sessions.store, self.speech
        if store and speech and self._hold and self.is_stored and (chunk := speech.chunk(self._before.audio_ms)):
            store.append_tail(self._hold, chunk)

    def _note_written(self, num_events: int, written: Future[None]) -> None:
        if not written.cancelled() and written.exception() is None:
            self._stored_events = max(self._stored_events, num_events)

    @property
    def stored_events(self) -> int | None:
        """How many of the client's messages need not be sent again, whatever becomes of this host; None for a session
        that is not stored.
        """
        return self._stored_events if self._hold else None

    async def wait(self, written: Future[None] | None) -> bool:
        """Wait until `put` has written, for STORE_S at most, and say whether `kept` has changed."""
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
        """Whether the server has a store."""
        return self._state.sessions.store is not None

    @property
    def is_stored(self) -> bool:
        """Whether the store has the session as this host's, or has to have it once it works again."""
        return self._hold is not None and self._is_stored and self.kept is not Kept.SUPERSEDED

    @property
    def can_move(self) -> bool:
        """Whether another host can go on with the session: all of it was stored."""
        return self.is_stored and self.kept is Kept.STORED

    async def release(self) -> bool:
        """Give the session away, and wait until any host may have it; False where that could not be written in time."""
        store = self._state.sessions.store
        if store is None or self._hold is None or not self.can_move:
            return False
        # The snapshot before has emptied the tail, and the turn that is open goes along.
        self.append_speech()
        released = store.release(self._hold)
        self._is_stored = False
        with anyio.move_on_after(STORE_S), suppress(StoreError):
            await asyncio.wrap_future(released)
            return True
        return False

    def end(self) -> None:
        """The session is over here: delete it, or give it away if the server stops. Does not wait."""
        store = self._state.sessions.store
        if store and self._hold and self.is_stored:
            if self._state.admission.draining:
                store.release(self._hold)
            else:
                store.forget(self._hold)
