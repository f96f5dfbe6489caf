"""One video stream that is being served."""

from __future__ import annotations

import logging
import time

import anyio

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
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
LABEL = "video"
# Frames that may wait for the socket: what answers a new question does not wait behind an old answer.
MAX_WAITING_FRAMES = 2


class LiveVideo(LiveStream):
    """One session; see line.Session."""

    def __init__(
        self,
        socket: WebSocketTransport,
        state: ServerState,
        caller: str,
        watcher: VideoModel,
        token: ResumeToken | None,
        *,
        ga: bool,
    ) -> None:
        super().__init__(socket, state, caller, token, LABEL, MAX_WAITING_FRAMES)
        self._watcher = watcher
        whole = state.settings.video.async_chunk == "off"
        self._wire = VideoDialect(lambda: time.monotonic() * 1000, whole=whole, ga=ga)
        self._session: VideoSession | None = None
        self._group: anyio.abc.TaskGroup

    async def run(self) -> None:
        """Until it is over."""
        self._enter()
        log.info("a video session begins")
        try:
            async with anyio.create_task_group() as self._group:
                await self.line.serve(self._socket, self._group)
                self._group.cancel_scope.cancel()
        finally:
            self._leave()
            seen = (self._session.num_frames, self._session.num_kept) if self._session else (0, 0)
            log.info("a video session ended after %d frames, %d kept", *seen)

    # --- what the line asks -----------------------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """See line.Session."""
        return self._draining or self._wire.closing

    @property
    def _limit_s(self) -> float:
        video = self._state.settings.video
        return video.video_idle_timeout_s if self._wire.configured else video.video_config_timeout_s

    async def idle(self) -> bool:
        """See line.Session. An answer under way is no idleness."""
        if time.monotonic() < self._active_s + self._limit_s or (self._session and not self._session.idle):
            return False
        self._wire.refuse(IDLE_TIMEOUT if self._wire.configured else CONFIG_TIMEOUT)
        self._push()
        self._finish(CLOSE_NORMAL, "timeout")
        return True

    async def take(self, data: str | bytes | AppendAudio) -> None:
        """See line.Session."""
        assert not isinstance(data, AppendAudio)
        self._active_s = time.monotonic()
        self._wire.receive(data)
        for item in self._wire.commands():
            if isinstance(item, VideoConfig):
                self._session = VideoSession(
                    item, self._watcher, self._emit, new_id=random_id, measure=self._state.metrics.measure
                )
                self._group.start_soon(self._watch, self._session)
            elif self._session:
                await self._session.put(item)
        if self._push():
            await self._outbox.room()

    async def wind_up(self) -> None:
        """See line.Session."""
        if self._draining and self._session:
            # The answer under way is completed; then the session ends, and the connection with it.
            await self._session.put(FinishVideo())
            return
        if self._session:
            # Who is gone reads no answer.
            self._session.close()
        self._finish(self._code, self._reason)

    # --- watching ---------------------------------------------------------------------------------------------------------

    async def _watch(self, session: VideoSession) -> None:
        try:
            await session.run()
        except Refused as refusal:
            self._wire.refuse("Query processing failed", str(refusal))
        except Exception:
            # The session's edge: whatever failed in it ends it alone.
            log.exception("a video session failed")
            self._wire.refuse("Internal error")
            self._code = CLOSE_INTERNAL
        self._push()
        self._finish(self._code, self._reason)

    async def _emit(self, output: VideoEvent) -> None:
        self._wire.send(output)
        if self._push():
            await self._outbox.room()
        self._active_s = time.monotonic()

    def _push(self) -> bool:
        return self._put(list(self._wire.frames()))
