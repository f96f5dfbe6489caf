"""HTTP to MCP servers at URLs of clients: only to allowed addresses, with bounded answers. Needs the extra `mcp`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx2

from antiphon.errors import RemoteProtocolError
from antiphon.remote.allowed_hosts import PORTS, AllowedHosts, NotAllowedError

# Seconds in which a server has to accept a connection, and to send each part of an answer.
CONNECT_S, READ_S = 10.0, 300.0
# Maximum size of one answer. The stream of a server's own messages is opened again when it has had as many.
MAX_ANSWER_BYTES = 64 << 20


def guarded_client(headers: Mapping[str, str], hosts: AllowedHosts) -> httpx2.AsyncClient:
    """Return an HTTP client that connects only to addresses of allowed hosts. `headers` are sent with each request.

    It uses no proxy, which would connect for it.
    """
    timeout = httpx2.Timeout(CONNECT_S, read=READ_S)
    sent = {"Accept-Encoding": "identity", **headers}
    return httpx2.AsyncClient(transport=_Guarded(hosts), headers=sent, timeout=timeout, trust_env=False)


class _Guarded(httpx2.AsyncBaseTransport):
    """Resolves the host of each request, also after a redirect, and connects to an address that it has checked."""

    def __init__(self, hosts: AllowedHosts) -> None:
        self._hosts = hosts
        self._inner = httpx2.AsyncHTTPTransport(trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and return the answer. Raises ConnectError if its host is not allowed, or not known."""
        url = request.url
        try:
            self._hosts.check(str(url), "server_url")
            (address, *_) = await self._hosts.addresses(url.host, url.port or PORTS[url.scheme])
        except RemoteProtocolError as error:
            raise httpx2.ConnectError(error.message) from None
        except NotAllowedError:
            raise httpx2.ConnectError("its host has no public address") from None
        except (OSError, UnicodeError):
            raise httpx2.ConnectError("its host is not known") from None
        checked = httpx2.Request(
            request.method,
            url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            # TLS verifies the name.
            extensions={**request.extensions, "sni_hostname": url.host},
        )
        answer = await self._inner.handle_async_request(checked)
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            await answer.aclose()
            raise httpx2.ReadError("its answer is compressed")
        assert isinstance(answer.stream, httpx2.AsyncByteStream)
        answer.stream = _Bounded(answer.stream)
        return answer

    async def aclose(self) -> None:
        """Close all connections, in use or not."""
        await self._inner.aclose()


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._inner:
            num_bytes += len(part)
            if num_bytes > MAX_ANSWER_BYTES:
                raise httpx2.ReadError("its answer is too large")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
