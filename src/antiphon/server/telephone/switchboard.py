"""What the telephone of one server keeps between requests: announced calls, calls that wait, and ways to call out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.stream import Call
from antiphon.server.credentials import Caller
from antiphon.server.telephone.offers import Notify, Offers
from antiphon.server.telephone.outgoing import Dialer, SipDialer, TwilioDialer, may_dial
from antiphon.server.telephone.tickets import ExpectedCalls
from antiphon.settings import TelephoneSettings
from antiphon.transports.leg import Leg


class Conversation(Protocol):
    """The conversation of one call, at this server or at a host of this door."""

    @property
    def id(self) -> str:
        """The id of its session on the wire."""
        ...

    @property
    def caller(self) -> Caller:
        """The caller that the call belongs to."""
        ...

    def hang_up(self) -> None:
        """Let the session finish the audio that it has received, then end. Returns at once."""
        ...

    async def run(self) -> None:
        """Serve the conversation until either side ends it. Does not raise."""
        ...


# Begins the conversation of a call when it has a leg.
Begin = Callable[[Leg], Conversation]


class CallHosts(Protocol):
    """The hosts that have the conversations of a door's calls: `server/telephone/at_hosts.py`."""

    def check(self) -> None:
        """Raise Refused if no host is known."""
        ...

    def open(self, caller: Caller, session: msgspec.Raw, call: Call) -> AbstractAsyncContextManager[Begin]:
        """Have a session for a call while the block runs. `session` is null for that of the caller's key.

        Raises Refused without a host that has room, and RemoteProtocolError for a key or a session that is not valid.
        """
        ...


class Switchboard:
    """The telephone of one server. `spawn` starts a task that outlives a call.

    - `expected`: calls whose media stream is about to open.
    - `offers`: incoming calls that wait for an application.
    - `dialers`: the carriers that call out, by their names, the preferred one first.
    - `sip`: calls out over SIP; None without `--sip`.
    - `hosts`: the hosts that have the conversations of calls; None if this server has them.
    """

    def __init__(self, settings: TelephoneSettings, spawn: Callable[[Notify], None]) -> None:
        self._settings = settings
        self.expected = ExpectedCalls()
        self.offers = Offers(settings, spawn)
        self.dialers: dict[str, Dialer] = {}
        self.sip: SipDialer | None = None
        self.hosts: CallHosts | None = None
        if settings.twilio_account and settings.twilio_auth_token:
            self.dialers["twilio"] = TwilioDialer(settings)

    def dialer(self, via: str) -> Dialer:
        """Return the carrier of this name, the preferred one for "". Raises RemoteProtocolError if there is none."""
        name = via or next(iter(self.dialers), "")
        if name not in self.dialers:
            have = ", ".join([*self.dialers, *(["sip"] if self.sip else [])])
            have = have or "none: set --sip, or --twilio-account and ANTIPHON_TWILIO_AUTH_TOKEN"
            raise RemoteProtocolError("unsupported_parameter", f"This server can call over {have}.", "via")
        return self.dialers[name]

    def check_target(self, target: str, param: str) -> None:
        """Raise RemoteProtocolError (`number_not_allowed`) for a number that `--telephone-dial` does not allow."""
        if not may_dial(self._settings, target):
            message = f"The number {target} is not among those of --telephone-dial."
            raise RemoteProtocolError("number_not_allowed", message, param)

    @property
    def transfers(self) -> dict[str, str]:
        """The numbers and SIP URIs of `--telephone-transfer`, by their names."""
        pairs = (entry.partition("=") for entry in self._settings.telephone_transfer)
        return {name.strip(): target.strip() for name, _, target in pairs}

    def transfer_of(self, call: Call) -> Callable[[str], Awaitable[None]] | None:
        """Return what transfers a call to a number or SIP URI; None if its carrier cannot."""
        dialer = self.dialers.get(call.carrier)

        async def transfer(target: str) -> None:
            assert dialer
            await dialer.transfer(call.id, target)

        return transfer if dialer else None
