"""A live telephone call: its session and its leg, from when the call is taken to its end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import anyio

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.opening import Opening
from antiphon.protocols.telephony.functions import session_of
from antiphon.protocols.telephony.stream import Call
from antiphon.server.credentials import Caller
from antiphon.server.live.handshake import kind_of
from antiphon.server.live.open_wire import context_of, open_wire, prepare_voices
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.state import ServerState
from antiphon.transports.telephone import Leg

log = logging.getLogger(__name__)
LegT = TypeVar("LegT", bound=Leg)


def check_models(state: ServerState) -> None:
    """Raise Refused while models load and while the server drains, and RemoteProtocolError if none can hold a call."""
    state.admission.refuse_if_draining()
    model = state.loaded().for_conversations
    if model is None or not model.profile.voices:
        raise RemoteProtocolError("model_not_found", "A call needs a language model and a voice.", "model")


async def hold_call(
    state: ServerState,
    caller: Caller,
    call: Call,
    take: Callable[[], Awaitable[LegT]],
    transfers: Mapping[str, str] | None = None,
    begun: Callable[[str], None] = lambda id: None,
) -> LegT:
    """Hold a call until it has ended, and return its leg.

    `take` takes the call, when it is certain that there is room for it, and returns its leg. `transfers`: where the
    model may transfer the call to, by name. `begun` gets the id of the session. Raises Refused without room,
    RemoteProtocolError, and what `take` raises.
    """
    session = session_of(caller.session, call, state.settings.telephone.telephone_instructions, list(transfers or ()))
    opening = Opening(session=session, plays=True)
    dialect = dialect_of(opening)
    with state.admission.admit(caller, kind_of(state, dialect, opening)):
        wire = dialect.connect(opening, context_of(state, caller))
        await prepare_voices(state, caller, session)
        first_frames = await open_wire(wire)
        leg = await take()
        live = LiveRealtime(state, caller, wire, leg, first_frames=first_frames, why_left=lambda: leg.ended_by)
        leg.beside = live.sidebands.tell
        state.sessions.calls[live.id], state.sessions.legs[live.id] = live, leg
        begun(live.id)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(leg.run)
                await live.run()
                leg.end("session_ended")
        finally:
            del state.sessions.calls[live.id], state.sessions.legs[live.id]
    log.info("call %s of %s has ended: %s", live.id, call.carrier, leg.ended_by)
    return leg
