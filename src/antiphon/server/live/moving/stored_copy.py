"""The copy of a live conversation in the session store, from which another host can go on.

A client learns of nothing that the copy lacks: its frames wait while the copy is written. How a row is written, and
whether this host still owns it, is `persistence.py`'s; where the conversation stands is `resume_point.py`'s.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import anyio
import msgspec

from antiphon.audio import Pcm
from antiphon.events.conversation import ConversationEvent, Item
from antiphon.events.duplex import EpochRaised
from antiphon.events.transcription import SessionEnding
from antiphon.protocols.connection import Command, Event, WireConnection
from antiphon.protocols.resume import moving_frame, session_elsewhere, state_degraded_frame
from antiphon.protocols.wire import Frame
from antiphon.server.live.moving.persistence import Kept, Persistence
from antiphon.server.live.moving.resume_point import MOVED, STORED_AFTER, Progress, ResumePoint, keeps_turn
from antiphon.server.live.realtime_session import RealtimeConversation
from antiphon.server.live.session import CLOSE_MOVED, LiveSession
from antiphon.sessions.inbox import Inbox
from antiphon.signals import become
from antiphon.store.sessions import StoredSession
from antiphon.transports.journal import SentFrame

log = logging.getLogger(__name__)
# The interval, in seconds, at which a conversation is stored while no event stores it.
STORE_EVERY_S = 5.0
# The interval at which the audio of the turn under way is stored, in seconds. Less unsettled audio is not stored.
SPEECH_EVERY_S, UNSETTLED_MS = 1.0, 500
# The frames that a client may lack go along with a session that moves, up to this size.
MAX_HANDED_OVER_BYTES = 2 << 20
# Of every other snapshot, without pieces of responses.
MAX_TOLD_BYTES = 32 << 10
# How long the user may go on speaking, in seconds: the turn is heard again by the next host.
MAX_TURN_S = 3.0
# What is left of a drain, in seconds, for the session to be worked off and written; of a short one, half.
HAND_OVER_S = 5.0
# Sessions that are given away at once do not all resume at once: each waits up to this long before it looks.
MAX_JITTER_S = 0.5
# What is heard ends by the clock, which wakes nobody.
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Restored:
    """What a conversation is restored from.

    - `row`: as this host has claimed it. `items`: the history as it goes on here (`recovered`).
    - `continued`: where it stood; None for a row of a version that did not store that.
    - `told`: the events that tell the client what is missing here. `tail`: the user's audio that had no words yet.
    """

    row: StoredSession
    items: Sequence[Item]
    continued: ResumePoint | None = None
    told: Sequence[ConversationEvent] = ()
    tail: Sequence[tuple[int, Pcm]] = ()


class StoredCopy:
    """Keeps the copy of one live session, and the frames that wait for it. Nothing is stored of a session without a
    token, of one that only transcribes, and by a server without a store; its frames pass at once.

    `persistence` writes the rows of `live`, whose commands `inbox` has. `send` takes each frame on its way to the
    outbox, and does not wait. `first_frames` are sent first.
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
    ) -> None:
        self._wire = wire
        self._live = live
        self._inbox = inbox
        self._persistence = persistence
        self._send = send
        # The frames that wait. While any write is under way, all new ones do.
        self._frames = list(first_frames)
        self._num_writing = 0
        self._is_closed = False
        self._restored = restored
        self._progress = Progress(inbox, restored.continued if restored else None, persistence.speech)
        self._conversation: RealtimeConversation | None = None
        self._is_on = persistence.is_on
        # Whether another host is to have the session.
        self._is_moving = False

    # --- the session --------------------------------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Whether the session begins at once, where another host has left it, and not with its client's first frame."""
        return self._restored is not None and self._restored.continued is not None

    def begin(self, conversation: RealtimeConversation | None) -> None:
        """The session begins: restore its history, and store a new one. None for one that only transcribes."""
        self._conversation = conversation
        if conversation is None:
            self._is_on = False
            return
        if self._restored:
            conversation.history.restore(self._restored.items)
        if not self.goes_on:
            self.write()

    async def go_on(self, emit: Callable[[Event], Awaitable[None]]) -> None:
        """Tell the client what is missing here, and have the session answer and hear what the last host owed."""
        if self._restored:
            for event in self._restored.told:
                await emit(event)
            await self._progress.ask_again()
            await self._progress.hear_again(self._restored.tail)

    # --- what the client sends ----------------------------------------------------------------------------------------

    def has(self, number: int) -> bool:
        """Whether the last host has carried out the client's message of this number, so that it is passed over here."""
        return self._restored is not None and self._progress.is_applied(number)

    def unheard(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return a message's commands without what the last host has carried out of them, as `Progress.unheard`."""
        return self._progress.unheard(commands) if self._restored else commands

    def received(self, number: int, commands: Sequence[Command]) -> None:
        """Note a message of the client once its commands are in the inbox, or carried out."""
        if self._is_on:
            self._progress.took(number, commands)

    # --- what the client gets -----------------------------------------------------------------------------------------

    def send(self, frames: Iterable[Frame] = (), *, at_once: bool = False) -> None:
        """Send the frames that wait and then these, unless the copy is being written; `at_once`: even then."""
        self._frames += frames
        if self._num_writing and not at_once:
            return
        waiting, self._frames = self._frames, []
        for frame in () if self._is_closed else waiting:
            self._send(frame)

    async def before_sending(self, event: Event, frames: Iterable[Frame]) -> None:
        """Have the frames of an event wait for `send`. Waits itself until the copy has what the event changes, so that
        it is there after the server was killed.
        """
        self._frames += frames
        self._progress.follow(event)
        if isinstance(event, STORED_AFTER):
            await self.store(turn_kept=keeps_turn(event))
            self._live.count_memory()
        elif isinstance(event, EpochRaised):
            self._live.outbox.raise_epoch(event.epoch)

    async def store_token(self) -> int | None:
        """Store the session's new token, and return how many of the client's messages need not be sent again, whatever
        becomes of this host; None for a session that is not stored.

        Raises RemoteProtocolError (`session_elsewhere`) where another host has the session by now.
        """
        await self.store()
        if self._persistence.kept is Kept.SUPERSEDED:
            raise session_elsewhere()
        return self._persistence.stored_events

    # --- writing ------------------------------------------------------------------------------------------------------

    async def store(self, *, turn_kept: bool = False) -> None:
        """Write the copy, and wait until that is done; then send the frames that wait.

        Where it fails, or takes longer than STORE_S, and when it works again, the client is told before it gets any
        other frame. Where another host has the session by now, it ends here with `session.replaced`. `turn_kept`: as
        `Persistence.put`.
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
            degraded = state_degraded_frame(self._wire.context.new_id, self._wire.id, degraded=kept is Kept.DEGRADED)
            self._frames.insert(0, degraded)
        self.send()

    def write(self, *, turn_kept: bool = False, handed_over: Sequence[SentFrame] | None = None) -> Future[None] | None:
        """Write the copy as the conversation is now; the future is done when that is. Does not wait.

        `handed_over`: all frames that its client may lack; otherwise those that tell of what is stored go along.
        """
        conversation, audio_s = self._conversation, self._inbox.backlog_s
        if not self._is_on:
            return None
        if conversation:
            items, audio_s = conversation.history.items, audio_s + conversation.progress.audio_s
            continued = self._progress.now(conversation, empties_tail=turn_kept)
        elif self._restored:
            items, continued = list(self._restored.items), self._restored.continued or ResumePoint()
        else:
            return None
        journal = self._live.outbox.journal
        told = journal.unacknowledged(self._frames, MAX_TOLD_BYTES) if handed_over is None else list(handed_over)
        continued = msgspec.structs.replace(continued, journal=told, is_whole=handed_over is not None)
        token, audio_ms = self._live.attachment.token, round(audio_s * 1000)
        return self._persistence.put(token, items, continued, audio_ms, turn_kept=turn_kept)

    async def store_regularly(self) -> None:
        """Store, until cancelled, what of the client's audio needs not be sent again; find out whether a store that
        failed works.
        """
        while True:
            await anyio.sleep(STORE_EVERY_S)
            if self._persistence.is_stored and self._live.lifecycle.reads_frames:
                await self.store()
                await self._live.outbox.wait_for_room()

    async def store_speech(self) -> None:
        """Write what is being said to the tail, where that is asked for, until cancelled. What fails of it the client
        sends again.
        """
        while self._persistence.speech:
            await anyio.sleep(SPEECH_EVERY_S)
            now = self._conversation.progress if self._conversation else None
            if now and now.audio_s * 1000 - now.settled_ms >= UNSETTLED_MS:
                self._persistence.append_speech()

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def can_move(self) -> bool:
        """Whether another host can go on with the session: it holds a conversation, all of which is stored."""
        return self._conversation is not None and self._persistence.can_move

    async def move(self, within_s: float) -> None:
        """End the session here where neither side speaks, `within_s` at the latest, for `give_away` to follow."""
        assert self._conversation
        await wait_for_boundary(self._conversation, within_s)
        self._conversation.leave_open_turn()
        self._is_moving = True
        self._live.end(CLOSE_MOVED, MOVED)

    async def give_away(self) -> None:
        """Where the session moves, store where it has ended, with the frames that its client may lack, and tell the
        client to go on at another host; where that is not possible, that the server stops.
        """
        if not self._is_moving:
            return
        self.send()
        handed_over = self._live.outbox.journal.hand_over(MAX_HANDED_OVER_BYTES)
        await self._persistence.wait(self.write(turn_kept=True, handed_over=handed_over))
        if await self._persistence.release():
            self.send([moving_frame(self._wire.context.new_id, self._wire.id)])
        else:
            self.send(self._wire.send(SessionEnding("server_shutting_down", "The server is shutting down.")))

    def _give_up(self) -> None:
        """End the session here, since another host has it: frames that were not sent are not the truth any more."""
        log.warning("session %s is another host's by now", self._wire.id)
        self._frames.clear()
        is_running = self._live.lifecycle.is_running
        if is_running:
            self.send([self._wire.replaced()], at_once=True)
        self._is_closed = True
        if is_running:
            self._live.close("session_replaced")

    def close(self) -> None:
        """The session is over: delete the copy, or leave it to other hosts if the server stops. Does not wait."""
        self._persistence.end()


async def wait_for_boundary(conversation: RealtimeConversation, within_s: float) -> None:
    """Wait until neither side of a conversation speaks. `within_s`: how long the drain lasts. A response that is longer
    is interrupted and cut to what was heard; a turn that goes on for too long is heard again by the next host.
    """
    now = conversation.progress
    with anyio.move_on_after(within_s - min(HAND_OVER_S, within_s / 2)):
        await anyio.sleep(random.uniform(0, MAX_JITTER_S))
        with anyio.move_on_after(MAX_TURN_S):
            await become(lambda: not (now.user_speaks or now.unread_items), POLL_S)
        await become(lambda: not (now.owed_responses or now.is_responding or now.is_heard), POLL_S)
    if now.is_responding or now.is_heard:
        await conversation.interrupt(MOVED)
