"""The resume point of a stored session: the state, besides its wire and its items, that another host needs to continue
it. Pure, except for the inbox.

A host may die between any two messages of its client, or in the middle of a response. So a snapshot records which of
the client's messages it covers, which response was open, and whether a response was owed.

Audio that a host has heard but not transcribed is lost when the host dies. So a snapshot records the number of the last
message up to which it covers everything, and the client sends all later messages again. Some later messages may be
covered as well, for example a message that created an item while the user was speaking. The snapshot lists them, and
the host that restores the conversation skips them. If only part of the first message's audio is covered, the snapshot
records how much.

A snapshot is written before the client receives the events that it covers. If the host dies in between, the next host
sends these events. It cannot send the deltas of a response again: if one is missing, the response is generated again.
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
    CommandRejected,
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
from antiphon.sessions.conversation.history import IMAGE_GONE
from antiphon.sessions.conversation.responses.queue import SESSION_ENDED, Unstored
from antiphon.sessions.conversation.responses.responder import MAX_OUT_OF_BAND
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.sessions.transcription.state import TranscriptionState
from antiphon.transports.journal import SentFrame

# The reason of a response that ended because its session moved to another host.
MOVED = "session_moved"
# The error message of a response that cannot begin again for that reason.
NOT_STORED = "The session has moved to another server, which does not have the images or audio of this response."
# Upper bounds that reveal a damaged row: the number of a session's messages, and the audio of one message in ms.
MAX_NUMBER = 10**15
MAX_HEARD_MS = 3_600_000
# The same for the audio of a transcription session that the client sends again, in seconds.
MAX_AGAIN_S = 3600.0
# Events that change the configuration or the history: the conversation is stored after each.
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
    """Return whether this event completes a user's turn, or a response that ended for another reason than a move."""
    return isinstance(event, TranscriptDone) or (isinstance(event, ResponseDone) and event.response.reason != MOVED)


class OpenResponse(msgspec.Struct):
    """A response: its id, whether it has audio, and the ids of its items in the history."""

    id: str
    audio_output: bool
    items: list[str] = []


class AskedResponse(msgspec.Struct):
    """A response, with the request for it."""

    response: OpenResponse
    request: CreateResponse


class ResumePoint(msgspec.Struct):
    """Records which of the client's messages and which responses a snapshot covers."""

    # The snapshot covers all messages of the client up to this number.
    received: int = 0
    # Numbers of later messages that it covers as well.
    applied: list[int] = []
    # Items whose audio had no transcript yet. The client sends their audio again.
    unread_items: list[str] = []
    # The response of the conversation whose beginning the client has seen.
    open_response: OpenResponse | None = None
    # Requests for responses that have yet to be generated.
    owed: list[CreateResponse] = []
    # The last response, if the history ends with it. The client may not have received all of it.
    finished: AskedResponse | None = None
    # True if the numbers in `journal` have no gap, so that its frames can be sent as they are. This is so if the host
    # handed the session over and the frames were not too large. Otherwise deltas of responses and the oldest frames are
    # missing.
    is_whole: bool = False
    # Frames that the client may not have received.
    journal: list[SentFrame] = []
    # Milliseconds of the audio after message `received` that the snapshot covers.
    heard_ms: float = 0.0
    # Of a transcription session: the position in its audio, in milliseconds, at which message `received` ends.
    from_ms: float = 0.0
    # The state of a transcription session; None for a conversation.
    transcription: TranscriptionState | None = None
    # Of a conversation: the number of labels that voices have.
    num_labels: int = 0
    # The out-of-band responses whose beginning the client has seen.
    beside: list[AskedResponse] = []
    # Out-of-band responses that are complete, of which the client may lack pieces.
    finished_beside: list[AskedResponse] = []
    # The native model of the conversation; "" if any conversation model can continue it.
    native_model: str = ""
    # What the conversation model had got on earlier hosts besides text: the next one does not have it.
    unstored: list[Unstored] = []
    # The key of the words that a transcription's client keeps (`ClientWords`); "" if it keeps none.
    words_key: str = ""

    @property
    def starts_at_ms(self) -> float:
        """The position, in the session's audio, of the first audio that the client sends again. A conversation counts
        from that audio on.
        """
        return self.from_ms if self.transcription else 0.0


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of the client.

    `audio_end_ms` is the position in the session's audio at which this message ends. `is_audio` is true if it contains
    only audio. `num_put` is the number of commands put into the inbox up to and including the message's last one.
    """

    number: int
    audio_end_ms: float
    is_audio: bool
    num_put: int


class SettledMessages(NamedTuple):
    """The client's messages that a snapshot covers: all up to the number `last`, the later ones listed in `applied`,
    and the first `heard_ms` of the audio that the client sends again. That audio begins at `from_ms`.
    """

    last: int
    applied: list[int]
    heard_ms: float = 0.0
    from_ms: float = 0.0


NOTHING = SettledMessages(0, [])


class ReceivedMessages:
    """The client's messages, from the first message that is not in the conversation yet.

    `before` lists the messages that are covered by the snapshot from which the session was restored. Positions in the
    session's audio are counted from `before.from_ms`, the end of the message `before.last`.
    """

    def __init__(self, before: SettledMessages = NOTHING) -> None:
        self._applied = set(before.applied)
        self._waiting: deque[_Message] = deque()
        self._num_settled = before.last
        self._heard_before_ms = before.from_ms + before.heard_ms
        # Position, in the session's audio, at which the waiting messages begin.
        self._waiting_from_ms = before.from_ms

    def is_applied(self, number: int) -> bool:
        """Return True if this message was carried out before the session was restored, and has to be skipped now."""
        if number not in self._applied:
            return False
        audio_end_ms = self._waiting[-1].audio_end_ms if self._waiting else self._waiting_from_ms
        self._waiting.append(_Message(number, audio_end_ms, False, 0))
        return True

    def add(self, number: int, audio_end_ms: float, num_put: int, *, is_audio: bool) -> None:
        """Record a message that was handled. For the parameters see `_Message`; `num_put` is 0 for a message without
        commands.
        """
        self._waiting.append(_Message(number, audio_end_ms, is_audio, num_put))

    def snapshot(self, settled_ms: float, num_taken: int) -> SettledMessages:
        """Return the messages that are in the conversation now.

        All audio before `settled_ms` is in the conversation or has no speech. `num_taken` is the number of commands
        that the session has taken out of the inbox.
        """
        while self._waiting and self._is_in(self._waiting[0], settled_ms, num_taken):
            message = self._waiting.popleft()
            self._num_settled, self._waiting_from_ms = message.number, message.audio_end_ms
            self._applied.discard(message.number)
        later = {m.number for m in self._waiting if not m.is_audio and m.num_put <= num_taken}
        heard_ms = max(settled_ms, self._heard_before_ms) - self._waiting_from_ms
        # Messages in `_applied` that the client has yet to send again are still in the conversation.
        applied = sorted(later | self._applied)
        return SettledMessages(self._num_settled, applied, max(0.0, heard_ms), self._waiting_from_ms)

    @staticmethod
    def _is_in(message: _Message, settled_ms: float, num_taken: int) -> bool:
        return message.num_put <= num_taken and not (message.is_audio and message.audio_end_ms > settled_ms)


@dataclass(slots=True)
class _Owed:
    """A response that was owed when the session was restored.

    `num_put` is the number of commands put into the inbox up to and including the response's request. It is None until
    the request is put.
    """

    request: CreateResponse
    num_put: int | None = None


class Progress:
    """Tracks one live conversation for its snapshots.

    `continued` is the resume point of a restored conversation. `speech` collects the audio if audio is stored too.
    """

    def __init__(self, inbox: Inbox, continued: ResumePoint | None = None, speech: SpeechTail | None = None) -> None:
        continued = continued or ResumePoint()
        self._inbox = inbox
        self._speech = speech
        begin_ms = continued.starts_at_ms
        before = SettledMessages(continued.received, continued.applied, continued.heard_ms, begin_ms)
        self._messages = ReceivedMessages(before)
        # Number of samples that will arrive again although another host has already transcribed them.
        self._num_heard = round(continued.heard_ms * SAMPLE_RATE_HZ / 1000)
        self._owed = [_Owed(replace(r, when_busy="wait") if r.stored else r) for r in continued.owed]
        # True while a response of the conversation is generated again that another host had begun.
        self._begins_anew = any(owed.request.stored for owed in self._owed)
        self._open: OpenResponse | None = None
        # Responses out of band by id: those under way, and the last ones that have ended.
        self._beside = dict[str, AskedResponse]()
        self._ended_beside = set[str]()
        self._finished_beside = deque[AskedResponse](maxlen=MAX_OUT_OF_BAND)
        self._lost = continued.unstored
        # The response that was under way when the session ended here.
        self._ended: OpenResponse | None = None
        self._finished: AskedResponse | None = None
        # Position, in samples of the session's audio, after the audio received by this host.
        self._num_samples = round(begin_ms * SAMPLE_RATE_HZ / 1000)

    def keeps_no_speech(self) -> None:
        """Collect no audio, because the session's tail has no audio."""
        self._speech = None

    def is_applied(self, number: int) -> bool:
        """Return True if another host has carried out the client's message `number`, so that it is skipped here."""
        return self._messages.is_applied(number)

    def took(self, number: int, commands: Sequence[Command]) -> None:
        """Record a message of the client after its commands were put into the inbox, or carried out at once."""
        audio = [command for command in commands if isinstance(command, AppendAudio)]
        self._num_samples += sum(len(command.pcm) for command in audio)
        is_audio = bool(commands) and len(audio) == len(commands)
        if is_audio and self._speech:
            self._speech.took(number, audio)
        end_ms = self._num_samples * 1000 / SAMPLE_RATE_HZ
        self._messages.add(number, end_ms, self._inbox.num_put if commands else 0, is_audio=is_audio)

    def unheard(self, commands: Sequence[Command]) -> Sequence[Command]:
        """Return a message's commands. Audio that another host has already transcribed is replaced by silence.

        While a response is being generated again, a request for another response waits instead of failing, because the
        client may not know of the first response yet.
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
        """Handle the messages of a stored tail as if the client sent them. Waits while the inbox is full."""
        for number, pcm in messages:
            if not self.is_applied(number):
                commands = self.unheard([AppendAudio(pcm)])
                for command in commands:
                    await self._inbox.put(command)
                self.took(number, commands)

    async def ask_again(self) -> None:
        """Put the requests for the responses that were owed into the inbox. Waits while the inbox is full."""
        for owed in list(self._owed):
            await self._inbox.put(owed.request)
            owed.num_put = self._inbox.num_put

    def follow(self, event: Event) -> None:
        """Record an event of the session before it is stored."""
        match event:
            case ResponseCreated(response) if response.stored:
                self._open = OpenResponse(response.id, response.audio_output)
            case ResponseDone(response) if response.stored and response.reason == SESSION_ENDED:
                # It had begun just before the session ended here. The next host, if there is one, generates it again.
                items = [item.id for item in response.output]
                self._open, self._ended = None, OpenResponse(response.id, response.audio_output, items)
                self._owed.append(_Owed(response.request))
            case ResponseDone(response) if response.stored:
                self._open = None
                self._begins_anew = self._begins_anew and response.reason == MOVED
                done = OpenResponse(response.id, response.audio_output, [item.id for item in response.output])
                is_complete = response.status == "completed" and bool(done.items)
                self._finished = AskedResponse(done, response.request) if is_complete else None
            case ResponseCreated(response):
                begun = OpenResponse(response.id, response.audio_output)
                self._beside[response.id] = AskedResponse(begun, response.request)
            case ResponseDone(response):
                self._ended_beside.add(response.id)
                if response.reason == SESSION_ENDED:
                    # As above: it stays open, and the next host generates it again.
                    self._owed.append(_Owed(response.request))
                elif (ended_here := self._beside.pop(response.id, None)) and response.status == "completed":
                    self._finished_beside.append(ended_here)

    def now_in(self, session: TranscriptionSession) -> ResumePoint:
        """Return the current resume point of a transcription session."""
        state = session.continuing.state
        received = self._messages.snapshot(state.settled * 1000 / SAMPLE_RATE_HZ, self._inbox.num_taken)
        heard_ms, from_ms = received.heard_ms, received.from_ms
        return ResumePoint(received.last, received.applied, heard_ms=heard_ms, from_ms=from_ms, transcription=state)

    def now(self, conversation: RealtimeConversation, *, empties_tail: bool = False) -> ResumePoint:
        """Return the current resume point. `empties_tail` is true if writing the snapshot empties the stored tail."""
        received = self._messages.snapshot(conversation.progress.settled_ms, self._inbox.num_taken)
        if self._speech:
            self._speech.settled(received.last, empties=empties_tail)
        history = conversation.history.items
        finished = self._finished
        if finished and not (history and history[-1].id in finished.response.items):
            finished = None
        # Requests that the session has taken from the inbox are in its own `owed_responses`.
        self._owed = [owed for owed in self._owed if owed.num_put is None or owed.num_put > self._inbox.num_taken]
        unread = conversation.progress.unread_items
        # An open response is generated again, also if only its last events are missing.
        closing = conversation.progress.closing_responses if self._open else []
        if self._open:
            # Messages that are complete begin again with their response. What was heard of a cancelled one stays.
            begun = {i.id for i in history if i.kind == "message" and (closing or i.status != "incomplete")}
            begun &= {*self._open.items}
            self._open.items = [
                i.id for i in history if i.role == "assistant" and (i.status == "in_progress" or i.id in begun)
            ]
        out_of_band = conversation.progress.out_of_band
        self._ended_beside &= out_of_band.keys()
        under_way = [request for id, request in out_of_band.items() if id not in self._ended_beside]
        owed = [owed.request for owed in self._owed] + closing + under_way + conversation.progress.owed_responses
        return ResumePoint(
            received.last,
            received.applied,
            unread,
            self._ended or self._open,
            owed,
            finished,
            heard_ms=received.heard_ms,
            num_labels=conversation.progress.num_labels,
            beside=list(self._beside.values()),
            finished_beside=list(self._finished_beside),
            native_model=conversation.progress.native_model,
            unstored=sorted({*self._lost, *conversation.progress.unstored}),
        )


def recovered(
    items: Sequence[Item], continued: ResumePoint
) -> tuple[list[Item], list[CreateResponse], list[ConversationEvent]]:
    """Return the history with which another host continues, the requests that it carries out, and the events that
    report the changes to the client.

    Deletes items without a transcript, whose audio the client sends again, and items of the open response, which is
    generated again. The open responses end as cancelled. A response out of band to images or audio that are not stored
    is not generated again: it ends as failed, or its request is rejected if no response had begun.
    """
    opened = continued.open_response
    gone = {*continued.unread_items, *(opened.items if opened else ())}
    kept = [item for item in items if item.id not in gone]
    missed_events: list[ConversationEvent] = [ItemDeleted(item.id) for item in items if item.id in gone]
    for beside in continued.beside:
        missed_events.insert(0, ResponseDone(_ended(beside.response, beside.request)))
    if opened:
        response = _ended(opened, CreateResponse())
        response.output = [item for item in items if item.id in opened.items]
        missed_events.insert(0, ResponseDone(response))
    begun = [beside.request for beside in continued.beside]
    for request in continued.owed:
        if _lacks_media(request) and request not in begun:
            missed_events.append(CommandRejected(MOVED, NOT_STORED, event_id=request.event_id))
    return kept, [request for request in continued.owed if not _lacks_media(request)], missed_events


def _ended(opened: OpenResponse, request: CreateResponse) -> Response:
    """Return a response as it ends because its host has ended."""
    response = Response(opened.id, opened.audio_output, None, None, request.metadata, request.stored)
    response.status, response.reason = "cancelled", MOVED
    if _lacks_media(request):
        response.status, response.reason, response.error, response.code = "failed", "", NOT_STORED, MOVED
    return response


def _lacks_media(request: CreateResponse) -> bool:
    """Return whether a stored request for a response out of band lacks images or audio that it is to answer."""
    given = [item for item in request.items or () if isinstance(item, Item) and not request.stored]
    media = [part for item in given for part in item.parts if part.kind in ("input_image", "input_audio")]
    return any(part.text in ("", IMAGE_GONE) for part in media)


def with_missed(continued: ResumePoint, last_received: int) -> ResumePoint:
    """Return the resume point for a client that has received the events up to number `last_received`.

    Its journal has the frames that the client lacks, numbered without a gap. If the client lacks a delta of a finished
    response, that response counts as open and is owed.
    """
    if continued.is_whole:
        return continued
    missed = [frame for frame in continued.journal if frame.seq > last_received]
    lacks_pieces = bool(missed) and missed[-1].seq - last_received > len(missed)
    if lacks_pieces:
        finished = [*([continued.finished] if continued.finished else []), *continued.finished_beside]
        again = [each for each in finished if _is_about(missed, each.response)]
        # Drops these responses' frames after the gap: they are sent again when the responses are generated again.
        about = {id for each in again for id in (each.response.id, *each.response.items)}
        before = _before_the_gap(missed, last_received)
        dropped = [f for f in missed[len(before) :] if any(id in str(f.frame) for id in about)]
        missed = [frame for frame in missed if frame not in dropped]
        unseen = [frame for frame in dropped if '"response.created"' in str(frame.frame)]
        opened = next((each.response for each in again if each.request.stored), continued.open_response)
        beside = [each for each in again if not each.request.stored and not _is_about(unseen, each.response)]
        continued = msgspec.structs.replace(
            continued,
            open_response=opened,
            beside=[*continued.beside, *beside],
            owed=[*(each.request for each in again), *continued.owed],
        )
    journal = [frame.renumbered(seq) for seq, frame in enumerate(missed, last_received + 1)]
    return msgspec.structs.replace(continued, journal=journal, finished=None, finished_beside=[], is_whole=True)


def with_journal(continued: ResumePoint, frames: Sequence[SentFrame], *, is_whole: bool) -> ResumePoint:
    """Return the resume point with the frames that the client may not have received. For `is_whole` see ResumePoint.

    A response out of band that has ended is kept only while the client may lack one of its frames.
    """
    finished = [each for each in continued.finished_beside if not is_whole and _is_about(frames, each.response)]
    return msgspec.structs.replace(continued, finished_beside=finished, journal=list(frames), is_whole=is_whole)


def _is_about(frames: Sequence[SentFrame], response: OpenResponse) -> bool:
    return any(response.id in str(frame.frame) for frame in frames)


def _before_the_gap(missed: list[SentFrame], last_received: int) -> list[SentFrame]:
    """Return the frames up to the first gap in their numbers."""
    return [frame for seq, frame in enumerate(missed, last_received + 1) if frame.seq == seq]


def check_counts(continued: ResumePoint) -> None:
    """Raise RemoteProtocolError if the counts are impossible, which means that the row is damaged."""
    is_wrong = any(not continued.received < number < MAX_NUMBER for number in continued.applied)
    is_wrong = is_wrong or not 0 <= continued.from_ms < MAX_NUMBER
    if state := continued.transcription:
        again_s = state.segmenter.now / SAMPLE_RATE_HZ - continued.from_ms / 1000
        is_wrong = is_wrong or not 0 <= again_s <= MAX_AGAIN_S
    if is_wrong or not 0 <= continued.received < MAX_NUMBER or not 0 <= continued.heard_ms <= MAX_HEARD_MS:
        raise RemoteProtocolError("unknown_session", "The stored session is damaged.", "session_id")
