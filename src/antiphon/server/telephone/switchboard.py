"""What the telephone of one server keeps between requests: announced calls, calls that wait, and ways to call out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.stream import Call
from antiphon.server.telephone.offers import Notify, Offers
from antiphon.server.telephone.outgoing import Dialer, SipDialer, TwilioDialer, may_dial
from antiphon.server.telephone.tickets import ExpectedCalls
from antiphon.settings import TelephoneSettings


class Switchboard:
    """The telephone of one server. `spawn` starts a task that outlives a call.

    - `expected`: calls whose media stream is about to open.
    - `offers`: incoming calls that wait for an application.
    - `dialers`: the carriers that call out, by their names, the preferred one first.
    - `sip`: calls out over SIP; None without `--sip`.
    """

    def __init__(self, settings: TelephoneSettings, spawn: Callable[[Notify], None]) -> None:
        self._settings = settings
        self.expected = ExpectedCalls()
        self.offers = Offers(settings, spawn)
        self.dialers: dict[str, Dialer] = {}
        self.sip: SipDialer | None = None
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
