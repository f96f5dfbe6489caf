"""The application of a door: every WebSocket is carried to a host, and every other request is passed on to one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

import anyio
import anyio.abc
import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from antiphon.cluster.door.carry import Carrier, HostRefused
from antiphon.cluster.door.client import WebSocketClient
from antiphon.cluster.door.hosts import Hosts
from antiphon.cluster.door.metrics import DoorMetrics
from antiphon.signals import Signal
from antiphon.transports.base_path import BasePath

log = logging.getLogger(__name__)
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
# A host's answer may take as long as its model needs; to be reached it gets this long, in seconds.
CONNECT_S = 5.0
# Headers that belong to one connection and are not passed on.
HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)


class Door:
    """What the routes of a door share. For one event loop.

    A session that lost its host is resumed within `grace_s` seconds, or ends. `draining`: no more connections are to be
    taken. `tasks`: those that outlive their requests, while the application runs.
    """

    def __init__(self, hosts: Hosts, grace_s: float) -> None:
        self.hosts = hosts
        self.grace_s = grace_s
        self.metrics = DoorMetrics()
        self.draining = False
        self.tasks: anyio.abc.TaskGroup
        self._num_open = 0
        self._changed = Signal()

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a connection while the block runs."""
        self._num_open += 1
        try:
            with self.metrics.connections.track_inprogress():
                yield
        finally:
            self._num_open -= 1
            self._changed.notify()

    async def all_closed(self) -> None:
        """Wait until there is none."""
        while self._num_open:
            await self._changed.wait()


def refused_response(refused: HostRefused) -> Response:
    """The answer of the last host that has refused a session, for the client."""
    headers = {k: v for k, v in refused.headers.items() if k.lower() not in {*HOP_HEADERS, "content-length"}}
    return Response(refused.body, refused.status, headers)


def build(door: Door, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Build the application of a door, which its `routes` find at `app.state.door`.

    The door checks no key: it hands on the client's, at each connection to a host. `routes`, `/health` and `/metrics`
    are its own, and `/ready` says whether a host is ready; `/internal/` is not to be had through it, and all else is
    the host's.
    """

    async def carry(websocket: WebSocket) -> None:
        with door.one_more():
            try:
                if door.draining:
                    raise HostRefused(503, {"retry-after": "5"}, b"")
                await Carrier(WebSocketClient(websocket), door.hosts, door.metrics, door.grace_s).run()
            except HostRefused as refused:
                await websocket.send_denial_response(refused_response(refused))

    async def pass_on(request: Request) -> Response:
        return await _pass_on(request, client, door.hosts)

    async def ready(request: Request) -> Response:
        if door.draining:
            return _failed(503, "The door is shutting down.", "server_shutting_down")
        return await pass_on(request)

    async def hidden(_: Request) -> Response:
        return _failed(404, "There is no such path.", "not_found")

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "role": "door"})

    async def exposed(_: Request) -> Response:
        return Response(door.metrics.exposed(), media_type="text/plain; version=0.0.4")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client, anyio.create_task_group() as door.tasks:
            yield
            door.tasks.cancel_scope.cancel()

    client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_S), trust_env=False, limits=NO_LIMITS)
    app = Starlette(
        routes=[
            *routes,
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", exposed),
            Route("/internal/{path:path}", hidden, methods=METHODS),
            WebSocketRoute("/{path:path}", carry),
            Route("/{path:path}", pass_on, methods=METHODS),
        ],
        middleware=[Middleware(BasePath)],
        lifespan=lifespan,
    )
    app.state.door = door
    return app


NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)


async def _pass_on(request: Request, client: httpx.AsyncClient, hosts: Hosts) -> Response:
    """Have the first host that can be reached answer the request; bodies are streamed both ways."""
    headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1").lower() not in HOP_HEADERS]
    for url in hosts.in_order():
        target = f"{url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        body = request.stream() if request.method not in ("GET", "HEAD", "OPTIONS") else None
        try:
            answer = await client.send(
                client.build_request(request.method, target, headers=headers, content=body), stream=True
            )
        except httpx.ConnectError as error:
            log.warning("the host %s cannot be reached: %s", url, error)
            hosts.failed(url)
            continue
        except httpx.HTTPError as error:
            log.warning("the host %s has broken off a request: %s", url, error)
            return _failed(502, "The host has broken off the request.", "host_lost")
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(answer.aclose))
    return _failed(503, "No host can be reached.", "no_host")


def _failed(status: int, message: str, code: str) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, {"retry-after": "5"} if status == 503 else None)
