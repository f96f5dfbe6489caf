"""The TCP connection of Asterisk's AudioSocket as the socket of a caller's leg. It carries frames."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from antiphon.protocols.telephony.asterisk import HANG_UP, HEADER_BYTES, framed
from antiphon.transports.transport import STALL_S, TransportClosed

# Seconds without a frame after which the switch counts as gone. It sends one for each 20 ms.
IDLE_S = 60.0


class AudioSocketTransport:
    """One connection. Its frames are read by `AudioSocketStream`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> bytes | None:
        """Wait for the next frame, with its header. Returns None after the switch has closed the connection."""
        try:
            async with asyncio.timeout(IDLE_S):
                header = await self._reader.readexactly(HEADER_BYTES)
                return header + await self._reader.readexactly(int.from_bytes(header[1:], "big"))
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def send(self, data: str | bytes) -> None:
        """Send a frame. Waits if the switch is slow to read. Raises TransportClosed if it has left."""
        assert isinstance(data, bytes)
        if self._writer.is_closing():
            raise TransportClosed
        self._writer.write(data)
        try:
            async with asyncio.timeout(STALL_S):
                await self._writer.drain()
        except OSError:
            # TimeoutError is an OSError.
            raise TransportClosed from None

    async def close(self, code: int, reason: str) -> None:
        """Hang up, and close the connection. AudioSocket has neither codes nor reasons. A second call is a no-op."""
        with suppress(TransportClosed):
            await self.send(framed(HANG_UP))
        self._writer.close()
