"""The port for Asterisk's AudioSocket: its check, its listener, and the connections of calls."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.telephony.asterisk import AudioSocketStream
from antiphon.server.http.auth import act_for
from antiphon.server.http.forwarded import Networks
from antiphon.server.listeners import Everyone, Listener, bind_listener, check_listener_exposure, unannounced
from antiphon.server.state import ServerState
from antiphon.server.telephone.serving import caller_of_signed, check_models, serve_stream
from antiphon.settings import Settings
from antiphon.transports.audiosocket import AudioSocketTransport

log = logging.getLogger(__name__)


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
        """Close the connection."""
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
