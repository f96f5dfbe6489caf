"""One live conversation: a listener that turns sound into turns and transcripts, and a responder that answers them.

The listener is a transcription session with its own tasks; what it tells comes through `handle_transcription`, and what the client asks of the conversation
through `handle`, in its place among the sound; a cancel is handled at once, on the reader's task. An answer is one task; cancelling it is
barge-in, and whatever ends it, its open part and item are closed in order and `ResponseDone` is last.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from antiphon.contracts import ConversationModel, ImageReader, Transcriber, TurnDetector, VoiceActivityDetector
from antiphon.contracts.playback import PlaybackTracker
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    ClearOutputAudio,
    CommandRejected,
    ConfigureConversation,
    ContentPart,
    ContentPosition,
    ConversationCommand,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    DeleteItem,
    IdleTimeoutReached,
    Item,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    ItemTruncated,
    RetrieveItem,
    TruncateItem,
    UserTurnCommitted,
    UserTurnStarted,
)
from antiphon.events.duplex import AppendFrames, SkipResponse
from antiphon.events.transcription import (
    CommitRefused,
    GuessDropped,
    OverlapDecided,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuessed,
    TranscriptionEvent,
    TranscriptPartial,
    TurnCleared,
    TurnCommitted,
)
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.item_media import ItemMediaResolver
from antiphon.sessions.conversation.native_turns import NativeTurns
from antiphon.sessions.conversation.playout import Playout
from antiphon.sessions.conversation.responder import Responder
from antiphon.sessions.conversation.response import EmitConversation, ResponseTask
from antiphon.sessions.conversation.turn_audio import TurnAudio, bound
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.echo import EchoGuard
from antiphon.turns.overlap import DECISION_S, MAX_BACKCHANNEL_S, RESPONSE_TAIL_S, OverlapDecider

# How long a client's word that what is said takes no floor holds: it says so with each piece of sound.
DISMISSED_S = 0.6
# A partner that takes turns by itself is asked for an answer.
UNASKED = "response_create_unsupported"
# How often it is looked whether somebody still speaks.
FRAME_S = 0.05


class ConversationSession:
    """Run with `run()`; sound and commits go into `inbox`, everything else to `handle`; closing the inbox ends it.

    `left_s`: seconds of sound that somebody still plays, where it is known better than by the clock. `new_id(prefix)` makes ids. `emit` is awaited for every output and may hold the session back.
    """

    def __init__(
        self,
        config: ConversationConfig,
        transcriber: Transcriber,
        detector: VoiceActivityDetector,
        partner: ConversationModel,
        inbox: Inbox,
        emit: EmitConversation,
        *,
        new_id: Callable[[str], str],
        min_commit_ms: int = 0,
        measure: Callable[[str, float], None] = lambda kind, seconds: None,
        judge: TurnDetector | None = None,
        reader: ImageReader | None = None,
        playback: PlaybackTracker | None = None,
        aside: Callable[[ConversationCommand], Awaitable[None]] | None = None,
        left_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._overlap = OverlapDecider()
        self._idling = anyio.CancelScope()
        self._deciding = anyio.CancelScope()
        self._closing = False
        self.conversation = ConversationHistory()
        hears = partner.profile.accepts_media
        self._looking = ItemMediaResolver(self.conversation, reader, transcriber, emit, self._looked, takes_media=hears)
        self._sounds = TurnAudio() if hears else None
        self._emit = emit
        self._new_id = new_id
        echo = EchoGuard()
        self._sounding = Playout(echo, clock)
        native = partner.native
        self._units = (
            NativeTurns(native, lambda turn: self._responder.tell(turn, lambda: turn.void), emit, clock)
            if native
            else None
        )
        self._left_s = left_s or (lambda: self._sounding.left_s)
        self._listener = TranscriptionSession(
            config.transcription,
            transcriber,
            detector,
            inbox,
            self.handle_transcription,
            min_commit_ms=min_commit_ms,
            measure=measure,
            aside=aside or self.handle,
            judge=judge,
            echo=echo,
            tap=self._units.hear if self._units else self._sounds.hear if self._sounds else None,
        )
        self._responder = Responder(
            config,
            partner,
            self.conversation,
            emit,
            self._sounding,
            new_id=new_id,
            measure=measure,
            playback=playback,
            now=lambda: self._listener.now,
            over=self._answered,
        )
        self._group: anyio.abc.TaskGroup | None = None
        # Turns whose transcript is still to come, and what was asked meanwhile.
        self._turns: dict[int, Item] = {}
        self._later: list[CreateResponse] = []
        # What has been heard so far of the turn that is being spoken.
        self._running: dict[int, str] = {}
        self._speaking = False
        # Until when in the sound the client has said that nothing takes the floor.
        self._dismissed_until_s = 0.0
        # Turns that began over an answer which they do not end.
        self._yielded: set[int] = set()
        # Turns that the client does not want answered.
        self._unanswered: set[int] = set()
        self._unanswered_next = False
        # Something was said that has no answer yet.
        self._owed = False

    @property
    def audio_s(self) -> float:
        """Seconds of sound heard."""
        return self._listener.audio_s

    @property
    def num_open_turns(self) -> int:
        """Turns that have no transcript yet, or whose audio is kept until they have: 0 once all turns are transcribed."""
        return len(self._turns.keys() | (self._sounds.open_turns if self._sounds else set()))

    @property
    def answering(self) -> bool:
        """An answer of the conversation is under way."""
        return self._responder.active is not None

    async def run(self) -> None:
        """Until the inbox is closed and what was heard is answered or the answer is cancelled."""
        try:
            async with anyio.create_task_group() as self._group:
                await self._responder.open(self._group)
                if self._units:
                    await self._units.open(self.config)
                    self._group.start_soon(self._units.run)
                await self._listener.run()
                self._closing = True
                if self._units:
                    self._units.close()
                self._idling.cancel()
                self._deciding.cancel()
                self._responder.cancel_all()
        finally:
            await self._responder.close()

    async def interrupt(self, reason: str) -> None:
        """End the conversation's answer, and its sound."""
        self._responder.ahead.forget()
        if answer := self._responder.active:
            answer.cancel(reason)
        await self._responder.silence()

    async def heard_of(self, items: list[tuple[ContentPosition, int]]) -> None:
        """It is known of these spoken items how many milliseconds of each were heard."""
        await self._responder.cut(items)

    async def speech_over_answer(self, *, takes_floor: bool, reason: str) -> None:
        """Whether what is being said over an answer takes the floor: the client knows."""
        self._dismissed_until_s = 0.0 if takes_floor else self.audio_s + DISMISSED_S
        if takes_floor and self._units and (self._units.waiting or not self.answering):
            # What it would begin to say is not said; an answer under way is ended as any other.
            self._units.interrupt()
        overlap = self._overlap
        await self._tell_all(overlap.take_floor(reason) if takes_floor else overlap.dismiss(reason))

    def _dismissed(self) -> bool:
        """The client has just said that what is said now does not take the floor."""
        return self.audio_s < self._dismissed_until_s

    @property
    def _answers(self) -> bool:
        """The end of a turn is answered: not where the partner takes turns by itself."""
        return self.config.create_response and self._units is None

    @property
    def interruptible(self) -> bool:
        """Speech that begins now ends an answer."""
        return self.config.interrupt_response and not self._dismissed()

    # --- what the client asks ---------------------------------------------------------------------------------------------

    async def handle(self, item: ConversationCommand) -> None:
        """Do what the client asks. Never raises for what it asks: what cannot be is answered."""
        try:
            await self._do(item)
        except RemoteProtocolError as error:
            event_id = None if isinstance(item, ConfigureConversation) else item.event_id
            await self._emit(CommandRejected(error.code, error.message, error.param, event_id))

    async def _do(self, item: ConversationCommand) -> None:
        conversation = self.conversation
        match item:
            case ConfigureConversation(config):
                self.config = self._responder.config = config
                await self._listener.configure(config.transcription)
            case CreateItem(new, after):
                self._looking.bound(new)
                previous = conversation.add(new, after)
                await self._emit(ItemAdded(new, previous))
                await self._emit(ItemDone(new, previous))
                assert self._group
                self._looking.look_at(new, item.event_id, self.config.transcription.language, self._group)
                bound(conversation.items)
            case RetrieveItem(item_id):
                await self._emit(ItemRetrieved(conversation.get(item_id)))
            case DeleteItem(item_id):
                conversation.delete(item_id)
                await self._emit(ItemDeleted(item_id))
            case TruncateItem(item_id, content_index, audio_end_ms):
                kept_ms = conversation.truncate(item_id, content_index, audio_end_ms)
                self._sounding.silenced(self._listener.now)
                await self._emit(ItemTruncated(item_id, content_index, kept_ms))
            case CreateResponse(items=items):
                if self.config.duplex and not (conversation.items or items or item.instructions):
                    raise RemoteProtocolError("response_create_without_input", "There is nothing to answer.")
                if self._units:
                    raise RemoteProtocolError(UNASKED, "This model decides by itself when to speak.")
                for given in items or ():
                    if isinstance(given, Item):
                        assert self._group
                        language = self.config.transcription.language
                        self._looking.look_at(given, item.event_id, language, self._group)
                if self._unknown():
                    # What is to be answered is still being transcribed, or read.
                    self._later.append(item)
                else:
                    self._responder.begin(item)
            case CancelResponse(response_id):
                self._responder.stop(response_id)
            case ClearOutputAudio():
                await self._responder.silence()
            case AppendFrames(frames):
                if self._units:
                    self._units.show(frames)
            case SkipResponse():
                self._unanswered_next = True
            case _:
                raise RemoteProtocolError("unknown_event", f"{type(item).__name__} is for a duplex session.")

    # --- what is heard ----------------------------------------------------------------------------------------------------

    async def handle_transcription(self, output: TranscriptionEvent) -> None:
        """Apply one event of the transcription session: emit it, and begin or end responses for it.

        Returns once its consequences were emitted; an overlap that has to be decided goes on in a task of its own.
        Only while `run` runs.
        """
        if isinstance(output, TurnCommitted) and self._unanswered_next:
            self._unanswered.add(output.turn)
            self._unanswered_next = False
        held = self._overlap.undecided_turn
        await self._tell_all(self._overlap.feed(output, overlaps=self._overlaps()))
        if self._overlap.undecided_turn is not None and self._overlap.undecided_turn != held:
            assert self._group
            self._group.start_soon(self._decide_overlap, self._overlap.undecided_turn)

    def _overlaps(self) -> bool:
        """An answer sounds for a while yet, and turns are taken by meaning: an acknowledgement does not end it."""
        vad = self.config.transcription.vad
        weighs = vad is not None and self.config.allows_backchannels and self.interruptible
        return weighs and (self._left_s() > RESPONSE_TAIL_S or self.answering)

    async def _decide_overlap(self, turn: int) -> None:
        with anyio.CancelScope() as self._deciding:
            await self._decide(turn)

    async def _decide(self, turn: int) -> None:
        if duplex := self.config.duplex:
            await anyio.sleep(DECISION_S)
            if self._overlap.undecided_turn == turn:
                speaking, short = self._listener.speaking, self._listener.spoken_ms <= duplex.short_ack_ms
                if speaking or short:
                    await self._tell_all(self._overlap.decide(speaking=speaking))
            await anyio.sleep(max(0.0, duplex.barge_in_ms / 1000 - DECISION_S))
        else:
            await anyio.sleep(MAX_BACKCHANNEL_S)
        while self._overlap.undecided_turn == turn:
            if self._listener.speaking:
                await self._tell_all(self._overlap.take_floor())
            await anyio.sleep(FRAME_S)

    async def _tell_all(self, outputs: list[TranscriptionEvent]) -> None:
        for output in outputs:
            await self._told(output)

    async def _told(self, output: TranscriptionEvent) -> None:
        if self._sounds:
            self._sounds.take(output)
        match output:
            case SpeechStarted(turn):
                self._speaking = True
                self._responder.ahead.forget()
                self._running.clear()
                self._idling.cancel()
                await self._name(turn)
                await self._emit(output)
                interrupts = self.interruptible
                if not interrupts:
                    self._yielded.add(turn)
                if (answer := self._responder.active) and interrupts:
                    # If it was a noise, what had not begun to be answered is still to be.
                    self._owed = self._answers and (self._owed or not answer.response.output)
                    answer.cancel("turn_detected")
                if interrupts:
                    await self._responder.silence()
            case SpeechStopped():
                self._speaking = False
                await self._emit(output)
            case TurnCommitted(turn):
                item = await self._name(turn)
                if self._sounds:
                    item.parts[0].media = self._sounds.of(output)
                previous = self.conversation.add(item)
                bound(self.conversation.items)
                await self._emit(UserTurnCommitted(turn, item, previous))
            case TranscriptDone(turn, text):
                item = await self._name(turn)
                del self._turns[turn]
                item.parts[0].text = text
                if not text.strip() and self.config.transcription.vad:
                    # A cough is no turn for anybody; what the client commits is one, words or none.
                    item.parts[0].media = None
                if self.config.reports_transcripts:
                    await self._emit(output)
                unanswered = turn in self._unanswered
                self._unanswered.discard(turn)
                if text.strip() and self._answers and self.config.transcription.vad and not unanswered:
                    self._owed = True
                await self._answer_turn(cancels=turn not in self._yielded)
                self._yielded.discard(turn)
                await self._catch_up()
            case CommitRefused():
                self._unanswered_next = False
                await self._emit(output)
            case TranscriptFailed(turn):
                if self._turns.pop(turn, None) and self._sounds and self._answers and self.config.transcription.vad:
                    # It was heard all the same.
                    self._owed = self._owed or turn not in self._unanswered
                self._yielded.discard(turn)
                self._unanswered.discard(turn)
                await self._emit(output)
                await self._answer_turn()
                await self._catch_up()
            case TranscriptGuessed(turn, text, speech_end_ms):
                await self._expect(turn, text, speech_end_ms)
            case GuessDropped():
                self._responder.ahead.forget()
            case TranscriptPartial():
                return
            case TranscriptDelta(turn, text):
                if self.config.reports_transcripts:
                    await self._emit(output)
                await self._prefill(turn, text)
            case TurnCleared():
                # An open turn ends without a trace.
                self._speaking = False
                self._responder.ahead.forget()
                await self._emit(output)
                await self._answer_turn()
            case _:
                await self._emit(output)

    async def _name(self, turn: int) -> Item:
        """The item that a turn will be; the client is told its id before anything else of it."""
        if turn not in self._turns:
            self._turns[turn] = Item(self._new_id("item_"), parts=[ContentPart("input_audio")])
            await self._emit(UserTurnStarted(turn, self._turns[turn].id))
        return self._turns[turn]

    async def _catch_up(self) -> None:
        """Answer what was asked while a turn was being transcribed."""
        while self._later and not self._unknown():
            await self.handle(self._later.pop(0))

    def _unknown(self) -> bool:
        """A turn that is an item already has no transcript yet, or an image has not been read."""
        waiting = {id(item) for item in self._turns.values()}
        return bool(self._looking.unread) or any(id(item) in waiting for item in self.conversation.items)

    async def _looked(self) -> None:
        await self._answer_turn()
        await self._catch_up()

    async def _answer_turn(self, *, cancels: bool = True) -> None:
        """Answer what is owed one, once nobody speaks and all that was said is known.

        `cancels`: an answer under way is ended for it, or else waited for.
        """
        if self._closing or not self._owed or self._speaking or self._unknown():
            return
        if self._responder.active is None:
            self._owed = False
            self._responder.begin(CreateResponse())
        elif self.config.interrupt_response and cancels and not self._responder.active.cancelled:
            await self._emit(OverlapDecided(-1, True, "turn_answered"))
            await self.interrupt("turn_detected")

    # --- answers ----------------------------------------------------------------------------------------------------------

    async def _answered(self, answering: ResponseTask) -> None:
        """An answer is over."""
        if answering.response.stored and self._group:
            self._group.start_soon(self._idle)
        await self._answer_turn()

    async def _idle(self) -> None:
        """Wait for somebody to speak after an answer has sounded; if nobody does, speak again."""
        timeout_ms, vad = self.config.idle_timeout_ms, self.config.transcription.vad
        if self._closing or timeout_ms is None or vad is None or vad.patience_ms is not None:
            return
        self._idling.cancel()
        with anyio.CancelScope() as self._idling:
            await anyio.sleep(self._sounding.left_s)
            start_ms = int(self.audio_s * 1000)
            await anyio.sleep(timeout_ms / 1000)
            if self.answering or self._speaking or self._unknown():
                return
            item = Item(self._new_id("item_"), parts=[ContentPart("input_audio")])
            await self._emit(IdleTimeoutReached(item.id, start_ms, int(self.audio_s * 1000)))
            await self._emit(UserTurnCommitted(-1, item, self.conversation.add(item)))
            self._responder.begin(CreateResponse())

    async def _expect(self, turn: int, text: str, speech_end_ms: int) -> None:
        """The user may have ended a turn. Nobody hears of the answer to it before it is asked for."""
        responder = self._responder
        await responder.ahead.drop()
        free = responder.active is None and not self._later and text.strip()
        others = {id(i) for t, i in self._turns.items() if t != turn}
        known = all(id(i) not in others for i in self.conversation.items)
        if free and known and self._answers and self.config.transcription.vad:
            sound = self._sounds.guess(turn, speech_end_ms) if self._sounds else None
            await responder.expect(text, self._turns.get(turn), sound)

    async def _prefill(self, turn: int, text: str) -> None:
        self._running[turn] = self._running.get(turn, "") + text
        if not (self._units or self._sounds or self._responder.active or self._responder.ahead or self._unknown()):
            await self._responder.prefill(self._running[turn].strip())
