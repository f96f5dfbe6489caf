"""The WebSocket of /v1/audio/speech/stream: one reader, one writer, one speech session a connection, in one task group."""

from __future__ import annotations

import logging
import time

import anyio
import anyio.lowlevel
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.errors import Refused, RemoteProtocolError
from antiphon.events import UnitSound
from antiphon.protocols.speech_stream import CONFIG_TIMEOUT, IDLE_TIMEOUT, SpeechStream
from antiphon.server.auth import bearer
from antiphon.server.errors import deny
from antiphon.server.facts import speech_facts
from antiphon.server.state import Live, ServerState
from antiphon.speech import SpeechSession

log = logging.getLogger(__name__)

LABEL = "speech_stream"
# A client that takes nothing for this long is gone. Until then its synthesis waits.
STALL_S = 300.0
CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_POLICY, CLOSE_INTERNAL = 1000, 1001, 1008, 1011
# Messages a second a client may send on average before each next one is taken more slowly.
MESSAGES_PER_S = 1000.0
# How a client that is gone, or has stopped reading, shows.
GONE = (WebSocketDisconnect, RuntimeError, OSError, TimeoutError)


async def speech_stream(websocket: WebSocket) -> None:
    """GET /v1/audio/speech/stream, upgraded. Refusals before the upgrade are HTTP answers."""
    state: ServerState = websocket.app.state.antiphon
    who = state.who(bearer(websocket.headers))
    if who is None:
        state.metrics.refused.labels("unauthorized").inc()
        await deny(websocket, 401, "Incorrect API key provided.", "invalid_api_key")
        return
    try:
        if state.loaded().speaks is None:
            await deny(websocket, 404, "No speech synthesizer is loaded.", "model_not_found")
            return
        with state.admit(who):
            await _Connection(websocket, state, who).run()
    except Refused as refusal:
        state.metrics.refused.labels("no_room").inc()
        await deny(websocket, 503, str(refusal), "rate_limit_exceeded", refusal.retry_after_s)


class _Connection:
    def __init__(self, websocket: WebSocket, state: ServerState, who: str) -> None:
        self._websocket = websocket
        self._state = state
        self._who = who
        self._wire = SpeechStream(speech_facts(state))
        self._session = SpeechSession(state.loaded().synthesizer, state.metrics.measure, state.loaded().hears)
        # The reader answers errors, the writer sends what is spoken: one frame at a time.
        self._sending = anyio.Lock()
        self._reading = anyio.CancelScope()
        self._active_s = time.monotonic()
        self._code, self._reason = CLOSE_NORMAL, ""

    async def run(self) -> None:
        await self._websocket.accept()
        metrics, live = self._state.metrics, Live(self._who, lambda: 0.0, self._drain)
        self._state.live.add(live)
        metrics.sessions.labels(LABEL).inc()
        metrics.sessions_started.labels(LABEL).inc()
        log.info("a speech stream begins")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._speak)
                group.start_soon(self._write, group.cancel_scope)
                try:
                    await self._read(group.cancel_scope)
                except GONE:
                    log.info("a speech stream's client left while it was answered")
                    group.cancel_scope.cancel()
        finally:
            self._state.leave(live)
            metrics.sessions.labels(LABEL).dec()
            metrics.audio_s.labels("spoken").inc(self._session.audio_s)
            log.info("a speech stream ended after %.1f s of sound", self._session.audio_s)

    # --- reading ----------------------------------------------------------------------------------------------------------

    async def _read(self, scope: anyio.CancelScope) -> None:
        """Until the client closes or leaves, the drain begins, or nothing happens for too long."""
        began = time.monotonic()
        taken = 0
        with self._reading:
            while not self._wire.closing:
                data = await self._receive()
                if data is None:
                    # The client left: nothing that is still to come has a reader.
                    scope.cancel()
                    return
                self._active_s = time.monotonic()
                taken += 1
                await self._take(data)
                # Others get their turn of the event loop however fast one client types.
                await anyio.sleep(max(0.0, taken / MESSAGES_PER_S - 1.0 - (time.monotonic() - began)))
            # Closed by the client, or by a handshake that failed: what is still to be said is not.
            await self._close(CLOSE_NORMAL if self._wire.configured else CLOSE_POLICY, self._reason)
            scope.cancel()
            return
        # The drain: what was said is spoken, then the writer closes.
        self._session.close()

    async def _receive(self) -> str | bytes | None:
        """The next message; None when the client left or was silent for too long."""
        speech = self._state.settings.speech
        while True:
            limit_s = speech.idle_timeout_s if self._wire.configured else speech.config_timeout_s
            with anyio.move_on_after(max(min(1.0, limit_s), self._active_s + limit_s - time.monotonic())):
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return None
                text: str | None = message.get("text")
                data: bytes = message.get("bytes") or b""
                return data if text is None else text
            if time.monotonic() < self._active_s + limit_s or not self._session.idle:
                continue
            self._wire.refuse(IDLE_TIMEOUT if self._wire.configured else CONFIG_TIMEOUT)
            await self._flush()
            await self._close(CLOSE_NORMAL, "timeout")
            return None

    async def _take(self, data: str | bytes) -> None:
        self._wire.receive(data)
        for item in self._wire.inputs():
            try:
                self._session.receive(item)
            except RemoteProtocolError as error:
                self._wire.refuse(error.message)
        await self._flush()

    def _drain(self) -> None:
        self._code, self._reason = CLOSE_GOING_AWAY, "server_shutting_down"
        self._reading.cancel()

    # --- speaking and writing -----------------------------------------------------------------------------------------------

    async def _speak(self) -> None:
        try:
            await self._session.run()
        except Exception:
            # The session's edge: whatever failed in it ends it alone.
            log.exception("a speech stream failed")
            self._wire.refuse("The session failed.")
            try:
                await self._flush()
            except GONE:
                log.info("a speech stream's client left before it was told")
            await self._close(CLOSE_INTERNAL, "server_error")

    async def _write(self, scope: anyio.CancelScope) -> None:
        """Send what is spoken until the session ends. A client that is gone or takes nothing ends the connection's tasks."""
        try:
            while output := await self._session.next_output():
                self._wire.send(output)
                await self._flush()
                self._active_s = time.monotonic()
                if isinstance(output, UnitSound):
                    # A message that waits is read before the next sound goes out.
                    await anyio.lowlevel.checkpoint()
            await self._close(self._code, self._reason)
        except GONE:
            log.info("a speech stream's client is gone, or has taken nothing for %.0f s", STALL_S)
        scope.cancel()

    async def _flush(self) -> None:
        """Send what the wire has. Raises one of GONE; with nothing to send the reader does not wait for the writer."""
        frames = self._wire.frames()
        if not frames:
            return
        with anyio.fail_after(STALL_S):
            await self._send(frames)

    async def _send(self, frames: list[str | bytes]) -> None:
        async with self._sending:
            for frame in frames:
                if isinstance(frame, str):
                    await self._websocket.send_text(frame)
                else:
                    await self._websocket.send_bytes(frame)

    async def _close(self, code: int, reason: str) -> None:
        try:
            await self._websocket.close(code, reason)
        except GONE:
            log.info("a speech stream's client left first")
