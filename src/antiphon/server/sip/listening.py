"""The SIP port of a server: its checks, and its sockets over UDP and TCP."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.abc

from antiphon.errors import SettingsError
from antiphon.server.http.forwarded import Networks
from antiphon.server.listeners import Everyone, Listener, bind_listener, check_listener_exposure
from antiphon.server.sip.agent import SipAgent
from antiphon.server.sip.calls import Calls
from antiphon.server.sip.peers import StreamPeer, UdpPeer
from antiphon.server.sip.registration import LEAVE_S, registered
from antiphon.server.state import ServerState
from antiphon.settings import Settings

log = logging.getLogger(__name__)


def check_sip(settings: Settings) -> None:
    """Raise SettingsError if the SIP port is open to others without a list or a password, and for wrong settings."""
    own = settings.sip
    if not own.sip:
        if own.sip_register:
            raise SettingsError("--sip-register needs --sip HOST:PORT, where the provider's calls arrive")
        return
    if not own.sip_caller_password:
        guard = own.sip_allow or own.sip_register
        check_listener_exposure("--sip", own.sip, guard, allow_anonymous=settings.server.allow_anonymous)
    first, last = map(int, own.sip_rtp_ports.split("-"))
    if not 0 < first < last <= 65535:
        raise SettingsError("--sip-rtp-ports: expected FIRST-LAST, as in 16384-32767")


class _UdpSocket(asyncio.DatagramProtocol):
    """The UDP socket of an agent."""

    def __init__(self, agent: SipAgent) -> None:
        self._agent = agent

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._agent.receive(data, UdpPeer(self._agent.send_udp, addr[0].removeprefix("::ffff:"), addr[1]))

    def error_received(self, exc: Exception) -> None:
        """A peer is not reachable. Its transactions find out by themselves."""


def _bind_both(address: str) -> tuple[socket.socket, socket.socket]:
    """Bind TCP and UDP to the same port. Raises SettingsError if the address is not available."""
    tries = 20 if address.endswith(":0") else 1
    for left in reversed(range(tries)):
        stream = bind_listener(address)
        datagrams = socket.socket(stream.family, socket.SOCK_DGRAM)
        datagrams.setblocking(False)
        try:
            datagrams.bind(stream.getsockname()[:2])
        except OSError as error:
            datagrams.close()
            stream.close()
            if not left:
                raise SettingsError(f"cannot listen on {address} over UDP: {error.strerror}") from None
        else:
            return stream, datagrams
    raise AssertionError("the last try returns or raises")


class SipPort:
    """The sockets of a server's SIP port, and its agent. Raises SettingsError if the port is not available."""

    def __init__(self, state: ServerState) -> None:
        own = state.settings.sip
        stream, self._datagrams = _bind_both(own.sip)
        is_open = not own.sip_allow and not own.sip_register
        allowed = Everyone() if is_open else Networks(own.sip_allow, "--sip-allow")
        self.port: int = stream.getsockname()[1]
        self.agent = agent = SipAgent(state, allowed, self.port)
        self._calls = state.switchboard.sip = Calls(agent)
        # Set unless the server is registered at the provider, which needs the UDP socket until it has left.
        self._has_left = anyio.Event()
        self._has_left.set()
        connect = partial(StreamPeer, agent.receive)
        state.listeners.add(Listener("sip", stream, connect, agent, self._registered))

    @asynccontextmanager
    async def _registered(self, port: int) -> AsyncIterator[None]:
        """Be registered at the provider while new calls are taken."""
        self._has_left = anyio.Event()
        try:
            async with registered(self.agent):
                yield
        finally:
            self._has_left.set()

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve UDP until this is cancelled: calls may go on while the server drains. TCP is served by the listener."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(partial(_UdpSocket, self.agent), sock=self._datagrams)

        def send(data: bytes, to: tuple[str, int]) -> None:
            if not transport.is_closing():
                transport.sendto(data, to)

        self.agent.send_udp = send
        try:
            task_status.started()
            await self._calls.serve()
        finally:
            with anyio.move_on_after(LEAVE_S, shield=True):
                await self._has_left.wait()
            transport.close()

    def close(self) -> None:
        """Close the socket, also if it was never served."""
        self._datagrams.close()


def open_sip(state: ServerState) -> SipPort | None:
    """Bind the SIP port, if the settings have one. Raises SettingsError as `SipPort` does."""
    return SipPort(state) if state.settings.sip.sip else None
