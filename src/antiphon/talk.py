"""One live conversation: a listener that turns sound into turns and transcripts, and a responder that answers them.

The listener is a transcription session with its own tasks; what it tells comes through `_heard`, and what the client asks of the conversation
through `handle`, in its place among the sound; a cancel is handled at once, on the reader's task. An answer is one task; cancelling it is
barge-in, and whatever ends it, its open part and item are closed in order and `ResponseDone` is last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio
import anyio.abc

from antiphon.adapters.base import (
    Partner,
    SpeechDetector,
    Talk,
    Transcriber,
    TurnJudge,
)
from antiphon.answering import FAILURES, Answering, Emit, Making, Playback, Wanted, speaks, wanted
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler
from antiphon.conversation import Conversation
from antiphon.errors import RemoteProtocolError
from antiphon.events import (
    GuessDropped,
    Output,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TranscriptGuess,
    TranscriptPartial,
    TurnCleared,
    TurnCommitted,
)
from antiphon.inbox import Inbox
from antiphon.overlap import LAST_S, LONGEST_S, Overlap
from antiphon.session import TranscriptionSession
from antiphon.talk_events import (
    Item,
    ItemAdded,
    ItemAsked,
    ItemCreated,
    ItemCut,
    ItemDeleted,
    ItemDone,
    ItemDropped,
    ItemShown,
    ItemTruncated,
    NobodySpoke,
    Part,
    Place,
    PlaybackCleared,
    Rejected,
    Response,
    ResponseAsked,
    ResponseStopped,
    SilenceAsked,
    SoundSaid,
    TalkConfig,
    TalkConfigured,
    TalkInput,
    TalkOutput,
    TurnNamed,
    UserTurn,
)
from antiphon.turn.echo import EchoGuard

log = logging.getLogger(__name__)

# How often it is looked whether somebody still speaks.
FRAME_S = 0.05


class TalkSession:
    """Run with `run()`; sound and commits go into `inbox`, everything else to `handle`; closing the inbox ends it.

    `new_id(prefix)` makes ids. `emit` is awaited for every output and may hold the session back.
    """

    def __init__(
        self,
        config: TalkConfig,
        transcriber: Transcriber,
        detector: SpeechDetector,
        partner: Partner,
        inbox: Inbox,
        emit: Emit,
        *,
        new_id: Callable[[str], str],
        min_commit_ms: int = 0,
        measure: Callable[[str, float], None] = lambda kind, seconds: None,
        judge: TurnJudge | None = None,
        playback: Playback | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._playback = playback
        self._clock = clock
        # Until when what was said so far sounds, if it is played as it comes (monotonic seconds).
        self._sounds_until_s = 0.0
        # What was cut of an answer that is still being closed.
        self._cut: list[tuple[Place, int]] = []
        self._overlap = Overlap()
        self._idling = anyio.CancelScope()
        self._closing = False
        self.conversation = Conversation()
        self._partner = partner
        self._emit = emit
        self._new_id = new_id
        self._measure = measure
        self._echo = EchoGuard()
        # What is said, on its way to the echo guard: the item, and its sound at the microphone's rate.
        self._reference: tuple[str, Resampler] | None = None
        self._listener = TranscriptionSession(
            config.listening,
            transcriber,
            detector,
            inbox,
            self._heard,
            min_commit_ms=min_commit_ms,
            measure=measure,
            aside=self.handle,
            judge=judge,
            echo=self._echo,
        )
        self._talk: Talk | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._answering: Answering | None = None
        # Answers beside the conversation.
        self._beside: set[Answering] = set()
        # The answer to a turn that has not ended yet.
        self._ahead: Making | None = None
        # Turns whose transcript is still to come, and what was asked meanwhile.
        self._turns: dict[int, Item] = {}
        self._later: list[ResponseAsked] = []
        # What has been heard so far of the turn that is being spoken.
        self._running: dict[int, str] = {}
        self._speaking = False
        # Something was said that has no answer yet.
        self._owed = False

    @property
    def audio_s(self) -> float:
        """Seconds of sound heard."""
        return self._listener.audio_s

    @property
    def answering(self) -> bool:
        """An answer of the conversation is under way."""
        return self._answering is not None

    async def run(self) -> None:
        """Until the inbox is closed and what was heard is answered or the answer is cancelled."""
        self._talk = await self._partner.open()
        try:
            async with anyio.create_task_group() as self._group:
                await self._listener.run()
                self._closing = True
                self._forget_ahead()
                self._idling.cancel()
                for answering in self._all():
                    answering.cancel("client_cancelled")
        finally:
            if self._ahead:
                await self._ahead.drop()
            self._talk.close()

    # --- what the client asks ---------------------------------------------------------------------------------------------

    async def handle(self, item: TalkInput) -> None:
        """Do what the client asks. Never raises for what it asks: what cannot be is answered."""
        try:
            await self._do(item)
        except RemoteProtocolError as error:
            event_id = None if isinstance(item, TalkConfigured) else item.event_id
            await self._emit(Rejected(error.code, error.message, error.param, event_id))

    async def _do(self, item: TalkInput) -> None:
        conversation = self.conversation
        match item:
            case TalkConfigured(config):
                self.config = config
                await self._listener.configure(config.listening)
            case ItemCreated(new, after):
                previous = conversation.add(new, after)
                await self._emit(ItemAdded(new, previous))
                await self._emit(ItemDone(new, previous))
            case ItemAsked(item_id):
                await self._emit(ItemShown(conversation.get(item_id)))
            case ItemDropped(item_id):
                conversation.delete(item_id)
                await self._emit(ItemDeleted(item_id))
            case ItemCut(item_id, content_index, audio_end_ms):
                kept_ms = conversation.truncate(item_id, content_index, audio_end_ms)
                self._not_sounding()
                await self._emit(ItemTruncated(item_id, content_index, kept_ms))
            case ResponseAsked():
                if self._transcribing():
                    # What is to be answered is still being transcribed.
                    self._later.append(item)
                else:
                    self._begin(item)
            case ResponseStopped(response_id):
                self._stop(response_id)
            case SilenceAsked():
                self._not_sounding()
                await self._silence()

    def _stop(self, response_id: str | None) -> None:
        if response_id is None:
            found = self._answering
        else:
            found = next((a for a in self._all() if a.response.id == response_id), None)
        if found is None:
            raise RemoteProtocolError("response_cancel_not_active", "Cancellation failed: no active response found")
        found.cancel("client_cancelled")

    def _all(self) -> list[Answering]:
        return [*([self._answering] if self._answering else []), *self._beside]

    # --- what is heard ----------------------------------------------------------------------------------------------------

    async def _heard(self, output: Output) -> None:
        held = self._overlap.held
        for told in self._overlap.take(output, overlaps=self._overlaps()):
            await self._told(told)
        if self._overlap.held is not None and self._overlap.held != held:
            assert self._group
            self._group.start_soon(self._decide_overlap, self._overlap.held)

    def _overlaps(self) -> bool:
        """An answer sounds for a while yet, and turns are taken by meaning: an acknowledgement does not end it."""
        vad = self.config.listening.turn
        by_meaning = vad is not None and vad.patience_ms is not None and self.config.interrupt_response
        sounds = self._sounds_until_s - self._clock() > LAST_S
        return by_meaning and (sounds or self._answering is not None)

    async def _decide_overlap(self, turn: int) -> None:
        await anyio.sleep(LONGEST_S)
        while self._overlap.held == turn:
            if self._listener.speaking:
                for told in self._overlap.release():
                    await self._told(told)
            await anyio.sleep(FRAME_S)

    async def _told(self, output: Output) -> None:
        match output:
            case SpeechStarted(turn):
                self._speaking = True
                self._forget_ahead()
                self._running.clear()
                self._idling.cancel()
                await self._name(turn)
                await self._emit(output)
                if self._answering and self.config.interrupt_response:
                    # If it was a noise, what had not begun to be answered is still to be.
                    self._owed = self._owed or not self._answering.response.output
                    self._answering.cancel("turn_detected")
                if self.config.interrupt_response:
                    self._not_sounding()
                    await self._silence()
            case SpeechStopped():
                self._speaking = False
                await self._emit(output)
            case TurnCommitted(turn):
                item = await self._name(turn)
                previous = self.conversation.add(item)
                await self._emit(UserTurn(turn, item, previous))
            case TranscriptDone(turn, text):
                item = await self._name(turn)
                del self._turns[turn]
                item.parts[0].text = text
                if self.config.transcribes:
                    await self._emit(output)
                if text.strip() and self.config.create_response and self.config.listening.turn:
                    self._owed = True
                self._answer_turn()
                await self._catch_up()
            case TranscriptFailed(turn):
                self._turns.pop(turn, None)
                await self._emit(output)
                self._answer_turn()
                await self._catch_up()
            case TranscriptGuess(turn, text):
                await self._expect(turn, text)
            case GuessDropped():
                self._forget_ahead()
            case TranscriptPartial():
                return
            case TranscriptDelta(turn, text):
                if self.config.transcribes:
                    await self._emit(output)
                await self._prefill(turn, text)
            case TurnCleared():
                # An open turn ends without a trace.
                self._speaking = False
                self._forget_ahead()
                await self._emit(output)
                self._answer_turn()
            case _:
                await self._emit(output)

    async def _name(self, turn: int) -> Item:
        """The item that a turn will be; the client is told its id before anything else of it."""
        if turn not in self._turns:
            self._turns[turn] = Item(self._new_id("item_"), parts=[Part("input_audio")])
            await self._emit(TurnNamed(turn, self._turns[turn].id))
        return self._turns[turn]

    async def _catch_up(self) -> None:
        """Answer what was asked while a turn was being transcribed."""
        while self._later and not self._transcribing():
            await self.handle(self._later.pop(0))

    def _transcribing(self) -> bool:
        """A turn that is an item already has no transcript yet."""
        waiting = {id(item) for item in self._turns.values()}
        return any(id(item) in waiting for item in self.conversation.items)

    def _answer_turn(self) -> None:
        """Answer what is owed one, once nobody speaks and all that was said is known."""
        if self._closing or not self._owed or self._speaking or self._transcribing():
            return
        if self._answering is None:
            self._owed = False
            self._begin(ResponseAsked())
        elif self.config.interrupt_response:
            self._answering.cancel("turn_detected")

    # --- answers ----------------------------------------------------------------------------------------------------------

    def _begin(self, asked: ResponseAsked) -> None:
        if asked.stored and self._answering:
            raise RemoteProtocolError(
                "conversation_already_has_active_response",
                f"Conversation already has an active response in progress: {self._answering.response.id}.",
            )
        config = self.config
        response = Response(
            self._new_id("resp_"),
            speaks(config, self._partner.profile, asked),
            asked.voice or config.voice,
            config.max_tokens if asked.max_tokens is None else asked.max_tokens,
            asked.metadata,
            asked.stored,
        )
        answering = Answering(
            response,
            lambda response: self._make(response, asked),
            self.conversation,
            self._partner.profile.sample_rate_hz,
            self._said,
            self._new_id,
            self._measure,
        )
        if asked.stored:
            self._answering = answering
        else:
            self._beside.add(answering)
        assert self._group
        self._group.start_soon(self._answer, answering)

    async def _answer(self, answering: Answering) -> None:
        try:
            await answering.run()
        finally:
            self._beside.discard(answering)
            if self._answering is answering:
                self._answering = None
        await self._cut_off(answering.response.id)
        if answering.response.stored and self._group:
            self._group.start_soon(self._idle)
        self._answer_turn()

    async def _said(self, output: Output | TalkOutput) -> None:
        if isinstance(output, SoundSaid):
            now = self._clock()
            self._sounds_until_s = max(now, self._sounds_until_s) + len(output.pcm) / output.rate_hz
            if self._reference is None or self._reference[0] != output.at.item_id:
                self._reference = (output.at.item_id, Resampler(output.rate_hz, SAMPLE_RATE_HZ))
            self._echo.played(self._reference[1].feed(output.pcm), self._listener.now)
        await self._emit(output)

    def _not_sounding(self) -> None:
        """Whoever plays the answer has stopped."""
        self._sounds_until_s = 0.0
        self._echo.silenced(self._listener.now)

    async def _silence(self) -> None:
        """Stop what the server plays. What was not heard of it is cut, once its answer is closed."""
        cut = self._playback.silence() if self._playback else []
        for response_id in dict.fromkeys(place.response_id for place, _ in cut):
            await self._emit(PlaybackCleared(response_id))
            self._cut += [c for c in cut if c[0].response_id == response_id]
            if all(a.response.id != response_id for a in self._all()):
                await self._cut_off(response_id)

    async def _cut_off(self, response_id: str) -> None:
        mine = [c for c in self._cut if c[0].response_id == response_id]
        self._cut = [c for c in self._cut if c[0].response_id != response_id]
        for place, heard_ms in mine:
            if any(i.id == place.item_id for i in self.conversation.items):
                kept_ms = self.conversation.truncate(place.item_id, place.content_index, heard_ms)
                await self._emit(ItemTruncated(place.item_id, place.content_index, kept_ms))

    async def _idle(self) -> None:
        """Wait for somebody to speak after an answer has sounded; if nobody does, speak again."""
        timeout_ms, vad = self.config.idle_timeout_ms, self.config.listening.turn
        if self._closing or timeout_ms is None or vad is None or vad.patience_ms is not None:
            return
        self._idling.cancel()
        with anyio.CancelScope() as self._idling:
            await anyio.sleep(max(0.0, self._sounds_until_s - self._clock()))
            start_ms = int(self.audio_s * 1000)
            await anyio.sleep(timeout_ms / 1000)
            if self._answering or self._speaking or self._transcribing():
                return
            item = Item(self._new_id("item_"), parts=[Part("input_audio")])
            await self._emit(NobodySpoke(item.id, start_ms, int(self.audio_s * 1000)))
            await self._emit(UserTurn(-1, item, self.conversation.add(item)))
            self._begin(ResponseAsked())

    async def _make(self, response: Response, asked: ResponseAsked) -> Making:
        """Begin to make an answer, or take the one that was begun before it was asked for."""
        wanted = self._wanted(asked, response.voice, response.max_tokens)
        assert self._group
        assert self._talk
        if not response.stored:
            making = Making(await self._partner.open(), *wanted)
            self._group.start_soon(self._make_beside, making)
            return making
        ahead, self._ahead = self._ahead, None
        if ahead:
            if ahead.asked == wanted and not ahead.cancelled:
                return ahead
            await ahead.drop()
        making = Making(self._talk, *wanted)
        self._group.start_soon(making.run)
        return making

    async def _make_beside(self, making: Making) -> None:
        try:
            await making.run()
        finally:
            making.talk.close()

    def _wanted(
        self, asked: ResponseAsked, voice: str | None, max_tokens: int | None, items: list[Item] | None = None
    ) -> Wanted:
        return wanted(self.config, self.conversation, self._partner.profile, asked, voice, max_tokens, items)

    # --- before it is asked ------------------------------------------------------------------------------------------------

    async def _expect(self, turn: int, text: str) -> None:
        """The user has paused and may have ended a turn: begin what would answer it. Nobody hears of it before it is asked for."""
        ahead, self._ahead = self._ahead, None
        if ahead:
            await ahead.drop()
        free = self._answering is None and not self._later and text.strip()
        if not (free and self.config.create_response and self.config.listening.turn):
            return
        mine = self._turns.get(turn)
        others = {id(i) for t, i in self._turns.items() if t != turn}
        if any(id(i) in others for i in self.conversation.items):
            return
        config = self.config
        items = [*(i for i in self.conversation.items if i is not mine), Item("", parts=[Part("input_audio", text)])]
        assert self._talk
        assert self._group
        self._ahead = Making(self._talk, *self._wanted(ResponseAsked(), config.voice, config.max_tokens, items))
        self._group.start_soon(self._ahead.run)

    def _forget_ahead(self) -> None:
        """What was begun ahead is not wanted. It ends within a step; who begins the next answer waits for that."""
        if self._ahead:
            self._ahead.cancel()

    async def _prefill(self, turn: int, text: str) -> None:
        """The user goes on speaking: the partner takes in what they have said so far."""
        self._running[turn] = self._running.get(turn, "") + text
        if self._answering or self._ahead or self._transcribing():
            return
        assert self._talk
        said = Item("", parts=[Part("input_audio", self._running[turn].strip())])
        messages = self.conversation.messages(self.config.instructions, [*self.conversation.items, said])
        try:
            await self._talk.prefill(messages, self.config.tools)
        except FAILURES as error:
            # The answer to the same will say it, if it is not for now only.
            log.warning("a turn was not prefilled: %s", error)
