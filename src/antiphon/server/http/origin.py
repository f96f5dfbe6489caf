"""Refuses requests from web pages of other sites. Detects them by a foreign Origin or a Host of another server.

Browsers let any page open a WebSocket to any server, and send it forms. A page can also point its own host name at this
machine (DNS rebinding), so that its requests look like the server's own. The Host header reveals such requests. Clients
other than browsers send no Origin and are not affected.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.server.access_log import REQUEST_ID, current_request
from antiphon.server.http.errors import Forbidden, response_to
from antiphon.settings import ServerSettings
from antiphon.transports.paths import respond

ANY = "*"
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
# Matches the refused names that are logged. The client chooses the name, and any other text could forge a log line.
_NAMES = re.compile(r"[A-Za-z0-9.:/+\[\]-]{1,200}")
# Response headers that a page may read. "*" allows all; the needed ones are also listed for old browsers without "*".
EXPOSED = (ANY, "Location", "Retry-After", REQUEST_ID)


def cors(server: ServerSettings) -> Middleware:
    """Return the middleware that lets pages of the allowed origins make any request, and read the response."""
    origins = allowed_origins(server)
    return Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=[ANY], allow_headers=[ANY], expose_headers=EXPOSED
    )


class Origins:
    """The origins and host names that requests may have.

    An `Origin` has to be one of `--cors-origin`, or the server's own according to the Host header. If the server
    listens on loopback or requires no key, `Host` has to be an IP address, `localhost`, `--host` or one of
    `--allowed-host`, because then only the host name in a request distinguishes a foreign page from the user.
    """

    def __init__(self, server: ServerSettings) -> None:
        self._origins = frozenset(allowed_origins(server))
        names = {"localhost", server.host.lower(), *(host.lower() for host in server.allowed_hosts)}
        checked = is_loopback(server.host) or not server.api_keys
        self._hosts = frozenset(names) if checked else frozenset({ANY})

    def check(self, headers: Headers) -> None:
        """Raise Forbidden for a Host or an Origin that is not allowed."""
        host = headers.get("host", "").lower()
        if host and not _is_allowed_host(host, self._hosts):
            _note(host, "--allowed-host")
            raise Forbidden(
                "This server is not known by the name in the Host header. It can be allowed with --allowed-host.",
                "host_not_allowed",
            )
        origin = headers.get("origin", "").lower()
        if origin and not self._origins & {origin, ANY} and (not host or origin not in _origins_of(host)):
            _note(origin, "--cors-origin")
            raise Forbidden(
                "Pages of this origin may not use the server. It can be allowed with --cors-origin.",
                "origin_not_allowed",
            )


class OriginCheck:
    """ASGI middleware that answers requests and upgrades of foreign web pages (`Origins`) with 403."""

    def __init__(self, app: ASGIApp, server: ServerSettings) -> None:
        self._app = app
        self._origins = Origins(server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._origins.check(Headers(scope=scope))
            except Forbidden as error:
                await respond(response_to(HTTPConnection(scope), error), scope, receive, send)
                return
        await self._app(scope, receive, send)


def allowed_origins(server: ServerSettings) -> list[str]:
    """Return the origins of `--cors-origin` as browsers send them: in lower case, without a default port."""
    origins = [origin.rstrip("/").lower() for origin in server.cors_origins]
    return [origin.removesuffix(_DEFAULT_PORTS.get(origin.split(":")[0], "")) for origin in origins]


def is_loopback(host: str) -> bool:
    """Return whether a host name without a port is `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _note(name: str, flag: str) -> None:
    """Add the refused name, and the flag that would allow it, to the request's log line."""
    record = current_request()
    record.refused, record.allowed_by = name if _NAMES.fullmatch(name) else "", flag


def _is_allowed_host(authority: str, names: Collection[str]) -> bool:
    """Return whether a Host header names the server.

    Any IP address is allowed, since a page cannot be served from an address that is not its own.
    """
    if ANY in names:
        return True
    try:
        name = urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def _origins_of(authority: str) -> tuple[str, str]:
    """Return the origins of the server's own page, with and without TLS. `Host` and `Origin` omit default ports."""
    return f"http://{authority}", f"https://{authority}"
