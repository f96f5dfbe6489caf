"""What another host needs to go on with a conversation, beside its wire and its items; and what it makes of that. Pure,
but for the inbox.

A host may die between any two messages of its client, and in the middle of a response. So a snapshot says which of the
client's messages are in it, which response was open, and whether one was owed.

A host that dies takes with it the audio that it had heard and not yet made words of. So a snapshot says up to which
message everything is in it; the client sends again what came after that. Of those later messages, some were carried
out nevertheless, an item that was created while somebody spoke for instance: these are listed, and the host that
restores the conversation passes them over. And where the first one to be sent again was heard in part, the snapshot
says how much of its audio is in it.

A snapshot is written before its client is told of what is in it, so that a host may die in between. The next host tells
it. What it cannot tell again is the pieces of a response: where one of those is missing, the response is begun anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ConversationEvent,
    CreateResponse,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemTruncated,
    Response,
    ResponseCreated,
    ResponseDone,
    UserTurnCommitted,
)
from antiphon.events.transcription import AppendAudio, TranscriptDone
from antiphon.protocols.connection import Command, Event
from antiphon.server.live.moving.tail import SpeechTail
from antiphon.server.live.realtime_session import RealtimeConversation
from antiphon.sessions.inbox import Inbox
from antiphon.transports.journal import SentFrame

# Why a response ended that was under way when its host went.
MOVED = "session_moved"
# No session has so many messages, and none of them has so much audio.
MAX_NUMBER = 10**15
MAX_HEARD_MS = 3_600_000
# Events after which a conversation is stored again, since its configuration or its history has changed.
STORED_AFTER = (
    UserTurnCommitted,
    TranscriptDone,
    ItemAdded,
    ItemDone,
    ItemDeleted,
    ItemTruncated,
    ResponseCreated,
    ResponseDone,
)


def keeps_turn(event: Event) -> bool:
    """Whether with this event a turn of the user, or an answer, is in the history: not one that ended with its host."""
    return isinstance(event, TranscriptDone) or (isinstance(event, ResponseDone) and event.response.reason != MOVED)


class OpenResponse(msgspec.Struct):
    """A response of the conversation that had begun, and was not done: its id, whether it is spoken, and its items."""

    id: str
    audio_output: bool
    items: list[str] = []


class FinishedResponse(msgspec.Struct):
    """The last response of a conversation, which was done, and what had asked for it."""

    response: OpenResponse
    request: CreateResponse


class ResumePoint(msgspec.Struct):
    """Where a snapshot stands among the client's messages and its responses.

    - `received`: all messages up to this number are in it. `applied`: later ones that are in it, too. `heard_ms`: so
      much of the audio that comes after them.
    - `unread_items`: items whose audio had no transcript yet; their audio is sent again.
    - `open_response`: what its client has seen the beginning of. `owed`: what is still to be answered.
    - `finished`: the last response, if the history ends with it. Its client may not have heard it to its end.
    - `journal`: the frames that the client may lack. `is_whole`: their numbers have no gap, so that they can be sent as
      they are: all frames are stored where a host gives the session away and they are not too large, and otherwise
      neither the pieces of responses nor the oldest frames.
    """

    received: int = 0
    applied: list[int] = []
    unread_items: list[str] = []
    open_response: OpenResponse | None = None
    owed: list[CreateResponse] = []
    finished: FinishedResponse | None = None
    is_whole: bool = False
    journal: list[SentFrame] = []
    heard_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Message:
    """One message: up to which millisecond the audio reached with it, whether it was audio alone, and the number of
    commands that had been put into the inbox with its last one.
    """

    number: int
    audio_end_ms: float
    is_audio: bool
    num_put: int


class SettledMessages(NamedTuple):
    """What of the client's messages is in a snapshot: all up to the number `last`, those of the later ones that are in
    `applied`, and the first `heard_ms` of the audio that the client sends again.
    """

    last: int
    applied: list[int]
    heard_ms: float = 0.0


NOTHING = SettledMessages(0, [])


class ReceivedMessages:
    """The client's messages that are not in the conversation yet, or come after one that is not.

    `before`: what the snapshot has in it that the session was restored from. Audio is counted from there on.
    """

    def __init__(self, before: SettledMessages = NOTHING) -> None:
        self._applied = set(before.applied)
        self._waiting: deque[_Message] = deque()
        self._num_settled = before.last
        self._heard_before_ms = before.heard_ms
        # The millisecond at which the audio begins of the messages that wait.
        self._waiting_from_ms = 0.0

    def is_applied(self, number: int) -> bool:
        """Whether this message was carried out before the session was restored, and is to be passed over now."""
        if number not in self._applied:
            return False
        audio_end_ms = self._waiting[-1].audio_end_ms if self._waiting else self._waiting_from_ms
        self._waiting.append(_Message(number, audio_end_ms, False, 0))
        return True

    def add(self, number: int, audio_end_ms: float, num_put: int, *, is_audio: bool) -> None:
        """Note a message that was taken. `audio_end_ms`: all audio so far. `num_put`: how many commands had been put
        into the inbox with it, 0 where it needed none. `is_audio`: it has nothing but audio.
        """
        self._waiting.append(_Message(number, audio_end_ms, is_audio, num_put))

    def snapshot(self, settled_ms: float, num_taken: int) -> SettledMessages:
        """Return what is in the conversation now.

        `settled_ms`: all audio before it is in the conversation, or holds no speech. `num_taken`: how many commands the
        session has taken out of the inbox.
        """
        while self._waiting and self._is_in(self._waiting[0], settled_ms, num_taken):
            message = self._waiting.popleft()
            self._num_settled, self._waiting_from_ms = message.number, message.audio_end_ms
            self._applied.discard(message.number)
        later = {m.number for m in self._waiting if not m.is_audio and m.num_put <= num_taken}
        heard_ms = max(settled_ms, self._heard_before_ms) - self._waiting_from_ms
        # Those that the client has yet to send again are still in the conversation.
        return SettledMessages(self._num_settled, sorted(later | self._applied), max(0.0, heard_ms))

    @staticmethod
    def _is_in(message: _Message, settled_ms: float, num_taken: int) -> bool:
        return message.num_put <= num_taken and not (message.is_audio and message.audio_end_ms > settled_ms)


@dataclass(slots=True)
class _Owed:
    """A response that was owed where the session was restored, and how many commands had been put into the inbox with
    it; None before it is there.
    """

    request: CreateResponse
    num_put: int | None = None


class Progress:
    """Follows one live conversation for its snapshots. `continued`: where it was restored, what from. `speech`: takes
    the audio, where that is stored too.
    """

    def __init__(self, inbox: Inbox, continued: ResumePoint | None = None, speech: SpeechTail | None = None) -> None:
        continued = continued or ResumePoint()
        self._inbox = inbox
        self._speech = speech
        self._messages = ReceivedMessages(SettledMessages(continued.received, continued.applied, continued.heard_ms))
        # Samples of audio to come that another host has heard and made words of.
        self._num_heard = round(continued.heard_ms * SAMPLE_RATE_HZ / 1000)
        self._owed = [_Owed(replace(request, when_busy="wait")) for request in continued.owed]
        # Whether a response is still begun anew that the client did not ask this host for.
        self._begins_anew = bool(self._owed)
        self._open: OpenResponse | None = None
        self._finished: FinishedResponse | None = None
        # Samples of audio that were taken here.
        self._num_samples = 0

    def is_applied(self, number: int) -> bool:
        """Whether the client's message of this number was carried out by another host, and is passed over here."""
        return self._messages.is_applied(number)

    def took(self, number: int, commands: Sequence[Command]) -> None:
        """Note a message of the client after its commands were put into the inbox, or carried out at once."""
        audio = [command for command in commands if isinstance(command, AppendAudio)]
        self._num_samples += sum(len(command.pcm) for command in audio)
        is_audio = bool(commands) and len(audio) == len(commands)
        if is_audio and self._speech:
            self._speech.took(number, audio)
        end_ms = self._num_samples * 1000 / SAMPLE_RATE_HZ
        self._messages.add(number, end_ms, self._inbox.num_put if commands else 0, is_audio=is_audio)

    def unheard(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return the commands of a message with silence in place of the audio that another host has made words of. A
        request for a response waits for the one that is begun anew, of which the client may not know yet.
        """
        if self._begins_anew:
            commands = [replace(c, when_busy="wait") if isinstance(c, CreateResponse) else c for c in commands]
        return (
            [self._unheard(c.pcm) if isinstance(c, AppendAudio) else c for c in commands]
            if self._num_heard
            else commands
        )

    def _unheard(self, pcm: Pcm) -> AppendAudio:
        pcm = pcm.copy()
        pcm[: self._num_heard] = 0.0
        self._num_heard = max(0, self._num_heard - len(pcm))
        return AppendAudio(pcm)

    async def hear_again(self, messages: Sequence[tuple[int, Pcm]]) -> None:
        """Take messages of the client that a tail has, by number, as if it sent them. Waits while the inbox is full."""
        for number, pcm in messages:
            if not self.is_applied(number):
                commands = self.unheard([AppendAudio(pcm)])
                for command in commands:
                    await self._inbox.put(command)
                self.took(number, commands)

    async def ask_again(self) -> None:
        """Put the responses that were owed into the inbox. Waits while it is full."""
        for owed in list(self._owed):
            await self._inbox.put(owed.request)
            owed.num_put = self._inbox.num_put

    def follow(self, event: Event) -> None:
        """Note an event of the session before it is stored."""
        match event:
            case ResponseCreated(response) if response.stored:
                self._open = OpenResponse(response.id, response.audio_output)
            case ResponseDone(response) if response.stored:
                self._open = None
                self._begins_anew = self._begins_anew and response.reason == MOVED
                done = OpenResponse(response.id, response.audio_output, [item.id for item in response.output])
                is_complete = response.status == "completed" and bool(done.items)
                self._finished = FinishedResponse(done, response.request) if is_complete else None

    def now(self, conversation: RealtimeConversation, *, empties_tail: bool = False) -> ResumePoint:
        """Return where the conversation stands now. `empties_tail`: the snapshot that is made of it does."""
        received = self._messages.snapshot(conversation.progress.settled_ms, self._inbox.num_taken)
        if self._speech:
            self._speech.settled(received.last, empties=empties_tail)
        history = conversation.history.items
        if self._open:
            self._open.items = [i.id for i in history if i.role == "assistant" and i.status == "in_progress"]
        finished = self._finished
        if finished and not (history and history[-1].id in finished.response.items):
            finished = None
        # Those that the session has taken, it owes itself.
        self._owed = [owed for owed in self._owed if owed.num_put is None or owed.num_put > self._inbox.num_taken]
        unread = conversation.progress.unread_items
        owed = [owed.request for owed in self._owed] + conversation.progress.owed_responses
        opened, heard_ms = self._open, received.heard_ms
        return ResumePoint(received.last, received.applied, unread, opened, owed, finished, heard_ms=heard_ms)


def recovered(items: Sequence[Item], continued: ResumePoint) -> tuple[list[Item], list[ConversationEvent]]:
    """Return the history as another host goes on with it, and what the client is told of that.

    Items without a transcript, and those of a response that was not done, are deleted: the audio of the first is sent
    again by the client, and the response is begun anew. The response that was open ends as cancelled.
    """
    opened = continued.open_response
    gone = {*continued.unread_items, *(opened.items if opened else ())}
    kept = [item for item in items if item.id not in gone]
    told: list[ConversationEvent] = [ItemDeleted(item.id) for item in items if item.id in gone]
    if opened:
        response = Response(opened.id, opened.audio_output, None, None, status="cancelled", reason=MOVED)
        response.output = [item for item in items if item.id in opened.items]
        told.insert(0, ResponseDone(response))
    return kept, told


def with_missed(continued: ResumePoint, last_received: int) -> ResumePoint:
    """Return where the conversation goes on for a client that has received the events up to this number.

    Its journal has what the client lacks, numbered on from there, and is whole. A finished response of which the client
    lacks a piece counts as open, and is owed.
    """
    if continued.is_whole:
        return continued
    missed = [frame for frame in continued.journal if frame.seq > last_received]
    finished = continued.finished
    lacks_pieces = bool(missed) and missed[-1].seq - last_received > len(missed)
    if lacks_pieces and finished and any(finished.response.id in str(frame.frame) for frame in missed):
        # What is told of the response once pieces are missing is told anew.
        about = {finished.response.id, *finished.response.items}
        before = _before_the_gap(missed, last_received)
        missed = before + [f for f in missed[len(before) :] if not any(id in str(f.frame) for id in about)]
        owed = [finished.request, *continued.owed]
        continued = msgspec.structs.replace(continued, open_response=finished.response, owed=owed)
    journal = [frame.renumbered(seq) for seq, frame in enumerate(missed, last_received + 1)]
    return msgspec.structs.replace(continued, journal=journal, finished=None, is_whole=True)


def _before_the_gap(missed: list[SentFrame], last_received: int) -> list[SentFrame]:
    """The first of the frames, as far as they follow each other."""
    return [frame for seq, frame in enumerate(missed, last_received + 1) if frame.seq == seq]


def check_counts(continued: ResumePoint) -> None:
    """Raise RemoteProtocolError for counts that no snapshot has: the row is damaged."""
    is_wrong = any(not continued.received < number < MAX_NUMBER for number in continued.applied)
    if is_wrong or not 0 <= continued.received < MAX_NUMBER or not 0 <= continued.heard_ms <= MAX_HEARD_MS:
        raise RemoteProtocolError("unknown_session", "The stored session is damaged.", "session_id")
