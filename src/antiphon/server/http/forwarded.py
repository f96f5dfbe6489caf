"""The addresses of clients behind proxies, doors and other hosts (`--trusted-proxies`).

uvicorn's middleware finds the address: of what proxies have added to `X-Forwarded-For`, the last one that is not a
trusted proxy's. What a client has sent itself comes before that, and is never believed.
"""

from __future__ import annotations

import ipaddress

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from antiphon.errors import SettingsError
from antiphon.server.http.connections import TOO_MANY, Connections
from antiphon.transports.paths import respond

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# The addresses of IPv4 on a socket of IPv6.
_MAPPED = "::ffff:"


class TrustedProxies:
    """The addresses of the proxies that are believed. `text`: addresses and networks, separated by commas; "" for none.

    Raises SettingsError for another text, and for a network of all addresses: a client could then choose its own.
    """

    def __init__(self, text: str) -> None:
        self._networks = [_network(part.strip()) for part in text.split(",") if part.strip()]

    def __contains__(self, address: object) -> bool:
        found = _address(str(address))
        return found is not None and any(found in network for network in self._networks)

    def for_uvicorn(self) -> list[str]:
        """Return them as uvicorn takes them: also as a socket of IPv6 shows those of IPv4."""
        mapped = [f"{_MAPPED}{n.network_address}/{96 + n.prefixlen}" for n in self._networks if n.version == 4]
        return [*map(str, self._networks), *mapped]


class ForwardedClients:
    """ASGI middleware that has a request's `client` be the one that trusted proxies say, and bounds what each has.

    The connections of proxies are not counted by address. So each client behind them may have as many requests and
    WebSockets under way as another one may have connections.
    """

    def __init__(self, app: ASGIApp, proxies: TrustedProxies, connections: Connections) -> None:
        self._app = app
        self._connections = connections
        self._found = ProxyHeadersMiddleware(self._serve, proxies.for_uvicorn())  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope[_PEER] = scope.get("client")
        await self._found(scope, receive, send)  # type: ignore[arg-type]

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer, client = scope.pop(_PEER), scope["client"]
        if client == peer:
            await self._app(scope, receive, send)
            return
        # What is no address was not said by a proxy, or is of no use.
        address = _address(client[0])
        scope["client"] = peer if address is None else (str(address), client[1])
        taken = self._connections.take_forwarded(scope["client"][0])
        if not taken:
            await respond(Response(TOO_MANY, 503, {"retry-after": "10"}, "application/json"), scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._connections.give_back_forwarded(scope["client"][0])


_PEER = "antiphon.peer"


def _network(text: str) -> Network:
    try:
        found = ipaddress.ip_network(text)
    except ValueError:
        raise SettingsError(
            f"--trusted-proxies: {text} is no address and no network; a network has the form 10.0.0.0/8"
        ) from None
    if found.prefixlen == 0:
        raise SettingsError(f"--trusted-proxies: {text} is every address, so that clients could choose theirs")
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, one of IPv4 as that; None for what is none, or has a zone, which may be any text."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    return None if found.scope_id else found.ipv4_mapped or found
