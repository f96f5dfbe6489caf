"""The port for Asterisk's AudioSocket: its check, its listener, and the connections of calls, which carry frames."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.telephony.asterisk import HANG_UP, HEADER_BYTES, AudioSocketStream, framed
from antiphon.server.http.auth import act_for
from antiphon.server.http.forwarded import Networks
from antiphon.server.listeners import Everyone, Listener, bind_listener, check_listener_exposure, unannounced
from antiphon.server.state import ServerState
from antiphon.server.telephone.serving import caller_of_signed, check_models, serve_stream
from antiphon.settings import Settings
from antiphon.transports.transport import STALL_S, TransportClosed

log = logging.getLogger(__name__)
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


class AudioSocketCall:
    """One connection, which carries one call. The session of the call drains as other sessions do."""

    def __init__(
        self, state: ServerState, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        self._state = state
        self._writer = writer
        self._transport = AudioSocketTransport(reader, writer)
        self._caller = caller_of_signed(state, address)

    async def run(self) -> None:
        """Serve the call until either side hangs up."""
        try:
            check_models(self._state)
            caller = act_for(self._caller)
            await serve_stream(self._state, caller, self._transport, lambda _: AudioSocketStream())
        except (Refused, RemoteProtocolError) as error:
            log.info("a call of AudioSocket is refused: %s", error)
        await self._transport.close(0, "")

    def drain(self) -> None:
        """Do nothing: the session of the call ends it when neither side speaks."""

    def cut(self) -> None:
        """Close the connection of the call at once."""
        self._writer.close()


def check_audiosocket(settings: Settings) -> None:
    """Raise SettingsError if the port is open to others without `--audiosocket-allow`."""
    own = settings.telephone
    if own.audiosocket:
        anonymous = settings.server.allow_anonymous
        check_listener_exposure("--audiosocket", own.audiosocket, own.audiosocket_allow, allow_anonymous=anonymous)


def open_audiosocket(state: ServerState) -> None:
    """Bind the port, if the settings have one, and add it to the server's listeners.

    Raises SettingsError if the address is not available, or if `--audiosocket-allow` is invalid.
    """
    own = state.settings.telephone
    if own.audiosocket:
        allowed = Networks(own.audiosocket_allow, "--audiosocket-allow") if own.audiosocket_allow else Everyone()
        sock, connect = bind_listener(own.audiosocket), partial(AudioSocketCall, state)
        state.listeners.add(Listener("audiosocket", sock, connect, allowed, unannounced))
