"""Registration at a SIP provider, so that its calls arrive here (RFC 3261, section 10)."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.sip.dialog import new_tag
from antiphon.protocols.telephony.sip.messages import Address, SipResponse
from antiphon.protocols.telephony.sip.transactions import Peer
from antiphon.server.sip.agent import SipAgent

log = logging.getLogger(__name__)
# Seconds that we ask for, the share of the granted time after which we register again, and the shortest such wait.
EXPIRES_S, RENEWED_AT, MIN_WAIT_S = 300, 0.6, 10.0
# Seconds between two packets that keep a way through NAT open.
KEEP_OPEN_S = 25.0
# Seconds until the first try after a failure, and the most.
RETRY_S, MAX_RETRY_S = 2.0, 120.0
# Seconds for the last message, when the server stops.
LEAVE_S = 2.0
_EXPIRES = re.compile(r"\d{1,9}")


@asynccontextmanager
async def registered(agent: SipAgent) -> AsyncIterator[None]:
    """Be registered at the provider while the block runs. Does nothing without `--sip-register`."""
    if not agent.settings.sip_register:
        yield
        return
    registration = _Registration(agent)
    async with anyio.create_task_group() as group:
        group.start_soon(registration.keep)
        try:
            yield
        finally:
            group.cancel_scope.cancel()
            with anyio.move_on_after(LEAVE_S, shield=True):
                await registration.leave()


class _Registration:
    """One registration. All its requests have one Call-ID, and growing numbers."""

    def __init__(self, agent: SipAgent) -> None:
        self._agent = agent
        self._call_id, self._tag, self._number = secrets.token_hex(16), new_tag(), 0
        self._peer: Peer | None = None
        self._is_away = agent.state.metrics.sip_provider_away

    async def keep(self) -> None:
        """Register, again before it expires, and after a while if it fails."""
        failures, is_logged = 0, False
        while True:
            try:
                granted_s = await self._ask(EXPIRES_S)
            except (OSError, RemoteProtocolError) as error:
                why = error.message if isinstance(error, RemoteProtocolError) else str(error)
                wait_s = min(RETRY_S * 2**failures, MAX_RETRY_S)
                log.warning("not registered at the provider, the next try is in %.0f s: %s", wait_s, why)
                failures, is_logged = failures + 1, False
                self._is_away.set(1)
                await anyio.sleep(wait_s)
                continue
            if not is_logged:
                log.info("registered at the provider for %d s", granted_s)
            failures, is_logged = 0, True
            self._is_away.set(0)
            await self._stay(max(granted_s * RENEWED_AT, MIN_WAIT_S))

    async def _stay(self, for_s: float) -> None:
        """Keep the way open. Ends early if the connection is closed."""
        while for_s > 0 and self._peer and not self._peer.is_closed:
            await anyio.sleep(min(for_s, KEEP_OPEN_S))
            for_s -= KEEP_OPEN_S
            self._peer.send(b"\r\n\r\n")

    async def leave(self) -> None:
        """Take the registration back. Failures are ignored."""
        if self._peer:
            try:
                await self._ask(0)
            except (OSError, RemoteProtocolError) as error:
                log.info("the registration was not taken back: %s", error)

    async def _ask(self, expires_s: int) -> int:
        """Register for some seconds; 0 ends it. Returns for how long. Raises OSError and RemoteProtocolError."""
        agent = self._agent
        uri = agent.uri_of("")
        peer = self._peer = await agent.peer_for(uri)
        user, _ = agent.account
        address, contact = f"<sip:{user}@{agent.domain}>", agent.contact_for(peer, user)
        self._number += 1
        _, response = await agent.ask(
            "REGISTER",
            uri,
            peer,
            own=f"{address};tag={self._tag}",
            other=address,
            call_id=self._call_id,
            number=self._number,
            contact=contact,
            headers=[("expires", str(expires_s))],
        )
        # A challenge takes another number.
        self._number += 1
        if response is None or response.status >= 300:
            shown = f"{response.status} {response.reason}" if response else "no answer"
            raise RemoteProtocolError("not_registered", shown)
        return granted_s(response, contact, expires_s)


def granted_s(response: SipResponse, contact: str, asked_s: int) -> int:
    """Return the seconds for which a registrar has registered this Contact."""
    own = Address.read(contact).uri
    listed = [Address.read(value) for value in response.all("contact")]
    found = [dict(address.params).get("expires", "") for address in listed if address.uri == own]
    for text in (*found, response.get("expires")):
        if _EXPIRES.fullmatch(text):
            return int(text)
    return asked_s
