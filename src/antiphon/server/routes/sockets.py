"""The WebSocket routes: realtime sessions of all dialects, speech streams and video streams.

An upgrade is refused over HTTP (`server/http/errors.py`) if its key is not valid, if the required model is missing, or
while models load.
"""

from __future__ import annotations

from starlette.websockets import WebSocket

from antiphon.errors import RemoteProtocolError, Unauthorized
from antiphon.protocols.connection import Resume
from antiphon.protocols.dialects import DIALECTS, dialect_of
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import opening_of
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import identify
from antiphon.server.live.handshake import (
    accept,
    check_query,
    keeps_words,
    kind_of,
    names_session,
    refuse,
    send_last,
    serve_by_first_frame,
    serve_resumed,
    wants_token,
)
from antiphon.server.live.open_wire import context_of, open_wire, prepare_voices
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.live.sideband import Sideband, may_share
from antiphon.server.live.speech import LiveSpeech
from antiphon.server.live.video import LiveVideo
from antiphon.server.state import ServerState
from antiphon.transports.journal import ResumeToken
from antiphon.transports.websocket import WebSocketTransport

PATHS = tuple(path for dialect in DIALECTS for path in dialect.paths)


async def realtime(websocket: WebSocket) -> None:
    """Serve one WebSocket of a realtime session, in the dialect that its URL selects, until it is closed.

    With `call_id`, it becomes a sideband of that session.

    A client secret for another kind of session is refused over HTTP too.
    """
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket, short=True)
    call_id = websocket.query_params.get("call_id")
    if call_id is not None and not names_session(websocket):
        check_query(websocket.query_params)
        await _sideband(state, caller, websocket, call_id)
        return
    state.admission.refuse_if_draining()
    state.loaded()
    opening = opening_of(websocket.url.path, websocket.query_params, websocket.headers, caller.session)
    dialect = dialect_of(opening)
    if dialect.parameters is None:
        check_query(websocket.query_params)
    else:
        state.log_ignored({name for name, _ in opening.query} - dialect.parameters, opening.path)
    if caller.granted is not None and not dialect.opens_secret(opening):
        raise Unauthorized("the client secret was made for another session")
    if dialect.client_first or (dialect.resume is not Resume.NEVER and names_session(websocket)):
        await serve_by_first_frame(state, caller, websocket, dialect, opening)
        return
    with state.admission.admit(caller, kind_of(state, dialect, opening)):
        token = ResumeToken() if dialect.resume is Resume.ON_REQUEST and wants_token(websocket) else None
        wire = dialect.connect(opening, context_of(state, caller, resume_token=token.renew() if token else None))
        if dialect.parameters is not None:
            first_frames = wire.open()
            await accept(websocket, dialect)
            if wire.finishing:
                await send_last(websocket, first_frames, wire.finishing)
                return
        else:
            await accept(websocket, dialect)
            await prepare_voices(state, caller, opening.session)
            try:
                first_frames = await open_wire(wire)
            except RemoteProtocolError as error:
                await refuse(websocket, error)
                return
        transport = WebSocketTransport(websocket)
        keeps = token is not None and keeps_words(websocket)
        await LiveRealtime(
            state, caller, wire, transport, first_frames=first_frames, token=token, keeps_words=keeps
        ).run()


async def _sideband(state: ServerState, caller: Caller, websocket: WebSocket, call_id: str) -> None:
    """Serve a WebSocket as a sideband of the live session `call_id`.

    Raises RemoteProtocolError (`call_not_found`) before the upgrade if the caller has no such session, and Refused if
    the session has too many sidebands.
    """
    call = state.sessions.calls.get(call_id)
    session = state.sessions.shared.get(call.id if call else call_id)
    if session is None or not isinstance(session.wire, RealtimeConnection) or not may_share(caller, session):
        raise RemoteProtocolError("call_not_found", "There is no such session of this key.", "call_id")
    token = ResumeToken() if wants_token(websocket) else None
    sideband = Sideband(state, caller, session, session.wire, token)
    session.sidebands.add(sideband)
    try:
        await accept(websocket)
        await sideband.serve(WebSocketTransport(websocket))
    finally:
        session.sidebands.remove(sideband)


async def speech_stream(websocket: WebSocket) -> None:
    """Serve one speech stream, new or resumed, until it is closed."""
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket)
    state.admission.refuse_if_draining()
    if state.loaded().synthesizer is None:
        raise RemoteProtocolError("model_not_found", "No speech synthesizer is loaded.")
    check_query(websocket.query_params)
    if names_session(websocket):
        await serve_resumed(state, caller, websocket)
        return
    with state.admission.admit(caller, "speech"):
        await accept(websocket)
        token = ResumeToken() if wants_token(websocket) else None
        await LiveSpeech(WebSocketTransport(websocket), state, caller, token).run()


async def video_stream(websocket: WebSocket) -> None:
    """Serve one video stream, new or resumed, until it is closed."""
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket)
    state.admission.refuse_if_draining()
    model = state.loaded().video_with(state.tool_servers)
    if model is None:
        raise RemoteProtocolError("model_not_found", "No language model is loaded.")
    check_query(websocket.query_params)
    if names_session(websocket):
        await serve_resumed(state, caller, websocket)
        return
    with state.admission.admit(caller, "video"):
        await accept(websocket)
        token = ResumeToken() if wants_token(websocket) else None
        ga = websocket.query_params.get("events") == "ga"
        await LiveVideo(WebSocketTransport(websocket), state, caller, model, token, ga=ga).run()
