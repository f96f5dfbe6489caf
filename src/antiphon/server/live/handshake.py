"""The first frames of a realtime connection: taking up a session that is there, or being turned away."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import anyio.to_thread
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.opening import Opening
from antiphon.protocols.resume.control import ResumeRequest, control, refused_frame, resume_from, resync_frame
from antiphon.protocols.resume.journal import JournalGap, ResumeToken
from antiphon.protocols.wire import random_id
from antiphon.server.auth import bearer
from antiphon.server.live.open_wire import duplex_for
from antiphon.server.live.persistence import owner, restored
from antiphon.server.live.realtime import CLOSE_POLICY, CLOSE_TRY_LATER, LiveRealtime
from antiphon.server.state import ServerState
from antiphon.store.sessions import StoredSession
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
# Values of a query parameter that switch something on.
TRUE_VALUES = ("1", "true", "yes")
# How long a full-duplex client may wait with its first frame, in seconds.
FIRST_FRAME_S = 10.0


def resume_asked(websocket: WebSocket) -> bool:
    """Whether the upgrade names a session to resume (`?resume=SESSION`); its first frame then carries the token."""
    resume = websocket.query_params.get("resume", "")
    return bool(resume) and resume not in TRUE_VALUES


def wants_token(websocket: WebSocket) -> bool:
    """Whether the client wants to be able to resume the session that begins (`?resume=1`)."""
    return bool(websocket.query_params.get("resume", ""))


async def by_resume(state: ServerState, caller: str, websocket: WebSocket) -> None:
    """A connection that takes up a session: its first frame says which."""
    await by_first_frame(state, caller, websocket, duplex=False)


async def by_first_frame(state: ServerState, caller: str, websocket: WebSocket, *, duplex: bool) -> None:
    """A connection that may take up a session that is there: its first frame says."""
    asked = websocket.query_params
    await accept(websocket)
    socket = WebSocketTransport(websocket)
    autostart = duplex and bool(asked.get("model")) and asked.get("autostart", "1") in TRUE_VALUES
    first: str | bytes | None = None
    if not autostart:
        with anyio.move_on_after(FIRST_FRAME_S) as waiting:
            first = await socket.receive()
        if waiting.cancelled_caught:
            error = RemoteProtocolError("config_timeout", f"No event came within {FIRST_FRAME_S:.0f} s.")
            await turn_away(websocket, error)
            return
        if first is None:
            return
        event = control(first)
        if event and event.get("type") == "session.resume":
            await _resume(state, caller, websocket, event)
            return
    if not duplex:
        await turn_away(websocket, RemoteProtocolError("bad_event", "The first event has to be a session.resume."))
        return
    try:
        with state.admit(caller):
            token = ResumeToken()
            secret = state.secret(bearer(websocket.headers))
            preset = secret.session if secret else None
            opening = Opening(model=asked.get("model", ""), duplex=True, session=preset)
            wire = duplex_for(state, opening, resume_token=token.renew(), autostart=autostart)
            wire.open()
            await LiveRealtime(state, caller, wire, WebSocketTransport(websocket, first), token=token).run()
    except RemoteProtocolError as error:
        await turn_away(websocket, error)
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        await turn_away(websocket, RemoteProtocolError("resource_exhausted", str(refusal)), CLOSE_TRY_LATER)


async def _resume(state: ServerState, caller: str, websocket: WebSocket, event: dict[str, object]) -> None:
    try:
        asked = resume_from(event)
        if asked.session_id in state.forgone:
            raise JournalGap("journal_overflow")
        if asked.session_id not in state.resumable and await _restore(
            state, caller, asked, WebSocketTransport(websocket)
        ):
            return
        connection = state.resumable.get(asked.session_id)
        if connection is None or connection.caller != caller:
            raise RemoteProtocolError("unknown_session", "There is no such session to resume.", "session_id")
        await connection.line.resume(asked.token, asked.last_received, WebSocketTransport(websocket))
    except Refused as refusal:
        await turn_away(websocket, RemoteProtocolError("resource_exhausted", str(refusal)), CLOSE_TRY_LATER)
    except JournalGap as gap:
        await _say(websocket, resync_frame(random_id, str(event.get("session_id")), gap.reason), gap.reason)
    except RemoteProtocolError as error:
        given = event.get("event_id")
        frame = refused_frame(random_id, error, given if isinstance(given, str) else None)
        await _say(websocket, frame, error.code)


async def _restore(state: ServerState, caller: str, asked: ResumeRequest, socket: WebSocketTransport) -> bool:
    """Take up a conversation of before a restart; False where there is none. Raises RemoteProtocolError, Refused."""
    if state.kept is None or asked.session_id in state.restoring:
        return False
    state.restoring.add(asked.session_id)
    try:
        row = await anyio.to_thread.run_sync(state.kept.get, asked.session_id)
        if row is None or row.key_hash != owner(caller) or asked.session_id in state.resumable:
            return False
        return await _take_up(state, caller, asked, socket, row)
    finally:
        state.restoring.discard(asked.session_id)


async def _take_up(
    state: ServerState, caller: str, asked: ResumeRequest, socket: WebSocketTransport, row: StoredSession
) -> bool:
    token = ResumeToken.stored(row.token)
    if not token.matches(asked.token):
        raise RemoteProtocolError("invalid_resume_token", "The token does not resume this session.", "resume_token")
    with state.admit(caller):
        wire, items = restored(state, row)
        connection = LiveRealtime(state, caller, wire, socket, token=token, items=items)
        journal = connection.line.outbox.journal
        journal.continue_from(asked.last_received)
        journal.push(wire.resumed(token.renew(), restored=True, num_items=len(items)))
        await connection.keep()
        state.restoring.discard(asked.session_id)
        await connection.run()
    return True


async def accept(websocket: WebSocket) -> None:
    """Accept it, as a browser wants that offers subprotocols."""
    protocols = websocket.scope.get("subprotocols", [])
    await websocket.accept(subprotocol="realtime" if "realtime" in protocols else None)


async def turn_away(websocket: WebSocket, error: RemoteProtocolError, code: int = CLOSE_POLICY) -> None:
    more: dict[str, Any] = {"type": "rate_limit_error", "retryable": True} if code == CLOSE_TRY_LATER else {}
    await _say(websocket, refused_frame(lambda prefix: f"{prefix}0", error, **more), error.code, code)


async def _say(websocket: WebSocket, frame: str, reason: str, code: int = CLOSE_POLICY) -> None:
    try:
        await websocket.send_text(frame)
        await websocket.close(code, reason)
    except (WebSocketDisconnect, RuntimeError):
        log.info("a client left before it was turned away")
