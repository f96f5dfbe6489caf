"""Holds one telephone call, whichever carrier or switch brings it, until it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import anyio
import msgspec

from antiphon.errors import Refused, RemoteProtocolError, Unauthorized
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.opening import Opening
from antiphon.protocols.telephony.functions import session_of
from antiphon.protocols.telephony.stream import Call, MediaStream, Started, Stopped
from antiphon.protocols.wire import random_id
from antiphon.server.credentials import Caller
from antiphon.server.live.open_wire import checked_session, context_of, open_wire, prepare_voices
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.live.session import CLOSE_NORMAL, CLOSE_POLICY, CLOSE_TRY_LATER
from antiphon.server.state import ServerState
from antiphon.server.telephone.offers import CallRejected, OfferedCall
from antiphon.server.telephone.switchboard import Begin
from antiphon.server.telephone.tickets import ExpectedCall, HoldOptions
from antiphon.transports.call_tools import CallTools
from antiphon.transports.http import LineLimit
from antiphon.transports.leg import Leg, LegOptions, LegSocket
from antiphon.transports.telephone import CallerLeg

log = logging.getLogger(__name__)
# Streams that are refused. At a door, any client can open one.
_refusals = LineLimit(time.monotonic)
LegT = TypeVar("LegT", bound=Leg)
# Waits for the decision of an application about a call. Raises CallRejected.
Decide = Callable[[], Awaitable[OfferedCall]]


def check_models(state: ServerState) -> None:
    """Raise Refused while models load and while the server drains, and RemoteProtocolError if none can hold a call.

    At a door, raise Refused if it has no host.
    """
    state.admission.refuse_if_draining()
    if hosts := state.switchboard.hosts:
        hosts.check()
        return
    model = state.loaded().for_conversations
    if model is None or not model.profile.voices:
        raise RemoteProtocolError("model_not_found", "A call needs a language model and a voice.", "model")


def caller_of_signed(state: ServerState, address: str) -> Caller:
    """Return the caller of calls that show no key, such as those that Twilio has signed: the first API key."""
    keys = state.settings.server.api_keys
    return Caller(keys[0] if keys else "", address=address)


async def check_session(state: ServerState, caller: Caller, session: msgspec.Raw, param: str) -> None:
    """Raise RemoteProtocolError if no call can have this session. `param`: the start of its fields' paths.

    At a door, this asks a host. Raises Unauthorized if that does not know the caller's key, and Refused without a host.
    """
    if Opening(session=session).is_transcription:
        raise RemoteProtocolError("invalid_value", "A call is a session of the type 'realtime'.", f"{param}type")
    if hosts := state.switchboard.hosts:
        try:
            async with hosts.open(caller, session, Call("")):
                return
        except RemoteProtocolError as error:
            if error.code == "invalid_api_key":
                raise Unauthorized(error.message) from None
            raise
    await checked_session(state, caller, session)


async def serve_stream(
    state: ServerState,
    caller: Caller,
    socket: LegSocket,
    read: Callable[[str | bytes], MediaStream],
    expected: ExpectedCall | None = None,
) -> tuple[int, str]:
    """Hold the call of a media stream until it has ended. Returns the code and the reason with which to close it.

    `read` returns the stream that begins with a message. `expected`: the call as it was announced.
    """
    try:
        stream, started = await _started(state, caller, socket, read)
        if expected:
            started = _announced(started, expected)
        options = expected.options if expected else HoldOptions(random_id("rtc_"))
        transfer = state.switchboard.transfer_of(started.call)

        async def take(options: LegOptions) -> CallerLeg:
            return CallerLeg(socket, stream, started, options, transfer=transfer)

        leg = await hold_call(state, caller, started.call, options, take, partial(_ring, socket, stream))
        return CLOSE_POLICY if leg.is_refused else CLOSE_NORMAL, leg.ended_by
    except RemoteProtocolError as error:
        _refusals.warn(log, "a media stream is refused: %s", error.message)
        return CLOSE_POLICY, error.code
    except CallRejected as rejection:
        log.info("a call has ended: %s", rejection)
        return CLOSE_NORMAL, "rejected"
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        log.info("a call is refused: %s", refusal)
        return CLOSE_TRY_LATER, "resource_exhausted"


async def _started(
    state: ServerState, caller: Caller, socket: LegSocket, read: Callable[[str | bytes], MediaStream]
) -> tuple[MediaStream, Started]:
    """Wait until a stream says which call it carries. Raises RemoteProtocolError, and Refused without a place."""
    stream: MediaStream | None = None
    with state.admission.await_first_event(caller), anyio.move_on_after(state.settings.telephone.telephone_start_s):
        while (data := await socket.receive()) is not None:
            stream = stream or read(data)
            for item in stream.read(data):
                if isinstance(item, Started):
                    return stream, item
    raise RemoteProtocolError("config_timeout", "The stream has not begun with a call.")


def _announced(started: Started, expected: ExpectedCall) -> Started:
    """Return a stream's call with the facts that its announcement had. Raises RemoteProtocolError for another call."""
    call, announced = started.call, expected.call
    # An outgoing call may be answered before the carrier's id of it is known.
    is_known = bool(announced.id) or not announced.is_outgoing
    if call.account != announced.account or (is_known and call.id != announced.id):
        raise RemoteProtocolError("bad_event", "The stream carries another call than its URL was made for.", "start")
    parameters = {**announced.parameters, **call.parameters}
    return Started(msgspec.structs.replace(announced, id=call.id, parameters=parameters), started.codec)


async def hold_call(
    state: ServerState,
    caller: Caller,
    call: Call,
    options: HoldOptions,
    take: Callable[[LegOptions], Awaitable[LegT]],
    ring: Callable[[Decide], Awaitable[OfferedCall]] = lambda decide: decide(),
) -> LegT:
    """Hold a call until it has ended, and return its leg.

    - `take`: takes the call, when it is certain that there is room for it and a session, and returns its leg.
    - `ring`: awaits the decision of an application about the call, if one decides about calls.

    Raises Refused without room, CallRejected, RemoteProtocolError for a session that is not valid, and what `take` and
    `ring` raise.
    """
    settings, offers = state.settings.telephone, state.switchboard.offers
    configured = caller.session if options.session is None else options.session
    offered: OfferedCall | None = None
    with state.admission.admit(caller, state.kind_of("conversation")):
        if offers.are_asked and bytes(configured) == b"null" and not call.is_outgoing:
            offered = await ring(lambda: offers.decide(options.id, call, caller))
            configured = offered.session
        hosts = state.switchboard.hosts
        async with hosts.open(caller, configured, call) if hosts else _open(state, caller, configured, call) as begin:
            greeting = settings.telephone_greeting if options.greeting is None else options.greeting
            transfers = state.switchboard.transfers
            leg = await take(LegOptions(greeting, settings.telephone_call_s, transfers, options.voicemail))
            live = begin(leg)
            state.sessions.calls[options.id], state.sessions.legs[options.id] = live, leg
            if offered:
                offered.begun.set()
            direction = "outgoing" if call.is_outgoing else "incoming"
            try:
                with state.metrics.telephone_calls.labels(call.carrier, direction).track_inprogress():
                    async with anyio.create_task_group() as group:
                        group.start_soon(leg.run)
                        await live.run()
                        leg.end("session_ended")
            finally:
                del state.sessions.calls[options.id], state.sessions.legs[options.id]
                state.metrics.telephone_calls_ended.labels(call.carrier, leg.ended_by or "server_error").inc()
    log.info("call %s of %s has ended: %s", options.id, call.carrier, leg.ended_by)
    return leg


@asynccontextmanager
async def _open(state: ServerState, caller: Caller, configured: msgspec.Raw, call: Call) -> AsyncIterator[Begin]:
    """Have a session of this server for a call, as `CallHosts.open` has one of a host."""
    session = session_of(configured, call, state.settings.telephone.telephone_instructions)
    opening = Opening(session=session, plays=True)
    wire = dialect_of(opening).connect(opening, context_of(state, caller))
    await prepare_voices(state, caller, session)
    first_frames = await open_wire(wire)

    def begin(leg: Leg) -> LiveRealtime:
        live = LiveRealtime(
            state, caller, wire, leg, first_frames=first_frames, why_left=lambda: leg.ended_by, tools=CallTools(leg)
        )
        leg.beside = live.sidebands.tell
        return live

    yield begin


async def _ring(socket: LegSocket, stream: MediaStream, decide: Decide) -> OfferedCall:
    """Wait for the decision about a call. What the caller says meanwhile is not kept.

    Raises CallRejected, and RemoteProtocolError for a message that no carrier sends, or if the caller hangs up.
    """
    found: OfferedCall | CallRejected | RemoteProtocolError
    found = RemoteProtocolError("caller_hung_up", "The caller has hung up before the call was accepted.")
    async with anyio.create_task_group() as group:

        async def read() -> None:
            nonlocal found
            try:
                while (data := await socket.receive()) is not None:
                    if any(isinstance(item, Stopped) for item in stream.read(data)):
                        break
            except RemoteProtocolError as error:
                found = error
            group.cancel_scope.cancel()

        group.start_soon(read)
        try:
            found = await decide()
        except CallRejected as rejection:
            found = rejection
        group.cancel_scope.cancel()
    if isinstance(found, OfferedCall):
        return found
    raise found
