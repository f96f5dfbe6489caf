"""A call of a door, from its opening at a host until its end."""

from __future__ import annotations

import logging

import anyio

from antiphon.cluster.door.app import Door
from antiphon.cluster.door.call import CallClient
from antiphon.cluster.door.carry import Carrier, HostRefused

log = logging.getLogger(__name__)
# Timeout, in seconds, for a host to make the requested session.
BEGIN_S = 10.0


class CarriedCall:
    """One call. Its creator runs `run` as a task of the door, awaits `begun`, and calls `hang_up` in any case.

    `ended` is set when no host has the session of the call anymore.
    """

    def __init__(self, door: Door, client: CallClient) -> None:
        self.ended = anyio.Event()
        self._door, self._client = door, client
        self._scope = anyio.CancelScope()
        self._refused: HostRefused | None = None

    @property
    def id(self) -> str:
        """The id of the session at the hosts; "" until a host has made it."""
        return self._client.session_id

    async def run(self) -> None:
        """Relay the call until its end. Does not raise."""
        door, client = self._door, self._client
        try:
            with self._scope, door.one_more():
                await Carrier(client, door.hosts, door.metrics, door.grace_s, door.warn).run()
        except HostRefused as refused:
            self._refused = refused
        except Exception:
            # The boundary of the call: any failure in it ends only this call.
            log.exception("call %s failed", client.session_id)
        finally:
            client.decided.set()
            self.ended.set()

    async def begun(self) -> None:
        """Wait until a host has made the session.

        Raises HostRefused if no host accepts it, and RemoteProtocolError if the session is not valid.
        """
        with anyio.move_on_after(BEGIN_S):
            await self._client.decided.wait()
        if self._refused:
            raise self._refused
        if self._client.refusal:
            raise self._client.refusal
        if not self.id:
            raise HostRefused(503, {"retry-after": "5"}, b"")

    def hang_up(self) -> None:
        """End the session if a host has made it, and do not wait for a host that has not made it yet."""
        self._client.hang_up()
        if not self.id:
            self._scope.cancel()
