"""HTTP connections for whichever event loop asks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from http.cookiejar import CookieJar
from typing import Any
from weakref import WeakKeyDictionary

import httpx

CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS, MAX_IDLE_CONNECTIONS = 1024, 64


class LoopClients:
    """An `httpx.AsyncClient` for each event loop that asks. They are closed with their loop (`shutdown_asyncgens`).

    Only the time to connect is limited; requests have limits of their own. Making one reads certificates, which takes
    tens of milliseconds.
    """

    def __init__(self) -> None:
        self._tls = httpx.create_ssl_context()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()
        self._closers: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[httpx.AsyncClient, None]] = (
            WeakKeyDictionary()
        )

    async def client(self) -> httpx.AsyncClient:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._clients.get(loop)
        if found is None:
            self._closers[loop] = closer = _open(self._tls)
            self._clients[loop] = found = await anext(closer)
        return found

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        loop = asyncio.get_running_loop()
        if closer := self._closers.pop(loop, None):
            del self._clients[loop]
            await closer.aclose()


class _NoCookies(CookieJar):
    """Keeps no cookies: those of a server would be sent with the requests of all keys, and fill memory."""

    def extract_cookies(self, response: Any, request: Any) -> None:
        """Do nothing."""


async def _open(tls: ssl.SSLContext) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client, closed when the generator is: at the latest when its event loop ends."""
    client = httpx.AsyncClient(
        verify=tls,
        headers={"Accept-Encoding": "identity"},
        cookies=_NoCookies(),
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_IDLE_CONNECTIONS),
    )
    try:
        yield client
    finally:
        await client.aclose()
