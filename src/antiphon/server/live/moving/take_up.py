"""Resumes a session that is not live at this host: restores it here, or relays its client to the host that owns it.

The store knows the owner of each session. A live host keeps its sessions, even if a connection to it is refused.
Another host claims a session only after the owner's lease has expired, or after the owner has released the session.

A session may crash its hosts, and a host that crashed does not say which session crashed it. A session with work to do
at once, such as an owed response, is suspected after the first crash. Any other session is suspected only after several
crashes, since the cause may also be a message that its client sends again. Suspects are restored after a random delay,
which grows each time, so that they are not restored together. An innocent session can then complete a turn before the
guilty one is restored; the turn clears it of suspicion. After MAX_RESTORES, or MAX_IDLE_RESTORES, a suspect is not
restored at all.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import anyio
import msgspec
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidHandshake

from antiphon.admission.certificate import Kind
from antiphon.cluster.relay import RELAYED_HEADER, open_relay, relay
from antiphon.errors import Refused, RemoteProtocolError, RowError, StoreError
from antiphon.events.conversation import Item
from antiphon.protocols.resume import (
    HowResumed,
    ResumeRequest,
    model_not_loaded,
    resumed_frame,
    session_elsewhere,
)
from antiphon.protocols.wire import random_id
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.client_words import with_client_words
from antiphon.server.live.moving.persistence import caller_hash, restored
from antiphon.server.live.moving.resume_point import OpenResponse, ResumePoint, recovered, with_missed
from antiphon.server.live.moving.stored_copy import Restored
from antiphon.server.live.moving.stored_video import restored_video
from antiphon.server.live.moving.tail import messages_of, parts_of
from antiphon.server.live.open_wire import prepare_voices
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.live.video import LiveVideo
from antiphon.server.state import ServerState
from antiphon.shares.threads import in_thread
from antiphon.signals import become
from antiphon.store.sessions import ClaimRefusal, Host, SessionStore, StoredSession, TailChunk
from antiphon.transports.journal import ResumeToken
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
T = TypeVar("T")
# Time for which a client waits for an unreachable host that does not count as dead yet, in TTLs of a host.
PATIENCE = 2
# Polling interval while a session ends, and the timeout for its end, in seconds.
GONE_S, GONE_WITHIN_S = 0.01, 5.0
# Interval between attempts to reach a live host that cannot be reached, in seconds.
RETRY_S = 0.25
# Maximum number of hosts that may restore a session, one after the other, without completing a turn of it: for a
# session with work to do at once, and for one without.
MAX_RESTORES, MAX_IDLE_RESTORES = 3, 12
# Upper limit of a suspect's random delay, in seconds. The limit is 1 s at first and doubles with each restoration.
MAX_DELAY_S = 4.0


async def is_lost(state: ServerState, caller: Caller, session_id: str) -> bool:
    """Return whether another host has claimed a session that is live here, because it took this host for dead.

    If so, the session has ended here when this returns. Only the owner in the store decides, whatever token the client
    shows. If the store cannot be read, the session stays. Raises RemoteProtocolError (`session_elsewhere`) if the
    session takes longer than GONE_WITHIN_S to end.
    """
    session, store = state.sessions.resumable.get(session_id), state.sessions.store
    if session is None or store is None or session.caller != caller:
        return False
    try:
        row = await in_thread(store.get, session_id)
    except StoreError as error:
        log.warning("session %s: its owner cannot be read: %s", session_id, error)
        return False
    if row is None or row.owner in ("", state.sessions.host_name):
        return False
    log.warning("session %s now belongs to host %s", session_id, row.owner)
    session.attachment.abandon()
    with anyio.move_on_after(GONE_WITHIN_S):
        await become(lambda: state.sessions.resumable.get(session_id) is not session, GONE_S)
        return True
    raise session_elsewhere()


async def is_unknown(state: ServerState, caller: Caller, session_id: str) -> bool:
    """Return True if no host has a session of this id that `caller` may resume; False if the store cannot be read."""
    session, store = state.sessions.resumable.get(session_id), state.sessions.store
    if session is not None or state.sessions.overflowed.get(caller.key, session_id):
        return session is not None and session.caller != caller
    if store is None:
        return True
    try:
        row = await in_thread(store.get, session_id)
    except StoreError:
        return False
    return row is None or row.key_hash != caller_hash(caller)


async def take_up(
    state: ServerState,
    caller: Caller,
    request: ResumeRequest,
    websocket: WebSocket,
    first: str | bytes,
    *,
    is_read: bool = False,
) -> bool:
    """Serve a session that a client resumes and that is not live here, until its connection ends.

    `first` is the client's frame that asks for it. With `is_read`, the session reads it as well. Returns False if no
    host has a session of this id that `caller` may resume. Waits while the session's owner cannot be reached but does
    not count as dead. Raises Refused, and RemoteProtocolError for a wrong token, for a session that no host can
    restore, and if waiting takes too long.
    """
    store = state.sessions.store
    if store is None:
        return False
    is_first = True
    try:
        until_s = anyio.current_time() + PATIENCE * state.settings.resume.host_ttl_s
        has_waited = False
        while anyio.current_time() < until_s:
            row = await _asked(partial(store.get, request.session_id))
            if row is None or row.key_hash != caller_hash(caller) or request.session_id in state.sessions.resumable:
                return False
            if not ResumeToken.stored(row.token).matches(request.token):
                raise RemoteProtocolError(
                    "invalid_resume_token", "The token does not resume this session.", "resume_token"
                )
            if is_first and state.sessions.restoring.setdefault(request.session_id, request) is not request:
                # Another connection of this client already waits for the session here.
                raise session_elsewhere()
            is_first = False
            ask_owner = partial(_asked, partial(store.host, row.owner))
            is_elsewhere = row.owner not in ("", state.sessions.host_name)
            if is_elsewhere and (owner := await state.sessions.alive_hosts.host(row.owner, ask_owner)):
                if websocket.headers.get(RELAYED_HEADER):
                    break
                if connection := await _reach(state, owner, row, websocket):
                    _is_restored(state, request)
                    await relay(websocket, connection, first)
                    return True
            elif not has_waited and (delay := delay_s(row)):
                has_waited = True
                until_s += delay
                await anyio.sleep(delay)
                # Another host may have claimed the session meanwhile.
                continue
            else:
                transport = WebSocketTransport(websocket, first if is_read else None)
                served = await _claim(state, store, caller, request, transport, row)
                if served is not None:
                    return served
            await state.sessions.alive_hosts.until_gone(row.owner, ask_owner, RETRY_S)
        raise session_elsewhere()
    finally:
        _is_restored(state, request)


def _check_models(state: ServerState, row: StoredSession) -> None:
    """Raise RemoteProtocolError (`model_not_loaded`) if this host has not loaded the model that a session needs."""
    models, due = state.loaded(), _due(row)
    if due.transcription and due.transcription.model != models.required_transcriber.profile.id:
        raise model_not_loaded(due.transcription.model)
    native = models.for_conversations.native if models.for_conversations else None
    if due.native_model and due.native_model != (native.profile.id if native else ""):
        raise model_not_loaded(due.native_model)
    watcher = models.for_video
    if due.video and due.video.model != (watcher.profile.id if watcher else ""):
        raise model_not_loaded(due.video.model)


def _is_restored(state: ServerState, request: ResumeRequest) -> None:
    """Let other connections restore the session again, unless another connection already does so."""
    if state.sessions.restoring.get(request.session_id) is request:
        del state.sessions.restoring[request.session_id]


async def _reach(state: ServerState, owner: Host, row: StoredSession, websocket: WebSocket) -> ClientConnection | None:
    """Open a connection to the host that owns the session; None if that is not possible now."""
    if not owner.address:
        return None
    try:
        return await open_relay(websocket, owner.address, state.sessions.host_name)
    except (OSError, TimeoutError, InvalidHandshake) as error:
        log.warning("session %s: its host %s cannot be reached: %s", row.id, owner.name, error)
        return None


async def _claim(
    state: ServerState,
    store: SessionStore,
    caller: Caller,
    request: ResumeRequest,
    transport: WebSocketTransport,
    row: StoredSession,
) -> bool | None:
    """Claim and serve a session without an owner. Returns None if another host was faster, False if it is gone."""
    _check_models(state, row)
    due = _due(row)
    kind: Kind = "video" if due.video else "captions" if due.transcription else state.kind_of("conversation")
    with state.admission.admit(caller, kind, resumes=True):
        claimed, tail = await _asked(partial(_claim_with_tail, store, row, state.sessions.host_name))
        if claimed is ClaimRefusal.UNKNOWN:
            return False
        if isinstance(claimed, ClaimRefusal):
            log.info("session %s is not restored: %s", request.session_id, claimed.value)
            return None
        how: HowResumed = "claimed" if row.owner else "handed_over"
        serve = _serve_video if due.video else _serve_restored
        await serve(state, store, caller, request, transport, claimed, tail, how)
    return True


def _claim_with_tail(
    store: SessionStore, row: StoredSession, host_name: str
) -> tuple[StoredSession | ClaimRefusal, tuple[TailChunk, ...]]:
    """Claim a session, and read the audio of the turn under way when the last host ended. Blocks.

    Returns no audio if the audio cannot be read, or if it may be the cause of the crashes. The client then sends it
    again.
    """
    claimed = store.claim(row.id, host_name, row.fence)
    if isinstance(claimed, ClaimRefusal) or (claimed.restores > 1 and not _due(row).transcription):
        return claimed, ()
    try:
        return claimed, store.tail(row.id)
    except StoreError as error:
        log.warning("session %s: its stored audio cannot be read: %s", row.id, error)
        return claimed, ()


async def _asked(ask: Callable[[], T]) -> T:
    """Query the store in a thread. Raises RemoteProtocolError for a damaged row, and Refused if the store fails."""
    try:
        return await in_thread(ask)
    except RowError as error:
        log.error("%s", error)
        raise _damaged() from None
    except StoreError as error:
        log.error("a session could not be read: %s", error)
        raise Refused("the stored conversations cannot be read now", 5.0) from None


def _damaged() -> RemoteProtocolError:
    text = "The stored session is damaged, or of another version of the server."
    return RemoteProtocolError("unknown_session", text, "session_id")


@contextmanager
def _released_on_failure(store: SessionStore, row: StoredSession, token: ResumeToken, asked: str) -> Iterator[None]:
    """Release a claimed row if the block fails. A damaged row becomes RemoteProtocolError.

    Raises RemoteProtocolError (`session_elsewhere`) if the client, which asked with the token `asked`, has resumed
    elsewhere since its row was read: the claimed row has a newer token then.
    """
    try:
        if not token.matches(asked):
            raise session_elsewhere()
        yield
    except StoreError as error:
        store.release(row.hold)
        log.error("%s", error)
        raise _damaged() from None
    except BaseException:
        store.release(row.hold)
        raise


async def _serve_restored(
    state: ServerState,
    store: SessionStore,
    caller: Caller,
    request: ResumeRequest,
    transport: WebSocketTransport,
    row: StoredSession,
    tail: Sequence[TailChunk],
    how: HowResumed,
) -> None:
    """Serve the session of a `row` that this host has just claimed; release it again if that fails."""
    token = ResumeToken.stored(row.token)
    with _released_on_failure(store, row, token, request.token):
        await prepare_voices(state, caller, row.snapshot)
        wire, items, continued = restored(state, caller, row)
        if continued:
            continued = with_missed(with_client_words(continued, request.words), request.last_received)
        left = _left(state, row, items, continued, tail)
        session = LiveRealtime(state, caller, wire, transport, token=token, restored=left)
        counts, lost, received = {}, {}, 0
        if continued:
            received = left.tail[-1][0] if left.tail else continued.received
            counts = {"received_events": received, "stored_events": row.received.events}
            lost = {"lost": continued.unstored} if continued.unstored else {}
        first_frame = wire.resumed(
            token.renew(),
            restored=True,
            num_items=len(left.items),
            **counts,
            **lost,
            received_audio_ms=row.received.audio_ms,
            how=how,
        )
        journal = continued.journal if continued else ()
        session.attachment.continue_from(received, request.last_received, first_frame, journal)
        # The new token is stored before the client gets it.
        await session.copy.store()
    _is_restored(state, request)
    await session.run()


async def _serve_video(
    state: ServerState,
    store: SessionStore,
    caller: Caller,
    request: ResumeRequest,
    transport: WebSocketTransport,
    row: StoredSession,
    tail: Sequence[TailChunk],
    how: HowResumed,
) -> None:
    """Serve the video stream of a `row` that this host has just claimed; release it again if that fails."""
    token = ResumeToken.stored(row.token)
    with _released_on_failure(store, row, token, request.token):
        left = restored_video(row, tail, request.last_received, state.settings.resume.store_frames)
        model = state.loaded().video_with(state.tool_servers)
        assert model
        video = LiveVideo(transport, state, caller, model, token, ga=left.point.ga, restored=left)
        received = left.point.received
        counts = {"received_events": received, "stored_events": received}
        lost = {"lost": left.lost} if left.lost else {}
        new = token.renew()
        frame = resumed_frame(random_id, row.id, {}, resume_token=new, restored=True, **counts, **lost, how=how)
        video.attachment.continue_from(received, request.last_received, frame)
        # The new token is stored before the client gets it.
        await video.copy.store()
    _is_restored(state, request)
    await video.run()


def _left(
    state: ServerState,
    row: StoredSession,
    items: Sequence[Item],
    continued: ResumePoint | None,
    tail: Sequence[TailChunk],
) -> Restored:
    """Return the state from which the session continues: without unfinished items, and with at most as much of its tail
    as the inbox of a live session accepts at once.
    """
    audio = state.settings.audio
    kept, owed, missed_events = recovered(items, continued or ResumePoint())
    continued = msgspec.structs.replace(continued, owed=owed) if continued else None
    max_s = audio.max_backlog_s / 2 if audio.overflow == "close" else math.inf
    if continued and continued.transcription:
        return Restored(row, kept, continued, missed_events, parts=parts_of(tail))
    messages = messages_of(tail, continued.received, continued.applied, max_s) if continued else ()
    return Restored(row, kept, continued, missed_events, messages)


class _Transcription(msgspec.Struct):
    model: str


class _Video(msgspec.Struct):
    model: str


class _Due(msgspec.Struct):
    # The state of a video stream. Only conversations and transcriptions have the other fields.
    video: _Video | None = None
    # The state of a transcription session.
    transcription: _Transcription | None = None
    # Requests for responses that have yet to be generated.
    owed: list[msgspec.Raw] = []
    # Items whose audio had no transcript yet.
    unread_items: list[str] = []
    # The response of the conversation that was under way.
    open_response: OpenResponse | None = None
    # The native model of the conversation, if it has one.
    native_model: str = ""


class _Snapshot(msgspec.Struct):
    continued: _Due | None = None
    video: _Video | None = None


# Made once: msgspec's description of a type must not be built by two threads at the same time.
_SNAPSHOTS = msgspec.json.Decoder(_Snapshot)


def delay_s(row: StoredSession) -> float:
    """Return the delay before a session may be claimed, in seconds; 0 for a session that is not suspected.

    Raises RemoteProtocolError (`restored_too_often`) if it may not be restored again.
    """
    if row.restores == 0:
        return 0.0
    due = _due(row)
    has_work = bool(due.owed or due.unread_items or due.open_response)
    limit = MAX_RESTORES if has_work else MAX_IDLE_RESTORES
    if row.restores >= limit:
        text = f"{limit} servers in turn have restored this session and did not live to its next turn."
        raise RemoteProtocolError("restored_too_often", text, "session_id")
    times = row.restores if has_work else row.restores - MAX_RESTORES
    return random.uniform(0.0, min(2.0 ** (times - 1), MAX_DELAY_S)) if times > 0 else 0.0


def _due(row: StoredSession) -> _Due:
    try:
        snapshot = _SNAPSHOTS.decode(row.snapshot)
        return _Due(snapshot.video) if snapshot.video else snapshot.continued or _Due()
    except msgspec.MsgspecError:
        # A damaged row is refused when it is restored.
        return _Due()
