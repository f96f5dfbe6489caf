"""One live video stream: frames, audio and questions in, answers out (`/v1/video/chat/stream`)."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

import anyio

from antiphon.contracts import VideoModel
from antiphon.errors import Refused
from antiphon.events.video import AppendFrame, FinishVideo, VideoConfig, VideoEvent
from antiphon.protocols.video.stream import CONFIG_TIMEOUT, IDLE_TIMEOUT, VideoDialect
from antiphon.protocols.wire import random_id
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.stored_video import RestoredVideo, StoredVideo
from antiphon.server.live.session import CLOSE_INTERNAL
from antiphon.server.live.stream import LiveStream
from antiphon.server.state import ServerState
from antiphon.sessions.video.session import VideoSession, VideoState
from antiphon.text.said import MODEL, USER, said_so_far
from antiphon.transports.journal import ResumeToken
from antiphon.transports.websocket import WebSocketTransport

log = logging.getLogger(__name__)
LABEL = "video"
# Number of frames that may wait for the socket. It is small, so that a new answer does not wait behind an old one.
MAX_WAITING_FRAMES = 2


class LiveVideo:
    """Serves one video stream over an accepted WebSocket, and closes the WebSocket at the end. Call `run` once.

    `model` answers its questions. `ga` selects the names of OpenAI's GA events for audio instead of the older ones.
    `restored` is the stored state of a stream that another host has begun. `copy` is its copy in the session store. A
    client that resumes attaches its transport to `attachment`.
    """

    def __init__(
        self,
        socket: WebSocketTransport,
        state: ServerState,
        caller: Caller,
        model: VideoModel,
        token: ResumeToken | None,
        *,
        ga: bool,
        restored: RestoredVideo | None = None,
    ) -> None:
        self._state = state
        session_id = restored.row.id if restored else ""
        self._stream = LiveStream(self, socket, state, caller, token, LABEL, MAX_WAITING_FRAMES, session_id=session_id)
        self.attachment = self._stream.attachment
        self.copy = StoredVideo(state, caller, self._stream, model.profile.id, ga=ga, restored=restored)
        self._stream.copy = self.copy
        self._restored = restored
        self._model = model
        whole = state.settings.video.async_chunk == "off"
        self._wire = VideoDialect(
            lambda: time.monotonic() * 1000,
            whole=whole,
            ga=ga,
            voices=model.profile.voices,
            strict=state.settings.server.strict_models,
        )
        # None until the configuration arrives.
        self._session: VideoSession | None = None
        # Set after a restored session has begun.
        self._goes_on = anyio.Event()

    async def run(self) -> None:
        """Serve until either side ends the stream, or it is not resumed within the grace period.

        A failure of the session ends only this stream. It is logged, not raised.
        """
        log.info("a video session begins")
        try:
            await self._stream.serve(self._go_on, self.copy.store_regularly)
        finally:
            self.copy.close()
            frames, kept = (self._session.num_frames, self._session.num_kept) if self._session else (0, 0)
            self._stream.live.log_end(frames=frames, kept=kept)

    # --- StreamedSession ----------------------------------------------------------------------------------------------

    @property
    def idle_limit_s(self) -> float:
        """The idle timeout in seconds, which is longer after the stream is configured."""
        video = self._state.settings.video
        return video.video_idle_timeout_s if self._wire.configured else video.video_config_timeout_s

    @property
    def num_bytes(self) -> int:
        return self._session.num_bytes if self._session else 0

    @property
    def idle(self) -> bool:
        """True if no answer is under way. A client that waits for an answer is not idle."""
        return self._session is None or self._session.idle

    @property
    def is_silent(self) -> bool:
        """Always true: a question is complete in one message, and `wind_up` answers the questions that were asked."""
        return True

    def refuse_idle(self) -> None:
        self._stream.put([self._wire.refuse(IDLE_TIMEOUT if self._wire.configured else CONFIG_TIMEOUT)])

    async def handle(self, data: str | bytes) -> None:
        """Pass a message's commands to the session. The configuration starts the session.

        Waits while the session's queue is full, and while the client does not read its errors. Finishes the stream if
        the configuration was refused, or if the client has closed the stream.
        """
        await self._goes_on.wait()
        number = self._stream.attachment.num_received
        known = self.copy.known(number)
        if known and (not known.is_frame or self.copy.has_frames):
            # Another host has carried it out, and the client has the results.
            self.copy.took(number, (), len(data))
            return
        received = self._wire.feed(data)
        answered = self._stream.put(received.answers)
        self.copy.took(number, received.commands, len(data))
        for command in received.commands:
            if isinstance(command, VideoConfig):
                self._begin(command, data)
            elif self._session:
                if known and isinstance(command, AppendFrame):
                    command = replace(command, is_known=True)
                await self._session.put(command)
        if answered:
            await self._stream.live.outbox.wait_for_room()
        if self._wire.closing and self._stream.live.lifecycle.reads_frames:
            if self._session:
                self._session.close()
            self._stream.finish()

    async def wind_up(self) -> None:
        """Have the session complete the answer that is under way, unless another host begins it again. The stream
        finishes when the session ends.
        """
        if self._session and self.copy.is_moving:
            self._session.close()
        elif self._session:
            await self._session.put(FinishVideo())
        else:
            self._stream.finish()

    # --- the session --------------------------------------------------------------------------------------------------

    def _begin(self, config: VideoConfig, message: str | bytes) -> None:
        """Start the session with the configuration in `message`. A restored session continues with its history."""
        before = self._restored
        exchanges = before.point.exchanges if before else ()
        if history := said_so_far(line for e in exchanges for line in ((USER, e.question), (MODEL, e.answer))):
            config = replace(config, instructions=f"{config.instructions}\n\n{history}".strip())
        self._session = VideoSession(
            config,
            self._model,
            self._emit,
            new_id=random_id,
            measure=self._stream.live.measure,
            owner=self._stream.caller.key,
            before=before.point.state if before else VideoState(),
            seen=before.frames if before else (),
            num_newest=self.copy.num_newest,
        )
        self.copy.begin(self._session, config, message)
        self._stream.live.start(partial(self._run_session, self._session))

    async def _go_on(self) -> None:
        """Begin a restored session with its stored configuration. Messages of the client wait until then."""
        if self._restored:
            config = self._restored.point.config
            for command in self._wire.feed(config).commands:
                if isinstance(command, VideoConfig):
                    self._begin(command, config)
            if self._session is None:
                log.error("session %s: its stored configuration is refused", self._stream.id)
                self._stream.put([self._wire.refuse("Internal error")])
                self._stream.finish(CLOSE_INTERNAL)
        self._goes_on.set()

    async def _run_session(self, session: VideoSession) -> None:
        close_code = None
        try:
            await session.run()
        except Refused as refusal:
            self._stream.put([self._wire.refuse("Query processing failed", str(refusal))])
        except Exception:
            # The boundary of the session: any failure in it ends only this stream.
            log.exception("a video session failed")
            self._stream.put([self._wire.refuse("Internal error")])
            close_code = CLOSE_INTERNAL
        await self.copy.give_away()
        self._stream.finish(close_code)

    async def _emit(self, event: VideoEvent) -> None:
        if await self.copy.send(event, self._wire.send(event)):
            await self._stream.live.outbox.wait_for_room()
        self._stream.mark_active()
