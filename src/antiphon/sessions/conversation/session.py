"""One live conversation: a listener turns audio into turns and transcripts, and a responder answers them.

The listener is a transcription session with its own tasks. It passes its events to `handle_transcription`, and the
client's other commands to `handle`, in the order in which they arrived among the audio. Only a cancel may overtake
them: the task that reads the client's messages handles it. Each response is one task, which barge-in cancels. However
the response ends, its open part and item are closed, and `ResponseDone` is its last event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from antiphon.audio import Pcm
from antiphon.contracts.playback import PlaybackTracker
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    CancelResponse,
    ClearOutputAudio,
    ConfigureConversation,
    ContentPart,
    ContentPosition,
    ConversationCommand,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    DeleteItem,
    Item,
    ItemDeleted,
    ItemRetrieved,
    RetrieveItem,
    TruncateItem,
    UserTurnCommitted,
    UserTurnStarted,
)
from antiphon.events.duplex import (
    AppendFrames,
    ConversationPaused,
    ConversationResumed,
    PauseConversation,
    SkipResponse,
)
from antiphon.events.transcription import (
    CommitRefused,
    GuessDropped,
    OverlapDecided,
    OverlapStarted,
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
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation, rejected
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.overlap_timing import DISMISSAL_S, OverlapHolder
from antiphon.sessions.conversation.progress import ConversationProgress
from antiphon.sessions.conversation.responses.heard import HeardResponses
from antiphon.sessions.conversation.responses.queue import ResponseQueue
from antiphon.sessions.conversation.turn_audio import TurnAudio, drop_old_media
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.turns.end_of_turn import MAX_SILENCE_MS
from antiphon.turns.floor import Floor
from antiphon.turns.overlap import BY_SOUND, is_backchannel


class ConversationSession:
    """One client's conversation. Run `run()` as a task. Put audio and commits into `inbox`. Closing it ends the
    session.

    - `context`: the models and the other dependencies of a conversation.
    - `emit`: awaited with every event, in order. The session waits until it returns.
    - `playback`: tracks how much of a response was heard. If None, the client truncates items itself.
    - `handle_other`: gets the commands from the inbox instead of `handle`, and has to call `handle` itself.
    - `left_s`: returns the seconds of sent audio that are still to be played. Pass it if a better source than the clock
      exists.

    `config` is the current configuration, `history` has the items, and `progress` reports the session's progress.
    Everything runs in one event loop.
    """

    def __init__(
        self,
        config: ConversationConfig,
        context: ConversationContext,
        inbox: Inbox,
        emit: EmitConversation,
        *,
        playback: PlaybackTracker | None = None,
        handle_other: Callable[[ConversationCommand], Awaitable[None]] | None = None,
        left_s: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self._emit = emit
        self._new_id = context.new_id
        self._count = context.count
        self._group: anyio.abc.TaskGroup | None = None
        self.history = ConversationHistory()
        self._floor = Floor()
        self._overlaps = OverlapHolder(self._apply_all, self._pause_response, context.backchannel_detector)
        profile = context.model.profile
        self._turn_audio = TurnAudio(profile.audio_window_ms) if profile.accepts_media else None
        self._listener = TranscriptionSession(
            config.transcription,
            context.transcriber,
            context.detector,
            inbox,
            self.handle_transcription,
            min_commit_ms=context.min_commit_ms,
            measure=context.measure,
            handle_other=handle_other or self.handle,
            turn_detector=context.turn_detector,
            guards_echo=True,
            tap=self._keep_audio if context.model.native or self._turn_audio else None,
            on_heard=self.audio_heard,
            on_commit=self._commit,
            speaker_model=context.speaker_model,
            on_other_voice=self._overlaps.other_voice,
        )
        self._heard = HeardResponses(self.history, self._listener, context, emit, playback=playback, left_s=left_s)
        self._queue = ResponseQueue(config, context, self.history, self._floor, self._listener, self._heard, emit)
        self._responder, self._native = self._queue.responder, self._queue.native
        # The turn that has taken the floor by its sound, if it is the newest.
        self._by_sound: int | None = None
        # The item of the user's last turn and the end of its speech in milliseconds, if a pause has ended it.
        self._last_turn: tuple[Item, int] | None = None
        self._is_paused = False
        self.progress = ConversationProgress(self._listener, self._floor, self._queue, self._heard)

    async def run(self) -> None:
        """Run until the inbox is closed and its audio is transcribed. Then cancels the responses under way.

        Failures of a response or a transcript are events. Raises Refused if the model has no room for another
        conversation, and ModelError or EngineError if a native model fails.
        """
        try:
            async with anyio.create_task_group() as self._group:
                await self._queue.open(self._group)
                await self._listener.run()
                self._overlaps.close()
                self._queue.end()
        finally:
            await self._queue.close()

    def leave_open_turn(self) -> None:
        """Leave the open turn open when the inbox is closed, because another host will get its audio again."""
        self._listener.leave_open_turn()

    async def interrupt(self, reason: str) -> None:
        """Cancel the response with `reason`, and truncate it to the part that was heard. If the client cancels, the
        waiting responses are cancelled too.
        """
        await self._queue.interrupt(reason)

    async def truncate_to_heard(self, items: list[tuple[ContentPosition, int]]) -> None:
        """Truncate each item to the milliseconds that were heard, after its response is closed."""
        await self._heard.truncate(items)

    async def decide_overlap(self, *, takes_floor: bool, reason: str) -> None:
        """Apply the client's decision on whether the speech over a response takes the floor. If it does not, the
        decision also applies to speech in the next DISMISSAL_S of audio.
        """
        self._floor.dismiss(0.0 if takes_floor else self._listener.audio_s + DISMISSAL_S)
        if takes_floor and self._native and (self._native.is_waiting or not self.progress.is_responding):
            # Drops a turn that the model is about to speak. A response under way ends in the same way as any other.
            self._native.interrupt()
        decider = self._overlaps.decider
        decision = decider.take_floor if takes_floor else decider.dismiss
        await self._overlaps.decide(lambda: decision(reason))

    async def audio_heard(self) -> None:
        """Decide the speech over a response by its sound, if that is enough. Called when audio was analysed."""
        # Otherwise a response that is ended by mistake could not be given back.
        if self._heard.can_pause(reports=self.config.reports_ducking) or self._answers_detected_turns:
            await self._overlaps.heard(self._listener)

    async def _pause_response(self) -> bool:
        """Pause the playback of the response, and return whether that is possible."""
        reports = self.config.reports_ducking
        if not self._heard.can_pause(reports=reports):
            return False
        await self._heard.hold(True, reports=reports)
        return True

    async def _commit(self, turn: int) -> None:
        """Handle the client's commit of a turn, which counts as a turn even if it was said over a response."""
        self._responder.cancel_kept()
        if self._native and self._queue.takes_turns:
            is_due = self.config.create_response and self.config.transcription.vad is not None
            is_skipped = self._floor.take_skip()
            self._native.commit(answers=is_due and not is_skipped)
        await self._overlaps.decide(lambda: self._overlaps.decider.commit(turn))

    @property
    def _answers_detected_turns(self) -> bool:
        """Whether the server answers a detected turn that has words. False for a native model, which takes turns."""
        return self._creates_responses and self.config.transcription.vad is not None

    @property
    def _creates_responses(self) -> bool:
        """Whether the end of a turn creates a response. False for a native model."""
        return self.config.create_response and not self._queue.takes_turns

    @property
    def may_interrupt(self) -> bool:
        """Whether speech ends a response, as configured. False for a native model that decides this by itself."""
        config = self.config
        return config.interrupt_response and not (config.native_decides_interruptions and self._queue.takes_turns)

    @property
    def interruptible(self) -> bool:
        """Whether speech that begins now ends a response, as configured and as the client has decided last."""
        return self.may_interrupt and not self._floor.is_dismissed(self._listener.audio_s)

    async def handle(self, command: ConversationCommand) -> None:
        """Handle one command while `run` runs. Does not wait for a response. A failure becomes a CommandRejected."""
        try:
            if not isinstance(command, PauseConversation):
                await self._resume()
            await self._carry_out(command)
        except RemoteProtocolError as error:
            await self._emit(rejected(error, command))

    async def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            await self._responder.reopen()
            await self._emit(ConversationResumed())

    async def _carry_out(self, command: ConversationCommand) -> None:
        match command:
            case PauseConversation():
                if not self._native and self.progress.is_quiet and self._responder.park():
                    self._is_paused = True
                    await self._emit(ConversationPaused())
            case ConfigureConversation(config):
                self.config = self._responder.config = config
                self._queue.tools.choose(config.servers)
                await self._listener.configure(config.transcription)
            case CreateItem(new, after):
                if new.kind == "approval":
                    self._queue.calls.check_answer(new)
                self._queue.item_media.check_size(new)
                if self._native and self._queue.takes_turns:
                    self._native.append_item(new)
                await self._queue.item_media.add(new, after)
                self._queue.resolve(new, command)
                drop_old_media(self.history, new)
                if new.kind == "approval":
                    self._queue.approve(new)
            case RetrieveItem(item_id):
                await self._emit(ItemRetrieved(self.history.get(item_id).snapshot()))
            case DeleteItem(item_id):
                self.history.delete(item_id)
                self._floor.item_deleted(item_id)
                await self._emit(ItemDeleted(item_id))
            case TruncateItem(item_id, content_index, audio_end_ms):
                await self._heard.truncate_as_asked(item_id, content_index, audio_end_ms)
            case CreateResponse():
                await self._queue.ask(command)
            case CancelResponse(response_id):
                self._queue.cancel(response_id)
            case ClearOutputAudio():
                await self._heard.silence()
            case AppendFrames(frames):
                if self._native:
                    self._native.append_frames(frames)
            case SkipResponse():
                self._floor.skip_next()
            case _:
                raise RemoteProtocolError("unknown_event", f"{type(command).__name__} is for a duplex session.")

    async def handle_transcription(self, event: TranscriptionEvent) -> None:
        """Apply one event of the transcription session: emit it, and begin or end responses. Returns after the
        resulting events were emitted, except that a task decides an overlap later. Call it only while `run` runs.
        """
        if isinstance(event, SpeechStarted):
            await self._resume()
        if isinstance(event, TurnCommitted) and not self._queue.takes_turns and self._floor.take_skip():
            self._floor.skip(event.turn)
        assert self._group
        config = self.config
        is_held = config.allows_backchannels or self._listener.speakers.is_on
        decides = bool(config.transcription.vad) and is_held and self.interruptible
        # Speech that begins now is an overlap to be decided, because a response will still be heard for a while.
        overlaps = decides and (self._heard.goes_on or self.progress.is_responding)
        continues = isinstance(event, SpeechStarted) and overlaps and self._is_false_start(event.at_ms)
        await self._overlaps.feed(
            event, self._listener, self._group, overlaps=overlaps, duplex=config.duplex, may_continue=continues
        )

    async def _apply_all(self, events: list[TranscriptionEvent]) -> None:
        for event in events if not self._floor.is_closed else ():
            await self._apply(event)

    async def _apply(self, event: TranscriptionEvent) -> None:
        """Apply an event to the conversation, and emit it."""
        if self._turn_audio:
            self._turn_audio.follow(event)
        match event:
            case SpeechStarted(turn):
                await self._speech_started(turn, event)
            case SpeechStopped():
                self._floor.user_stopped()
                await self._emit(event)
            case TurnCommitted(turn):
                item = await self._item_of(turn)
                if self._turn_audio:
                    item.parts[0].media = self._turn_audio.ended_turn(event)
                previous = self.history.add(item)
                self._floor.committed(turn)
                self._responder.turn_ended()
                is_skipped = self._floor.turns[turn].is_skipped
                self._last_turn = None if event.speech_end_ms is None or is_skipped else (item, event.speech_end_ms)
                drop_old_media(self.history, item)
                end_ms = event.end_ms if event.speech_end_ms is None else event.speech_end_ms
                await self._emit(UserTurnCommitted(turn, item.snapshot(), previous, end_ms))
            case TranscriptDone(turn, text):
                await self._transcribed(turn, text, event)
            case CommitRefused():
                self._floor.take_skip()
                await self._emit(event)
            case TranscriptFailed(turn):
                await self._responder.drop_kept()
                if turn in self._floor.turns:
                    # A model that gets the audio can answer without a transcript.
                    hears = self._turn_audio is not None
                    self._floor.transcribed(turn, owes_response=hears and self._answers_detected_turns)
                    self._listener.settle_turn(turn)
                await self._emit(event)
                await self._queue.go_on()
                self._queue.go_on_idle()
            case TranscriptGuessed(turn, text, speech_end_ms):
                await self._begin_preemptive(turn, text, speech_end_ms)
            case GuessDropped():
                self._responder.cancel_preemptive()
            case TranscriptPartial(turn, text):
                await self._correct(turn, text)
            case OverlapStarted():
                if self.config.duplex:
                    await self._pause_response()
                await self._emit(event)
            case OverlapDecided(turn, takes_floor, reason):
                self._by_sound = turn if takes_floor and reason == BY_SOUND else None
                if not takes_floor:
                    await self._heard.hold(False, reports=self.config.reports_ducking)
                await self._emit(event)
            case TranscriptDelta(turn, text):
                await self._correct(turn, text)
                if self.config.reports_transcripts:
                    await self._emit(event)
                prefills = not self._turn_audio and self._may_prefill(turn)
                await self._responder.hear(turn, text, self._open_item(turn), prefills=prefills)
            case TurnCleared():
                # The open turn ends without an item.
                self._floor.input_cleared()
                await self._responder.drop_preemptive()
                await self._responder.drop_growing()
                await self._emit(event)
                await self._queue.respond_if_due()
                self._queue.go_on_idle()
            case _:
                await self._emit(event)

    async def _speech_started(self, turn: int, event: SpeechStarted) -> None:
        self._responder.cancel_preemptive()
        self._queue.stop_idle()
        if self._native:
            self._native.turn_started()
        await self._item_of(turn)
        await self._emit(event)
        active = self._responder.active
        has_output = bool(active and active.response.output)
        answers = self._creates_responses
        false_start = self._is_false_start(event.at_ms)
        if false_start:
            self._continue_turn(turn, event.at_ms)
        elif self._by_sound == turn and self._answers_detected_turns and self.interruptible:
            await self._responder.drop_kept()
            self._responder.keep(turn)
        else:
            await self._responder.drop_kept()
        commands = self._floor.user_started(
            turn, takes_floor=self.interruptible, answers=answers, has_output=has_output, false_start=false_start
        )
        await self._queue.obey(commands)
        if not commands:
            # The speech does not take the floor after all.
            await self._heard.hold(False, reports=self.config.reports_ducking)

    def _is_false_start(self, onset_ms: float) -> bool:
        """Return whether speech that begins at `onset_ms` continues the last turn, to which the response came too
        early.
        """
        config = self.config
        if self._last_turn is None or not (self._creates_responses and config.false_start_ms):
            return False
        item, speech_end_ms = self._last_turn
        is_newest = self.history.newest_user_item() == item.id
        has_content = bool(item.text.strip()) or item.id in self.progress.unread_items
        is_pause = onset_ms - speech_end_ms <= MAX_SILENCE_MS["auto"]
        if not (is_newest and has_content and is_pause and self.interruptible):
            return False
        return self._responder.is_false_start(onset_ms / 1000, config.false_start_ms / 1000)

    def _continue_turn(self, turn: int, onset_ms: float) -> None:
        """Join the turn to the last one, and hide the response between them from the model."""
        assert self._last_turn
        item, speech_end_ms = self._last_turn
        self._floor.turns[turn].item.continues = item.id
        self._responder.retract()
        self._listener.turn_goes_on(onset_ms - speech_end_ms)
        self._count("false_starts", 1)

    async def _correct(self, turn: int, text: str) -> None:
        """Give up the response that the sound of this turn has ended, if the turn's words are not a backchannel."""
        if self._responder.kept and self._responder.kept.turn == turn and not is_backchannel(text):
            await self._responder.drop_kept()

    def _open_item(self, turn: int) -> Item | None:
        """Return the item that a turn will become, if the client knows of the turn."""
        known = self._floor.turns.get(turn)
        return known.item if known else None

    async def _transcribed(self, turn: int, text: str, event: TranscriptDone) -> None:
        item, has_words = await self._item_of(turn), bool(text.strip())
        item.parts[0].text, item.speaker = text, event.speaker
        await self._correct(turn, text if event.speaker != "other" else "")
        # Speech that was a backchannel, or no speech, has ended a response by its sound. The response goes on.
        goes_on = self._responder.keeps(turn)
        if goes_on:
            item.retracted = True
        if event.speaker == "other" or goes_on:
            self._floor.skip(turn)
        # This comes before the event is emitted, so that a snapshot taken at the event has the turn as transcribed, and
        # its response as due.
        done = self._floor.transcribed(turn, owes_response=has_words and self._answers_detected_turns)
        if self._native and has_words and not done.is_skipped and self.config.transcription.vad:
            self._native.turn_ended()
        self._listener.settle_turn(turn)
        if has_words:
            self._queue.note_words()
        if not has_words and self.config.transcription.vad:
            # A detected turn without words, such as a cough, is dropped. A committed turn counts without words too.
            item.parts[0].media = None
            await self._responder.drop_growing()
        if self.config.reports_transcripts:
            await self._emit(event)
        if goes_on:
            self._queue.give_back(turn)
        await self._queue.go_on(interrupts=done.takes_floor)
        if not has_words:
            self._queue.go_on_idle()

    async def _item_of(self, turn: int) -> Item:
        """Return the item that a turn will become. The client gets the item's id before anything else about it."""
        known = self._floor.turns.get(turn)
        if known is None:
            known = self._floor.open_turn(turn, Item(self._new_id("item_"), parts=[ContentPart("input_audio")]))
            await self._emit(UserTurnStarted(turn, known.item.id))
        return known.item

    async def _begin_preemptive(self, turn: int, text: str, speech_end_ms: int) -> None:
        """Begin a preemptive response to a turn that may have ended. The client does not see it."""
        await self._correct(turn, text)
        if self._responder.keeps(turn):
            return
        await self._responder.drop_preemptive()
        is_answered = self._answers_detected_turns and text.strip() and not self._listener.speakers.seems_other(turn)
        if is_answered and self._queue.may_guess(turn):
            audio = self._turn_audio.paused_turn(turn, speech_end_ms) if self._turn_audio else None
            await self._responder.begin_preemptive(text, self._open_item(turn), audio)

    def _may_prefill(self, turn: int | None = None) -> bool:
        busy = self._native or self._responder.is_busy or self._queue.has_unresolved()
        return not (busy or (turn is not None and self._listener.speakers.seems_other(turn)))

    async def _keep_audio(self, pcm: Pcm) -> None:
        """Pass audio to a native model. For other models that hear audio, keep it, and prefill the turn so far, window
        by window.
        """
        if self._native:
            await self._native.append_audio(pcm)
            return
        assert self._turn_audio
        await self._turn_audio.append_audio(pcm)
        detected = self.config.transcription.vad is not None
        if self._group and self._may_prefill() and (audio := self._turn_audio.growing_turn(detected=detected)):
            self._group.start_soon(
                self._responder.prefill_audio, audio, self._open_item(max(self._floor.turns, default=-1))
            )
