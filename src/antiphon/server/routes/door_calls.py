"""POST /v1/realtime/calls at a door. The door answers the call, and a host has its session (`cluster/door/call.py`)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from antiphon.cluster.door.app import Door, refused_response
from antiphon.cluster.door.call import WebRtcClient
from antiphon.cluster.door.carried_call import CarriedCall
from antiphon.cluster.door.carry import HostRefused
from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import any_value
from antiphon.server.http.errors import NOT_FOUND, BodyTooLarge, error_response
from antiphon.server.http.offers import new_call, read_offer
from antiphon.server.http.origin import cors
from antiphon.server.registry import LiveCall
from antiphon.server.routes.calls import hang_up as hang_up_telephone
from antiphon.settings import ServerSettings

if TYPE_CHECKING:
    from antiphon.transports.webrtc import WebRtcCall

# Timeout, in seconds, for all calls to end when the door ends.
END_S = 2.0
PATH = "/v1/realtime/calls"


class DoorCalls:
    """The calls of a door, by the ids of their sessions."""

    def __init__(self, door: Door, server: ServerSettings) -> None:
        self._door = door
        self._server = server
        self._open: dict[str, WebRtcClient] = {}

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
        client = WebRtcClient(request, call, session)
        carried = CarriedCall(self._door, client)
        self._door.tasks.start_soon(self._carry, client, call, carried)
        try:
            await carried.begun()
            self._open[carried.id] = client
            answer = await call.answer(offer)
        except BaseException:
            carried.hang_up()
            raise
        location = {"Location": f"{PATH}/{carried.id}"}
        return Response(answer, 201, location, media_type="application/sdp")

    async def _carry(self, client: WebRtcClient, call: WebRtcCall, carried: CarriedCall) -> None:
        """Relay a call until its end. Does not raise."""
        try:
            await carried.run()
        finally:
            self._open.pop(carried.id, None)
            with anyio.CancelScope(shield=True):
                await call.hang_up()

    async def hang_up_all(self, others: Sequence[LiveCall]) -> None:
        """End all calls, and the `others`, and wait for at most END_S until their hosts know of it."""
        calls: list[LiveCall | WebRtcClient] = [*self._open.values(), *others]
        if not calls:
            return
        for call in calls:
            call.hang_up()
        with anyio.move_on_after(END_S):
            await self._door.all_closed()

    async def hang_up(self, request: Request) -> Response:
        """End a call of the same API key, over WebRTC or on the telephone.

        Returns 404 (`call_not_found`) if the key has no such call at this door.
        """
        client = self._open.get(request.path_params["id"])
        if client is None:
            return await hang_up_telephone(request)
        if not secrets.compare_digest(_key(client.connection), _key(request)):
            return error_response(404, "There is no such call.", code="call_not_found")
        client.hang_up()
        return JSONResponse({})


def _key(connection: HTTPConnection) -> bytes:
    return connection.headers.get("authorization", "").encode()
