"""A sideband: a second connection to a live session (`/v1/realtime?call_id=ID`), of a program beside its client.

The program gets the session's events from then on, without audio, and its own messages act as if the client had sent
them. Neither connection ends the other: a sideband ends with its session, and may be resumed as a session is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.protocols.connection import WireConnection
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.resume import Control, HowResumed, control, refused_frame, replaced_frame
from antiphon.protocols.wire import Frame, decode_json, random_id
from antiphon.server.credentials import Caller
from antiphon.server.live.session import CLOSE_NORMAL, LiveSession
from antiphon.server.state import ServerState
from antiphon.transports.journal import ResumeToken
from antiphon.transports.transport import ClientData
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
# The most sidebands of one session, and the most frames that one of them may leave unread before it is left behind.
MAX_SIDEBANDS, MAX_UNREAD_FRAMES = 8, 10_000
# When a program may try again, in seconds, if a session has MAX_SIDEBANDS.
RETRY_S = 5.0
_AUDIO = frozenset({"response.output_audio.delta", "response.audio.delta"})
Answer = Callable[[Iterable[Frame]], None]


class SharedSession(Protocol):
    """The live session of a sideband, as the sideband uses it: `server/live/realtime.py`."""

    sidebands: Sidebands
    wire: WireConnection

    @property
    def id(self) -> str:
        """The session's id on the wire."""
        ...

    @property
    def caller(self) -> Caller:
        """The caller that opened the session."""
        ...

    async def handle_beside(self, data: str | bytes, answer: Answer) -> None:
        """Handle a frame of a sideband. Errors of the frame go to `answer`, everything else to all connections."""
        ...


class Sidebands:
    """The sidebands of one live session."""

    def __init__(self) -> None:
        self._all: list[Sideband] = []
        self._closed: tuple[int, str] | None = None

    def add(self, sideband: Sideband) -> None:
        """Add a sideband. Raises Refused if there are MAX_SIDEBANDS already."""
        if len(self._all) >= MAX_SIDEBANDS:
            raise Refused(f"a session has {MAX_SIDEBANDS} sidebands at most", RETRY_S, by_own_limit=True)
        self._all.append(sideband)
        if self._closed:
            sideband.end(*self._closed)

    def remove(self, sideband: Sideband) -> None:
        """Remove a sideband that has ended."""
        self._all.remove(sideband)

    def put(self, frame: Frame) -> None:
        """Send a frame of the session to all sidebands. Does not wait.

        Audio is left out, and so are frames about the client's own connection, which may have its token.
        """
        is_audio = isinstance(frame.payload, bytes) or frame.payload.get("type") in _AUDIO
        if frame.numbered and not is_audio:
            for sideband in list(self._all):
                sideband.put(frame)

    def tell(self, event: str) -> None:
        """Send an event of the transport to all sidebands: JSON text. Does not wait."""
        self.put(Frame(decode_json(event)))

    def close(self, code: int, reason: str) -> None:
        """End all sidebands after the frames that wait for them, because the session has ended. Does not wait."""
        self._closed = code, reason
        for sideband in list(self._all):
            sideband.end(code, reason)


class Sideband:
    """One sideband of `session`, over its first WebSocket and those that resume it with `token`. Call `serve` once.

    Without a token, it ends with its WebSocket.
    """

    idle_s = None
    num_bytes = 0
    backlog_s = 0.0

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        session: SharedSession,
        wire: RealtimeConnection,
        token: ResumeToken | None,
    ) -> None:
        self.id = random_id("side_")
        self.caller = caller
        self._session = session
        self._wire = wire
        self._live = LiveSession(self, state, caller, token, MAX_UNREAD_FRAMES)
        self.attachment = self._live.attachment
        self._live.outbox.put(wire.beside(self.id, token.renew() if token else ""))

    async def serve(self, transport: WebSocketTransport) -> None:
        """Serve until either side ends the connection, or the session ends."""
        await self._live.serve(transport)
        log.info("sideband %s of session %s has ended", self.id, self._session.id)

    # --- called by the session

    def put(self, frame: Frame) -> None:
        """Queue a frame. A program that does not read is left behind, and loses its connection."""
        outbox = self._live.outbox
        outbox.put(frame)
        if outbox.num_waiting > MAX_UNREAD_FRAMES or outbox.journal.is_overfull:
            log.warning("sideband %s does not read, and is left behind", self.id)
            self.attachment.abandon()

    def end(self, code: int, reason: str) -> None:
        """Close the connection after the waiting frames. Does not wait."""
        self._live.finish(code, reason)

    # --- AttachedSession

    def drain(self, within_s: float) -> None:
        """Do nothing: the sideband ends with its session, which drains."""

    def finish(self) -> None:
        self._live.finish(CLOSE_NORMAL, "")

    async def handle(self, data: ClientData) -> None:
        assert isinstance(data, str | bytes)

        def answer(frames: Iterable[Frame]) -> None:
            for frame in frames:
                self.put(frame)

        await self._session.handle_beside(data, answer)

    async def end_if_idle(self) -> None:
        """Do nothing: a program may only listen."""

    async def wind_up(self) -> None:
        self._live.finish()

    def control(self, data: str | bytes) -> Control | None:
        return control(data)

    async def reject(self, error: RemoteProtocolError, event_id: str | None) -> None:
        self.put(refused_frame(random_id, error, event_id))

    async def resumed(self, token: str, how: HowResumed) -> Frame:
        return self._wire.resumed(token, received_events=self.attachment.num_received, how=how)

    def replaced(self) -> list[Frame]:
        return [replaced_frame(random_id, self.id)]


def is_error(frame: Frame) -> bool:
    """Whether a frame is an error about a message of a client."""
    return not isinstance(frame.payload, bytes) and frame.payload.get("type") == "error"


def may_share(caller: Caller, session: SharedSession) -> bool:
    """Whether a caller may join a session: with the session's API key, or the client secret that has opened it."""
    owner = session.caller
    return caller.key == owner.key and caller.granted in (None, owner.granted)
