"""The SIP side of a server: every message of every peer comes here, and is passed to the call that it belongs to."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Container
from functools import partial
from ipaddress import ip_address
from itertools import count
from typing import Protocol

import anyio

from antiphon.errors import RemoteProtocolError
from antiphon.extras import missing_packages
from antiphon.protocols.telephony.sip import sdp
from antiphon.protocols.telephony.sip.dialog import ALLOWED, Dialog, new_tag, out_of_dialog
from antiphon.protocols.telephony.sip.digest import Challenger, answered
from antiphon.protocols.telephony.sip.messages import SipRequest, SipResponse, SipUri, answer, parse
from antiphon.protocols.telephony.sip.transactions import Peer, ServerTransaction, Transactions
from antiphon.server.http.listening import is_wildcard
from antiphon.server.http.origin import is_loopback
from antiphon.server.listeners import host_of
from antiphon.server.sip.peers import StreamPeer, UdpPeer
from antiphon.server.state import ServerState
from antiphon.transports.http import LineLimit
from antiphon.transports.rtp import RtpPort

log = logging.getLogger(__name__)
# Calls that are being taken at one time: beyond it, an INVITE is answered with 503. And the seconds in Retry-After.
MAX_BEGINNING, RETRY_S = 64, 5
# The port of a SIP URI that has none.
DEFAULT_PORT = 5060
_NUMBER = re.compile(r"[\w.+*#-]*")
# Messages that cannot be read, which anyone who reaches the port can send.
_invalid = LineLimit(time.monotonic)


class InDialog(Protocol):
    """A call, as the agent passes requests to it: `server/sip/call.py`."""

    dialog: Dialog

    def take(self, transaction: ServerTransaction) -> None:
        """Answer a request within the call. Does not wait."""
        ...


# Takes a call that begins with this INVITE.
TakeInvite = Callable[[ServerTransaction], None]


class SipAgent:
    """The agent of one server. `take_invite` is called with each INVITE that begins a call.

    `allowed`: the addresses that may send requests, besides loopback and those of the provider. As a container, the
    agent has all of them. `port`: the port that others reach it at.
    """

    def __init__(self, state: ServerState, allowed: Container[object], port: int) -> None:
        self.state, self.settings, self.port = state, state.settings.sip, port
        self._allowed = allowed
        # The addresses of the provider, since it was last looked up.
        self._provider: frozenset[str] = frozenset()
        # The other sides of live calls. Those that the server has called need not be allowed to call it.
        self._called: Counter[str] = Counter()
        # Connections of ours, by host and port.
        self._streams: dict[tuple[str, int], StreamPeer] = {}
        names = (name.strip().lower() for name in self.settings.sip_codecs.split(","))
        # The codecs of calls, best first.
        self.codecs = tuple(name for name in names if name in sdp.CLOCKS_HZ)
        self.has_srtp = not missing_packages("sip")
        loop = asyncio.get_running_loop()
        self.transactions = Transactions(loop.call_later)
        self.calls: dict[tuple[str, str, str], InDialog] = {}
        self.take_invite: TakeInvite = lambda transaction: None
        # Calls that are being taken.
        self.num_beginning = 0
        # Sends over UDP. Set while the port is open.
        self.send_udp: Callable[[bytes, tuple[str, int]], None] = lambda data, to: None
        password = self.settings.sip_caller_password
        self._challenger = Challenger(password, loop.time) if password else None
        first, last = map(int, self.settings.sip_rtp_ports.split("-"))
        self._rtp_ports = range(first + first % 2, last + 1, 2)
        self._rtp_turn = count(secrets.randbelow(len(self._rtp_ports)))

    # --- messages -----------------------------------------------------------------------------------------------------

    def __contains__(self, address: object) -> bool:
        return is_loopback(str(address)) or address in self._allowed or address in self._provider

    def receive(self, data: bytes, peer: Peer) -> None:
        """Handle one message of a peer. Does not wait, and does not raise."""
        if not data.strip(b"\r\n\0 "):
            # What keeps a way through NAT open.
            return
        is_known = peer.host in self or peer.host in self._called
        if not is_known and not data.startswith(b"SIP/2.0 "):
            self.state.metrics.refused.labels("listener_address").inc()
            return
        try:
            message = parse(data)
            if isinstance(message, SipResponse):
                self.transactions.take_response(message)
            else:
                self._take(message, peer)
        except RemoteProtocolError as error:
            _invalid.warn(log, "a message over SIP is dropped: %s", error.message)
        except Exception:
            # The boundary of a message: any failure in it ends nothing else.
            log.exception("a message over SIP failed")

    def _take(self, request: SipRequest, peer: Peer) -> None:
        via, rest = request.via, request.all("via")[1:]
        request.set("via", via.stamped(peer.host, peer.port))
        for value in rest:
            request.add("via", value)
        if isinstance(peer, UdpPeer) and not via.wants_rport:
            # An older telephone, which listens at another port than the one that it sends from.
            peer = peer.at(via.port or DEFAULT_PORT)
        begins = request.method == "INVITE" and not request.to_tag
        if begins and not self.transactions.knows(request) and (refusal := self._refusal(request, peer)):
            # It is answered without a transaction, so that a flood takes no memory.
            peer.send(refusal.encode())
            return
        transaction = self.transactions.take(request, peer)
        if transaction is None:
            return
        if begins:
            self.take_invite(transaction)
        elif request.to_tag:
            self._take_in_dialog(transaction)
        elif request.method == "OPTIONS":
            self._answer(transaction, 503 if self.state.admission.draining else 200, ("allow", ALLOWED))
        else:
            self._answer(transaction, 405, ("allow", ALLOWED))

    def _take_in_dialog(self, transaction: ServerTransaction) -> None:
        request = transaction.request
        call = self.calls.get((request.call_id, request.to_tag, request.from_tag))
        if call is None:
            self._answer(transaction, 481)
        elif not call.dialog.admits(request):
            self._answer(transaction, 500)
        else:
            call.take(transaction)

    def _answer(self, transaction: ServerTransaction, status: int, *headers: tuple[str, str]) -> None:
        transaction.respond(answer(transaction.request, status, tag=new_tag(), headers=headers))

    def _refusal(self, request: SipRequest, peer: Peer) -> SipResponse | None:
        """Return why a call is not taken; None if it may be."""
        refused = self.state.metrics.refused
        # A provider does not know the password of our callers.
        is_known = peer.host in self._provider
        if self._challenger and not is_known and not self._challenger.admits(request):
            return answer(request, 401, tag=new_tag(), headers=self._challenger.challenges())
        if self.num_beginning >= MAX_BEGINNING or self.transactions.is_full:
            refused.labels("no_room").inc()
            return answer(request, 503, tag=new_tag(), headers=[("retry-after", str(RETRY_S))])
        if required := request.all("require"):
            return answer(request, 420, tag=new_tag(), headers=[("unsupported", ", ".join(required))])
        return None

    # --- addresses ----------------------------------------------------------------------------------------------------

    def address_for(self, peer: str) -> str:
        """Return our address as a peer reaches it: the configured one, or that from which packets go there."""
        host = host_of(self.settings.sip)
        if self.settings.sip_public_address and not is_loopback(peer):
            return self.settings.sip_public_address
        if not is_wildcard(host) and host != "localhost":
            return host
        family = socket.AF_INET6 if ip_address(peer).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # No packet is sent.
            probe.connect((peer, self.port))
            return str(probe.getsockname()[0])

    def contact_for(self, peer: Peer, user: str = "antiphon") -> str:
        """Return our Contact for a peer."""
        host = self.address_for(peer.host)
        shown = f"[{host}]" if ":" in host else host
        transport = ";transport=tcp" if peer.protocol == "TCP" else ""
        return f"<sip:{user}@{shown}:{self.port}{transport}>"

    async def open_rtp(self) -> RtpPort:
        """Open a port for the audio of a call. Raises OSError if none is free."""
        turn = next(self._rtp_turn)
        ports = self._rtp_ports
        host = host_of(self.settings.sip)
        return await RtpPort.open(host or "0.0.0.0", (ports[(turn + n) % len(ports)] for n in range(len(ports))))

    # --- requests of ours ---------------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        uri: str,
        peer: Peer,
        *,
        own: str,
        other: str,
        call_id: str,
        number: int,
        contact: str,
        headers: list[tuple[str, str]] | None = None,
        body: bytes = b"",
    ) -> tuple[SipRequest, SipResponse | None]:
        """Send a request outside of a dialog, and answer a challenge. Returns the request and its last response.

        The response is None if none came. If this is cancelled, an INVITE is cancelled too.
        """
        user, password = self.account
        more = list(headers or ())
        for attempt in range(2):
            request = out_of_dialog(
                method,
                uri,
                own=own,
                other=other,
                call_id=call_id,
                number=number + attempt,
                contact=contact,
                peer=peer,
                headers=more,
                body=body,
            )
            response = await self.exchange(request, peer)
            if response is None or response.status not in (401, 407) or not password:
                break
            credentials = answered(request, response, user, password)
            if credentials is None:
                break
            more = [*(headers or ()), credentials]
        return request, response

    @property
    def account(self) -> tuple[str, str]:
        """The user and the password of the account at the provider; empty without one."""
        registrar = self.settings.sip_register
        return SipUri.read(registrar).user if registrar else "", self.settings.sip_password

    @property
    def domain(self) -> str:
        """The provider's name; "" without one."""
        registrar = self.settings.sip_register
        return SipUri.read(registrar).host if registrar else ""

    def uri_of(self, to: str) -> str:
        """Return the URI of a number at the provider; of the provider itself for "". A URI is returned as it is.

        Raises RemoteProtocolError (`invalid_value`) for a number without a provider, and for what is neither.
        """
        registrar = self.settings.sip_register
        if ":" in to:
            SipUri.read(to)
            return to
        if not registrar or not _NUMBER.fullmatch(to):
            raise RemoteProtocolError("invalid_value", "It is neither a SIP URI nor a number at a provider.", "to")
        scheme, _, rest = registrar.partition(":")
        at = rest.rpartition("@")[2]
        return f"{scheme}:{to}@{at}" if to else f"{scheme}:{at}"

    async def peer_for(self, uri: str) -> UdpPeer | StreamPeer:
        """Return where requests to a URI go. A TCP connection is made if there is none.

        Names are looked up as addresses: there is no NAPTR and no SRV. Raises OSError and RemoteProtocolError.
        """
        target = SipUri.read(uri)
        if target.scheme != "sip":
            raise RemoteProtocolError("invalid_value", "Only sip: URIs can be called.", "to")
        port = target.port or DEFAULT_PORT
        found = await anyio.getaddrinfo(target.host, port, type=socket.SOCK_DGRAM)
        hosts = [str(address[0]) for *_, address in found]
        if target.host == self.domain:
            self._provider = frozenset(hosts)
        if target.transport != "tcp":
            return UdpPeer(self.send_udp, hosts[0], port)
        known = self._streams.get((hosts[0], port))
        if known is None or known.is_closed:
            reader, writer = await asyncio.open_connection(hosts[0], port)
            known = self._streams[hosts[0], port] = StreamPeer(self.receive, reader, writer, hosts[0])
            self.state.spawn(partial(self._read, known))
        return known

    async def _read(self, stream: StreamPeer) -> None:
        try:
            await stream.run()
        finally:
            stream.close()

    async def exchange(self, request: SipRequest, peer: Peer) -> SipResponse | None:
        """Send a request, and return its last response; None if none came. If this is cancelled, so is an INVITE."""
        done: asyncio.Future[SipResponse | None] = asyncio.get_running_loop().create_future()

        def arrived(response: SipResponse | None) -> None:
            is_given_up = done.cancelled()
            if not done.done() and (response is None or response.status >= 200):
                done.set_result(response)
            if response and request.method == "INVITE" and 200 <= response.status < 300:
                # Each repetition asks for another ACK.
                dialog = Dialog.of_answer(request, response, peer, request.get("contact"))
                peer.send(dialog.request("ACK", number=request.cseq[0]).encode())
                if is_given_up:
                    self.transactions.send(dialog.request("BYE"), peer, lambda _: None)

        sent = self.transactions.send(request, peer, arrived)
        try:
            return await done
        except asyncio.CancelledError:
            sent.cancel()
            raise

    def enter(self, call: InDialog) -> None:
        """Add a call, which then gets the requests within its dialog."""
        self.calls[call.dialog.key] = call
        self._called[call.dialog.peer.host] += 1

    def leave(self, call: InDialog) -> None:
        """Remove a call. Does nothing for an unknown call."""
        if self.calls.pop(call.dialog.key, None):
            self._called[call.dialog.peer.host] -= 1
            self._called += Counter()
