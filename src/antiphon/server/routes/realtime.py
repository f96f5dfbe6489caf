"""The WebSockets of realtime sessions: those of /v1/realtime, and of the dialects that have URLs of their own."""

from __future__ import annotations

from starlette.websockets import WebSocket

from antiphon.errors import RemoteProtocolError, Unauthorized
from antiphon.protocols.connection import Resume
from antiphon.protocols.dialects import DIALECTS, dialect_of
from antiphon.protocols.opening import TRUE_VALUES, Opening
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.server.auth import identify
from antiphon.server.credentials import Caller
from antiphon.server.live.handshake import (
    accept,
    check_query,
    kind_of,
    names_session,
    refuse,
    serve_by_first_frame,
    wants_token,
)
from antiphon.server.live.open_wire import context_of, open_wire, prepare_voices
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.state import ServerState
from antiphon.transports.websocket import WebSocketTransport

PATHS = tuple(path for dialect in DIALECTS for path in dialect.paths)


async def realtime(websocket: WebSocket) -> None:
    """Serve one WebSocket of a realtime session, in the dialect that its URL asks for, until it is closed.

    Without an admissible key, with a client secret for another session, or while models load, the upgrade is refused
    over HTTP (`server/errors.py`).
    """
    state: ServerState = websocket.app.state.antiphon
    caller = identify(websocket, short=True)
    state.loaded()
    check_query(websocket.query_params)
    opening = _opening(caller, websocket)
    dialect = dialect_of(opening)
    if caller.granted is not None and not dialect.opens_secret(opening):
        raise Unauthorized("the client secret was made for another session")
    if dialect.client_first or (dialect.resume is not Resume.NEVER and names_session(websocket)):
        await serve_by_first_frame(state, caller, websocket, dialect, opening)
        return
    with state.admission.admit(caller, kind_of(dialect, opening)):
        token = ResumeToken() if dialect.resume is Resume.ON_REQUEST and wants_token(websocket) else None
        wire = dialect.connect(opening, context_of(state, caller, resume_token=token.renew() if token else None))
        await accept(websocket, dialect)
        await prepare_voices(state, caller, opening.session)
        try:
            first_frames = await open_wire(wire)
        except RemoteProtocolError as error:
            await refuse(websocket, error)
            return
        transport = WebSocketTransport(websocket)
        await LiveRealtime(state, caller, wire, transport, first_frames=first_frames, token=token).run()


def _opening(caller: Caller, websocket: WebSocket) -> Opening:
    query = websocket.query_params
    return Opening(
        model=query.get("model", ""),
        dialect=query.get("dialect", ""),
        intent=query.get("intent", ""),
        beta="realtime=v1" in websocket.headers.get("openai-beta", "") or query.get("events") == "beta",
        session=caller.session,
        duplex=query.get("duplex") in TRUE_VALUES,
        path=websocket.url.path,
        mode=query.get("mode", ""),
        consents=query.get("record") in TRUE_VALUES,
    )
