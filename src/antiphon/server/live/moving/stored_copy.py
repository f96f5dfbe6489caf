"""The copy of a live session in the session store, from which another host can continue it.

A client never learns of anything that the copy lacks: its frames wait while the copy is written. `persistence.py`
writes the rows and knows whether this host still owns them; `resume_point.py` computes the resume point.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import anyio

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.events.conversation import ConversationEvent, Item, ResponseDone
from antiphon.events.duplex import EpochRaised
from antiphon.events.transcription import SessionEnding, TranscriptDelta, TranscriptDone
from antiphon.protocols.connection import Command, Event, WireConnection
from antiphon.protocols.resume import RESUME_WORDS, session_elsewhere
from antiphon.protocols.wire import Frame
from antiphon.server.live.moving.client_words import ClientWords, new_key
from antiphon.server.live.moving.persistence import Persistence
from antiphon.server.live.moving.resume_point import (
    MOVED,
    STORED_AFTER,
    Progress,
    ResumePoint,
    keeps_turn,
    with_journal,
)
from antiphon.server.live.moving.stored_row import Kept
from antiphon.server.live.moving.tail import chunk_of
from antiphon.server.live.realtime_session import RealtimeConversation, RealtimeSession
from antiphon.server.live.session import CLOSE_MOVED, LiveSession
from antiphon.sessions.conversation.responses.queue import SESSION_ENDED
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.sessions.transcription.state import ContinuedTranscription, TurnPart
from antiphon.signals import become
from antiphon.store.sessions import StoredSession
from antiphon.transports.journal import SentFrame

log = logging.getLogger(__name__)
# A session is stored again when its last write is older than this, in seconds.
STORE_EVERY_S = 5.0
# Interval, in seconds, at which the audio of the current turn is stored, if at least UNSETTLED_MS of it is unsettled.
SPEECH_EVERY_S, UNSETTLED_MS = 1.0, 500
# Maximum size of the frames that are stored with a moving session because its client may not have received them.
MAX_HANDED_OVER_BYTES = 2 << 20
# The same limit for any other snapshot, which has no deltas of responses.
MAX_TOLD_BYTES = 32 << 10
# Seconds for which a moving session waits for the user's turn to end. The next host hears a longer turn again.
MAX_TURN_S = 3.0
# The part of a drain, in seconds, that is reserved for finishing and storing the session; at most half of the drain.
HAND_OVER_S = 5.0
# Jitter before each session begins to move, in seconds, so that a drain's sessions do not all resume at the same time.
MAX_JITTER_S = 0.5
# Polling interval, in seconds. Polls because no event reports the end of playback.
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Restored:
    """The stored state from which a session is restored."""

    # The row as this host has claimed it.
    row: StoredSession
    # The history with which a conversation continues here (see `recovered`).
    items: Sequence[Item]
    # Its resume point; None for a row of an earlier version, which did not store this.
    continued: ResumePoint | None = None
    # The events that report to the client what is missing here.
    missed_events: Sequence[ConversationEvent] = ()
    # The user's audio that was not transcribed yet, by message number.
    tail: Sequence[tuple[int, Pcm]] = ()
    # The finished parts of a transcription session's open turns.
    parts: Sequence[TurnPart] = ()

    @property
    def transcription(self) -> ContinuedTranscription | None:
        """The state from which a transcription session continues; None for a conversation."""
        point = self.continued
        if point is None or point.transcription is None:
            return None
        return ContinuedTranscription(point.transcription, self.parts, round(point.from_ms * SAMPLE_RATE_HZ / 1000))


class StoredCopy:
    """Keeps the stored copy of one live session, and the frames that wait for it to be written.

    Stores nothing if the session has no token, or if the server has no store. The frames of such a session do not wait.

    `persistence` writes the rows of `live`, whose commands are in `inbox`. `send` passes a frame to the outbox without
    waiting. `first_frames` are sent first. `keeps_words`: the client of a new session keeps `resume_words`.
    """

    def __init__(
        self,
        wire: WireConnection,
        live: LiveSession,
        inbox: Inbox,
        persistence: Persistence,
        send: Callable[[Frame], None],
        first_frames: Iterable[Frame] = (),
        restored: Restored | None = None,
        *,
        keeps_words: bool = False,
    ) -> None:
        self._wire = wire
        self._live = live
        self._inbox = inbox
        self._persistence = persistence
        self._send = send
        # Frames that wait. While a write is under way, every new frame waits.
        self._frames = list(first_frames)
        self._num_writing = 0
        # The time of the last write, in seconds of the event loop's clock.
        self._written_s = anyio.current_time()
        # True while frames of a transcription session wait for its next event, which is stored together with theirs.
        self._awaits_event = False
        # Whether an event that waits has to be stored, and whether one has ended a turn.
        self._has_to_store = self._has_ended_turn = False
        self._is_closed = False
        self._restored = restored
        self._progress = Progress(inbox, restored.continued if restored else None, persistence.speech)
        self._conversation: RealtimeConversation | None = None
        self._transcription: TranscriptionSession | None = None
        self._is_on = persistence.is_on
        # True while the session is moving to another host.
        self._is_moving = False
        # The words that the client of a transcription session keeps; None if it keeps none.
        key = restored.continued.words_key if restored and restored.continued else new_key() if keeps_words else ""
        self._client_words = ClientWords(key) if key else None
        # Turns of a transcription session that have parts in the tail.
        self._has_parts = {part.turn for part in restored.parts} if restored else set[int]()

    # --- the session --------------------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """True if the session continues at once where another host left it, without waiting for a first frame."""
        return self._restored is not None and self._restored.continued is not None

    @property
    def keeps_transcription(self) -> bool:
        """True if a transcription session is stored: the server has a store for it, and the client can resume."""
        return self._persistence.keeps_captions and self._live.attachment.token is not None

    @property
    def transcription(self) -> ContinuedTranscription | None:
        """The state from which a transcription session continues here; None if it is new."""
        return self._restored.transcription if self._restored else None

    def begin(self, session: RealtimeSession) -> None:
        """Restore the history of a session that begins; store it if it is new."""
        if isinstance(session, TranscriptionSession):
            self._transcription, self._is_on = session, self.keeps_transcription
            self._progress.keeps_no_speech()
            self._persistence.speech = None
        else:
            self._conversation = session
            if self._restored:
                session.history.restore(self._restored.items)
                if self._restored.continued:
                    session.progress.num_labels = self._restored.continued.num_labels
        if not self.goes_on:
            self.write()

    async def go_on(self, emit: Callable[[Event], Awaitable[None]]) -> None:
        """Report to the client what is missing here; then handle the requests and audio that the last host left."""
        if self._restored:
            for event in self._restored.missed_events:
                await emit(event)
            await self._progress.ask_again()
            await self._progress.hear_again(self._restored.tail)

    # --- what the client sends ----------------------------------------------------------------------------------------

    def has(self, number: int) -> bool:
        """Return True if the last host has carried out the client's message `number`, so that it is skipped here."""
        return self._restored is not None and self._progress.is_applied(number)

    def unheard(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return a message's commands without the parts that the last host has handled; see `Progress.unheard`."""
        return self._progress.unheard(commands) if self._restored else commands

    def received(self, number: int, commands: Sequence[Command]) -> None:
        """Record a message of the client after its commands were put into the inbox, or carried out."""
        if self._is_on:
            self._progress.took(number, commands)

    # --- what the client gets -----------------------------------------------------------------------------------------

    def send(self, frames: Iterable[Frame] = (), *, at_once: bool = False) -> None:
        """Send the waiting frames, then `frames`. They wait while the copy is written, unless `at_once` is true."""
        self._frames += frames
        if (self._num_writing or self._awaits_event) and not at_once:
            return
        waiting, self._frames = self._frames, []
        for frame in () if self._is_closed else waiting:
            self._send(frame)

    async def before_sending(self, event: Event, frames: Iterable[Frame]) -> None:
        """Queue an event's frames for `send`. Waits until the change that the event reports is stored, so that it
        survives if the server is killed. Events of a transcription session that follow each other at once are stored
        together.
        """
        # The next host reports the end of a response that ends because the session moves.
        ends_by_move = self._is_moving and isinstance(event, ResponseDone) and event.response.reason == SESSION_ENDED
        self._frames += () if ends_by_move else frames
        self._progress.follow(event)
        if self._transcription:
            self._has_ended_turn |= isinstance(event, TranscriptDone)
            if self._is_on and self._frames:
                self._has_to_store |= not self._is_kept_by_client(event)
                self._awaits_event = self._transcription.continuing.emits_more
                if not self._awaits_event and self._has_to_store:
                    turn_kept, self._has_ended_turn, self._has_to_store = self._has_ended_turn, False, False
                    await self.store(turn_kept=turn_kept)
        elif isinstance(event, STORED_AFTER):
            await self.store(turn_kept=keeps_turn(event))
            self._live.count_memory()
        elif isinstance(event, EpochRaised):
            self._live.outbox.raise_epoch(event.epoch)

    def _is_kept_by_client(self, event: Event) -> bool:
        """Add the words of a transcription's event to its frame if the client keeps them. Returns whether it does, so
        that the event need not be stored.
        """
        words = self._client_words
        if not (words and self._transcription and isinstance(event, TranscriptDelta)):
            return False
        frame = self._frames[-1]
        given = words.for_client(event.turn, self._transcription.continuing)
        if given is None or isinstance(frame.payload, bytes) or self._persistence.kept is not Kept.STORED:
            return False
        self._frames[-1] = replace(frame, payload={**frame.payload, RESUME_WORDS: given})
        return True

    async def store_token(self) -> int | None:
        """Store the session's new token, and return `Persistence.stored_events`; None if the session is not stored.

        Raises RemoteProtocolError (`session_elsewhere`) if another host owns the session.
        """
        await self.store()
        if self._persistence.kept is Kept.SUPERSEDED:
            raise session_elsewhere()
        return self._persistence.stored_events

    # --- writing ------------------------------------------------------------------------------------------------------

    async def store(self, *, turn_kept: bool = False) -> None:
        """Write the copy, wait until that is done, and send the frames that wait.

        If a write fails or takes longer than STORE_S, the client is notified before it gets any other frame, and again
        when a write succeeds. If another host owns the session, it ends here with `session.replaced`. For `turn_kept`
        see `Persistence.put`.
        """
        self._num_writing += 1
        try:
            changed = await self._persistence.wait(self.write(turn_kept=turn_kept))
        finally:
            self._num_writing -= 1
        kept = self._persistence.kept
        if changed and kept is Kept.SUPERSEDED:
            self._give_up()
        elif changed:
            self._frames[:0] = self._wire.notice("degraded" if kept is Kept.DEGRADED else "stored")
        self.send()

    def write(self, *, turn_kept: bool = False, handed_over: Sequence[SentFrame] | None = None) -> Future[None] | None:
        """Write the copy as the conversation is now, and return a future of the write. Does not wait.

        `handed_over` are all frames that the client may not have received. If None, the newest unacknowledged frames
        are stored, up to MAX_TOLD_BYTES and without deltas.
        """
        conversation, audio_s = self._conversation, self._inbox.backlog_s
        if not self._is_on:
            return None
        items: Sequence[Item] = ()
        clears_tail = turn_kept
        if session := self._transcription:
            audio_s += session.audio_s
            continued = self._progress.now_in(session)
            if (words := self._client_words) and continued.transcription:
                continued.words_key = words.key
                words.wrote(continued.transcription)
            clears_tail = self._append_parts(session.continuing.take_parts(), continued)
        elif conversation:
            items, audio_s = conversation.history.items, audio_s + conversation.progress.audio_s
            continued = self._progress.now(conversation, empties_tail=turn_kept)
        elif self._restored:
            items, continued = list(self._restored.items), self._restored.continued or ResumePoint()
        else:
            return None
        journal = self._live.outbox.journal
        frames = journal.unacknowledged(self._frames, MAX_TOLD_BYTES) if handed_over is None else list(handed_over)
        continued = with_journal(continued, frames, is_whole=handed_over is not None)
        token, audio_ms = self._live.attachment.token, round(audio_s * 1000)
        self._written_s = anyio.current_time()
        return self._persistence.put(
            token, items, continued, audio_ms, turn_kept=turn_kept, clears_tail=turn_kept and clears_tail
        )

    def _append_parts(self, parts: Sequence[TurnPart], continued: ResumePoint) -> bool:
        """Add the finished parts of a transcription's open turns to the tail. Returns whether the tail may be deleted,
        because no open turn has such parts.
        """
        unread = {turn.turn for turn in continued.transcription.unread} if continued.transcription else set()
        kept = [part for part in parts if part.turn in unread]
        if kept:
            self._persistence.append(chunk_of(kept))
        self._has_parts = {turn for turn in (*self._has_parts, *(part.turn for part in kept)) if turn in unread}
        return not self._has_parts

    async def store_regularly(self) -> None:
        """Store the copy whenever its last write is STORE_EVERY_S old, until cancelled.

        This updates how much audio the client need not send again, and detects that a failed store works again.
        """
        while True:
            await anyio.sleep_until(self._written_s + STORE_EVERY_S)
            if anyio.current_time() < self._written_s + STORE_EVERY_S:
                continue
            self._written_s = anyio.current_time()
            if self._persistence.is_stored and self._live.lifecycle.reads_frames:
                await self.store()
                await self._live.outbox.wait_for_room()

    async def store_speech(self) -> None:
        """With `--store-speech`, write the audio of the turn under way to the tail, until cancelled.

        The client sends again any audio that could not be written.
        """
        while self._persistence.speech:
            await anyio.sleep(SPEECH_EVERY_S)
            now = self._conversation.progress if self._conversation else None
            if now and now.audio_s * 1000 - now.settled_ms >= UNSETTLED_MS:
                self._persistence.append_speech()

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def can_move(self) -> bool:
        """True if another host can continue the session, because all of it is stored."""
        return (self._conversation or self._transcription) is not None and self._persistence.can_move

    async def move(self, within_s: float) -> None:
        """End the session here when neither side speaks, or after `within_s` seconds. Call `give_away` afterwards."""
        session = self._conversation or self._transcription
        assert session
        if isinstance(session, TranscriptionSession):
            await wait_for_silence(session, within_s)
        else:
            await wait_for_boundary(session, within_s)
        session.leave_open_turn()
        self._is_moving = True
        self._live.end(CLOSE_MOVED, MOVED)

    async def give_away(self) -> None:
        """Store and release a session that moves, along with the frames that its client may not have received.

        Sends the client to another host; if the session cannot be released, reports that the server is shutting down.
        Only sends the frames that wait for a session that does not move.
        """
        self._awaits_event = False
        self.send()
        if not self._is_moving:
            return
        handed_over = self._live.outbox.journal.hand_over(MAX_HANDED_OVER_BYTES)
        await self._persistence.wait(self.write(turn_kept=True, handed_over=handed_over))
        if await self._persistence.release():
            self.send(self._wire.notice("moving"))
        else:
            self.send(self._wire.send(SessionEnding("server_shutting_down", "The server is shutting down.")))

    def _give_up(self) -> None:
        """End the session here, since another host owns it. Drops the frames that wait: they are outdated."""
        log.warning("session %s now belongs to another host", self._wire.id)
        self._frames.clear()
        is_running = self._live.lifecycle.is_running
        if is_running:
            self.send(self._wire.notice("replaced"), at_once=True)
        self._is_closed = True
        if is_running:
            self._live.close("session_replaced")

    def close(self) -> None:
        """Delete the copy of a session that is over; leave it to other hosts if the server drains. Does not wait."""
        self._persistence.end()


async def wait_for_silence(session: TranscriptionSession, within_s: float) -> None:
    """Wait until a transcription's user is silent and all speech has its transcript, in a drain of `within_s`.

    Waits for at most MAX_TURN_S: the next host continues a longer turn where this host leaves it.
    """
    with anyio.move_on_after(min(MAX_TURN_S, within_s / 2)):
        await anyio.sleep(random.uniform(0, MAX_JITTER_S))
        await become(lambda: session.is_silent, POLL_S)


async def wait_for_boundary(conversation: RealtimeConversation, within_s: float) -> None:
    """Wait until neither side of a conversation speaks, in a drain that lasts `within_s`.

    A response that takes longer is interrupted and cut to what was heard. A turn longer than MAX_TURN_S is heard again
    by the next host.
    """
    now = conversation.progress
    with anyio.move_on_after(within_s - min(HAND_OVER_S, within_s / 2)):
        await anyio.sleep(random.uniform(0, MAX_JITTER_S))
        with anyio.move_on_after(MAX_TURN_S):
            await become(lambda: not (now.user_speaks or now.unread_items), POLL_S)
        await become(lambda: not (now.owed_responses or now.out_of_band or now.is_responding or now.is_heard), POLL_S)
    if now.is_responding or now.is_heard:
        await conversation.interrupt(MOVED)
