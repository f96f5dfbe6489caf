"""One live conversation: a listener turns audio into turns and transcripts, and a responder answers them.

The listener is a transcription session with tasks of its own. Its events come to `handle_transcription`, and the
client's other commands to `handle`, in their order among the audio; only a cancel overtakes them, on the reader's task.
A response is one task, which barge-in cancels; whatever ends it, its part and item close, and `ResponseDone` is last.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable

import anyio
import anyio.abc

from antiphon.audio import Pcm
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
    ItemDeleted,
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
from antiphon.sessions.conversation.idle_timeout import IdleTimeout
from antiphon.sessions.conversation.item_media import ItemMediaResolver
from antiphon.sessions.conversation.native_turns import NativeTurns
from antiphon.sessions.conversation.overlap_timing import DISMISSAL_S, decide_in_time
from antiphon.sessions.conversation.playout import Playout
from antiphon.sessions.conversation.responder import Responder
from antiphon.sessions.conversation.response import EmitConversation, ResponseTask
from antiphon.sessions.conversation.turn_audio import TurnAudio, drop_old_media
from antiphon.sessions.conversation.waiting_requests import WaitingRequests
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.echo import EchoGuard
from antiphon.turns.overlap import RESPONSE_TAIL_S, OverlapDecider


class ConversationSession:
    """One client's conversation. `run()` it as a task; audio and commits go into `inbox`, whose closing ends it.

    - `model`: answers; a native model takes turns by itself instead. `transcriber`, `detector`, `turn_detector` and
      `image_reader` serve the listener and items with media. All models belong to the caller.
    - `emit`: is awaited with every event, in order, and may hold the session back.
    - `new_id`: returns a fresh id that begins with the given prefix. `clock`: returns monotonic seconds.
    - `min_commit_ms`, `measure`: as TranscriptionSession has them; responses are measured too.
    - `playback`: knows how much of a response was heard; None: the client truncates items itself.
    - `handle_other`: gets the commands that come out of the inbox in place of `handle`, which it has to call.
    - `left_s`: returns the seconds of sent audio still to be played, where that is known better than by the clock.
    - `owner`: whose conversation it is, as `ConversationModel.open` has it.

    `config` is the present configuration and `conversation` the history. All of it runs in one event loop.
    """

    def __init__(
        self,
        config: ConversationConfig,
        transcriber: Transcriber,
        detector: VoiceActivityDetector,
        model: ConversationModel,
        inbox: Inbox,
        emit: EmitConversation,
        *,
        new_id: Callable[[str], str],
        min_commit_ms: int = 0,
        measure: Callable[[str, float], None] = lambda kind, seconds: None,
        turn_detector: TurnDetector | None = None,
        image_reader: ImageReader | None = None,
        playback: PlaybackTracker | None = None,
        handle_other: Callable[[ConversationCommand], Awaitable[None]] | None = None,
        left_s: Callable[[], float] | None = None,
        owner: Hashable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._overlap = OverlapDecider()
        self._deciding = anyio.CancelScope()
        self._closing = self._user_speaking = False
        self.conversation = ConversationHistory()
        accepts_media = model.profile.accepts_media
        self._item_media = ItemMediaResolver(
            self.conversation, image_reader, transcriber, emit, self._go_on, accepts_media=accepts_media
        )
        self._turn_audio = TurnAudio(model.profile.audio_window_ms) if accepts_media else None
        self._emit = emit
        self._new_id = new_id
        echo_guard = EchoGuard()
        self._playout = Playout(echo_guard, clock)
        self._native_turns = (
            NativeTurns(native, lambda turn: self._responder.begin_unasked(turn), emit, clock)
            if (native := model.native)
            else None
        )
        self._left_s = left_s or (lambda: self._playout.left_s)
        self._idle = IdleTimeout(lambda: self._playout.left_s, self._is_busy, lambda: self.audio_s, self._ask_again)
        self._listener = TranscriptionSession(
            config.transcription,
            transcriber,
            detector,
            inbox,
            self.handle_transcription,
            min_commit_ms=min_commit_ms,
            measure=measure,
            handle_other=handle_other or self.handle,
            turn_detector=turn_detector,
            echo_guard=echo_guard,
            tap=self._native_turns.append_audio if self._native_turns else self._keep_audio if accepts_media else None,
            on_commit=self._commit,
        )
        self._responder = Responder(
            config,
            model,
            self.conversation,
            emit,
            self._playout,
            new_id=new_id,
            measure=measure,
            playback=playback,
            now=lambda: self._listener.now,
            on_ended=self._response_ended,
            owner=owner,
        )
        self._group: anyio.abc.TaskGroup | None = None
        # The items of turns without a transcript, and responses that were asked for meanwhile.
        self._untranscribed: dict[int, Item] = {}
        self._waiting_requests = WaitingRequests()
        # The time in the audio until which the client has said that speech does not take the floor.
        self._dismissed_until_s = 0.0
        # Turns that began during a response which they do not end.
        self._without_floor: set[int] = set()
        # Turns that the client wants no response to, and whether the next one is such a turn.
        self._skipped_turns: set[int] = set()
        self._skips_next_turn = self._response_due = False

    @property
    def audio_s(self) -> float:
        """Seconds of audio that the session has listened to so far. Audio that waits in the inbox does not count."""
        return self._listener.audio_s

    @property
    def num_open_turns(self) -> int:
        """Turns without a transcript, or whose audio is kept until they have one: 0 once all are transcribed."""
        return len(self._untranscribed.keys() | (self._turn_audio.open_turns if self._turn_audio else set()))

    @property
    def answering(self) -> bool:
        """Whether a response of the conversation is being produced. One out of band, or one still heard, is not."""
        return self._responder.active is not None

    async def run(self) -> None:
        """Run until the inbox is closed and its audio is transcribed; responses under way are cancelled then.

        Failures of a response or a transcript are events. Raises Refused where the model has no room for another
        conversation, and ModelError or EngineError where a native model fails.
        """
        try:
            async with anyio.create_task_group() as self._group:
                await self._responder.open(self._group)
                self._idle.open(self._group)
                if self._native_turns:
                    await self._native_turns.open(self.config)
                    self._group.start_soon(self._native_turns.run)
                await self._listener.run()
                self._closing = True
                if self._native_turns:
                    self._native_turns.close()
                self._idle.close()
                self._deciding.cancel()
                self._responder.cancel_all()
        finally:
            await self._responder.close()

    async def interrupt(self, reason: str) -> None:
        """Cancel the response with `reason`, and those that wait if the client does; truncate to what was heard."""
        if reason == "client_cancelled":
            self._waiting_requests.withdraw()
        await self._responder.interrupt(reason)

    async def truncate_to_heard(self, items: list[tuple[ContentPosition, int]]) -> None:
        """Truncate items to the milliseconds of each that were heard, once their response is closed."""
        await self._responder.truncate(items)

    async def decide_overlap(self, *, takes_floor: bool, reason: str) -> None:
        """Let the client decide whether the speech over a response takes the floor. A decision that it does not holds
        for what is said in the next DISMISSAL_S of audio.
        """
        self._dismissed_until_s = 0.0 if takes_floor else self.audio_s + DISMISSAL_S
        if takes_floor and self._native_turns and (self._native_turns.is_waiting or not self.answering):
            # A turn that the model is about to speak is dropped; a response under way is ended as any other.
            self._native_turns.interrupt()
        decide = self._overlap.take_floor if takes_floor else self._overlap.dismiss
        await self._apply_all(decide(reason))

    async def _commit(self, turn: int) -> None:
        """The client has ended a turn: it is one, whatever was said over a response."""
        if self._native_turns:
            is_due = self.config.create_response and self.config.transcription.vad is not None
            self._native_turns.commit(answers=is_due and not self._skips_next_turn)
            self._skips_next_turn = False
        await self._apply_all(self._overlap.commit(turn))

    @property
    def _responds_to_turns(self) -> bool:
        """Whether the end of a turn begins a response: not with a model that takes turns by itself."""
        return self.config.create_response and self._native_turns is None

    @property
    def interruptible(self) -> bool:
        """Whether speech that begins now ends a response: by the configuration, and by the client's last decision."""
        return self.config.interrupt_response and self.audio_s >= self._dismissed_until_s

    async def handle(self, command: ConversationCommand) -> None:
        """Handle one command, only while `run` runs; it waits for `emit`, not for a response that the command begins.
        A command that cannot be carried out raises nothing: the client gets a CommandRejected.
        """
        try:
            await self._carry_out(command)
        except RemoteProtocolError as error:
            event_id = None if isinstance(command, ConfigureConversation) else command.event_id
            await self._emit(CommandRejected(error.code, error.message, error.param, event_id))

    async def _carry_out(self, command: ConversationCommand) -> None:
        conversation = self.conversation
        match command:
            case ConfigureConversation(config):
                self.config = self._responder.config = config
                await self._listener.configure(config.transcription)
            case CreateItem(new, after):
                self._item_media.check_size(new)
                if self._native_turns:
                    self._native_turns.append_item(new)
                await self._item_media.add(new, after)
                self._resolve(new, command)
                drop_old_media(conversation, new)
            case RetrieveItem(item_id):
                await self._emit(ItemRetrieved(conversation.get(item_id).snapshot()))
            case DeleteItem(item_id):
                conversation.delete(item_id)
                await self._emit(ItemDeleted(item_id))
            case TruncateItem(item_id, content_index, audio_end_ms):
                kept_ms = conversation.truncate(item_id, content_index, audio_end_ms)
                self._responder.keep_truncated(item_id, content_index, kept_ms)
                self._playout.stop(self._listener.now)
                await self._emit(ItemTruncated(item_id, content_index, kept_ms))
            case CreateResponse() if self._native_turns:
                self._native_turns.ask(command)
            case CreateResponse(items=items):
                if self.config.duplex and not (conversation.items or items or command.instructions):
                    raise RemoteProtocolError("response_create_without_input", "There is nothing to answer.")
                self._waiting_requests.check()
                for given in items or ():
                    if isinstance(given, Item):
                        self._resolve(given, command)
                if command.when_busy == "cut":
                    await self.interrupt("client_cancelled")
                if self._has_to_wait(command):
                    self._waiting_requests.add(command)
                else:
                    self._responder.begin(command)
            case CancelResponse(response_id):
                waiting = self._native_turns or self._waiting_requests
                if not (response_id is None and waiting.withdraw()) or self.answering:
                    self._responder.cancel(response_id)
            case ClearOutputAudio():
                await self._responder.silence()
            case AppendFrames(frames):
                if self._native_turns:
                    self._native_turns.append_frames(frames)
            case SkipResponse():
                self._skips_next_turn = True
            case _:
                raise RemoteProtocolError("unknown_event", f"{type(command).__name__} is for a duplex session.")

    def _resolve(self, item: Item, command: CreateItem | CreateResponse) -> None:
        assert self._group
        self._item_media.resolve(item, command.event_id, self.config.transcription.language, self._group)

    async def handle_transcription(self, event: TranscriptionEvent) -> None:
        """Apply one event of the transcription session: emit it, and begin or end responses for it. Returns once its
        consequences were emitted; an overlap that has to be decided goes on in a task. Only while `run` runs.
        """
        if isinstance(event, TurnCommitted) and self._skips_next_turn and not self._native_turns:
            self._skipped_turns.add(event.turn)
            self._skips_next_turn = False
        before = self._overlap.undecided_turn
        await self._apply_all(self._overlap.feed(event, overlaps=self._overlaps()))
        if self._overlap.undecided_turn is not None and self._overlap.undecided_turn != before:
            assert self._group
            self._group.start_soon(self._decide_overlap, self._overlap.undecided_turn)

    def _overlaps(self) -> bool:
        """Whether speech that begins now is an overlap to be decided: a response is heard for a while yet."""
        decides = self.config.transcription.vad and self.config.allows_backchannels and self.interruptible
        return bool(decides) and (self._left_s() > RESPONSE_TAIL_S or self.answering)

    async def _decide_overlap(self, turn: int) -> None:
        with anyio.CancelScope() as self._deciding:
            await decide_in_time(self._overlap, turn, self._listener, self.config.duplex, self._apply_all)

    async def _apply_all(self, events: list[TranscriptionEvent]) -> None:
        for event in events:
            await self._apply(event)

    async def _apply(self, event: TranscriptionEvent) -> None:
        """Do what an event means for the conversation, and pass it on to the client."""
        if self._turn_audio:
            self._turn_audio.follow(event)
        match event:
            case SpeechStarted(turn):
                self._user_speaking = True
                self._responder.preemptive.cancel()
                self._idle.stop()
                await self._item_of(turn)
                await self._emit(event)
                takes_floor = self.interruptible
                if not takes_floor:
                    self._without_floor.add(turn)
                if (task := self._responder.active) and takes_floor:
                    # If the speech was a noise, a turn whose response had not begun still needs one.
                    self._response_due = self._responds_to_turns and (self._response_due or not task.response.output)
                    task.cancel("turn_detected")
                if takes_floor:
                    await self._responder.silence()
            case SpeechStopped():
                self._user_speaking = False
                await self._emit(event)
            case TurnCommitted(turn):
                item = await self._item_of(turn)
                if self._turn_audio:
                    item.parts[0].media = self._turn_audio.ended_turn(event)
                previous = self.conversation.add(item)
                drop_old_media(self.conversation, item)
                await self._emit(UserTurnCommitted(turn, item.snapshot(), previous))
            case TranscriptDone(turn, text):
                item = await self._item_of(turn)
                del self._untranscribed[turn]
                item.parts[0].text = text
                if not text.strip() and self.config.transcription.vad:
                    # A cough is no turn for the model; audio that the client commits is one, with words or without.
                    item.parts[0].media = None
                    await self._responder.drop_growing()
                if self.config.reports_transcripts:
                    await self._emit(event)
                is_skipped = turn in self._skipped_turns
                self._skipped_turns.discard(turn)
                if text.strip() and self._responds_to_turns and self.config.transcription.vad and not is_skipped:
                    self._response_due = True
                await self._go_on(cancels=turn not in self._without_floor)
                self._without_floor.discard(turn)
                if not text.strip():
                    self._idle.go_on(self.config)
            case CommitRefused():
                self._skips_next_turn = False
                await self._emit(event)
            case TranscriptFailed(turn):
                is_due = self._responds_to_turns and self.config.transcription.vad
                if self._untranscribed.pop(turn, None) and self._turn_audio and is_due:
                    # The model hears the audio, and needs no transcript.
                    self._response_due = self._response_due or turn not in self._skipped_turns
                self._without_floor.discard(turn)
                self._skipped_turns.discard(turn)
                await self._emit(event)
                await self._go_on()
                self._idle.go_on(self.config)
            case TranscriptGuessed(turn, text, speech_end_ms):
                await self._begin_preemptive(turn, text, speech_end_ms)
            case GuessDropped():
                self._responder.preemptive.cancel()
            case TranscriptPartial():
                return
            case TranscriptDelta(turn, text):
                if self.config.reports_transcripts:
                    await self._emit(event)
                await self._responder.hear(turn, text, prefills=not self._turn_audio and self._may_prefill())
            case TurnCleared():
                # The open turn ends and leaves nothing.
                self._user_speaking = False
                self._responder.preemptive.cancel()
                await self._responder.drop_growing()
                await self._emit(event)
                await self._respond_if_due()
                self._idle.go_on(self.config)
            case _:
                await self._emit(event)

    async def _item_of(self, turn: int) -> Item:
        """The item that a turn will become. Its id is the first thing that the client gets of it."""
        if turn not in self._untranscribed:
            self._untranscribed[turn] = Item(self._new_id("item_"), parts=[ContentPart("input_audio")])
            await self._emit(UserTurnStarted(turn, self._untranscribed[turn].id))
        return self._untranscribed[turn]

    async def _go_on(self, *, cancels: bool = True) -> None:
        """Begin the response that is due (`_respond_if_due`), and those that had to wait."""
        await self._respond_if_due(cancels=cancels)
        while taken := self._waiting_requests.take(self._has_to_wait):
            await self.handle(taken[0])
            if self._closing:
                self._responder.cancel_all()
            elif taken[1] and self._responder.active:
                self._responder.cancel(None)

    def _has_to_wait(self, request: CreateResponse) -> bool:
        """Whether a turn is still being transcribed, an item's media are not resolved, or it waits for a response."""
        return self._has_unresolved() or (request.when_busy != "refuse" and self.answering)

    def _has_unresolved(self) -> bool:
        """Whether an item of the history has no transcript yet, or media of an item are not resolved."""
        return bool(self._item_media.unresolved) or self._has_untranscribed()

    def _has_untranscribed(self, but: int | None = None) -> bool:
        waiting = {id(item) for turn, item in self._untranscribed.items() if turn != but}
        return any(id(item) in waiting for item in self.conversation.items)

    async def _respond_if_due(self, *, cancels: bool = True) -> None:
        """Begin the response that is due, once the user is silent and all transcripts are there. `cancels`: a response
        under way is ended for it; otherwise it is waited for.
        """
        if self._closing or not self._response_due or self._user_speaking or self._has_unresolved():
            return
        if self._responder.active is None:
            self._response_due = False
            self._responder.begin(CreateResponse(), unasked=True)
        elif self.config.interrupt_response and cancels and not self._responder.active.cancelled:
            await self._emit(OverlapDecided(-1, True, "turn_answered"))
            await self.interrupt("turn_detected")

    async def _response_ended(self, task: ResponseTask) -> None:
        """A response has ended: another may be due, or the user's silence be waited for."""
        if task.response.stored:
            self._idle.begin(self.config)
        await self._go_on()

    def _is_busy(self) -> bool:
        return self.answering or self._user_speaking or self._has_unresolved()

    async def _ask_again(self, since_s: float) -> None:
        """Respond to a silence of `idle_timeout_ms`, which began after `since_s` seconds of audio."""
        item = Item(self._new_id("item_"), parts=[ContentPart("input_audio")])
        await self._emit(IdleTimeoutReached(item.id, int(since_s * 1000), int(self.audio_s * 1000)))
        previous = self.conversation.add(item)
        await self._emit(UserTurnCommitted(-1, item.snapshot(), previous))
        if not self.answering:
            await self.handle(CreateResponse())

    async def _begin_preemptive(self, turn: int, text: str, speech_end_ms: int) -> None:
        """Begin a preemptive response to a turn that may have ended. The client does not learn of it."""
        responder = self._responder
        await responder.preemptive.drop()
        free = responder.active is None and not self._waiting_requests and text.strip()
        if free and not self._has_untranscribed(turn) and self._responds_to_turns and self.config.transcription.vad:
            audio = self._turn_audio.paused_turn(turn, speech_end_ms) if self._turn_audio else None
            await responder.begin_preemptive(text, self._untranscribed.get(turn), audio)

    def _may_prefill(self) -> bool:
        return not (self._native_turns or self._responder.is_busy or self._has_unresolved())

    async def _keep_audio(self, pcm: Pcm) -> None:
        """Keep audio, and have the model take in what has come of the turn, a window at a time."""
        assert self._turn_audio
        await self._turn_audio.append_audio(pcm)
        detected = self.config.transcription.vad is not None
        if self._group and self._may_prefill() and (audio := self._turn_audio.growing_turn(detected=detected)):
            self._group.start_soon(self._responder.prefill_audio, audio)
