"""The hosts to which this server may connect for a client, and their addresses.

A client may name a URL of which the operator allows only some hosts. A name is resolved here, and the caller connects
to an address that was checked, so that the name cannot resolve to another address between the check and the
connection. No address may be private unless the operator lists exactly this address and port.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import SplitResult, urlsplit

import anyio
import anyio.to_thread

from antiphon.errors import RemoteProtocolError, SettingsError

MAX_URL_CHARS = 2048
PORTS = {"http": 80, "https": 443}
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


class NotAllowedError(Exception):
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


class AllowedHosts:
    """The hosts of one setting: host names, `*.DOMAIN`, `*` or addresses, each with a port or without.

    - `entries`: the setting's values. If there are none, no host is allowed.
    - `flag`: the setting's flag, for messages.

    Raises SettingsError for an entry that is not a host.
    """

    def __init__(self, entries: Sequence[str], flag: str) -> None:
        self._flag = flag
        self._hosts = [_host(entry, flag) for entry in entries]
        self._places = frozenset(
            (address, port)
            for host in self._hosts
            if (address := _address(host.name))
            for port in ([host.port] if host.port else PORTS.values())
        )

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def check(self, url: str, param: str) -> SplitResult:
        """Return the parts of a URL, whose host is not resolved yet.

        Raises RemoteProtocolError (`invalid_value`) that names `param` and says what is not allowed.
        """
        try:
            # Parsers differ on characters that a URL may not have: some quote them, some drop them.
            parts = urlsplit(url.encode("ascii").decode())
            name, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme, 0)
        except ValueError:
            raise refusal(param, "it is not a URL") from None
        if parts.scheme not in PORTS or not name or len(url) > MAX_URL_CHARS or re.search(r"[\s\\\x00-\x1f]", url):
            raise refusal(param, "it is not an http or https URL")
        if "@" in parts.netloc:
            raise refusal(param, "a URL may not have a user or password")
        if not any(host.allows(name, port, parts.scheme) for host in self._hosts):
            raise refusal(param, f"the host {name[:80]!r} is not among those of {self._flag}")
        return parts

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host, all of which may be connected to.

        Raises NotAllowedError, OSError for an unknown name, and UnicodeError for an invalid name.
        """
        # Runs in a separate thread, which is abandoned when the caller's time is over.
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        limiter = anyio.CapacityLimiter(1)
        found = await anyio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=limiter)
        addresses = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
        if not all(is_public(a) or (a, port) in self._places for a in map(ipaddress.ip_address, addresses)):
            raise NotAllowedError
        return addresses


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


def _host(entry: str, flag: str) -> _Host:
    try:
        parts = urlsplit(f"//{entry}")
        name, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        name, port = "", None
    if not re.fullmatch(r"\*|(\*\.)?[\w.:-]+", name) or name not in entry.lower() or re.search(r"[/@?#]", entry):
        raise SettingsError(f"{flag}: expected a host, as in cdn.example.com, *.example.com or 10.0.0.7:9000: {entry}")
    return _Host(name, port)


def _address(name: str) -> Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def refusal(param: str, why: str) -> RemoteProtocolError:
    """Return the error for a URL that is not allowed."""
    return RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {why}.", param)
