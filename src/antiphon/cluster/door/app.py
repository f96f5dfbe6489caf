"""The ASGI application of a door: it carries every WebSocket to a host, and forwards every other request to one."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy

import anyio
import anyio.abc
import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from antiphon.cluster.door.carry import Carrier, DoorMetrics, HostRefused
from antiphon.cluster.door.hosts import Hosts
from antiphon.cluster.door.speech import SpokenAnswer, is_speech, unless_gone, with_seed
from antiphon.cluster.relay import FORWARDED_HEADERS, forwarded
from antiphon.protocols.connection import Resume
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.opening import opening_of
from antiphon.signals import Signal
from antiphon.transports.http import CutStream, LineLimit, in_time
from antiphon.transports.paths import BasePath, CheckedPaths, is_for_clients, raw_path, respond
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
# Monitoring endpoints of the door itself.
OWN_PATHS = frozenset({"/health", "/ready", "/metrics"})
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
# Timeout, in seconds, for connecting to a host. A response has no timeout, since a model may take any length of time.
CONNECT_S = 5.0
# Headers that belong to one connection and are not passed on.
HOP_HEADERS = frozenset(
    {"connection", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
# Limit on the body of a request that is kept for another host, in bytes. A larger one, which has a recording, goes to
# one host only.
MAX_KEPT_BYTES = 1 << 20
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)
# Status for a client that is gone and does not read the response. Same as in `server/http/disconnect.py`.
CLIENT_CLOSED_REQUEST = 499
# Returns the response that refuses a request, or None to let it pass.
Refusal = Callable[[HTTPConnection], Response | None]


class Door:
    """The state that the routes of a door share. For one event loop.

    `grace_s`: time limit for resuming a session that lost its host, in seconds. `metrics_key`: the API key of
    `/metrics`; "" if no key is needed. `body_timeout_s`: timeout of request bodies, see `in_time`. `draining`: new
    connections are refused. `tasks`: a task group for tasks that outlive their requests. `session_of` returns the id
    that the hosts know a call by, and `calls_exposed` the metrics of calls. Both may be replaced.
    """

    def __init__(self, hosts: Hosts, grace_s: float, metrics_key: str = "", body_timeout_s: float = 30.0) -> None:
        self.hosts = hosts
        self.grace_s = grace_s
        self.metrics_key = metrics_key
        self.body_timeout_s = body_timeout_s
        self.metrics = DoorMetrics()
        self.draining = False
        self.session_of: Callable[[str], str] = lambda id: id
        self.calls_exposed: Callable[[], bytes] = lambda: b""
        self.tasks: anyio.abc.TaskGroup
        self._num_open = 0
        self._changed = Signal()
        self._lines = LineLimit(time.monotonic)

    def warn(self, text: str, *values: object) -> None:
        """Log a failure, in at most a few lines a minute: any client may cause it, as a door cannot check keys."""
        self._lines.warn(log, text, *values)

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a connection while the `with` block runs."""
        self._num_open += 1
        try:
            with self.metrics.connections.track_inprogress():
                yield
        finally:
            self._num_open -= 1
            self._changed.notify()

    async def all_closed(self) -> None:
        """Wait until the door has no open connections."""
        while self._num_open:
            await self._changed.wait()


class WebSocketClient:
    """The DoorClient of a WebSocket, which is accepted after a host has accepted its session.

    `session_of` returns the id that the hosts know a call by.
    """

    def __init__(self, websocket: WebSocket, session_of: Callable[[str], str]) -> None:
        self.connection = self._websocket = websocket
        self.path, self.query = raw_path(websocket.scope), websocket.query_params
        dialect = dialect_of(opening_of(self.path, self.query, websocket.headers))
        if is_sideband := "call_id" in self.query:
            self.query = QueryParams({**self.query, "call_id": session_of(self.query["call_id"])})
        self.is_held = dialect.resume is Resume.ON_REQUEST and not (self.query.get("resume") or is_sideband)
        self._transport = WebSocketTransport(websocket)

    async def accept(self, subprotocol: str | None) -> None:
        """Accept the client's WebSocket with the host's subprotocol."""
        await self._websocket.accept(subprotocol=subprotocol)

    async def receive(self) -> str | bytes | None:
        """Return the client's next frame; None if the client has left."""
        return await self._transport.receive()

    async def send(self, frame: str | bytes) -> None:
        """Send the client a frame. Raises TransportClosed."""
        await self._transport.send(frame)

    async def close(self, code: int, reason: str) -> None:
        """Close the client's WebSocket. Raises TransportClosed if the client closed it first."""
        await self._transport.close(code, reason)


def refused_response(refused: HostRefused) -> Response:
    """Return, for the client, the response of the last host that refused its session."""
    headers = {k: v for k, v in refused.headers.items() if k.lower() not in {*HOP_HEADERS, "content-length"}}
    return Response(refused.body, refused.status, headers)


def build(door: Door, routes: Sequence[BaseRoute] = (), refusal: Refusal = lambda _: None) -> Starlette:
    """Build the application of a door. Its routes find the door at `app.state.door`.

    The door does not check clients' API keys; it forwards them with each connection to a host. It serves `routes`,
    `/health`, `/metrics` and `/ready` itself; `/ready` reports whether a host is ready. Clients reach only those paths
    of a host that are meant for clients. `refusal` is called before the door answers a request itself.
    """

    async def carry(websocket: WebSocket) -> None:
        with door.one_more():
            try:
                if door.draining:
                    raise HostRefused(503, {"retry-after": "5"}, b"")
                await Carrier(
                    WebSocketClient(websocket, door.session_of), door.hosts, door.metrics, door.grace_s, door.warn
                ).run()
            except HostRefused as refused:
                await websocket.send_denial_response(refused_response(refused))

    async def pass_on(request: Request) -> Response:
        return await _pass_on(request, client, door)

    async def ready(request: Request) -> Response:
        if door.draining:
            return _failed(503, "The door is shutting down.", "server_shutting_down")
        return await pass_on(request)

    async def health(request: Request) -> Response:
        return refusal(request) or JSONResponse({"status": "ok", "role": "door"})

    async def exposed(request: Request) -> Response:
        if refused := refusal(request):
            return refused
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else ""
        if door.metrics_key and not secrets.compare_digest(door.metrics_key.encode(), given.encode()):
            door.warn("a request to /metrics without the key of the metrics")
            return _failed(401, "The key of the metrics is missing or unknown.", "invalid_api_key")
        return Response(door.metrics.exposed() + door.calls_exposed(), media_type="text/plain; version=0.0.4")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client, anyio.create_task_group() as door.tasks:
            yield
            door.tasks.cancel_scope.cancel()

    # One HTTP client serves all clients, so it must not store cookies.
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    client = httpx.AsyncClient(timeout=timeout, trust_env=False, limits=NO_LIMITS, cookies=no_cookies)
    app = Starlette(
        routes=[
            *routes,
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", exposed),
            WebSocketRoute("/{path:path}", carry),
            Route("/{path:path}", pass_on, methods=METHODS),
        ],
        middleware=[
            Middleware(BasePath),
            Middleware(CheckedPaths, lambda wrong: _failed(400, wrong, "invalid_path")),
            Middleware(_Hidden),
        ],
        lifespan=lifespan,
    )
    app.state.door = door
    return app


class _Hidden:
    """ASGI middleware that answers 404 for paths that are not for clients and that the door does not serve."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] not in ("http", "websocket")
            or is_for_clients(path := raw_path(scope))
            or (scope["type"] == "http" and path in OWN_PATHS)
        ):
            await self._app(scope, receive, send)
        else:
            await respond(_failed(404, "There is no such path.", "not_found"), scope, receive, send)


async def _pass_on(request: Request, client: httpx.AsyncClient, door: Door) -> Response:
    """Forward the request to the first host that can be reached. Large bodies are streamed both ways.

    A host that answers 503 has no room or drains, so the next one gets the request, unless its body is large. Speech is
    asked for again at other hosts if its host is lost.
    """
    path, query = raw_path(request.scope), request.scope["query_string"]
    target = path.encode("latin-1")
    asked = {"target": target + b"?" + query if query else target}
    has_body, headers = _of_request(request)
    timed = Request(request.scope, in_time(request.receive, door.body_timeout_s))
    kept: bytes | None = None
    if has_body and _is_small(request):
        try:
            kept = await timed.body()
        except (TimeoutError, ClientDisconnect) as error:
            return _of_body(error)
        headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    speaks = kept is not None and is_speech(request, path)
    if kept is not None and speaks:
        kept = with_seed(kept)
    refused: Response | None = None

    async def ask(url: str) -> httpx.Response:
        body = kept if kept is not None else timed.stream() if has_body else None
        made = client.build_request(request.method, url, headers=headers, content=body, extensions=asked)
        return await client.send(made, stream=True)

    for url in door.hosts.in_order():
        try:
            answer = await (unless_gone(door.hosts, url, partial(ask, url)) if speaks else ask(url))
            shown = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
            if answer.status_code == 503 and (kept is not None or not has_body):
                refused = Response(b"".join([piece async for piece in answer.aiter_raw()]), 503, shown)
                continue
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            door.warn("the host %s cannot be reached: %s", url, error)
            door.hosts.failed(url)
            continue
        except (TimeoutError, ClientDisconnect) as error:
            return _of_body(error)
        except Exception as error:
            # The boundary of the request: any failure ends only this request.
            door.warn("the host %s has broken off a request: %s", url, type(error).__name__)
            if speaks:
                door.hosts.failed(url)
                continue
            return _failed(502, "The host has broken off the request.", "host_lost")
        lost = partial(_broken_off, door)
        body: AsyncIterable[bytes] = answer.aiter_raw()
        ends = answer.aclose
        if speaks:
            body = spoken = SpokenAnswer(answer, url, door.hosts, ask, lost)
            ends = spoken.aclose
        return CutStream(
            body, httpx.HTTPError, partial(lost, url), answer.status_code, shown, background=BackgroundTask(ends)
        )
    return refused or _failed(503, "No host can be reached.", "no_host")


def _is_small(request: Request) -> bool:
    """Return whether the body of a request has a known size, and can be kept."""
    length = request.headers.get("content-length", "")
    return "transfer-encoding" not in request.headers and length.isdigit() and int(length) <= MAX_KEPT_BYTES


def _of_body(error: TimeoutError | ClientDisconnect) -> Response:
    """Return the response to a request whose body did not arrive."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return _failed(408, "The body came too slowly.", "request_timeout")


def _broken_off(door: Door, url: str, error: Exception) -> None:
    door.warn("the host %s has broken off an answer: %s", url, type(error).__name__)


def _of_request(request: Request) -> tuple[bool, list[tuple[bytes, bytes]]]:
    """Return whether a request has a body (with any method), and the headers to forward.

    A chunked body is forwarded chunked, even if the request also has a content-length.
    """
    chunked = "transfer-encoding" in request.headers
    left = {name.encode() for name in HOP_HEADERS} | FORWARDED_HEADERS
    if chunked:
        left.add(b"content-length")
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in left]
    added = [(name.encode(), value.encode()) for name, value in forwarded(request).items()]
    return chunked or request.headers.get("content-length", "0") != "0", headers + added


def _failed(status: int, message: str, code: str) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status, {"retry-after": "5"} if status == 503 else None)
