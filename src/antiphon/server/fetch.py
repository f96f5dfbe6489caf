"""Fetches files that a client names by URL. Uses only hosts that the operator lists, and no unlisted private address.

This module resolves a host's name itself and connects to an address that it has checked, so the name cannot resolve to
another address between the check and the connection. Each redirect is checked like the first URL. A key has at most
MAX_FETCHES_OF_KEY fetches under way, and keys take turns, so that slow hosts of one key do not delay the others.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio
import anyio.to_thread
import httpcore

from antiphon.errors import RemoteProtocolError, SettingsError
from antiphon.shares.places import Places

FLAG = "--fetch-from"
# Limits of one fetch: its total time, including the wait for a place; its redirects; the length of its URL.
MAX_FETCH_S, MAX_REDIRECTS, MAX_URL_CHARS = 10.0, 3, 2048
# Maximum number of concurrent fetches, in all and of one key.
MAX_FETCHES, MAX_FETCHES_OF_KEY = 8, 2
PORTS = {"http": 80, "https": 443}
# Content types that are accepted for an audio file.
AUDIO_TYPES = re.compile(r"(audio|video)/.+|application/(octet-stream|ogg)|binary/octet-stream")
# The range of all public IPv6 addresses. Other addresses stand for IPv4 addresses, are local to a site or link, belong
# to a protocol, or are unassigned.
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
# Ranges for documentation (RFC 9637), relays of 6to4 (RFC 7526) and protocols (RFC 6890).
NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("3fff::/20", "192.88.99.0/24", "192.0.0.0/24")))
# IPv6 addresses that a gateway translates to the IPv4 address in their last 32 bits (RFC 6052).
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Bits 64 to 95 of an IPv6 address that a host translates to the IPv4 address in its last 32 bits (ISATAP, RFC 5214).
ISATAP = (0x5EFE, 0x0200_5EFE)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _NotAllowedError(Exception):
    """A host has an address that is neither public nor listed."""


@dataclass(frozen=True, slots=True)
class _Host:
    """An entry of the list of hosts.

    `name` is a host name as in a URL, `*.` followed by a domain for all its subdomains, or `*` for all hosts. If `port`
    is None, the entry is for the scheme's default port.
    """

    name: str
    port: int | None

    def allows(self, name: str, port: int, scheme: str) -> bool:
        below = self.name.startswith("*.") and name.endswith(self.name[1:])
        return (self.name in ("*", name) or below) and port == (self.port or PORTS[scheme])


class Fetcher:
    """Fetches audio files from `hosts`, as listed by `--fetch-from`; refuses every fetch if the list is empty.

    Connects to a private address only if the list contains exactly this address and port. Raises SettingsError for an
    entry that is not a host.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = [_host(entry) for entry in hosts]
        self._places = frozenset(
            (address, port)
            for host in self._hosts
            if (address := _address(host.name))
            for port in ([host.port] if host.port else PORTS.values())
        )
        self._fetches = Places(MAX_FETCHES, MAX_FETCHES_OF_KEY)

    def check(self, url: str, param: str) -> None:
        """Check a URL without resolving its host.

        Raises RemoteProtocolError (`invalid_value`) that names `param` and says what is not allowed.
        """
        self._checked(url, param)

    async def audio(self, url: str, param: str, max_bytes: int) -> bytes:
        """Return the file at a URL. Waits for at most MAX_FETCH_S, including the wait for a place.

        Raises RemoteProtocolError (`invalid_value`) that names `param` and the reason: the host or address is not
        allowed (also after a redirect); the file is missing, larger than `max_bytes` or of another type; or the server
        fails or is too slow.
        """
        try:
            with anyio.fail_after(MAX_FETCH_S):
                async with self._fetches.held():
                    return await self._follow(url, param, max_bytes)
        except TimeoutError:
            raise _refusal(param, f"it took longer than {MAX_FETCH_S:.0f} s") from None
        except _NotAllowedError:
            raise _refusal(param, "its host has no public address") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise _refusal(param, "its server cannot be reached") from None
        except UnicodeError:
            # The name has an empty label, or a label that is too long.
            raise _refusal(param, "its host is not a valid name") from None

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
                        try:
                            url = urljoin(url, found[b"location"].decode("latin-1"))
                        except ValueError:
                            raise _refusal(param, "it redirects to an invalid URL") from None
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
            # Parsers differ on characters that a URL may not have: some quote them, some drop them.
            parts = urlsplit(url.encode("ascii").decode())
            name, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme, 0)
        except ValueError:
            raise _refusal(param, "it is not a URL") from None
        if parts.scheme not in PORTS or not name or len(url) > MAX_URL_CHARS or re.search(r"[\s\\\x00-\x1f]", url):
            raise _refusal(param, "it is not an http or https URL")
        if "@" in parts.netloc:
            raise _refusal(param, "a URL may not have a user or password")
        if not any(host.allows(name, port, parts.scheme) for host in self._hosts):
            raise _refusal(param, f"the host {name[:80]!r} is not among those of {FLAG}")
        return parts


class _AllowedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to a host's addresses if each is public, or listed with the port. TLS still verifies the host's name."""

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
        """Connect to the first address that answers.

        Raises _NotAllowedError, OSError for an unknown name, and UnicodeError for an invalid name.
        """
        # Runs in a separate thread, which is abandoned when the fetch times out.
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        limiter = anyio.CapacityLimiter(1)
        found = await anyio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=limiter)
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
        """Wait for `seconds`. The pool calls it between attempts to connect."""
        await self._inner.sleep(seconds)


async def _body(response: httpcore.Response, headers: dict[bytes, bytes], param: str, max_bytes: int) -> bytes:
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind and not AUDIO_TYPES.fullmatch(kind):
        raise _refusal(param, f"it is {kind[:80]}, not an audio file")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise _refusal(param, "it is compressed")
    body = bytearray()
    async for part in response.aiter_stream():
        body += part
        if len(body) > max_bytes:
            raise _refusal(param, f"at most {max_bytes >> 20} MiB")
    return bytes(body)


def is_public(address: Address) -> bool:
    """Return whether an address is public. If it stands for an IPv4 address, that address has to be public too."""
    if isinstance(address, ipaddress.IPv6Address):
        last = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if address.ipv4_mapped or address in NAT64:
            return is_public(last)
        inner = [*filter(None, [address.sixtofour]), *(address.teredo or ())]
        if int(address) >> 32 & 0xFFFF_FFFF in ISATAP:
            inner.append(last)
        if address not in GLOBAL_UNICAST or not all(map(is_public, inner)):
            return False
    is_listed = any(address in network for network in NOT_PUBLIC)
    return address.is_global and not address.is_multicast and not is_listed


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
