"""SIP transactions (RFC 3261, section 17): messages are repeated until answered, and repetitions are absorbed.

One simplification: the last response to an INVITE is repeated until its ACK comes, whatever its status. The RFC has the
same timers for a success, but gives them to the layer above.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

from antiphon.protocols.telephony.sip.messages import BRANCH_PREFIX, SipRequest, SipResponse, answer

# Seconds until a message is sent again for the first time, the longest wait between two times, and the time after which
# the other side counts as gone (T1, T2 and 64 T1 of the RFC).
T1_S, T2_S, GIVE_UP_S = 0.5, 4.0, 32.0
# Most transactions that are known. Beyond it, requests are answered without one, or dropped.
MAX_TRANSACTIONS = 10_000


class Timer(Protocol):
    """A call that is due later, as `asyncio.TimerHandle`."""

    def cancel(self) -> None: ...


class Peer(Protocol):
    """Where messages of one other side go: an address over UDP, or a TCP connection."""

    # UDP or TCP.
    protocol: str
    # Whether what is sent arrives, so that nothing has to be sent again.
    is_reliable: bool
    # The address of the other side.
    host: str
    port: int

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        ...

    def send(self, data: bytes) -> None:
        """Send one message. Does not wait, and does not raise."""
        ...


Later = Callable[[float, Callable[[], None]], Timer]
# Gets a response, or None if no last response came.
OnResponse = Callable[[SipResponse | None], None]


class _Repeats:
    """Sends a message at once, and then again in growing intervals, until `stop` or GIVE_UP_S."""

    def __init__(self, later: Later, peer: Peer, data: bytes, max_wait_s: float, give_up: Callable[[], None]) -> None:
        self._later, self._peer, self._data, self._give_up = later, peer, data, give_up
        self._max_wait_s = max_wait_s
        self._left_s = GIVE_UP_S
        self._wait_s = GIVE_UP_S if peer.is_reliable else T1_S
        peer.send(data)
        self._timer = later(self._wait_s, self._again)

    def _again(self) -> None:
        self._left_s -= self._wait_s
        if self._left_s <= 0:
            self._give_up()
            return
        self._peer.send(self._data)
        self._wait_s = min(2 * self._wait_s, self._max_wait_s, self._left_s)
        self._timer = self._later(self._wait_s, self._again)

    def stop(self) -> None:
        self._timer.cancel()


class ServerTransaction:
    """A request of the other side, and its responses. `Transactions.take` makes it.

    - `acknowledged`: called with the ACK to the last response of an INVITE, once.
    - `unacknowledged`: called if no ACK came.
    - `cancelled`: called for a CANCEL that comes before the last response.
    """

    def __init__(self, layer: Transactions, request: SipRequest, peer: Peer) -> None:
        self.request, self.peer = request, peer
        self.acknowledged: Callable[[SipRequest], None] = lambda _: None
        self.unacknowledged: Callable[[], None] = lambda: None
        self.cancelled: Callable[[], None] = lambda: None
        self._layer = layer
        self._last: bytes = b""
        self._repeats: _Repeats | None = None
        # Whether the last response was sent.
        self.is_answered = False
        self._is_acknowledged = False

    def respond(self, response: SipResponse) -> None:
        """Send a response. Nothing is sent after the last one, whose status is 200 or more."""
        if self.is_answered:
            return
        self._last = response.encode()
        self.is_answered = response.status >= 200
        if self.is_answered and self.request.method == "INVITE":
            self._repeats = _Repeats(self._layer.later, self.peer, self._last, T2_S, self._not_acknowledged)
            return
        self.peer.send(self._last)
        if self.is_answered:
            self._layer.later(0 if self.peer.is_reliable else GIVE_UP_S, self._forget)

    def repeated(self) -> None:
        """Send the last response again, because the request has come again."""
        if self._last and not self._is_acknowledged:
            self.peer.send(self._last)

    def ack(self, request: SipRequest) -> None:
        """Take the ACK: nothing has to be repeated any more."""
        if self._repeats and not self._is_acknowledged:
            self._is_acknowledged = True
            self._repeats.stop()
            self._layer.later(GIVE_UP_S, self._forget)
            self.acknowledged(request)

    def _not_acknowledged(self) -> None:
        self._forget()
        self.unacknowledged()

    def _forget(self) -> None:
        self._layer.forget(self)


class ClientTransaction:
    """A request of ours. `Transactions.send` makes it."""

    def __init__(
        self, layer: Transactions, request: SipRequest, peer: Peer, on_response: Callable[[SipResponse | None], None]
    ) -> None:
        self.request, self.peer = request, peer
        self._layer, self._on_response = layer, on_response
        self._is_invite = request.method == "INVITE"
        self._is_done = False
        wait_s = GIVE_UP_S if self._is_invite else T2_S
        self._repeats = _Repeats(layer.later, peer, request.encode(), wait_s, self._timed_out)

    def take(self, response: SipResponse) -> None:
        """Handle a response. The last response of an INVITE may come again, and is passed on again if it is a 2xx."""
        if self._is_invite and response.status >= 300:
            self.peer.send(self._ack(response).encode())
        if self._is_done and not (self._is_invite and response.status < 300):
            return
        if response.status >= 200 or self._is_invite:
            self._repeats.stop()
        if response.status >= 200 and not self._is_done:
            self._is_done = True
            self._layer.later(GIVE_UP_S, self._forget)
        self._on_response(response)

    def cancel(self) -> None:
        """Send a CANCEL for an INVITE that has no last response."""
        if self._is_invite and not self._is_done:
            kept = [(n, v) for n, v in self.request.headers if n in ("via", "from", "to", "call-id", "route")]
            cancel = SipRequest(method="CANCEL", uri=self.request.uri, headers=kept)
            cancel.add("cseq", f"{self.request.cseq[0]} CANCEL")
            cancel.add("max-forwards", "70")
            self._layer.send(cancel, self.peer, lambda _: None)

    def _ack(self, response: SipResponse) -> SipRequest:
        kept = [(n, v) for n, v in self.request.headers if n in ("via", "from", "call-id", "route")]
        headers = [*kept, ("to", response.get("to")), ("cseq", f"{self.request.cseq[0]} ACK"), ("max-forwards", "70")]
        return SipRequest(method="ACK", uri=self.request.uri, headers=headers)

    def _timed_out(self) -> None:
        self._forget()
        if not self._is_done:
            self._is_done = True
            self._on_response(None)

    def _forget(self) -> None:
        self._layer.forget(self)


class Transactions:
    """All transactions of one server. `later` calls a function after some seconds, as `loop.call_later`."""

    def __init__(self, later: Later) -> None:
        self.later = later
        self._server: dict[tuple[str, str, str], ServerTransaction] = {}
        self._client: dict[tuple[str, str], ClientTransaction] = {}
        # INVITEs by what their ACK shows: the id of the call, the tag of the caller, and the number of the CSeq.
        self._invites: dict[tuple[str, str, int], ServerTransaction] = {}

    @property
    def is_full(self) -> bool:
        """Whether no more transactions are begun by others."""
        return len(self._server) >= MAX_TRANSACTIONS

    def knows(self, request: SipRequest) -> bool:
        """Return whether a request has come before."""
        return (*request.via.key, request.method) in self._server

    def take(self, request: SipRequest, peer: Peer) -> ServerTransaction | None:
        """Return the transaction that a request begins.

        None for a request that needs nothing more: one that came again, an ACK and a CANCEL. Other requests beyond
        MAX_TRANSACTIONS are dropped.
        """
        key = (*request.via.key, request.method)
        if request.method == "ACK":
            if invite := self._invites.get((request.call_id, request.from_tag, request.cseq[0])):
                invite.ack(request)
            return None
        if known := self._server.get(key):
            known.repeated()
            return None
        if request.method == "CANCEL":
            invite = self._server.get((*request.via.key, "INVITE"))
            peer.send(answer(request, 200 if invite else 481, tag=secrets.token_hex(4)).encode())
            if invite and not invite.is_answered:
                invite.cancelled()
            return None
        if self.is_full:
            return None
        begun = self._server[key] = ServerTransaction(self, request, peer)
        if request.method == "INVITE":
            self._invites[request.call_id, request.from_tag, request.cseq[0]] = begun
        return begun

    def take_response(self, response: SipResponse) -> None:
        """Pass a response to the request of ours that it answers. Others are dropped."""
        if sent := self._client.get((response.via.branch, response.cseq[1])):
            sent.take(response)

    def send(
        self, request: SipRequest, peer: Peer, on_response: Callable[[SipResponse | None], None]
    ) -> ClientTransaction:
        """Send a request whose Via has a branch of `new_branch`.

        `on_response` is called with each response that is not a repetition (a 2xx to an INVITE: each time, since it
        asks for another ACK), and with None if no last response came.
        """
        sent = ClientTransaction(self, request, peer, on_response)
        self._client[request.via.branch, request.method] = sent
        return sent

    def forget(self, ended: ServerTransaction | ClientTransaction) -> None:
        """Drop a transaction that has ended."""
        request = ended.request
        if isinstance(ended, ClientTransaction):
            self._client.pop((request.via.branch, request.method), None)
            return
        self._server.pop((*request.via.key, request.method), None)
        self._invites.pop((request.call_id, request.from_tag, request.cseq[0]), None)


def new_branch() -> str:
    """Return the name of a new transaction."""
    return BRANCH_PREFIX + secrets.token_hex(10)
