"""Calls in both directions: takes INVITEs, and calls others. Each call holds a session until it ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import anyio
import msgspec

from antiphon.audio.line.line_codecs import line_codec
from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.telephony.sip import sdp
from antiphon.protocols.telephony.sip.dialog import ALLOWED, Dialog, new_tag
from antiphon.protocols.telephony.sip.messages import Address, SipRequest, SipUri, answer, checked_header
from antiphon.protocols.telephony.sip.sdp import Description
from antiphon.protocols.telephony.sip.transactions import ServerTransaction
from antiphon.protocols.telephony.stream import MAX_FACT_CHARS, MAX_PARAMETERS, Call
from antiphon.protocols.wire import random_id
from antiphon.server.credentials import Caller
from antiphon.server.sip.agent import RETRY_S, SipAgent
from antiphon.server.sip.call import SDP, SipCall
from antiphon.server.telephone.offers import CallRejected
from antiphon.server.telephone.outgoing import REFUSED
from antiphon.server.telephone.serving import caller_of_signed, check_models, hold_call
from antiphon.server.telephone.tickets import HoldOptions
from antiphon.shares.places import current_owner
from antiphon.transports.leg import LegOptions
from antiphon.transports.rtp import RtpLeg, RtpPort

log = logging.getLogger(__name__)
T = TypeVar("T")
# Headers of an INVITE that become parameters of the call, beside those that begin with X-.
_FACTS = ("diversion", "p-asserted-identity", "user-to-user", "subject")
# Seconds in which a call of ours has to be answered.
RING_S = 60.0
NOT_ACCEPTABLE = RemoteProtocolError("invalid_offer", "There is no common codec.", "sdp")


class Calls:
    """Takes and makes the calls of one agent. It is the `SipDialer` of the server."""

    def __init__(self, agent: SipAgent) -> None:
        self._agent, self._state = agent, agent.state
        # Calls that are to be taken, at most MAX_BEGINNING.
        self._invites: asyncio.Queue[tuple[ServerTransaction, _Taken]] = asyncio.Queue()
        agent.take_invite = self.take

    # --- calls of others ----------------------------------------------------------------------------------------------

    def take(self, invite: ServerTransaction) -> None:
        """Take a call, in a task of its own. Does not wait."""
        invite.respond(answer(invite.request, 100))
        self._invites.put_nowait((invite, _Taken(self._agent)))

    async def serve(self) -> None:
        """Begin the tasks of calls, until this is cancelled."""
        while True:
            self._state.spawn(partial(self._serve, *await self._invites.get()))

    async def _serve(self, invite: ServerTransaction, taken: _Taken) -> None:
        """Hold a call until it has ended. Does not raise."""
        request, state, status = invite.request, self._state, 500
        caller = caller_of_signed(state, invite.peer.host)
        current_owner.set(caller.key)
        try:
            check_models(state)
            call = call_of(request)
            with anyio.CancelScope() as scope:
                invite.cancelled = scope.cancel
                take, options = partial(taken.answer, invite, call), HoldOptions(random_id("rtc_"))
                await taken.conclude(await hold_call(state, caller, call, options, take))
            status = 487
        except Refused as refusal:
            state.metrics.refused.labels("no_room").inc()
            log.info("a call over SIP is refused: %s", refusal)
            status = 503
        except CallRejected as rejection:
            log.info("a call over SIP is refused: %s", rejection)
            status = rejection.status
        except RemoteProtocolError as error:
            log.info("a call over SIP is refused: %s", error.message)
            status = {"invalid_offer": 488, "bad_sip": 400}.get(error.code, 500)
        except Exception:
            # The boundary of the call: any failure in it ends only this call.
            log.exception("a call over SIP failed")
        finally:
            taken.close()
            retry = [("retry-after", str(RETRY_S))] if status == 503 else []
            # Nothing is sent if the call was answered.
            invite.respond(answer(request, status, tag=new_tag(), headers=retry))

    # --- calls of ours ------------------------------------------------------------------------------------------------

    async def dial(
        self, caller: Caller, call: Call, options: HoldOptions, headers: Mapping[str, str] | None = None
    ) -> None:
        """Call a SIP URI, or a number at the provider. Returns when it is answered, see SipDialer.

        `headers` are added to the INVITE. The call then goes on as a call of the caller's key does. A header that
        cannot be raises RemoteProtocolError (`invalid_value`).
        """
        check_models(self._state)
        own_headers = [checked_header(name, value) for name, value in (headers or {}).items()]
        uri = self._agent.uri_of(call.called)
        if not call.caller:
            call = msgspec.structs.replace(call, caller=self._agent.account[0])
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state.spawn(partial(self._call, caller, call, options, uri, own_headers, begun))
        await begun

    async def _call(
        self,
        caller: Caller,
        call: Call,
        options: HoldOptions,
        uri: str,
        headers: list[tuple[str, str]],
        begun: asyncio.Future[None],
    ) -> None:
        """Hold a call of ours until it has ended. The failure to begin it is the exception of `begun`."""
        current_owner.set(caller.key)
        taken = _Taken(self._agent)

        async def take(leg_options: LegOptions) -> RtpLeg:
            leg = await taken.dial(call, uri, headers, leg_options)
            # The call is in the registry when the waiting task goes on.
            _set_result(begun, None)
            return leg

        try:
            with anyio.CancelScope() as scope:
                begun.add_done_callback(lambda done: scope.cancel() if done.cancelled() else None)
                await taken.conclude(await hold_call(self._state, caller, call, options, take))
        except Exception as error:
            if begun.done():
                log.exception("a call over SIP failed")
            else:
                begun.set_exception(error)
        finally:
            begun.cancel()
            taken.close()


class _Taken:
    """One call, from its INVITE on."""

    def __init__(self, agent: SipAgent) -> None:
        self._agent = agent
        self._port: RtpPort | None = None
        self._call: SipCall | None = None
        self._is_beginning = True
        agent.num_beginning += 1

    async def _open_port(self) -> RtpPort:
        try:
            self._port = await self._agent.open_rtp()
        except OSError as error:
            raise Refused(str(error), RETRY_S) from error
        return self._port

    async def answer(self, invite: ServerTransaction, call: Call, options: LegOptions) -> RtpLeg:
        """Answer an INVITE, and return the leg. Raises RemoteProtocolError and Refused if it cannot be."""
        agent, request, peer = self._agent, invite.request, invite.peer
        theirs = sdp.read(request.body) if request.body else None
        tag, contact = new_tag(), agent.contact_for(peer)
        dialog = Dialog.of_invite(request, tag, peer, contact)
        own = self._call = SipCall(agent, dialog, await self._open_port(), agent.address_for(peer.host))
        body = own.agree(theirs, agent.codecs) if theirs else own.offer(agent.codecs)
        if body is None:
            raise NOT_ACCEPTABLE
        agent.enter(own)
        acknowledged: asyncio.Future[SipRequest | None] = asyncio.get_running_loop().create_future()
        acknowledged.add_done_callback(lambda _: self._begun())
        invite.acknowledged = partial(_set_result, acknowledged)
        invite.unacknowledged = partial(_set_result, acknowledged, None)
        headers = ("contact", contact), ("allow", ALLOWED), SDP
        invite.respond(answer(request, 200, tag=tag, headers=headers, body=body))
        if theirs is None:
            ack = await acknowledged
            theirs = sdp.read(ack.body if ack else b"")
            if own.agree(theirs, agent.codecs) is None:
                raise NOT_ACCEPTABLE
        leg = self._leg(own, call, theirs, options)
        invite.unacknowledged = partial(leg.end, "no_ack")
        return leg

    async def dial(self, call: Call, uri: str, headers: list[tuple[str, str]], options: LegOptions) -> RtpLeg:
        """Call a URI, and return the leg when it is answered. Raises RemoteProtocolError and Refused if it is not."""
        agent, port = self._agent, await self._open_port()
        peer = await agent.peer_for(uri)
        contact, own_host = agent.contact_for(peer), agent.address_for(peer.host)
        user, domain = agent.account[0] or "antiphon", agent.domain or own_host
        version = secrets.randbits(20) << 8
        request, response = None, None
        with anyio.move_on_after(RING_S):
            request, response = await agent.ask(
                "INVITE",
                uri,
                peer,
                own=f"<sip:{user}@{domain}>;tag={new_tag()}",
                other=f"<{uri}>",
                call_id=secrets.token_hex(16),
                number=1,
                contact=contact,
                headers=[("allow", ALLOWED), SDP, *headers],
                body=sdp.offer((own_host, port.number), version, agent.codecs),
            )
        if request is None or response is None or response.status >= 300:
            shown = f"{response.status} {response.reason}" if response else "no answer"
            raise RemoteProtocolError(REFUSED, f"The call was not taken: {shown}.")
        dialog = Dialog.of_answer(request, response, peer, contact)
        own = self._call = SipCall(agent, dialog, port, own_host)
        agent.enter(own)
        theirs = sdp.read(response.body)
        if own.agree(theirs, agent.codecs) is None:
            raise NOT_ACCEPTABLE
        self._begun()
        return self._leg(own, call, theirs, options)

    def _leg(self, own: SipCall, call: Call, theirs: Description, options: LegOptions) -> RtpLeg:
        agreed = own.agreed
        assert agreed
        assert self._port
        leg = own.leg = RtpLeg(
            call,
            line_codec(agreed.codec),
            self._port,
            own,
            options,
            sends_keys=agreed.events is not None,
            comedia=self._agent.settings.sip_comedia,
        )
        leg.agree(agreed, theirs, own.keys)
        return leg

    async def conclude(self, leg: RtpLeg) -> None:
        """End the call for the other side, unless it has ended there, and count its packets."""
        if self._call:
            await self._call.hang_up(leg.ended_by)
        packets = self._agent.state.metrics.rtp_packets
        for what, num in (("lost", leg.num_lost), ("late", leg.num_late), ("foreign", leg.num_foreign)):
            packets.labels(what).inc(num)

    def close(self) -> None:
        """Release what the call holds. If it was answered and did not begin, the other side is hung up."""
        self._begun()
        if self._port:
            self._port.close()
        if self._call and self._call.is_open:
            self._agent.state.spawn(partial(self._call.hang_up, "failed"))

    def _begun(self) -> None:
        if self._is_beginning:
            self._is_beginning = False
            self._agent.num_beginning -= 1


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def call_of(invite: SipRequest) -> Call:
    """Return the facts of a call: who calls whom, and the headers that an application may have set."""
    facts = {n: v for n, v in invite.headers if n.startswith("x-") or n in _FACTS}
    fitting = {n: v for n, v in facts.items() if len(v) <= MAX_FACT_CHARS}
    caller, called = _shown(invite.get("from")), _shown(invite.get("to"))
    parameters = dict(list(fitting.items())[:MAX_PARAMETERS])
    return Call("sip", invite.call_id[:MAX_FACT_CHARS], "", caller, called, parameters)


def _shown(address: str) -> str:
    """Return the number, or the name, of an address."""
    uri = Address.read(address).uri
    try:
        known = SipUri.read(uri)
    except RemoteProtocolError:
        return uri[:MAX_FACT_CHARS]
    return (known.user or known.host)[:MAX_FACT_CHARS]
