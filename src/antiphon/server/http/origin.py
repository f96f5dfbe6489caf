"""Refuses requests that a web page of another site makes: a foreign Origin, or a Host that is not this server's.

Browsers let any page open a WebSocket to any server, and send it forms. A page can also point its own host name at
this machine (DNS rebinding), so that its requests look like the server's own; the Host header gives them away. Clients
that are no browsers send no Origin and are not affected.
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
# What of a refused name is logged: it is the client's, and could forge a line.
_NAMES = re.compile(r"[A-Za-z0-9.:/+\[\]-]{1,200}")
# What a page may read of an answer's headers: all; those that it needs by name too, since old browsers take no "*".
EXPOSED = (ANY, "Location", "Retry-After", REQUEST_ID)


def cors(server: ServerSettings) -> Middleware:
    """The middleware that lets pages of the allowed origins make any request, and read its answer."""
    origins = allowed_origins(server)
    return Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=[ANY], allow_headers=[ANY], expose_headers=EXPOSED
    )


class Origins:
    """The origins and names that requests may have.

    `Origin`, where there is one, has to be one of `--cors-origin`, or that of the server itself as the Host header
    names it. `Host` has to be an IP address, `localhost`, `--host` or one of `--allowed-host` while the server listens
    on loopback or asks for no key: then the address a request was sent to is all that tells a page from the user.
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
    """Return the origins of `--cors-origin` as browsers send them: in small letters, without a default port."""
    origins = [origin.rstrip("/").lower() for origin in server.cors_origins]
    return [origin.removesuffix(_DEFAULT_PORTS.get(origin.split(":")[0], "")) for origin in origins]


def is_loopback(host: str) -> bool:
    """Return whether a host, without a port, is this machine: `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _note(name: str, flag: str) -> None:
    """Have the request's log line say what was refused, and which flag would allow it."""
    record = current_request()
    record.refused, record.allowed_by = name if _NAMES.fullmatch(name) else "", flag


def _is_allowed_host(authority: str, names: Collection[str]) -> bool:
    """Return whether a Host header names the server. No page can be served from an address that is not its own, so
    that every IP address is allowed.
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
    """Return the origins of the server's own page, behind TLS and without it. Default ports are in neither header."""
    return f"http://{authority}", f"https://{authority}"
