"""The conversations of a door's telephone calls, at its hosts. See `CallHosts` (server/telephone/switchboard.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from antiphon.cluster.door.app import Door
from antiphon.cluster.door.carried_call import CarriedCall
from antiphon.cluster.door.carry import HostRefused
from antiphon.cluster.door.telephone import TelephoneClient
from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.telephony.stream import Call
from antiphon.server.credentials import Caller
from antiphon.server.telephone.switchboard import Begin
from antiphon.settings import TelephoneSettings
from antiphon.transports.leg import Leg

# When a call may be tried again, in seconds, if no host takes it.
RETRY_S = 5.0


class _Problem(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Answer(msgspec.Struct):
    """The answer of a host that has refused a session."""

    error: _Problem = msgspec.field(default_factory=_Problem)


class DoorConversation:
    """One conversation: the session of a host, and the functions of the call."""

    def __init__(self, caller: Caller, carried: CarriedCall, client: TelephoneClient) -> None:
        self.caller = caller
        self._carried, self._client = carried, client

    @property
    def id(self) -> str:
        """The session's id at the hosts."""
        return self._carried.id

    def hang_up(self) -> None:
        """End the call. Does not wait."""
        self._carried.hang_up()

    async def run(self) -> None:
        """Carry the call until its end."""
        await self._client.serve(self._carried.ended)


class AtHosts:
    """The `CallHosts` of a door. `settings`: those of the door."""

    def __init__(self, door: Door, settings: TelephoneSettings) -> None:
        self._door, self._settings = door, settings

    def check(self) -> None:
        """Raise Refused if the door has no host."""
        if not self._door.hosts.in_order():
            raise Refused("no host is known", RETRY_S)

    @asynccontextmanager
    async def open(self, caller: Caller, session: msgspec.Raw, call: Call) -> AsyncIterator[Begin]:
        """Have a session of a host for a call, see `CallHosts`."""
        client = TelephoneClient(caller.key, caller.address, session, call, self._settings.telephone_instructions)
        carried = CarriedCall(self._door, client)
        self._door.tasks.start_soon(carried.run)

        def begin(leg: Leg) -> DoorConversation:
            client.take(leg)
            return DoorConversation(caller, carried, client)

        try:
            await carried.begun()
            yield begin
        except HostRefused as refused:
            raise _error_of(refused) from None
        finally:
            carried.hang_up()


def _error_of(refused: HostRefused) -> Exception:
    """Return the error of a call that no host has taken."""
    try:
        problem = msgspec.json.decode(refused.body, type=_Answer).error
    except msgspec.DecodeError:
        problem = _Problem()
    reason = problem.message or f"the hosts answer with {refused.status}"
    if refused.status >= 500 or refused.status == 429:
        return Refused(reason, RETRY_S, by_own_limit=refused.status == 429)
    return RemoteProtocolError(problem.code or "bad_event", reason)
