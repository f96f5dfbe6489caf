"""The Wyoming port of a server: its checks, its listener, and its announcement on the local network."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from antiphon.extras import require_extra
from antiphon.server.http.forwarded import Networks
from antiphon.server.http.listening import is_wildcard
from antiphon.server.listeners import Everyone, Listener, bind_listener, check_listener_exposure, host_of
from antiphon.server.state import ServerState
from antiphon.server.wyoming.connection import WyomingJobs
from antiphon.server.wyoming.handling import Histories
from antiphon.settings import Settings

log = logging.getLogger(__name__)
SERVICE = "_wyoming._tcp.local."
# An address of the documentation's network (RFC 5737). No packet is sent to it.
ELSEWHERE = ("192.0.2.1", 9)


@asynccontextmanager
async def announced(name: str, host: str, port: int) -> AsyncIterator[None]:
    """Announce a Wyoming port by zeroconf while the block runs. Does nothing for the name "".

    Multicast reaches the local network. If this machine has no IPv4 address there, an error is logged.
    """
    address = address_of(host) if name else ""
    if not address:
        yield
        return
    from zeroconf import ServiceInfo
    from zeroconf.asyncio import AsyncZeroconf

    service = ServiceInfo(SERVICE, f"{name}.{SERVICE}", addresses=[socket.inet_aton(address)], port=port)
    # Only on the network of this address, and on all networks for a port on all addresses.
    zeroconf = AsyncZeroconf() if is_wildcard(host) else AsyncZeroconf(interfaces=[address])
    try:
        await zeroconf.async_register_service(service, allow_name_change=True)
        log.info("the Wyoming port is announced as %s at %s:%d", service.name, address, port)
        yield
    finally:
        await zeroconf.async_unregister_all_services()
        await zeroconf.async_close()


def address_of(host: str) -> str:
    """Return the IPv4 address at which others reach a port that is bound to `host`. "" without one, with a log line."""
    try:
        if not is_wildcard(host):
            return socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(ELSEWHERE)
            return str(probe.getsockname()[0])
    except OSError:
        log.error("the Wyoming port is not announced: %s has no IPv4 address on a network", host or "this machine")
        return ""


def check_wyoming(settings: Settings) -> None:
    """Raise SettingsError if the Wyoming port is open to others without `--wyoming-allow`, or an extra is missing."""
    own = settings.wyoming
    if own.wyoming:
        anonymous = settings.server.allow_anonymous
        check_listener_exposure("--wyoming", own.wyoming, own.wyoming_allow, allow_anonymous=anonymous)
    if own.wyoming_zeroconf:
        require_extra("wyoming", "--wyoming-zeroconf")


def open_wyoming(state: ServerState) -> None:
    """Bind the Wyoming port, if the settings have one, and add it to the server's listeners.

    Raises SettingsError if the address is not available, or if `--wyoming-allow` is invalid.
    """
    own = state.settings.wyoming
    if own.wyoming:
        allowed = Networks(own.wyoming_allow, "--wyoming-allow") if own.wyoming_allow else Everyone()
        connect = partial(WyomingJobs, state, Histories())
        announce = partial(announced, own.wyoming_zeroconf, host_of(own.wyoming))
        state.listeners.add(Listener("wyoming", bind_listener(own.wyoming), connect, allowed, announce))
