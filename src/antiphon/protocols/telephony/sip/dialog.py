"""SIP dialogs (RFC 3261, section 12): what both sides of a call know about it, and the requests within it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.protocols.telephony.sip.messages import Address, Request, Response, SipMessage, SipUri, bad_sip
from antiphon.protocols.telephony.sip.transactions import Peer, new_branch

ALLOWED = "INVITE, ACK, CANCEL, BYE, OPTIONS, INFO, NOTIFY"
MAX_FORWARDS = "70"


def new_tag() -> str:
    """Return a tag, which is also what proves that a request belongs to a call."""
    return secrets.token_hex(8)


@dataclass(slots=True)
class Dialog:
    """One dialog, from our side.

    - `own`, `other`: the values of From in our requests and of From in theirs, with the tags.
    - `target`: the URI that our requests have. `routes`: the proxies that they pass.
    - `peer`: where they are sent: to where the other side's last request came from, which also works behind NAT.
    - `contact`: our own URI.
    """

    call_id: str
    own: str
    other: str
    target: str
    routes: tuple[str, ...]
    peer: Peer
    contact: str
    own_number: int
    other_number: int

    @classmethod
    def of_invite(cls, invite: Request, tag: str, peer: Peer, contact: str) -> Dialog:
        """Return the dialog of an INVITE of the other side. Raises RemoteProtocolError without a Contact."""
        target = _target(invite)
        own, routes = f"{invite.get('to')};tag={tag}", tuple(invite.all("record-route"))
        return cls(invite.call_id, own, invite.get("from"), target, routes, peer, contact, 0, invite.cseq[0])

    @classmethod
    def of_answer(cls, invite: Request, response: Response, peer: Peer, contact: str) -> Dialog:
        """Return the dialog of an INVITE of ours, from its 2xx. Raises RemoteProtocolError without a Contact."""
        routes = tuple(reversed(response.all("record-route")))
        own, number = invite.get("from"), invite.cseq[0]
        return cls(invite.call_id, own, response.get("to"), _target(response), routes, peer, contact, number, -1)

    @property
    def key(self) -> tuple[str, str, str]:
        """The id of the call, our tag, and theirs."""
        return self.call_id, Address.read(self.own).tag, Address.read(self.other).tag

    def admits(self, request: Request) -> bool:
        """Return whether a request of the other side is newer than all before, and remember its number."""
        number = request.cseq[0]
        if number <= self.other_number:
            return False
        self.other_number = number
        return True

    def moved(self, request: Request) -> None:
        """Take the new Contact of a re-INVITE."""
        if request.get("contact"):
            self.target = _target(request)

    def request(
        self, method: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b"", number: int | None = None
    ) -> Request:
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
) -> Request:
    """Return a request with these values of From, To, Call-ID, CSeq and Contact, and a Via of our own."""
    at = SipUri.read(Address.read(contact).uri)
    host = f"[{at.host}]" if ":" in at.host else at.host
    return Request(
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
