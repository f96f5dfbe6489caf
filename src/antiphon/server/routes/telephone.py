"""Telephone calls: `POST /v1/telephone/twilio` answers Twilio with TwiML, and `/v1/telephone/media` has media streams.

See docs/telephone.md. A stream is accepted before it says which call it carries, so that it is refused by closing it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from urllib.parse import parse_qsl
from xml.sax.saxutils import quoteattr

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.errors import Refused, RemoteProtocolError, Unauthorized
from antiphon.protocols.opening import Opening
from antiphon.protocols.telephony.carriers import stream_of
from antiphon.protocols.telephony.stream import MAX_FACT_CHARS, Call, MediaStream, Started
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import act_for, identify
from antiphon.server.http.body import json_response, limited
from antiphon.server.live.held_call import check_models, hold_call
from antiphon.server.live.session import CLOSE_NORMAL, CLOSE_POLICY, CLOSE_TRY_LATER
from antiphon.server.state import ServerState
from antiphon.server.telephone import SIGNATURE, ExpectedCall, is_signed, public_url
from antiphon.transports.telephone import CallerLeg
from antiphon.transports.transport import TransportClosed
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 << 10
MEDIA, TWILIO = "/v1/telephone/media", "/v1/telephone/twilio"
WRONG_SIGNATURE = "The request is not signed by the Twilio account of this server."


async def twilio(request: Request) -> Response:
    """Answer Twilio's request for a call with TwiML that connects the call to a media stream of this server.

    Without room for a call, the TwiML rejects it as busy. Raises Unauthorized for a request that is not signed, or
    without an API key if no auth token is set.
    """
    state: ServerState = request.app.state.antiphon
    settings = state.settings.telephone
    body = (await limited(request, MAX_BODY_BYTES).body()).decode(errors="replace")
    fields = parse_qsl(body, keep_blank_values=True)
    if settings.twilio_auth_token:
        if not is_signed(request, settings, fields):
            raise Unauthorized(WRONG_SIGNATURE)
        keys = state.settings.server.api_keys
        caller = act_for(Caller(keys[0] if keys else "", address=request.client.host if request.client else ""))
    else:
        caller = identify(request)
    given = {name: value[:MAX_FACT_CHARS] for name, value in fields}
    call = Call(
        "twilio",
        id=given.get("CallSid", ""),
        account=given.get("AccountSid", ""),
        caller=given.get("From", ""),
        called=given.get("To", ""),
    )
    try:
        check_models(state)
        state.admission.refuse_early(caller, state.kind_of("conversation"))
    except Refused as refusal:
        log.info("a call is rejected as busy: %s", refusal)
        return _twiml('<Reject reason="busy"/>')
    ticket = state.expected_calls.expect(call, caller)
    url = public_url(request, settings, "wss", f"{MEDIA}/{ticket}")
    return _twiml(f"<Connect><Stream url={quoteattr(url)}/></Connect>")


def _twiml(verb: str) -> Response:
    return Response(f'<?xml version="1.0" encoding="UTF-8"?><Response>{verb}</Response>', 200, None, "text/xml")


async def media(websocket: WebSocket) -> None:
    """Serve the media stream of one call, until either side hangs up."""
    state: ServerState = websocket.app.state.antiphon
    check_models(state)
    caller, expected = _identified(state, websocket)
    await websocket.accept()
    transport = WebSocketTransport(websocket)
    code, reason = CLOSE_POLICY, ""
    try:
        stream, started = await _started(state, caller, transport)
        started = replace(started, call=_known(started.call, expected))
        leg = await _serve(state, caller, transport, stream, started)
        code, reason = CLOSE_POLICY if leg.is_refused else CLOSE_NORMAL, leg.ended_by
    except RemoteProtocolError as error:
        log.warning("a media stream is refused: %s", error.message)
        reason = error.code
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        log.info("a call is refused: %s", refusal)
        code, reason = CLOSE_TRY_LATER, "resource_exhausted"
    with suppress(TransportClosed, WebSocketDisconnect):
        await transport.close(code, reason)


def _identified(state: ServerState, websocket: WebSocket) -> tuple[Caller, ExpectedCall | None]:
    """Return the caller of a stream, and the call if the stream's path has the ticket of an announced one.

    Raises Unauthorized for a wrong signature, for an announced call of Twilio's without one, and for a wrong key.
    """
    settings, key = state.settings.telephone, websocket.path_params.get("key", "")
    has_token = bool(settings.twilio_auth_token)
    if has_token and SIGNATURE in websocket.headers and not is_signed(websocket, settings):
        raise Unauthorized(WRONG_SIGNATURE)
    if expected := state.expected_calls.take(key):
        if has_token and SIGNATURE not in websocket.headers:
            raise Unauthorized(WRONG_SIGNATURE)
        return act_for(expected.caller), expected
    if has_token and not state.settings.server.api_keys:
        raise Unauthorized("Without API keys, only calls that Twilio has signed may open a stream.")
    caller = identify(websocket, short=True, key=key or None)
    if Opening(session=caller.session).is_transcription:
        raise Unauthorized("the client secret was made for another session")
    return caller, None


class ShownCall(msgspec.Struct, rename={"caller": "from", "called": "to"}):
    """A live telephone call, as applications see it."""

    # The id of the call's session.
    id: str
    # The carrier's name, and its id of the call.
    carrier: str
    carrier_id: str  # As the carrier writes it.
    # The number of the caller, and the number that was called; empty if the carrier does not state them.
    caller: str
    called: str  # See `caller`.
    # The parameters of the call, by name.
    parameters: Mapping[str, str]
    # The type of the object.
    object: str = "telephone.call"


class ShownCalls(msgspec.Struct):
    """The live telephone calls of one API key."""

    data: list[ShownCall]
    object: str = "list"


async def calls(request: Request) -> Response:
    """Return the live telephone calls of the caller's key."""
    state: ServerState = request.app.state.antiphon
    key = identify(request).key
    legs = [(id, leg.call) for id, leg in state.sessions.legs.items() if state.sessions.calls[id].caller.key == key]
    return json_response(
        ShownCalls([ShownCall(id, c.carrier, c.id, c.caller, c.called, c.parameters) for id, c in legs])
    )


async def _started(state: ServerState, caller: Caller, transport: WebSocketTransport) -> tuple[MediaStream, Started]:
    """Wait until a stream says which call it carries. Raises RemoteProtocolError, and Refused without a place."""
    stream: MediaStream | None = None
    with state.admission.await_first_event(caller), anyio.move_on_after(state.settings.telephone.telephone_start_s):
        while (data := await transport.receive()) is not None:
            stream = stream or stream_of(data)
            for item in stream.read(data):
                if isinstance(item, Started):
                    return stream, item
    raise RemoteProtocolError("config_timeout", "The stream has not begun with a call.")


def _known(call: Call, expected: ExpectedCall | None) -> Call:
    """Return the facts of a call, with those that its announcement had. Raises RemoteProtocolError for another call."""
    if expected is None:
        return call
    announced = expected.call
    if (call.id, call.account) != (announced.id, announced.account):
        raise RemoteProtocolError("bad_event", "The stream carries another call than its URL was made for.", "start")
    return msgspec.structs.replace(announced, parameters=call.parameters)


async def _serve(
    state: ServerState, caller: Caller, transport: WebSocketTransport, stream: MediaStream, started: Started
) -> CallerLeg:
    """Hold the call until it has ended, and return its leg."""
    settings = state.settings.telephone

    async def leg() -> CallerLeg:
        greeting, max_s = settings.telephone_greeting, settings.telephone_call_s
        return CallerLeg(transport, stream, started, greeting=greeting, max_s=max_s)

    return await hold_call(state, caller, started.call, leg)
