"""Telephone calls: `POST /v1/telephone/twilio` answers Twilio with TwiML, and `/v1/telephone/media` has media streams.

`/v1/telephone/calls` lists the calls, and makes calls. See docs/telephone.md. A stream is accepted before it says which
call it carries, so that it is refused by closing it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from urllib.parse import parse_qsl
from xml.sax.saxutils import quoteattr

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.errors import Refused, RemoteProtocolError, Unauthorized
from antiphon.protocols.fields import EMPTY, decode_named, json_object
from antiphon.protocols.opening import NULL, Opening
from antiphon.protocols.telephony.carriers import SUBPROTOCOLS, stream_of
from antiphon.protocols.telephony.functions import target_of
from antiphon.protocols.telephony.stream import MAX_FACT_CHARS, Call, facts
from antiphon.protocols.wire import random_id
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import act_for, identify
from antiphon.server.http.body import json_response, limited
from antiphon.server.http.errors import error_response
from antiphon.server.state import ServerState
from antiphon.server.telephone.outgoing import RINGS_S, UNREACHABLE, OutgoingCall
from antiphon.server.telephone.serving import caller_of_signed, check_models, check_session, serve_stream
from antiphon.server.telephone.tickets import (
    SIGNATURE,
    TICKET_S,
    ExpectedCall,
    HoldOptions,
    is_signed,
    public_url,
)
from antiphon.transports.leg import Voicemail
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
        caller = act_for(caller_of_signed(state, request.client.host if request.client else ""))
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
    ticket = state.switchboard.expected.expect(call, caller, HoldOptions(random_id("rtc_")))
    return _twiml(f"<Connect><Stream url={quoteattr(_stream_url(request, ticket))}/></Connect>")


def _twiml(verb: str) -> Response:
    return Response(f'<?xml version="1.0" encoding="UTF-8"?><Response>{verb}</Response>', 200, None, "text/xml")


def _stream_url(request: Request, ticket: str) -> str:
    return public_url(request, request.app.state.antiphon.settings.telephone, "wss", f"{MEDIA}/{ticket}")


async def media(websocket: WebSocket) -> None:
    """Serve the media stream of one call, until either side hangs up."""
    state: ServerState = websocket.app.state.antiphon
    check_models(state)
    caller, expected = _identified(state, websocket)
    offered = websocket.scope.get("subprotocols", ())
    subprotocol = next((name for name in offered if name in SUBPROTOCOLS), "")
    await websocket.accept(subprotocol or None)
    transport = WebSocketTransport(websocket)
    read = partial(stream_of, subprotocol=subprotocol)
    code, reason = await serve_stream(state, caller, transport, read, expected)
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
    if expected := state.switchboard.expected.take(key):
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

    # The id of the call.
    id: str
    # The carrier's name, and its id of the call.
    carrier: str
    carrier_id: str  # As the carrier writes it.
    # The number of the caller, and the number that was called; empty if the carrier does not state them.
    caller: str
    called: str  # See `caller`.
    # The parameters of the call, by name.
    parameters: Mapping[str, str]
    # Whether the server has called: `outgoing`, or `incoming`.
    direction: str
    # How long it lasts so far; null while the other side's telephone rings.
    seconds: int | None
    # The type of the object.
    object: str = "telephone.call"


class ShownCalls(msgspec.Struct):
    """The live telephone calls of one API key."""

    data: list[ShownCall]
    object: str = "list"


def _shown(id: str, call: Call, seconds: int | None) -> ShownCall:
    direction = "outgoing" if call.is_outgoing else "incoming"
    return ShownCall(id, call.carrier, call.id, call.caller, call.called, call.parameters, direction, seconds)


async def calls(request: Request) -> Response:
    """GET: return the live telephone calls of the caller's key. POST: call a number."""
    if request.method == "POST":
        return await _dial(request)
    state: ServerState = request.app.state.antiphon
    key = identify(request).key
    legs = [(id, leg) for id, leg in state.sessions.legs.items() if state.sessions.calls[id].caller.key == key]
    return json_response(ShownCalls([_shown(id, leg.call, int(leg.lasts_s)) for id, leg in legs]))


class CallRequest(msgspec.Struct, forbid_unknown_fields=True, rename={"caller": "from"}):
    """A call that is to be made."""

    # The number that is called.
    to: str
    # The number that the call comes from; by default `--twilio-number`. Over SIP, it is that of the account.
    caller: str = ""
    # The session of the call, with the fields of a `session.update`.
    session: msgspec.Raw = NULL
    # What the model says when the other side answers; by default it waits for the other side.
    greeting: str = ""
    # Facts for the model, by name.
    parameters: dict[str, str] = {}
    # What is done when an answering machine answers.
    voicemail: Voicemail = "message"
    # The way to call: `twilio` or `sip`; by default the first of them that is configured.
    via: str = ""


async def _dial(request: Request) -> Response:
    """Call a number. Returns 201 with the call as soon as the carrier has taken it, before it is answered. Over SIP,
    returns when it is answered.
    """
    state: ServerState = request.app.state.antiphon
    settings, caller = state.settings.telephone, identify(request)
    asked = decode_named(await limited(request, MAX_BODY_BYTES).body(), CallRequest)
    check_models(state)
    state.admission.refuse_early(caller, state.kind_of("conversation"))
    board, called = state.switchboard, target_of(asked.to, "to")
    sip = board.sip if asked.via == "sip" or not (asked.via or board.dialers) else None
    dialer = None if sip else board.dialer(asked.via)
    board.check_target(called, "to")
    number = asked.caller or settings.twilio_number
    if dialer and not number:
        raise RemoteProtocolError(
            "missing_required_parameter", "'from' is required: --twilio-number is not set.", "from"
        )
    if facts(asked.parameters) != asked.parameters:
        raise RemoteProtocolError(
            "invalid_value", "There are too many 'parameters', or they are too long.", "parameters"
        )
    session = EMPTY if bytes(asked.session) == b"null" else json_object(bytes(asked.session), "session", "session")
    await check_session(state, caller, session, "session.")
    options = HoldOptions(random_id("rtc_"), session, asked.greeting, asked.voicemail)
    if sip:
        call = Call("sip", "", "", asked.caller, called, asked.parameters, is_outgoing=True)
        await sip.dial(caller, call, options)
        return json_response(_shown(options.id, state.sessions.legs[options.id].call, 0), 201)
    assert dialer
    call = Call(dialer.carrier, "", dialer.account, number, called, asked.parameters, is_outgoing=True)
    expected = board.expected
    ticket = expected.expect(call, caller, options, RINGS_S + TICKET_S)
    try:
        carrier_id = await dialer.dial(
            OutgoingCall(called, number, _stream_url(request, ticket), settings.telephone_call_s)
        )
    except RemoteProtocolError as error:
        expected.take(ticket)
        if error.code == UNREACHABLE:
            return error_response(502, error.message, code=error.code)
        raise
    expected.identify(ticket, carrier_id)
    return json_response(_shown(options.id, msgspec.structs.replace(call, id=carrier_id), None), 201)
