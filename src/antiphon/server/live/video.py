"""One live video stream: frames, audio and questions in, answers out (`/v1/video/chat/stream`)."""

from __future__ import annotations

import logging
import time

import anyio
import anyio.abc

from antiphon.contracts import VideoModel
from antiphon.errors import Refused
from antiphon.events.transcription import AppendAudio
from antiphon.events.video import FinishVideo, VideoConfig, VideoEvent
from antiphon.protocols.resume.journal import ResumeToken
from antiphon.protocols.video.stream import CONFIG_TIMEOUT, IDLE_TIMEOUT, VideoDialect
from antiphon.protocols.wire import random_id
from antiphon.server.live.stream import CLOSE_INTERNAL, CLOSE_NORMAL, LiveStream
from antiphon.server.state import ServerState
from antiphon.sessions.video.session import VideoSession
from antiphon.transports.attachment import ClientData
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
LABEL = "video"
# Frames that may wait for the socket: an answer to a new question does not wait behind an old one.
MAX_WAITING_FRAMES = 2


class LiveVideo(LiveStream):
    """Serves one video stream: `run` it once. The WebSocket is accepted before, and closed at the end.

    `model` answers its questions. `ga`: the names of OpenAI's GA events for audio, instead of the older ones.
    """

    def __init__(
        self,
        socket: WebSocketTransport,
        state: ServerState,
        caller: str,
        model: VideoModel,
        token: ResumeToken | None,
        *,
        ga: bool,
    ) -> None:
        super().__init__(socket, state, caller, token, LABEL, MAX_WAITING_FRAMES)
        self._model = model
        whole = state.settings.video.async_chunk == "off"
        self._wire = VideoDialect(lambda: time.monotonic() * 1000, whole=whole, ga=ga)
        # Begins with the configuration.
        self._session: VideoSession | None = None
        self._group: anyio.abc.TaskGroup

    async def run(self) -> None:
        """Serve until the stream is over: ended by either side, or not resumed within the grace period.

        Failures of the session end it alone and are logged; none is raised.
        """
        self._enter()
        log.info("a video session begins")
        try:
            async with anyio.create_task_group() as self._group:
                await self.attachment.serve(self._socket, self._group)
                self._group.cancel_scope.cancel()
        finally:
            self._leave()
            counts = (self._session.num_frames, self._session.num_kept) if self._session else (0, 0)
            log.info("a video session ended after %d frames, %d kept", *counts)

    # --- AttachedSession ----------------------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """The server drains, or the client's configuration was refused: no more messages are read."""
        return self._draining or self._wire.closing

    @property
    def _limit_s(self) -> float:
        video = self._state.settings.video
        return video.video_idle_timeout_s if self._wire.configured else video.video_config_timeout_s

    async def end_if_idle(self) -> bool:
        """End the stream if neither side has sent anything for the limit, and no answer is being given."""
        if time.monotonic() < self._active_s + self._limit_s or (self._session and not self._session.idle):
            return False
        self._put([self._wire.refuse(IDLE_TIMEOUT if self._wire.configured else CONFIG_TIMEOUT)])
        self._finish(CLOSE_NORMAL, "timeout")
        return True

    async def handle(self, data: ClientData) -> None:
        """Give a message's commands to the session; the configuration starts it.

        Waits while the session's queue is full, and while the client does not read its errors.
        """
        assert not isinstance(data, AppendAudio)
        self._active_s = time.monotonic()
        received = self._wire.feed(data)
        answered = self._put(received.answers)
        for command in received.commands:
            if isinstance(command, VideoConfig):
                self._session = VideoSession(
                    command, self._model, self._emit, new_id=random_id, measure=self._state.metrics.measure
                )
                self._group.start_soon(self._run_session, self._session)
            elif self._session:
                await self._session.put(command)
        if answered:
            await self._outbox.wait_for_room()

    async def wind_up(self) -> None:
        """When the server drains, have the answer under way completed; the session's end closes the connection.

        Otherwise close it now, and give up the answer: its client has left, or was refused.
        """
        if self._draining and self._session:
            await self._session.put(FinishVideo())
            return
        if self._session:
            self._session.close()
        self._finish(self._close_code, self._close_reason)

    # --- the session --------------------------------------------------------------------------------------------------

    async def _run_session(self, session: VideoSession) -> None:
        try:
            await session.run()
        except Refused as refusal:
            self._put([self._wire.refuse("Query processing failed", str(refusal))])
        except Exception:
            # The session's edge: whatever failed in it ends this stream alone.
            log.exception("a video session failed")
            self._put([self._wire.refuse("Internal error")])
            self._close_code = CLOSE_INTERNAL
        self._finish(self._close_code, self._close_reason)

    async def _emit(self, event: VideoEvent) -> None:
        if self._put(self._wire.send(event)):
            await self._outbox.wait_for_room()
        self._active_s = time.monotonic()
