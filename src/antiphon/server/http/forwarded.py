"""Finds the addresses of clients behind proxies, doors and other hosts (`--trusted-proxies`).

uvicorn's middleware uses the last address in `X-Forwarded-For` that is not a trusted proxy's. Proxies append to this
header. So an address that the client itself has put there comes earlier, and is never used.
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
# The prefix of IPv4 addresses on an IPv6 socket.
_MAPPED = "::ffff:"


class Networks:
    """A set of addresses. `text` has addresses and networks, separated by commas; "" for none.

    Raises SettingsError for an invalid text, which names the setting `flag`.
    """

    def __init__(self, text: str, flag: str) -> None:
        self._networks = [_network(part.strip(), flag) for part in text.split(",") if part.strip()]

    def __contains__(self, address: object) -> bool:
        found = _address(str(address))
        return found is not None and any(found in network for network in self._networks)


class TrustedProxies(Networks):
    """The addresses of trusted proxies.

    Raises SettingsError for a network of all addresses, since clients could then choose their own address.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, "--trusted-proxies")
        for network in self._networks:
            if network.prefixlen == 0:
                raise SettingsError(
                    f"--trusted-proxies: {network} is every address, so that clients could choose their own"
                )

    def for_uvicorn(self) -> list[str]:
        """Return the networks for uvicorn's middleware, with IPv4 networks also in their IPv6-mapped form."""
        mapped = [f"{_MAPPED}{n.network_address}/{96 + n.prefixlen}" for n in self._networks if n.version == 4]
        return [*map(str, self._networks), *mapped]


class ForwardedClients:
    """ASGI middleware that sets a request's `client` to the address that trusted proxies report, and limits each one.

    Connections of proxies are not counted by address. Instead, each client behind a proxy may have as many requests and
    WebSockets under way as a direct client may have connections.
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
        # Uses the proxy's own address if the text is not an address, because such text does not identify a client.
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


def _network(text: str, flag: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise SettingsError(
            f"{flag}: {text} is neither an address nor a network; a network has the form 10.0.0.0/8"
        ) from None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address, and convert a mapped IPv6 address to IPv4. None for other text, or with a zone (free text)."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    return None if found.scope_id else found.ipv4_mapped or found
