"""Incoming calls that an application accepts or rejects, as OpenAI's SIP has it: `realtime.call.incoming`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import anyio
import httpx
import msgspec

from antiphon.errors import AntiphonError
from antiphon.protocols.opening import NULL
from antiphon.protocols.telephony.stream import Call
from antiphon.protocols.wire import random_id
from antiphon.server.credentials import Caller
from antiphon.settings import TelephoneSettings

log = logging.getLogger(__name__)
# Seconds for one request to the application, and until the next one after a failure. The latter doubles.
REQUEST_S, RETRY_S = 5.0, 0.5
# Seconds for which a request that accepts a call waits until its session has begun.
BEGIN_S = 10.0
# The SIP status of a rejection that names none: OpenAI's default.
DECLINED = 603
# The SIP status of a call that was not accepted in time.
NO_ANSWER = 480
Notify = Callable[[], Coroutine[Any, Any, None]]


class CallRejected(AntiphonError):
    """An application has rejected a call, or has not accepted it in time. `status` is a SIP status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the application has rejected the call ({status})")
        self.status = status


class SipHeader(msgspec.Struct):
    """A header of the INVITE of a call. A call without SIP has `From`, `To`, `Call-ID` and its parameters."""

    # The name of the header.
    name: str
    # Its value.
    value: str


class IncomingData(msgspec.Struct):
    """The call that an `IncomingEvent` is about."""

    # The id with which the call is accepted or rejected.
    call_id: str
    # The headers of the INVITE, in order.
    sip_headers: list[SipHeader]


class IncomingEvent(msgspec.Struct, kw_only=True):
    """The webhook event for a call that waits for an application."""

    # The id of the event.
    id: str
    # The type of the object.
    object: str = "event"
    # Unix time.
    created_at: int
    # The type of the event.
    type: str = "realtime.call.incoming"
    # The call.
    data: IncomingData


class OfferedCall:
    """A call that waits for a decision. `call` and `caller` are those of the call."""

    def __init__(self, call: Call, caller: Caller) -> None:
        self.call, self.caller = call, caller
        # Set when the call was accepted or rejected, and when its session has begun.
        self.decided, self.begun = anyio.Event(), anyio.Event()
        self.session: msgspec.Raw = NULL
        self.status = 0

    async def accept(self, session: msgspec.Raw) -> None:
        """Begin the call with a session, which has been checked. Returns when the session has begun."""
        self.session = session
        self.decided.set()
        with anyio.move_on_after(BEGIN_S):
            await self.begun.wait()

    def reject(self, status: int = DECLINED) -> None:
        """Reject the call with a SIP status. Returns at once."""
        self.status = status
        self.decided.set()


class Offers:
    """The calls that wait for the application of `--telephone-webhook`, by their id.

    `spawn` starts a task that outlives the call: an application may accept a call before it has answered the event.
    """

    def __init__(self, settings: TelephoneSettings, spawn: Callable[[Notify], None]) -> None:
        self._settings = settings
        self._spawn = spawn
        self._waiting: dict[str, OfferedCall] = {}

    @property
    def are_asked(self) -> bool:
        """Whether an application decides about calls."""
        return bool(self._settings.telephone_webhook)

    def find(self, id: str, caller: Caller) -> OfferedCall | None:
        """Return the call that waits under this id and belongs to the caller's key; None if there is none."""
        offered = self._waiting.get(id)
        return offered if offered and not offered.decided.is_set() and offered.caller.key == caller.key else None

    async def decide(self, id: str, call: Call, caller: Caller, headers: Sequence[SipHeader] = ()) -> OfferedCall:
        """Ask the application, and return the call when it is accepted. Set `begun` then when its session has begun.

        `headers`: those of the INVITE, if there is one. Raises CallRejected.
        """
        offered = self._waiting[id] = OfferedCall(call, caller)
        self._spawn(partial(self._notify, IncomingData(id, list(headers) or headers_of(call)), offered))
        try:
            with anyio.move_on_after(self._settings.telephone_ring_s):
                await offered.decided.wait()
            is_decided = offered.decided.is_set()
        finally:
            del self._waiting[id]
            offered.decided.set()
        if not is_decided or offered.status:
            raise CallRejected(offered.status or NO_ANSWER)
        return offered

    async def _notify(self, data: IncomingData, offered: OfferedCall) -> None:
        """Send the event until the application has taken it, or the call no longer waits. Failures are logged."""
        event_id, retry_s, secret = random_id("evt_"), RETRY_S, self._settings.telephone_webhook_secret
        async with httpx.AsyncClient(timeout=REQUEST_S) as http:
            while not offered.decided.is_set():
                now = int(time.time())
                body = msgspec.json.encode(IncomingEvent(id=event_id, created_at=now, data=data))
                signed = signature_headers(secret, event_id, now, body)
                try:
                    answer = await http.post(self._settings.telephone_webhook, content=body, headers=signed)
                    if answer.is_success:
                        return
                    problem = f"it answered {answer.status_code}"
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    problem = str(error) or type(error).__name__
                log.warning("the application of --telephone-webhook has not taken a call: %s", problem)
                with anyio.move_on_after(retry_s):
                    await offered.decided.wait()
                retry_s *= 2


def headers_of(call: Call) -> list[SipHeader]:
    """Return the headers that a call without SIP has."""
    known = {"From": call.caller, "To": call.called, "Call-ID": call.id, **call.parameters}
    return [SipHeader(name, value) for name, value in known.items() if value]


def signature_headers(secret: str, id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a webhook event, with its signature as OpenAI makes it (Standard Webhooks).

    `secret`: `whsec_` and base64; without one, the event is not signed.
    """
    headers = {"content-type": "application/json", "webhook-id": id, "webhook-timestamp": str(timestamp)}
    if secret:
        key = base64.b64decode(secret.removeprefix("whsec_") + "==")
        signed = hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
    return headers
