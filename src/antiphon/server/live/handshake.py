"""Handles the first frames of a realtime connection, which begin, resume or restore a session.

Routes check a request before the upgrade, and refuse it over HTTP. This module accepts the WebSocket first, so its
refusals are an error frame followed by a close.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio
from msgspec import UNSET
from starlette.datastructures import QueryParams
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.admission.certificate import Kind
from antiphon.cluster.relay import RELAYED_HEADER
from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.connection import Dialect, first_frame, refusal
from antiphon.protocols.fields import nearest, unknown_parameter
from antiphon.protocols.opening import TRUE_VALUES, Opening
from antiphon.protocols.resume import (
    RETRYABLE,
    HowResumed,
    SessionResume,
    refused_frame,
    resume_from,
    resync_frame,
)
from antiphon.protocols.wire import Frame, random_id
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import KEY_SUBPROTOCOLS
from antiphon.server.http.connections import limit_first_message
from antiphon.server.live.moving.take_up import is_lost, is_unknown, take_up
from antiphon.server.live.open_wire import context_of, open_wire, prepare_voices
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.live.session import CLOSE_POLICY, CLOSE_TRY_LATER, KINDS_OF
from antiphon.server.state import ServerState
from antiphon.transports.journal import JournalGap, ResumeToken
from antiphon.transports.websocket import PlayedWire, PlayingWebSocket, WebSocketTransport

log = logging.getLogger(__name__)
T = TypeVar("T")
_FALSE_VALUES = ("0", "false", "no")
# Query parameters of sessions, each with its allowed values; () allows any.
_PARAMETERS: Mapping[str, Sequence[str]] = {
    "autostart": (*TRUE_VALUES, *_FALSE_VALUES),
    "call_id": (),
    "dialect": ("openai", "vllm"),
    "duplex": (*TRUE_VALUES, *_FALSE_VALUES),
    "events": ("beta", "ga"),
    "intent": ("transcription", "conversation"),
    "keeps_words": (*TRUE_VALUES, *_FALSE_VALUES),
    "mode": (),
    "model": (),
    "record": (*TRUE_VALUES, *_FALSE_VALUES),
    "resume": (),
}
# Timeout, in seconds, for the first frame of a client that resumes or speaks full duplex.
FIRST_FRAME_S = 10.0
# How long, in seconds, an attempt to resume waits to see whether its client has already left.
GIVEN_UP_S = 0.5
# Maximum size of the first message of a WebSocket that can only resume a session.
MAX_RESUME_BYTES = 64 << 10


def check_query(query: QueryParams) -> None:
    """Check the query of a session's URL, before the upgrade. Ignores parameters of other servers.

    Raises RemoteProtocolError with one of two codes: `unknown_parameter` for a name similar to a supported name, or
    `invalid_value`.
    """
    for name in query:
        if name not in _PARAMETERS and (meant := nearest(name, frozenset(_PARAMETERS))):
            raise unknown_parameter(name, meant)
    for name, values in _PARAMETERS.items():
        if values and (value := query.get(name)) and value not in values:
            one_of = ", ".join(f"'{v}'" for v in values)
            raise RemoteProtocolError("invalid_value", f"Invalid value: '{value}'. Supported are: {one_of}.", name)


def names_session(websocket: WebSocket) -> bool:
    """Return whether the upgrade names a session to resume (`?resume=SESSION`).

    The first frame then has to be a `session.resume` with the token.
    """
    resume = websocket.query_params.get("resume", "")
    return bool(resume) and resume not in TRUE_VALUES


def kind_of(state: ServerState, dialect: Dialect, opening: Opening) -> Kind:
    """Return the kind of a session, as far as the upgrade request shows it. The first message may correct it."""
    if dialect.name != "realtime":
        return state.kind_of(KINDS_OF.get(dialect.name, "duplex"))
    transcribes = opening.intent == "transcription" or opening.is_transcription or opening.dialect == "vllm"
    return "captions" if transcribes else state.kind_of("conversation")


def wants_token(websocket: WebSocket) -> bool:
    """Return whether the client asks for a session that it can resume later (`?resume=1`)."""
    return bool(websocket.query_params.get("resume", ""))


def keeps_words(websocket: WebSocket) -> bool:
    """Return whether the client keeps `resume_words` for the next host (`?keeps_words=1`)."""
    return websocket.query_params.get("keeps_words") in TRUE_VALUES


async def serve_resumed(state: ServerState, caller: Caller, websocket: WebSocket) -> None:
    """Accept a WebSocket whose first frame has to be a `session.resume`, and serve the session until it detaches.

    Refuses any other first frame, or none within FIRST_FRAME_S. A frame larger than MAX_RESUME_BYTES closes the
    WebSocket with 1009.
    """
    await serve_by_first_frame(state, caller, websocket)


async def serve_by_first_frame(
    state: ServerState,
    caller: Caller,
    websocket: WebSocket,
    dialect: Dialect | None = None,
    opening: Opening | None = None,
) -> None:
    """Accept a WebSocket and serve the session that its first frame begins or resumes, until it is over.

    A `session.resume` resumes a session of `caller`. If `dialect` is given, its clients send first, and any other frame
    begins a session of that dialect with `opening`. With a `model` in the URL, the session begins without waiting for a
    frame (unless `autostart=0`). While waiting for the frame, the WebSocket holds a place that is counted apart from
    sessions.

    Raises Refused before the upgrade if the server has no room for a session and no session to resume, and if a native
    model has no KV for another conversation while all sessions have their clients. After the upgrade, errors are sent
    as frames.
    """
    query, resumes = websocket.query_params, names_session(websocket)
    if dialect is not None and opening is not None and not resumes:
        if not state.sessions.awaits_client:
            state.admission.refuse_without_kv(kind_of(state, dialect, opening))
        if not state.sessions.may_resume:
            state.admission.refuse_early(caller, kind_of(state, dialect, opening))
    await accept(websocket, dialect)
    transport = WebSocketTransport(websocket)
    if resumes and await is_unknown(state, caller, query["resume"]):
        await _refuse_unknown(state, caller, websocket, transport)
        return
    begins = dialect is not None and dialect.client_first
    autostart = begins and bool(query.get("model")) and query.get("autostart", "1") in TRUE_VALUES
    first: str | bytes | None = None
    resumable = True
    if not autostart:
        if not begins:
            limit_first_message(websocket.scope, MAX_RESUME_BYTES)
        try:
            first = await _first_frame(state, caller, transport)
        except RemoteProtocolError as error:
            await refuse(websocket, error, dialect=dialect)
            return
        except Refused as refused:
            await _refuse_for_room(state, websocket, refused, dialect)
            return
        if first is None:
            return
        asked = dialect.first_frame(first) if dialect else first_frame(first)
        if asked.resumes:
            await _resume(state, caller, websocket, asked.resumes, first, dialect, is_read=asked.is_read)
            return
        resumable = asked.resumable
    if not begins:
        await refuse(websocket, RemoteProtocolError("bad_event", "The first event has to be a session.resume."))
        return
    assert dialect
    assert opening
    await _serve_new(state, caller, websocket, dialect, opening, first, autostart=autostart, resumable=resumable)


async def _first_frame(state: ServerState, caller: Caller, transport: WebSocketTransport) -> str | bytes | None:
    """Wait for the first frame; None if the client leaves. Raises Refused, RemoteProtocolError (`config_timeout`)."""
    with state.admission.await_first_event(caller), anyio.move_on_after(FIRST_FRAME_S):
        return await transport.receive()
    raise RemoteProtocolError("config_timeout", f"No event came within {FIRST_FRAME_S:.0f} s.")


async def _refuse_unknown(
    state: ServerState, caller: Caller, websocket: WebSocket, transport: WebSocketTransport
) -> None:
    """Report an unknown session at once, and close when the client's first frame arrives or its timeout expires.

    A client that sends before it reads would otherwise find the connection broken, and try again.
    """
    error = unknown_session("resume")
    with suppress(WebSocketDisconnect, RuntimeError):
        await websocket.send_text(str(refused_frame(lambda prefix: f"{prefix}0", error).encode()))
    with suppress(RemoteProtocolError, Refused):
        await _first_frame(state, caller, transport)
    with suppress(WebSocketDisconnect, RuntimeError):
        await websocket.close(CLOSE_POLICY, error.code)


async def _refuse_for_room(
    state: ServerState, websocket: WebSocket, refused: Refused, dialect: Dialect | None = None
) -> None:
    state.metrics.refused.labels("no_room").inc()
    await refuse(websocket, RemoteProtocolError("resource_exhausted", str(refused)), CLOSE_TRY_LATER, dialect)


async def _serve_new(
    state: ServerState,
    caller: Caller,
    websocket: WebSocket,
    dialect: Dialect,
    opening: Opening,
    first: str | bytes | None,
    *,
    autostart: bool,
    resumable: bool,
) -> None:
    try:
        with state.admission.admit(caller, kind_of(state, dialect, opening)):
            token = ResumeToken() if resumable else None
            context = context_of(state, caller, resume_token=token.renew() if token else None, autostart=autostart)
            wire = dialect.connect(opening, context)
            await prepare_voices(state, caller, opening.session)
            frames = await open_wire(wire)
            if not isinstance(wire, PlayedWire):
                transport = WebSocketTransport(websocket, first)
                await LiveRealtime(state, caller, wire, transport, first_frames=frames, token=token).run()
                return
            playing = PlayingWebSocket(websocket, wire, first)
            async with anyio.create_task_group() as group:
                group.start_soon(playing.play)
                await LiveRealtime(state, caller, wire, playing, first_frames=frames, token=token).run()
                group.cancel_scope.cancel()
    except RemoteProtocolError as error:
        await refuse(websocket, error, dialect=dialect)
    except Refused as refused:
        await _refuse_for_room(state, websocket, refused, dialect)


def unknown_session(param: str) -> RemoteProtocolError:
    """Return the error for a session id that no host has, or that belongs to another caller."""
    return RemoteProtocolError("unknown_session", "There is no such session to resume.", param)


async def _resume(
    state: ServerState,
    caller: Caller,
    websocket: WebSocket,
    message: SessionResume,
    first: str | bytes,
    dialect: Dialect | None,
    *,
    is_read: bool,
) -> None:
    """Resume the session that a client's first frame names: a live one here, or a stored one here or at its owner.

    `message` is what the frame `first` asks for. With `is_read`, the session reads the frame as well.
    """
    try:
        request = resume_from(message)
        sessions = state.sessions
        if sessions.overflowed.get(caller.key, request.session_id):
            raise JournalGap("journal_overflow")
        is_here = request.session_id in sessions.resumable and not await is_lost(state, caller, request.session_id)
        if not is_here and await take_up(state, caller, request, websocket, first, is_read=is_read):
            return
        session = sessions.resumable.get(request.session_id)
        if session is None or session.caller != caller:
            raise unknown_session("session_id")
        how: HowResumed = "relayed" if websocket.headers.get(RELAYED_HEADER) else "attached"
        transport = WebSocketTransport(websocket, first if is_read else None)
        await session.attachment.resume(
            request.token, request.last_received, transport, how, has_left=partial(transport.has_left, GIVEN_UP_S)
        )
    except Refused as refused:
        await _refuse_for_room(state, websocket, refused, dialect)
    except JournalGap as gap:
        frame = resync_frame(random_id, str(None if message.session_id is UNSET else message.session_id), gap.reason)
        await send_last(websocket, [frame], (CLOSE_POLICY, gap.reason))
    except RemoteProtocolError as error:
        event_id = message.event_id if isinstance(message.event_id, str) else None
        retryable = error.code in RETRYABLE
        code = CLOSE_TRY_LATER if retryable else CLOSE_POLICY
        if is_read and dialect:
            await refuse(websocket, error, code, dialect)
            return
        frame = refused_frame(random_id, error, event_id, retryable=retryable)
        await send_last(websocket, [frame], (code, error.code))


async def accept(websocket: WebSocket, dialect: Dialect | None = None) -> None:
    """Accept the upgrade, with the dialect's subprotocol or one of KEY_SUBPROTOCOLS, if the client offers it.

    Browsers require that a server selects one of the offered subprotocols.
    """
    offered = websocket.scope.get("subprotocols", [])
    wanted = (dialect.subprotocol if dialect else "realtime", *KEY_SUBPROTOCOLS)
    await websocket.accept(subprotocol=next((name for name in wanted if name in offered), None))


async def refuse(
    websocket: WebSocket, error: RemoteProtocolError, code: int = CLOSE_POLICY, dialect: Dialect | None = None
) -> None:
    """Answer an accepted WebSocket with an error, and close it. `code` is the close code, unless the dialect has its
    own. CLOSE_TRY_LATER marks the error as retryable.

    Does not raise if the client has left.
    """
    await send_last(websocket, *(dialect.refusal if dialect else refusal)(error, code))


async def send_last(websocket: WebSocket, frames: Sequence[Frame], closing: tuple[int, str]) -> None:
    """Send frames over an accepted WebSocket, and close it with a code and a reason.

    Does not raise if the client has left.
    """
    try:
        for frame in frames:
            await websocket.send_text(str(frame.encode()))
        await websocket.close(*closing)
    except (WebSocketDisconnect, RuntimeError):
        log.info("a client left before it was refused")
