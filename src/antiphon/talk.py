"""One live conversation: a listener that turns sound into turns and transcripts, and a responder that answers them.

The listener is a transcription session with its own tasks; what it tells comes through `_heard`, and what the client asks of the conversation
through `handle`, in its place among the sound; a cancel is handled at once, on the reader's task. An answer is one task; cancelling it is
barge-in, and whatever ends it, its open part and item are closed in order and `ResponseDone` is last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import anyio
import anyio.abc

from antiphon.adapters.base import (
    Answer,
    Partner,
    ReplyDone,
    ReplyOptions,
    Speaking,
    SpeechDetector,
    Talk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Transcriber,
    TurnJudge,
    VoiceOptions,
)
from antiphon.conversation import Conversation, cut_to
from antiphon.errors import EngineError, ModelError, Refused, RemoteProtocolError
from antiphon.events import (
    Configured,
    Output,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptFailed,
    TurnCleared,
    TurnCommitted,
)
from antiphon.inbox import Inbox
from antiphon.session import TranscriptionSession
from antiphon.talk_events import (
    ArgumentsDone,
    ArgumentsSaid,
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
    OutputItemAdded,
    OutputItemDone,
    Part,
    PartAdded,
    PartDone,
    Place,
    Rejected,
    Response,
    ResponseAsked,
    ResponseCreated,
    ResponseDone,
    ResponseStopped,
    SoundSaid,
    TalkConfig,
    TalkConfigured,
    TalkInput,
    TalkOutput,
    TextSaid,
    TurnNamed,
    Usage,
    UserTurn,
)

log = logging.getLogger(__name__)

Emit = Callable[[Output | TalkOutput], Awaitable[None]]


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
    ) -> None:
        self.config = config
        self.conversation = Conversation()
        self._partner = partner
        self._emit = emit
        self._new_id = new_id
        self._measure = measure
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
        )
        self._talk: Talk | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._answering: _Answering | None = None
        # Answers beside the conversation.
        self._beside: set[_Answering] = set()
        # Turns whose transcript is still to come, and what was asked meanwhile.
        self._turns: dict[int, Item] = {}
        self._later: list[ResponseAsked] = []
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
                for answering in self._all():
                    answering.cancel("client_cancelled")
        finally:
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
                await self._listener.put(Configured(config.listening))
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
                await self._emit(ItemTruncated(item_id, content_index, kept_ms))
            case ResponseAsked():
                if self._transcribing():
                    # What is to be answered is still being transcribed.
                    self._later.append(item)
                else:
                    self._begin(item)
            case ResponseStopped(response_id):
                self._stop(response_id)

    def _stop(self, response_id: str | None) -> None:
        if response_id is None:
            found = self._answering
        else:
            found = next((a for a in self._all() if a.response.id == response_id), None)
        if found is None:
            raise RemoteProtocolError("response_cancel_not_active", "Cancellation failed: no active response found")
        found.cancel("client_cancelled")

    def _all(self) -> list[_Answering]:
        return [*([self._answering] if self._answering else []), *self._beside]

    # --- what is heard ----------------------------------------------------------------------------------------------------

    async def _heard(self, output: Output) -> None:
        match output:
            case SpeechStarted(turn):
                self._speaking = True
                await self._name(turn)
                await self._emit(output)
                if self._answering and self.config.interrupt_response:
                    # If it was a noise, what had not begun to be answered is still to be.
                    self._owed = self._owed or not self._answering.response.output
                    self._answering.cancel("turn_detected")
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
            case TranscriptDelta():
                if self.config.transcribes:
                    await self._emit(output)
            case TurnCleared():
                # An open turn ends without a trace.
                self._speaking = False
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
        if not self._owed or self._speaking or self._transcribing():
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
        speaks = (config.speaks if asked.speaks is None else asked.speaks) and bool(self._partner.profile.voices)
        response = Response(
            self._new_id("resp_"),
            speaks,
            asked.voice or config.voice,
            config.max_tokens if asked.max_tokens is None else asked.max_tokens,
            asked.metadata,
            asked.stored,
        )
        answering = _Answering(self, response, asked)
        if asked.stored:
            self._answering = answering
        else:
            self._beside.add(answering)
        assert self._group
        self._group.start_soon(self._answer, answering)

    async def _answer(self, answering: _Answering) -> None:
        try:
            await answering.run()
        finally:
            self._beside.discard(answering)
            if self._answering is answering:
                self._answering = None
        self._answer_turn()

    def context(self, asked: ResponseAsked) -> tuple[str, list[Item] | None]:
        """The instructions, and the items in place of the conversation. Raises RemoteProtocolError for a reference to none."""
        instructions = self.config.instructions if asked.instructions is None else asked.instructions
        if asked.items is None:
            return instructions, None
        return instructions, [self.conversation.get(i) if isinstance(i, str) else i for i in asked.items]


class _Answering:
    """One answer under way: what of it is open on the wire."""

    def __init__(self, session: TalkSession, response: Response, asked: ResponseAsked) -> None:
        self.response = response
        self._session = session
        self._asked = asked
        self._scope = anyio.CancelScope()
        self._item: Item | None = None
        self._previous: str | None = None
        self._rate_hz = session._partner.profile.sample_rate_hz
        self._sounded = False
        self._began_s = time.monotonic()

    def cancel(self, reason: str) -> None:
        """End it within a step; it is closed in order."""
        if not self.response.reason:
            self.response.reason = reason
        self._scope.cancel()

    async def run(self) -> None:
        response, emit = self.response, self._session._emit
        await emit(ResponseCreated(response))
        with self._scope:
            try:
                await self._stream()
                if response.status == "in_progress":
                    response.status = "completed"
            except (ModelError, EngineError, Refused) as error:
                log.error("an answer failed: %s", error)
                response.status, response.error = "failed", str(error)
            except RemoteProtocolError as error:
                response.status, response.error = "failed", error.message
        if response.status == "in_progress":
            response.status = "cancelled"
        await self._close()
        await emit(ResponseDone(response))

    async def _stream(self) -> None:
        session, asked, response = self._session, self._asked, self.response
        instructions, items = session.context(asked)
        config = session.config
        messages = session.conversation.messages(instructions, items)
        options = ReplyOptions(
            max_tokens=response.max_tokens,
            tools=config.tools if asked.tools is None else asked.tools,
            tool_choice=config.tool_choice if asked.tool_choice is None else asked.tool_choice,
        )
        voice = None
        if response.speaks:
            names = session._partner.profile.voices
            voice = VoiceOptions(response.voice if response.voice in names else names[0], config.speed)
        talk = session._talk if response.stored else await session._partner.open()
        assert talk
        try:
            async with aclosing(talk.respond(messages, options, voice)) as answers:
                async for answer in answers:
                    await self._take(answer)
        finally:
            if talk is not session._talk:
                talk.close()

    async def _take(self, answer: Answer) -> None:
        response, emit = self.response, self._session._emit
        match answer:
            case TextDelta(text):
                item = await self._message()
                item.parts[0].text += text
                await emit(TextSaid(self._place(), text, response.speaks))
            case Speaking(pcm, words):
                item = await self._message()
                if not self._sounded:
                    self._sounded = True
                    self._session._measure("first_answer_sound", time.monotonic() - self._began_s)
                item.parts[0].audio_s += len(pcm) / self._rate_hz
                item.parts[0].words += words
                await emit(SoundSaid(self._place(), pcm, self._rate_hz))
            case ToolCallStarted(call_id, name):
                await self._close()
                await self._open(
                    Item(
                        self._session._new_id("item_"),
                        "function_call",
                        "assistant",
                        "in_progress",
                        call_id=call_id,
                        name=name,
                    )
                )
            case ToolCallDelta(arguments):
                assert self._item
                self._item.arguments += arguments
                await emit(ArgumentsSaid(self._place(), self._item.call_id, arguments))
            case ReplyDone(reason):
                response.usage = Usage(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
                if reason == "length":
                    response.status, response.reason = "incomplete", "max_output_tokens"

    async def _message(self) -> Item:
        """The message that is being said; begun where there is none."""
        if self._item and self._item.kind == "message":
            return self._item
        await self._close()
        kind = "output_audio" if self.response.speaks else "output_text"
        item = Item(self._session._new_id("item_"), "message", "assistant", "in_progress", [Part(kind)])  # type: ignore[arg-type]
        await self._open(item)
        await self._session._emit(PartAdded(self._place(), item.parts[0]))
        return item

    async def _open(self, item: Item) -> None:
        response, session = self.response, self._session
        self._item, self._previous = item, None
        response.output.append(item)
        if response.stored:
            self._previous = session.conversation.add(item)
        index = len(response.output) - 1
        await session._emit(OutputItemAdded(response, index, item, self._previous))
        if response.stored:
            await session._emit(ItemAdded(item, self._previous))

    async def _close(self) -> None:
        """Close the open part and item, whatever ended them."""
        item, emit = self._item, self._session._emit
        if item is None:
            return
        place = self._place()
        item.status = "completed" if self.response.status in ("in_progress", "completed") else "incomplete"
        if item.kind == "message":
            await emit(PartDone(place, item.parts[0]))
        else:
            await emit(ArgumentsDone(place, item.call_id, item.name, item.arguments))
        if self.response.stored:
            await emit(ItemDone(item, self._previous))
        await emit(OutputItemDone(self.response, place.output_index, item, self._previous))
        if self.response.status == "cancelled" and item.kind == "message" and self.response.speaks:
            # What was written and never became sound was not said: the next turn does not know of it.
            part = item.parts[0]
            part.text = cut_to(part.text, [w.text for w in part.words], len(part.words))
        self._item = None

    def _place(self) -> Place:
        assert self._item
        return Place(self.response.id, self._item.id, len(self.response.output) - 1)
