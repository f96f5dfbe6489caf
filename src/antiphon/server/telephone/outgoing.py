"""Calls that this server makes, and transfers: over Twilio's REST API, and over SIP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

import httpx
import msgspec

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.stream import Call
from antiphon.server.credentials import Caller
from antiphon.server.telephone.tickets import HoldOptions
from antiphon.settings import TelephoneSettings

# Seconds for one request, and for which the other side's telephone rings.
REQUEST_S, RINGS_S = 10.0, 45
# The code of the error for what the carrier refuses, and when it cannot be reached.
REFUSED, UNREACHABLE = "carrier_refused", "carrier_unreachable"


@dataclass(frozen=True, slots=True)
class OutgoingCall:
    """A call that is to be made: the numbers, and the URL of the media stream that it is connected to."""

    called: str
    caller: str
    stream_url: str
    # The longest call in seconds; 0 for no limit.
    max_s: float = 0.0


class Dialer(Protocol):
    """One way to make calls. All methods raise RemoteProtocolError with the codes REFUSED and UNREACHABLE."""

    # The carrier's name, as in `Call.carrier`.
    carrier: str
    # The account that its streams name, "" if they name none.
    account: str

    async def dial(self, call: OutgoingCall) -> str:
        """Let the telephone of the other side ring. Returns the carrier's id of the call, before it is answered."""
        ...

    async def transfer(self, carrier_id: str, target: str) -> None:
        """Connect the other side of a call with another number or SIP URI. Its media stream ends then."""
        ...


class SipDialer(Protocol):
    """The way to call over SIP: `server/sip/calls.py`. This server holds the call itself, without a media stream."""

    async def dial(self, caller: Caller, call: Call, options: HoldOptions) -> None:
        """Call `call.called`: a SIP URI, or a number at the provider. Returns when it is answered.

        Raises Refused without room, and RemoteProtocolError: `invalid_value` for an invalid target, and REFUSED
        if the other side does not take the call.
        """
        ...


class _TwilioCall(msgspec.Struct):
    sid: str


class _TwilioError(msgspec.Struct):
    message: str = ""


class TwilioDialer:
    """Makes and transfers calls of one Twilio account. Calls nothing but `--twilio-api`."""

    carrier = "twilio"

    def __init__(self, settings: TelephoneSettings) -> None:
        self.account = settings.twilio_account
        self._auth = httpx.BasicAuth(self.account, settings.twilio_auth_token)
        self._calls = f"{settings.twilio_api}/2010-04-01/Accounts/{self.account}/Calls"

    async def dial(self, call: OutgoingCall) -> str:
        """Let the telephone of the other side ring, see Dialer."""
        twiml = f"<Response><Connect><Stream url={quoteattr(call.stream_url)}/></Connect></Response>"
        fields = {"To": call.called, "From": call.caller, "Twiml": twiml, "Timeout": str(RINGS_S)}
        if call.max_s:
            fields["TimeLimit"] = str(max(1, round(call.max_s)))
        answer = await self._post(f"{self._calls}.json", fields)
        try:
            return msgspec.json.decode(answer, type=_TwilioCall).sid
        except msgspec.DecodeError:
            raise RemoteProtocolError(REFUSED, "Twilio's answer names no call.") from None

    async def transfer(self, carrier_id: str, target: str) -> None:
        """Connect the other side of a call with another number or SIP URI, see Dialer."""
        to = f"<Sip>{escape(target)}</Sip>" if target.startswith("sip") else f"<Number>{escape(target)}</Number>"
        twiml = f"<Response><Dial>{to}</Dial></Response>"
        await self._post(f"{self._calls}/{quote(carrier_id, safe='')}.json", {"Twiml": twiml})

    async def _post(self, url: str, fields: dict[str, str]) -> bytes:
        try:
            async with httpx.AsyncClient(timeout=REQUEST_S, auth=self._auth) as http:
                answer = await http.post(url, data=fields)
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
            raise RemoteProtocolError(UNREACHABLE, f"Twilio's API cannot be reached: {problem}.") from None
        if answer.is_success:
            return answer.content
        try:
            said = msgspec.json.decode(answer.content, type=_TwilioError).message
        except msgspec.DecodeError:
            said = ""
        raise RemoteProtocolError(REFUSED, f"Twilio has refused this: {said or answer.status_code}.")


def may_dial(settings: TelephoneSettings, target: str) -> bool:
    """Return whether `--telephone-dial` allows a number or SIP URI."""
    allowed = (beginning.strip() for beginning in settings.telephone_dial.split(","))
    return any(beginning == "*" or (beginning and target.startswith(beginning)) for beginning in allowed)
