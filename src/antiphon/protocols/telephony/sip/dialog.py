"""SIP dialogs (RFC 3261, section 12): what both sides of a call know about it, and the requests within it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.protocols.telephony.sip.messages import Address, SipMessage, SipRequest, SipResponse, SipUri, bad_sip
from antiphon.protocols.telephony.sip.transactions import Peer, new_branch

ALLOWED = "INVITE, ACK, CANCEL, BYE, OPTIONS, INFO, NOTIFY"
MAX_FORWARDS = "70"


def new_tag() -> str:
    """Return a tag, which is also what proves that a request belongs to a call."""
    return secrets.token_hex(8)


@dataclass(slots=True)
class Dialog:
    """One dialog: what is needed for requests within a call, in both directions."""

    # The Call-ID.
    call_id: str
    # The value of From in our requests, with our tag.
    own: str
    # The value of From in their requests, with their tag.
    other: str
    # The URI of our requests.
    target: str
    # The proxies that our requests pass.
    routes: tuple[str, ...]
    # Where our requests are sent: to where the last request of the other side came from, which also works behind NAT.
    peer: Peer
    # Our own Contact.
    contact: str
    # The number of our last request.
    own_number: int
    # The number of their last request; -1 if there was none.
    other_number: int

    @classmethod
    def of_invite(cls, invite: SipRequest, tag: str, peer: Peer, contact: str) -> Dialog:
        """Return the dialog of an INVITE of the other side. Raises RemoteProtocolError without a Contact."""
        target = _target(invite)
        own, routes = f"{invite.get('to')};tag={tag}", tuple(invite.all("record-route"))
        return cls(invite.call_id, own, invite.get("from"), target, routes, peer, contact, 0, invite.cseq[0])

    @classmethod
    def of_answer(cls, invite: SipRequest, response: SipResponse, peer: Peer, contact: str) -> Dialog:
        """Return the dialog of an INVITE of ours, from its 2xx. Raises RemoteProtocolError without a Contact."""
        routes = tuple(reversed(response.all("record-route")))
        own, number = invite.get("from"), invite.cseq[0]
        return cls(invite.call_id, own, response.get("to"), _target(response), routes, peer, contact, number, -1)

    @property
    def key(self) -> tuple[str, str, str]:
        """The id of the call, our tag, and theirs."""
        return self.call_id, Address.read(self.own).tag, Address.read(self.other).tag

    def admits(self, request: SipRequest) -> bool:
        """Return whether a request of the other side is newer than all before, and remember its number."""
        number = request.cseq[0]
        if number <= self.other_number:
            return False
        self.other_number = number
        return True

    def moved(self, request: SipRequest) -> None:
        """Take the new Contact of a re-INVITE."""
        if request.get("contact"):
            self.target = _target(request)

    def request(
        self, method: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b"", number: int | None = None
    ) -> SipRequest:
        """Return a request within the dialog, with the next number. `number`: that of the INVITE, for its ACK."""
        if number is None:
            self.own_number += 1
            number = self.own_number
        return out_of_dialog(
            method,
            self.target,
            own=self.own,
            other=self.other,
            call_id=self.call_id,
            number=number,
            contact=self.contact,
            peer=self.peer,
            headers=[*(("route", route) for route in self.routes), *headers],
            body=body,
        )


def out_of_dialog(
    method: str,
    uri: str,
    *,
    own: str,
    other: str,
    call_id: str,
    number: int,
    contact: str,
    peer: Peer,
    headers: Sequence[tuple[str, str]] = (),
    body: bytes = b"",
) -> SipRequest:
    """Return a request with these values of From, To, Call-ID, CSeq and Contact, and a Via of our own."""
    at = SipUri.read(Address.read(contact).uri)
    host = f"[{at.host}]" if ":" in at.host else at.host
    return SipRequest(
        method=method,
        uri=uri,
        headers=[
            ("via", f"SIP/2.0/{peer.protocol} {host}:{at.port};branch={new_branch()};rport"),
            ("max-forwards", MAX_FORWARDS),
            ("from", own),
            ("to", other),
            ("call-id", call_id),
            ("cseq", f"{number} {method}"),
            ("contact", contact),
            ("user-agent", "antiphon"),
            *headers,
        ],
        body=body,
    )


def _target(message: SipMessage) -> str:
    contacts = message.all("contact")
    if not contacts:
        raise bad_sip("A message has no contact.")
    return Address.read(contacts[0]).uri
