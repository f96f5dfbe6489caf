"""What this server tells about itself over Wyoming: its `info`, and its announcement on the local network."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from antiphon import __version__
from antiphon.protocols.wyoming.info import Info, info
from antiphon.server.http.listening import is_wildcard
from antiphon.server.state import ServerState

log = logging.getLogger(__name__)
SERVICE = "_wyoming._tcp.local."
# An address of the documentation's network (RFC 5737). No packet is sent to it.
ELSEWHERE = ("192.0.2.1", 9)


def current_info(state: ServerState) -> Info:
    """Return the `info` of the loaded models. Raises Refused while the server drains."""
    models = state.loaded()
    return info(
        models.transcriber.profile if models.transcriber else None,
        models.synthesizer.profile if models.synthesizer else None,
        models.language_model.profile if models.language_model else None,
        __version__,
        finds_end=state.settings.wyoming.wyoming_endpointing == "server",
    )


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
