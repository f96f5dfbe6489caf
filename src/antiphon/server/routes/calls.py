"""POST /v1/realtime/calls: a conversation over WebRTC, with Opus both ways and events on the `oai-events` data channel.

The server sends a response's audio in real time, so it knows how much was heard. A barge-in cuts the rest without the
client's help. Calls of the telephone are accepted, transferred and ended here too, in OpenAI's form.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from antiphon.errors import RemoteProtocolError, Unauthorized
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.fields import EMPTY, decode_named, json_object, number
from antiphon.protocols.opening import TRUE_VALUES, Opening
from antiphon.protocols.telephony.functions import target_of
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import identify
from antiphon.server.http.body import limited
from antiphon.server.http.errors import error_response
from antiphon.server.http.offers import new_call, read_offer
from antiphon.server.live.handshake import check_query, kind_of
from antiphon.server.live.open_wire import context_of, open_wire, prepare_voices
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.state import ServerState
from antiphon.server.telephone.offers import DECLINED
from antiphon.server.telephone.serving import check_session
from antiphon.transports.transport import STALL_S

if TYPE_CHECKING:
    from antiphon.transports.webrtc import WebRtcCall

log = logging.getLogger(__name__)
# Most bytes of the session of a call.
MAX_SESSION_BYTES = 1 << 20


async def calls(request: Request) -> Response:
    """Answer an SDP offer, sent as multipart `sdp` and `session`, or as `application/sdp` alone.

    Returns 201 with the SDP answer and the call's Location. The call then continues as a task of the server, and holds
    a place until it ends. It ends if it does not connect within STALL_S.
    """
    state: ServerState = request.app.state.antiphon
    caller = identify(request, short=True)
    check_query(request.query_params)
    offer, session = await read_offer(request)
    granted = Opening(session=caller.session)
    if granted.has_session and session and Opening(session=session).is_transcription != granted.is_transcription:
        raise Unauthorized("the client secret was made for another session")
    opening = Opening(
        model=request.query_params.get("model", ""),
        session=session or caller.granted or EMPTY,
        plays=True,
        consents=request.query_params.get("record") in TRUE_VALUES,
    )
    await prepare_voices(state, caller, opening.session)
    dialect = dialect_of(opening)
    wire = dialect.connect(opening, context_of(state, caller))
    first_frames = await open_wire(wire)
    with ExitStack() as stack:
        stack.enter_context(state.admission.admit(caller, kind_of(state, dialect, opening)))
        call = await new_call(state.settings.server.ice_servers)
        try:
            answer = await call.answer(offer)
        except RemoteProtocolError:
            await call.hang_up()
            raise
        # From here on, the call holds the place instead of the request.
        place = stack.pop_all()
    live = LiveRealtime(state, caller, wire, call, first_frames=first_frames)
    # A program that gets the Location may join the call before it is connected.
    state.sessions.shared[live.id] = live
    state.spawn(lambda: _serve(state, live, call, place))
    headers = {"Location": f"/v1/realtime/calls/{wire.id}"}
    return Response(answer, 201, headers, media_type="application/sdp")


async def _serve(state: ServerState, live: LiveRealtime, call: WebRtcCall, place: ExitStack) -> None:
    """Run an answered call until it ends; then release its place. Does not raise."""
    try:
        with anyio.fail_after(STALL_S):
            await call.opened.wait()
        state.sessions.calls[live.id] = live
        await live.run()
    except TimeoutError:
        log.info("call %s: the client did not connect", live.id)
    except Exception:
        # The boundary of the call: any failure in it ends only this call.
        log.exception("call %s failed", live.id)
    finally:
        state.sessions.calls.pop(live.id, None)
        live.leave()
        place.close()
        await call.hang_up()


async def hang_up(request: Request) -> Response:
    """POST /v1/realtime/calls/{id}/hangup: end a call of the same API key. Returns before it has ended.

    A call that waits for an application is rejected. Returns 404 (`call_not_found`) if the id is not a connected call,
    or belongs to another key.
    """
    state, id, caller = _addressed(request)
    if offered := state.switchboard.offers.find(id, caller):
        offered.reject()
        return JSONResponse({})
    live = state.sessions.calls.get(id)
    if live is None or live.caller.key != caller.key:
        return _not_found()
    live.hang_up()
    return JSONResponse({})


# --- telephone calls, as OpenAI's SIP has them


class RejectRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How a call is rejected: with a SIP status."""

    status_code: int = DECLINED


class ReferRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Whom a call is transferred to: `tel:` and a number, or a SIP URI."""

    target_uri: str


async def accept(request: Request) -> Response:
    """POST /v1/realtime/calls/{id}/accept: begin a call that waits, with the session in the body.

    Returns when the session has begun, so that `/v1/realtime?call_id=` finds it.
    """
    state, id, caller = _addressed(request)
    offered = state.switchboard.offers.find(id, caller)
    if offered is None:
        return _not_found()
    session = json_object(await limited(request, MAX_SESSION_BYTES).body())
    await check_session(state, caller, session, "")
    await offered.accept(session)
    return JSONResponse({})


async def reject(request: Request) -> Response:
    """POST /v1/realtime/calls/{id}/reject: reject a call that waits. Returns before it has ended."""
    state, id, caller = _addressed(request)
    offered = state.switchboard.offers.find(id, caller)
    if offered is None:
        return _not_found()
    body = await limited(request, MAX_SESSION_BYTES).body()
    status = decode_named(body.strip() or b"{}", RejectRequest).status_code
    offered.reject(round(number(status, "status_code", 300, 699)))
    return JSONResponse({})


async def refer(request: Request) -> Response:
    """POST /v1/realtime/calls/{id}/refer: transfer a telephone call. Returns when the carrier has taken it."""
    state, id, caller = _addressed(request)
    leg = state.sessions.legs.get(id)
    if leg is None or state.sessions.calls[id].caller.key != caller.key:
        return _not_found()
    asked = decode_named(await limited(request, MAX_SESSION_BYTES).body(), ReferRequest)
    target = target_of(asked.target_uri, "target_uri")
    state.switchboard.check_target(target, "target_uri")
    await leg.transfer(target)
    return JSONResponse({})


def _addressed(request: Request) -> tuple[ServerState, str, Caller]:
    return request.app.state.antiphon, request.path_params["id"], identify(request)


def _not_found() -> Response:
    return error_response(404, "There is no such call.", code="call_not_found")
