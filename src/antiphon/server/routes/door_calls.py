"""POST /v1/realtime/calls at a door. The door answers the call, and a host has its session (`cluster/door/call.py`)."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from antiphon.cluster.door.app import Door, refused_response
from antiphon.cluster.door.call import CallClient
from antiphon.cluster.door.carry import Carrier, HostRefused
from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import any_value
from antiphon.server.http.errors import NOT_FOUND, BodyTooLarge, error_response
from antiphon.server.http.offers import new_call, read_offer
from antiphon.server.http.origin import cors
from antiphon.settings import ServerSettings

if TYPE_CHECKING:
    from antiphon.transports.webrtc import WebRtcCall

log = logging.getLogger(__name__)
# Timeout, in seconds, for a host to make the requested session.
BEGIN_S = 10.0
# Timeout, in seconds, for all calls to end when the door ends.
END_S = 2.0
PATH = "/v1/realtime/calls"


class DoorCalls:
    """The calls of a door, by the ids of their sessions."""

    def __init__(self, door: Door, server: ServerSettings) -> None:
        self._door = door
        self._server = server
        self._open: dict[str, CallClient] = {}

    def routes(self) -> list[Route]:
        """Return the routes for calls, which the door serves itself."""
        # This middleware serves the responses themselves. A host answers the preflight requests.
        middleware = [cors(self._server)] if self._server.cors_origins else []
        return [
            Route(PATH, self.call, methods=["POST"], middleware=middleware),
            Route(f"{PATH}/{{id}}/hangup", self.hang_up, methods=["POST"], middleware=middleware),
        ]

    async def call(self, request: Request) -> Response:
        """Answer an SDP offer as a host does: 201 with the answer and the call's Location, when a host has the session.

        The call then continues as a task of the door.
        """
        try:
            if self._door.draining:
                raise HostRefused(503, {"retry-after": "5"}, b"")
            offer, asked = await read_offer(request)
            if asked is not None:
                # Refuses an invalid session before a request is sent to a host.
                any_value(asked, "session")
            return await self._answer(request, offer, asked)
        except HostRefused as refused:
            return refused_response(refused)
        except RemoteProtocolError as error:
            status = 404 if error.code in NOT_FOUND else 400
            return error_response(status, error.message, code=error.code, param=error.param)
        except BodyTooLarge as error:
            return error_response(413, error.detail, code=error.code, param=error.param)
        except HTTPException as error:
            return error_response(error.status_code, error.detail, code="invalid_value")

    async def _answer(self, request: Request, offer: str, session: msgspec.Raw | None) -> Response:
        """Answer an offer. Raises HostRefused, and RemoteProtocolError for an invalid session or offer."""
        call = await new_call(self._server.ice_servers)
        client = CallClient(request, call, session)
        carried = _Carried()
        self._door.tasks.start_soon(self._carry, client, call, carried)
        try:
            with anyio.move_on_after(BEGIN_S):
                await client.decided.wait()
            if carried.refused or client.refusal:
                raise carried.refused or client.refusal  # type: ignore[misc]
            if not client.session_id:
                raise HostRefused(503, {"retry-after": "5"}, b"")
            self._open[client.session_id] = client
            answer = await call.answer(offer)
        except BaseException:
            # Ends the session if a host has made it. Does not wait for a host that has not made it yet.
            client.hang_up()
            if not client.session_id:
                carried.scope.cancel()
            raise
        location = {"Location": f"{PATH}/{client.session_id}"}
        return Response(answer, 201, location, media_type="application/sdp")

    async def _carry(self, client: CallClient, call: WebRtcCall, carried: _Carried) -> None:
        """Relay a call until its end. Does not raise."""
        try:
            with carried.scope, self._door.one_more():
                door = self._door
                await Carrier(client, door.hosts, door.metrics, door.grace_s, door.warn).run()
        except HostRefused as refused:
            carried.refused = refused
        except Exception:
            # The boundary of the call: any failure in it ends only this call.
            log.exception("call %s failed", client.session_id)
        finally:
            client.decided.set()
            self._open.pop(client.session_id, None)
            with anyio.CancelScope(shield=True):
                await call.hang_up()

    async def hang_up_all(self) -> None:
        """End all calls, and wait for at most END_S until their hosts know of it."""
        if not self._open:
            return
        for client in list(self._open.values()):
            client.hang_up()
        with anyio.move_on_after(END_S):
            await self._door.all_closed()

    async def hang_up(self, request: Request) -> Response:
        """End a call of the same API key. Returns 404 (`call_not_found`) if the key has no such call at this door."""
        client = self._open.get(request.path_params["id"])
        if client is None or not secrets.compare_digest(_key(client.connection), _key(request)):
            return error_response(404, "There is no such call.", code="call_not_found")
        client.hang_up()
        return JSONResponse({})


def _key(connection: HTTPConnection) -> bytes:
    return connection.headers.get("authorization", "").encode()


@dataclass(slots=True)
class _Carried:
    """The connection of a call to a host. `refused` is set if no host has accepted the call."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    refused: HostRefused | None = None
