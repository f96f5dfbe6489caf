"""The copy of a live video stream in the session store, from which another host can continue it.

A client that resumes sends its newest messages again, so images and audio need not be stored. With `--store-frames`,
the newest frames are stored in the row's tail. An answer that is under way when its host ends begins again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import anyio
import msgspec

from antiphon.errors import StoreError
from antiphon.events.video import (
    AnswerDone,
    AnswerStarted,
    FrameReceived,
    VideoCommand,
    VideoConfig,
    VideoEvent,
    VideoFailed,
)
from antiphon.protocols.resume import moving_frame, session_elsewhere, state_degraded_frame
from antiphon.protocols.wire import Frame, random_id
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.persistence import caller_hash
from antiphon.server.live.moving.resume_point import MOVED
from antiphon.server.live.moving.stored_copy import HAND_OVER_S, MAX_JITTER_S, POLL_S, STORE_EVERY_S
from antiphon.server.live.moving.stored_row import Kept, StoredRow
from antiphon.server.live.moving.video_messages import LaterMessage, VideoMessages, VideoPoint
from antiphon.server.live.session import CLOSE_MOVED
from antiphon.server.live.stream import LiveStream
from antiphon.server.state import ServerState
from antiphon.sessions.video.session import SeenFrame, VideoSession, VideoState
from antiphon.signals import become
from antiphon.store.sessions import MAX_TAIL_BYTES, StoredSession, TailChunk

log = logging.getLogger(__name__)
# Limit on the stored frames of a session, in bytes. When the tail has twice as many, it is written again.
MAX_STORED_BYTES = MAX_TAIL_BYTES // 2
# What a session has lost, in `session.resumed`.
Lost = Literal["audio", "frames"]


class _Snapshot(msgspec.Struct):
    """The stored JSON of a video stream."""

    video: VideoPoint


# Made once: msgspec's description of a type must not be built by two threads at the same time.
_SNAPSHOTS = msgspec.json.Decoder(_Snapshot)
_FRAMES = msgspec.msgpack.Decoder(SeenFrame)


@dataclass(frozen=True, slots=True)
class RestoredVideo:
    """The stored state from which a video stream is restored: the row as this host has claimed it, its content, and the
    stored frames, the oldest first.
    """

    row: StoredSession
    point: VideoPoint
    frames: Sequence[SeenFrame] = ()

    @property
    def lost(self) -> list[Lost]:
        """What the video model had got and this host's model does not."""
        has_seen = self.point.has_seen and self.point.state.num_kept > len(self.frames)
        found: list[tuple[Lost, bool]] = [("audio", self.point.has_heard), ("frames", has_seen)]
        return [kind for kind, is_lost in found if is_lost]


def restored_video(row: StoredSession, tail: Sequence[TailChunk], last_received: int, max_frames: int) -> RestoredVideo:
    """Return the stored state for a client that has received the events up to `last_received`.

    Of the stored frames, the newest `max_frames` are used. Raises StoreError for a damaged row. Damaged chunks count as
    missing.
    """
    try:
        point = _SNAPSHOTS.decode(row.snapshot).video
    except msgspec.MsgspecError as error:
        raise StoreError(f"the stored session {row.id} cannot be read: {error}") from error
    if not point.is_possible:
        raise StoreError(f"the stored session {row.id} has impossible numbers")
    frames = []
    for chunk in tail:
        try:
            frames.append(_FRAMES.decode(chunk.data))
        except msgspec.MsgspecError as error:
            log.error("a stored frame cannot be read: %s", error)
    return RestoredVideo(row, point.for_client(last_received), frames[-max_frames:] if max_frames else ())


class StoredVideo:
    """Keeps the stored copy of one live video stream, and sends the events that have to be stored first.

    Stores nothing if the stream has no token, or if the server has no store. `stream` carries the session of `caller`.
    `model` is the name of the video model, and `ga` whether audio events have GA names.
    """

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        stream: LiveStream,
        model: str,
        *,
        ga: bool,
        restored: RestoredVideo | None = None,
    ) -> None:
        self._caller = caller
        self._stream = stream
        self._model, self._ga = model, ga
        self._row = StoredRow(state, restored.row if restored else None)
        self._restored = restored
        self.num_newest = state.settings.resume.store_frames if self._row.is_on else 0
        point = restored.point if restored else None
        self._messages = VideoMessages(stores_frames=self.num_newest > 0, before=point)
        self._config, self._max_frames = (point.config, 0) if point else ("", 0)
        self._session: VideoSession | None = None
        # Frames in the tail and their bytes, since it was last deleted. The tail of another host is written again.
        self._tail_frames, self._tail_bytes = (2 * self.num_newest if restored else 0), 0
        self._sending = anyio.Lock()
        self.is_moving = False

    @property
    def is_on(self) -> bool:
        """Whether the session is stored."""
        return self._row.is_on and self._stream.attachment.token is not None and bool(self._config)

    @property
    def can_move(self) -> bool:
        """True if another host can continue the session, because all of it is stored."""
        return self._session is not None and self._row.can_move

    # --- the session --------------------------------------------------------------------------------------------------

    def begin(self, session: VideoSession, config: VideoConfig, message: str | bytes) -> None:
        """Store a session that begins with the configuration in `message`. Does not wait."""
        self._session, self._max_frames = session, config.max_frames
        self._config = message if isinstance(message, str) else message.decode(errors="replace")
        self.write()

    def known(self, number: int) -> LaterMessage | None:
        """Return what the client has received about its message `number` from another host; None if nothing."""
        return self._messages.known(number)

    @property
    def has_frames(self) -> bool:
        """Whether the newest frames of another host are stored, so that they are not needed from the client."""
        return bool(self._restored and self._restored.frames)

    def took(self, number: int, commands: Sequence[VideoCommand | VideoConfig], num_bytes: int) -> None:
        """Record a message of the client, before its commands are carried out."""
        if self._row.is_on:
            self._messages.took(number, commands, num_bytes, self._stream.live.outbox.journal.end)

    async def send(self, event: VideoEvent, frames: Sequence[Frame]) -> bool:
        """Send the frames of an event, and return whether there were any.

        Results of frames and questions are stored first, so that another host does not report them again.
        """
        if not self.is_on:
            return self._stream.put(frames)
        async with self._sending:
            messages = self._messages
            end = self._stream.live.outbox.journal.end
            seq = end + sum(frame.numbered for frame in frames)
            match event:
                case AnswerStarted():
                    messages.answer_began(end)
                case AnswerDone(text):
                    messages.answer_done(event.question, text, seq)
                case VideoFailed(ends_answer=True):
                    messages.answer_done("", "", seq)
                case VideoFailed(refuses="question"):
                    messages.question_refused(seq)
                case FrameReceived() | VideoFailed(refuses="frame"):
                    messages.frame_done(seq)
            if isinstance(event, FrameReceived) and event.accepted:
                self._store_frame()
            has_changed = False
            if frames and isinstance(event, AnswerDone | VideoFailed | FrameReceived):
                has_changed = await self._row.wait(self.write(turn_kept=isinstance(event, AnswerDone)))
            sent = self._stream.put(frames)
            if has_changed:
                self._report()
            return sent

    async def store_token(self) -> int | None:
        """Store the session's new token, and return `StoredRow.stored_events`; None if the session is not stored.

        Raises RemoteProtocolError (`session_elsewhere`) if another host owns the session.
        """
        await self.store()
        if self._row.kept is Kept.SUPERSEDED:
            raise session_elsewhere()
        return self._row.stored_events

    # --- writing ------------------------------------------------------------------------------------------------------

    async def store(self) -> None:
        """Write the copy, and wait until that is done. If another host owns the session, it ends here."""
        if await self._row.wait(self.write()):
            self._report()

    def write(self, *, turn_kept: bool = False, clears_tail: bool = False) -> Future[None] | None:
        """Write the copy as the session is now, and return a future of the write. Does not wait."""
        token = self._stream.attachment.token
        if token is None or not self.is_on:
            return None
        messages = self._messages
        if self._session:
            messages.settle(self._stream.live.outbox.journal.acknowledged, self._max_frames)
        state = self._session.state if self._session else self._restored.point.state if self._restored else VideoState()
        point = VideoPoint(
            self._model,
            self._config,
            self._ga,
            messages.received,
            messages.later(),
            list(messages.exchanges),
            state,
            messages.has_heard,
            messages.has_seen,
        )
        snapshot = msgspec.json.encode(_Snapshot(point))
        row = StoredSession(self._stream.id, caller_hash(self._caller), token.hash, snapshot)
        return self._row.put_row(row, messages.received, 0, turn_kept=turn_kept, clears_tail=clears_tail)

    def _store_frame(self) -> None:
        """Add the newest frame to the tail. If the tail has twice as many frames as are kept, write it again."""
        if not (self._session and self._session.newest):
            return
        newest = self._session.newest
        number = self._session.state.num_kept
        chunk = TailChunk(number, msgspec.msgpack.encode(newest[-1]))
        if self._tail_frames >= 2 * self.num_newest or self._tail_bytes + len(chunk.data) > MAX_TAIL_BYTES:
            self._tail_frames = self._tail_bytes = 0
            self.write(clears_tail=True)
            chunks = [TailChunk(number - n, msgspec.msgpack.encode(frame)) for n, frame in enumerate(reversed(newest))]
        else:
            chunks = [chunk]
        kept: list[TailChunk] = []
        for each in chunks:
            if sum(len(other.data) for other in kept) + len(each.data) > MAX_STORED_BYTES:
                break
            kept.append(each)
        for each in reversed(kept):
            self._tail_frames, self._tail_bytes = self._tail_frames + 1, self._tail_bytes + len(each.data)
            self._row.append(each)

    async def store_regularly(self) -> None:
        """Store the copy every STORE_EVERY_S until cancelled, so that the client has to keep fewer messages."""
        while True:
            await anyio.sleep(STORE_EVERY_S)
            if self._row.is_stored and self._stream.live.lifecycle.reads_frames:
                await self.store()

    def _report(self) -> None:
        """Report to the client that the session is no longer stored, or is stored again. End a session that another
        host owns.
        """
        if self._row.kept is not Kept.SUPERSEDED:
            degraded = self._row.kept is Kept.DEGRADED
            self._stream.put([state_degraded_frame(random_id, self._stream.id, degraded=degraded)])
            return
        log.warning("session %s now belongs to another host", self._stream.id)
        if self._stream.live.lifecycle.is_running:
            self._stream.put(self._stream.replaced())
            self._stream.live.close("session_replaced")

    # --- the end ------------------------------------------------------------------------------------------------------

    async def move(self, within_s: float) -> None:
        """End the session here when its questions are answered, or after `within_s` seconds. An answer that is under
        way then begins again at the next host. Call `give_away` afterwards.
        """
        with anyio.move_on_after(within_s - min(HAND_OVER_S, within_s / 2)):
            await anyio.sleep(random.uniform(0, MAX_JITTER_S))
            await become(lambda: not self._messages.has_question, POLL_S)
        self.is_moving = True
        self._stream.live.end(CLOSE_MOVED, MOVED)

    async def give_away(self) -> None:
        """Store and release a session that moves, and send its client to another host. Does nothing for any other."""
        if not self.is_moving:
            return
        await self._row.wait(self.write(turn_kept=True))
        if await self._row.release():
            self._stream.put([moving_frame(random_id, self._stream.id)])

    def close(self) -> None:
        """Delete the copy of a session that is over; leave it to other hosts if the server drains. Does not wait."""
        self._row.end()
