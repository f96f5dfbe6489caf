"""Fetches what a client names by a URL: from the hosts that the operator lists, and never from a private address.

A host's addresses are looked up here and the connection is made to one of those, so that nothing can point the name
elsewhere between the check and the connection. Each redirect is checked like the first URL.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio
import httpcore

from antiphon.errors import RemoteProtocolError, SettingsError

FLAG = "--fetch-from"
# Bounds of one fetch: its seconds in all, its redirects, and the characters of its URL. So many go on at a time.
MAX_FETCH_S, MAX_REDIRECTS, MAX_URL_CHARS, MAX_FETCHES = 10.0, 3, 2048, 8
PORTS = {"http": 80, "https": 443}
# What a server may say that an audio file is.
AUDIO_TYPES = re.compile(r"(audio|video)/.+|application/(octet-stream|ogg)|binary/octet-stream")
# IPv6 addresses that a network's gateway takes for the IPv4 address in their last 32 bits (RFC 6052).
NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _NotAllowedError(Exception):
    """A host has an address that is not public and not listed."""


@dataclass(frozen=True, slots=True)
class _Host:
    """An entry of the list: `name` as in a URL, `*.` before it for what lies below it, or `*`. Without a `port` it is
    the scheme's own.
    """

    name: str
    port: int | None

    def allows(self, name: str, port: int, scheme: str) -> bool:
        below = self.name.startswith("*.") and name.endswith(self.name[1:])
        return (self.name in ("*", name) or below) and port == (self.port or PORTS[scheme])


class Fetcher:
    """Fetches audio files from `hosts`, as `--fetch-from` lists them; from nowhere where that is empty.

    An address that is not public is connected to only if the list has that very address and port. Raises SettingsError
    for an entry that is no host.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = [_host(entry) for entry in hosts]
        self._places = frozenset(
            (address, port)
            for host in self._hosts
            if (address := _address(host.name))
            for port in ([host.port] if host.port else PORTS.values())
        )
        self._limiter = anyio.CapacityLimiter(MAX_FETCHES)

    def check(self, url: str, param: str) -> None:
        """Check what can be seen of a URL without looking it up.

        Raises RemoteProtocolError (`invalid_value`) that names `param` and says what is not allowed.
        """
        self._checked(url, param)

    async def audio(self, url: str, param: str, max_bytes: int) -> bytes:
        """Return the file at a URL. Waits for at most MAX_FETCH_S once one of MAX_FETCHES places is free.

        Raises RemoteProtocolError (`invalid_value`) that names `param` and says why: a host or an address that is not
        allowed, also after a redirect; a file of more than `max_bytes`, of another type, or none; a server that is too
        slow or fails.
        """
        async with self._limiter:
            try:
                with anyio.fail_after(MAX_FETCH_S):
                    return await self._follow(url, param, max_bytes)
            except TimeoutError:
                raise _refusal(param, f"it took longer than {MAX_FETCH_S:.0f} s") from None
            except _NotAllowedError:
                raise _refusal(param, "its host has no public address") from None
            except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
                raise _refusal(param, "its server cannot be reached") from None

    async def _follow(self, url: str, param: str, max_bytes: int) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._checked(url, param)
            backend = _AllowedAddresses(self._places)
            async with httpcore.AsyncConnectionPool(max_connections=1, network_backend=backend) as pool:
                target = parts._replace(fragment="").geturl().encode()
                headers = [("accept", "audio/*"), ("accept-encoding", "identity"), ("user-agent", "antiphon")]
                async with pool.stream("GET", target, headers=[("host", parts.netloc), *headers]) as response:
                    found = {name.lower(): value for name, value in response.headers}
                    if response.status in (301, 302, 303, 307, 308) and b"location" in found:
                        url = urljoin(url, found[b"location"].decode("latin-1"))
                        if parts.scheme == "https" and not url.startswith("https:"):
                            raise _refusal(param, "it redirects from https to http")
                        continue
                    if response.status != 200:
                        raise _refusal(param, f"its server answered {response.status}")
                    return await _body(response, found, param, max_bytes)
        raise _refusal(param, f"it has more than {MAX_REDIRECTS} redirects")

    def _checked(self, url: str, param: str) -> SplitResult:
        if not self._hosts:
            raise _refusal(param, f"nothing is fetched; give the file as base64, or start the server with {FLAG}")
        try:
            # What a URL may not have would be quoted by some readers and dropped by others.
            parts = urlsplit(url.encode("ascii").decode())
            name, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme, 0)
        except ValueError:
            raise _refusal(param, "it is no URL") from None
        if parts.scheme not in PORTS or not name or len(url) > MAX_URL_CHARS or re.search(r"[\s\\\x00-\x1f]", url):
            raise _refusal(param, "it is no http or https URL")
        if "@" in parts.netloc:
            raise _refusal(param, "a URL may not have a user or password")
        if not any(host.allows(name, port, parts.scheme) for host in self._hosts):
            raise _refusal(param, f"the host {name[:80]!r} is not among those of {FLAG}")
        return parts


class _AllowedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to a host's addresses if each is public, or listed with the port. TLS names the host, as ever."""

    def __init__(self, listed: frozenset[tuple[Address, int]]) -> None:
        self._listed = listed
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers. Raises _NotAllowedError, and OSError for an unknown name."""
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
        if not all(is_public(a) or (a, port) in self._listed for a in map(ipaddress.ip_address, addresses)):
            raise _NotAllowedError
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.NetworkError:
                continue
        return await self._inner.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        """Wait, between attempts to connect."""
        await self._inner.sleep(seconds)


async def _body(response: httpcore.Response, headers: dict[bytes, bytes], param: str, max_bytes: int) -> bytes:
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind and not AUDIO_TYPES.fullmatch(kind):
        raise _refusal(param, f"it is {kind[:80]}, and no audio file")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise _refusal(param, "it is compressed")
    body = bytearray()
    async for part in response.aiter_stream():
        body += part
        if len(body) > max_bytes:
            raise _refusal(param, f"at most {max_bytes >> 20} MiB")
    return bytes(body)


def is_public(address: Address) -> bool:
    """Whether an address, and any IPv4 address that it stands for, is one of the public internet."""
    inner: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        inner += [a for a in (address.ipv4_mapped, address.sixtofour) if a]
        inner += address.teredo or ()
        if address in NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped:
            inner.remove(address)
    return all(a.is_global and not a.is_multicast for a in inner)


def _host(entry: str) -> _Host:
    try:
        parts = urlsplit(f"//{entry}")
        name, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        name, port = "", None
    if not re.fullmatch(r"\*|(\*\.)?[\w.:-]+", name) or name not in entry.lower() or re.search(r"[/@?#]", entry):
        raise SettingsError(f"{FLAG}: expected a host, as in cdn.example.com, *.example.com or 10.0.0.7:9000: {entry}")
    return _Host(name, port)


def _address(name: str) -> Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _refusal(param: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {why}.", param)
