"""Where SIP messages go: addresses over UDP, and TCP connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import anyio

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.telephony.sip.messages import SipFramer
from antiphon.protocols.telephony.sip.transactions import Peer

log = logging.getLogger(__name__)
READ_BYTES = 1 << 16
# Seconds without a byte after which a TCP connection is closed.
IDLE_S = 1800.0
# Bytes that may wait for a peer that does not read. It is then cut off.
MAX_UNREAD_BYTES = 1 << 20
# Seconds in which the last messages over TCP have to be sent when the server stops.
LAST_WORDS_S = 2.5

# Handles one message of a peer. Does not wait, and does not raise.
Receive = Callable[[bytes, Peer], None]


class UdpPeer:
    """An address over UDP. `socket` sends a datagram to an address."""

    protocol, is_reliable, is_closed = "UDP", False, False

    def __init__(self, socket: Callable[[bytes, tuple[str, int]], None], host: str, port: int) -> None:
        self.host, self.port, self._socket = host, port, socket

    def at(self, port: int) -> UdpPeer:
        """Return the same host with another port."""
        return UdpPeer(self._socket, self.host, port)

    def send(self, data: bytes) -> None:
        """Send one message in a datagram."""
        self._socket(data, (self.host, self.port))


class StreamPeer:
    """One TCP connection, as a peer and as a connection of the listener."""

    protocol, is_reliable = "TCP", True

    def __init__(
        self, receive: Receive, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        self.host, self.port = address, int(writer.get_extra_info("peername", ("", 0))[1])
        self._receive, self._reader, self._writer = receive, reader, writer

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._writer.is_closing()

    def send(self, data: bytes) -> None:
        """Send one message. It is lost if the connection is closed."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            transport.abort()
            return
        self._writer.write(data)

    async def run(self) -> None:
        framer = SipFramer()
        try:
            while True:
                with anyio.fail_after(IDLE_S):
                    data = await self._reader.read(READ_BYTES)
                if not data:
                    return
                for message in framer.feed(data):
                    self._receive(message, self)
        except (OSError, TimeoutError):
            return
        except RemoteProtocolError as error:
            log.info("a connection over SIP is closed: %s", error.message)

    def drain(self) -> None:
        """Do nothing: its calls go on."""

    def cut(self) -> None:
        # Its calls are ended after this, with messages over this connection.
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._writer.close)

    def close(self) -> None:
        """Close the connection, also if it is closed."""
        self._writer.close()
