"""One call over SIP: the requests within its dialog, in both directions."""

from __future__ import annotations

import logging
import re
import secrets

import anyio

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.sip import sdp
from antiphon.protocols.telephony.sip.dialog import ALLOWED, Dialog
from antiphon.protocols.telephony.sip.messages import Address, SipRequest, SipUri, answer
from antiphon.protocols.telephony.sip.sdp import Agreed, Crypto, Description
from antiphon.protocols.telephony.sip.transactions import ServerTransaction
from antiphon.server.sip.agent import SipAgent
from antiphon.server.telephone.outgoing import REFUSED
from antiphon.transports.rtp import RtpLeg, RtpPort

log = logging.getLogger(__name__)
# Seconds in which the other side has to answer the end of a call. Our side has ended by then.
BYE_S = 2.0
# Seconds in which the target of a transfer has to answer.
TRANSFER_S = 60.0
SDP = ("content-type", "application/sdp")
# Keys in an INFO: a body with `Signal=5`, or with the key alone.
_RELAYED_KEY = re.compile(r"\s*Signal\s*=\s*([0-9A-D*#])\s*", re.IGNORECASE)
_FRAGMENT = re.compile(r"SIP/2\.0 (\d{3})(?: ([^\r\n]*))?")


class SipCall:
    """One call. It is the signalling of its leg, which is None until the call is answered.

    `own`: our address and port for audio. `wanted`: the codecs that we may agree to, best first.
    """

    def __init__(self, agent: SipAgent, dialog: Dialog, port: RtpPort, own: str) -> None:
        self.dialog = dialog
        self.leg: RtpLeg | None = None
        self.agreed: Agreed | None = None
        self.keys: Crypto | None = None
        self._agent, self._port, self._own = agent, port, (own, port.number)
        self._version = secrets.randbits(20) << 8
        self._is_over = False
        # How a transfer ends: the status and the reason of the target's response.
        self._transferred: tuple[int, str] | None = None
        self._notified = anyio.Event()

    # --- what is agreed -----------------------------------------------------------------------------------------------

    def agree(self, theirs: Description, codecs: tuple[str, ...]) -> bytes | None:
        """Return the answer to an offer; None if there is no common codec, or no common key."""
        agreed = sdp.agree(theirs, codecs)
        keys = own_keys(theirs, self.keys) if self._agent.has_srtp else None
        if agreed is None or (theirs.is_secure and keys is None):
            return None
        self.agreed, self.keys = agreed, keys
        self._version += 1
        return sdp.answer(theirs, agreed, self._own, self._version, keys)

    def offer(self, codecs: tuple[str, ...]) -> bytes:
        """Return an offer of these codecs."""
        self._version += 1
        return sdp.offer(self._own, self._version, codecs)

    # --- Signalling: called by the leg -------------------------------------------------------------------------------

    async def hang_up(self, reason: str) -> None:
        if self._is_over:
            return
        self.over()
        # Our name for the reason, for those who read the traces of the other side (RFC 3326).
        bye = self.dialog.request("BYE", [("reason", f'SIP;cause=200;text="{reason}"')])
        with anyio.move_on_after(BYE_S, shield=True):
            await self._agent.exchange(bye, self.dialog.peer)

    async def transfer(self, target: str) -> None:
        self._notified, self._transferred = anyio.Event(), None
        if ":" not in target:
            domain = self._agent.domain or SipUri.read(Address.read(self.dialog.other).uri).host
            target = f"sip:{target}@{domain}"
        request = self.dialog.request("REFER", [("refer-to", f"<{target}>"), ("referred-by", self.dialog.contact)])
        response = await self._agent.exchange(request, self.dialog.peer)
        if response is None or response.status >= 300:
            shown = "no answer" if response is None else f"{response.status} {response.reason}"
            raise RemoteProtocolError(REFUSED, f"not transferred: {shown}")
        with anyio.move_on_after(TRANSFER_S):
            await self._notified.wait()
        if self._transferred is None:
            raise RemoteProtocolError(REFUSED, "not transferred: nothing is known of the target")
        status, reason = self._transferred
        if status >= 300:
            raise RemoteProtocolError(REFUSED, f"not transferred: {status} {reason}")

    @property
    def is_open(self) -> bool:
        """Whether the call goes on for the other side."""
        return not self._is_over and self.dialog.key in self._agent.calls

    def over(self) -> None:
        """The call has ended for the other side. Requests of it are answered with 481 from now on."""
        self._is_over = True
        self._agent.leave(self)

    # --- InDialog: called by the agent --------------------------------------------------------------------------------

    def take(self, transaction: ServerTransaction) -> None:
        request = transaction.request
        if transaction.peer.host == self.dialog.peer.host:
            # Its port, or its connection, may be another one by now.
            self.dialog.peer = transaction.peer
        match request.method:
            case "BYE":
                self._respond(transaction, 200)
                self.over()
                if self.leg:
                    self.leg.end("transfer" if self._transferred else "caller_hung_up")
            case "INVITE":
                self._change(transaction)
            case "INFO":
                self._take_info(transaction)
            case "NOTIFY":
                self._respond(transaction, 200)
                self._take_notice(request)
            case "OPTIONS":
                self._respond(transaction, 200, ("allow", ALLOWED))
            case "REFER":
                # The caller must not choose whom this server calls.
                self._respond(transaction, 603)
            case _:
                self._respond(transaction, 405, ("allow", ALLOWED))

    def _respond(
        self, transaction: ServerTransaction, status: int, *headers: tuple[str, str], body: bytes = b""
    ) -> None:
        transaction.respond(answer(transaction.request, status, headers=headers, body=body))

    def _change(self, transaction: ServerTransaction) -> None:
        """Answer a re-INVITE: hold, resume, or another address for the audio. The codec stays.

        Without an offer, ours is the codec of the call, and the answer is in the ACK.
        """
        request, agreed, leg = transaction.request, self.agreed, self.leg
        if agreed is None or leg is None:
            self._respond(transaction, 500, ("retry-after", "1"))
            return
        headers = ("contact", self.dialog.contact), ("allow", ALLOWED), SDP
        try:
            self.dialog.moved(request)
            if not request.body:
                transaction.acknowledged = self._take_answer
                self._respond(transaction, 200, *headers, body=self.offer((agreed.codec,)))
                return
            theirs = sdp.read(request.body)
            body = self.agree(theirs, (agreed.codec,))
        except RemoteProtocolError as error:
            log.info("a change of a call is refused: %s", error.message)
            body = None
        if body is None or self.agreed is None:
            self._respond(transaction, 488)
            return
        leg.agree(self.agreed, theirs, self.keys)
        self._respond(transaction, 200, *headers, body=body)

    def _take_answer(self, ack: SipRequest) -> None:
        """Take the answer to an offer of ours in a re-INVITE. An answer that cannot be read changes nothing."""
        if self.agreed is None or self.leg is None:
            return
        try:
            theirs = sdp.read(ack.body)
        except RemoteProtocolError as error:
            log.info("an answer within a call is ignored: %s", error.message)
            return
        if agreed := sdp.agree(theirs, (self.agreed.codec,)):
            self.agreed = agreed
            self.leg.agree(agreed, theirs)

    def _take_info(self, transaction: ServerTransaction) -> None:
        request = transaction.request
        kind = request.get("content-type").partition(";")[0].strip().lower()
        text = request.body[:200].decode("latin-1")
        key = ""
        if kind == "application/dtmf-relay" and (found := _RELAYED_KEY.match(text)):
            key = found[1].upper()
        elif kind == "application/dtmf":
            key = text.strip().upper()
        elif request.body:
            self._respond(transaction, 415, ("accept", "application/dtmf-relay, application/dtmf"))
            return
        if key and self.leg:
            self.leg.press(key)
        self._respond(transaction, 200)

    def _take_notice(self, request: SipRequest) -> None:
        """Take a report about a transfer: the status of the call to the target."""
        found = _FRAGMENT.match(request.body[:200].decode("latin-1"))
        if request.get("event").partition(";")[0].strip().lower() == "refer" and found and int(found[1]) >= 200:
            self._transferred = int(found[1]), found[2] or ""
            self._notified.set()


def own_keys(theirs: Description, before: Crypto | None) -> Crypto | None:
    """Return our keys for an offer of SRTP: those before if they fit, else new ones; None without a common suite."""
    if not theirs.crypto:
        return None
    best = min(theirs.crypto, key=lambda c: sdp.SUITES.index(c.suite))
    if before and before.suite == best.suite:
        return Crypto(best.tag, best.suite, before.key)
    return Crypto(best.tag, best.suite, secrets.token_bytes(sdp.KEY_BYTES))
