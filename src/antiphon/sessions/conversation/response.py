"""One answer of a conversation under way: what its partner makes becomes items, and what is open is closed in order, whatever ends it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

import anyio
import anyio.abc

from antiphon.contracts import (
    ConversationProfile,
    ConversationStream,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    VoiceOptions,
)
from antiphon.errors import EngineError, ModelError, Refused, RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPart,
    ContentPartAdded,
    ContentPartDone,
    ContentPosition,
    ConversationConfig,
    ConversationEvent,
    CreateResponse,
    Item,
    ItemAdded,
    ItemDone,
    OutputItemAdded,
    OutputItemDone,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    Usage,
)
from antiphon.events.transcription import TranscriptionEvent
from antiphon.sessions.conversation.history import ConversationHistory, cut_to

log = logging.getLogger(__name__)

# Bound: what a partner has made of an answer that nobody has taken; it waits then.
MAX_WAITING = 64

EmitConversation = Callable[[TranscriptionEvent | ConversationEvent], Awaitable[None]]
FAILURES = (ModelError, EngineError, Refused, RemoteProtocolError)
# What a partner is asked: Talk.respond's arguments.
ResponseRequest = tuple[tuple[Message, ...], ReplyOptions, VoiceOptions | None]


def speaks(config: ConversationConfig, profile: ConversationProfile, asked: CreateResponse) -> bool:
    """The answer is to be spoken, and somebody can."""
    return (config.audio_output if asked.audio_output is None else asked.audio_output) and bool(profile.voices)


def wanted(
    config: ConversationConfig,
    conversation: ConversationHistory,
    profile: ConversationProfile,
    asked: CreateResponse,
    voice: str | None,
    max_tokens: int | None,
    items: list[Item] | None = None,
) -> ResponseRequest:
    """What the partner is asked; `items` in place of the conversation's. Raises RemoteProtocolError for a reference to no item."""
    if asked.items is not None:
        items = [conversation.get(i) if isinstance(i, str) else i for i in asked.items]
    instructions = config.instructions if asked.instructions is None else asked.instructions
    options = ReplyOptions(
        max_tokens=max_tokens,
        tools=config.tools if asked.tools is None else asked.tools,
        tool_choice=config.tool_choice if asked.tool_choice is None else asked.tool_choice,
        truncation=config.truncation,
    )
    voices = profile.voices
    spoken = None
    if speaks(config, profile, asked):
        named = (v for v in voices if voice and v.lower() == voice.lower())
        spoken = VoiceOptions(next(named, voices[0]), config.speed)
    return conversation.messages(instructions, items), options, spoken


class ResponseSource(Protocol):
    """An answer that somebody makes."""

    def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Take what is made, once. Raises Refused, ModelError, EngineError, RemoteProtocolError."""
        ...

    async def drop(self) -> None:
        """Nobody takes any more of it. It ends, if it has not."""
        ...


class ResponseGeneration:
    """An answer as it is made, by a task of its own: begun when it is asked for, or before, on the chance that just it will be.

    `messages`, `options` and `voice` are Talk.respond's; two of equal ones are the same answer.
    """

    def __init__(
        self, talk: ConversationStream, messages: tuple[Message, ...], options: ReplyOptions, voice: VoiceOptions | None
    ) -> None:
        self.talk = talk
        self.asked = (messages, options, voice)
        self._send, self._receive = anyio.create_memory_object_stream[ResponseChunk](MAX_WAITING)
        self._scope = anyio.CancelScope()
        self._failure: Exception | None = None
        self._over = anyio.Event()

    async def run(self) -> None:
        """The task. Never raises what a model does; `stream` does."""
        try:
            with self._scope:
                async with aclosing(self.talk.respond(*self.asked)) as answers:
                    async for answer in answers:
                        await self._send.send(answer)
        except FAILURES as error:
            self._failure = error
        finally:
            self._send.close()
            self._over.set()

    async def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Take what is made. Raises Refused, ModelError, EngineError, RemoteProtocolError."""
        async for answer in self._receive:
            yield answer
        if self._failure:
            raise self._failure

    async def drop(self) -> None:
        """End it, and wait for its end: the talk is free for another then."""
        self.cancel()
        with anyio.CancelScope(shield=True):
            await self._over.wait()
        self._receive.close()

    @property
    def cancelled(self) -> bool:
        """It will not be complete."""
        return self._scope.cancel_called

    def cancel(self) -> None:
        """End it within a step."""
        self._scope.cancel()


class ResponseTask:
    """One answer under way: what of it is open on the wire.

    `make` gives what is made of it, at `rate_hz`; it may raise what a model does.
    """

    def __init__(
        self,
        response: Response,
        make: Callable[[Response], Awaitable[ResponseSource]],
        conversation: ConversationHistory,
        rate_hz: int,
        emit: EmitConversation,
        new_id: Callable[[str], str],
        measure: Callable[[str, float], None],
    ) -> None:
        self.response = response
        self._make = make
        self._conversation = conversation
        self._emit = emit
        self._new_id = new_id
        self._measure = measure
        self._scope = anyio.CancelScope()
        self._item: Item | None = None
        self._previous: str | None = None
        # What still has to be told of its end.
        self._ends: list[ConversationEvent] = []
        self._rate_hz = rate_hz
        self._sounded = False
        self._began_s = time.monotonic()
        # It is closed.
        self.over = anyio.Event()

    def cancel(self, reason: str) -> None:
        """End it within a step; it is closed in order."""
        if not self.response.reason:
            self.response.reason = reason
        self._scope.cancel()

    @property
    def cancelled(self) -> bool:
        """It is being ended."""
        return self._scope.cancel_called

    async def run(self) -> None:
        response, emit = self.response, self._emit
        await emit(ResponseCreated(response))
        with self._scope:
            try:
                await self._stream()
                if response.status == "in_progress":
                    response.status = "completed"
            except RemoteProtocolError as error:
                response.status, response.error, response.code = "failed", error.message, error.code
            except FAILURES as error:
                log.error("an answer failed: %s", error)
                response.status, response.error = "failed", str(error)
        if response.status == "in_progress":
            response.status = "cancelled"
        await self._close()
        await emit(ResponseDone(response))
        self.over.set()

    async def _stream(self) -> None:
        making = await self._make(self.response)
        try:
            async for answer in making.stream():
                await self._take(answer)
        finally:
            await making.drop()

    async def _take(self, answer: ResponseChunk) -> None:
        response, emit = self.response, self._emit
        match answer:
            case TextDelta(text):
                item = await self._message()
                item.parts[0].text += text
                await emit(ResponseTextDelta(self._place(), text, response.audio_output))
            case ResponseAudio(pcm, words):
                item = await self._message()
                if not self._sounded:
                    self._sounded = True
                    self._measure("first_answer_sound", time.monotonic() - self._began_s)
                item.parts[0].audio_s += len(pcm) / self._rate_hz
                item.parts[0].words += words
                await emit(ResponseAudioDelta(self._place(), pcm, self._rate_hz, words))
            case ToolCallStarted(call_id, name):
                await self._close()
                await self._open(
                    Item(self._new_id("item_"), "function_call", "assistant", "in_progress", call_id=call_id, name=name)
                )
            case ToolCallDelta(arguments):
                assert self._item
                self._item.arguments += arguments
                await emit(ArgumentsDelta(self._place(), self._item.call_id, arguments))
            case ReplyDone(reason):
                response.usage = Usage(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
                if reason == "length":
                    response.status, response.reason = "incomplete", "max_output_tokens"

    async def _message(self) -> Item:
        """The message that is being said; begun where there is none."""
        if self._item and self._item.kind == "message":
            return self._item
        await self._close()
        kind = "output_audio" if self.response.audio_output else "output_text"
        item = Item(self._new_id("item_"), "message", "assistant", "in_progress", [ContentPart(kind)])  # type: ignore[arg-type]
        await self._open(item)
        await self._emit(ContentPartAdded(self._place(), item.parts[0]))
        return item

    async def _open(self, item: Item) -> None:
        response = self.response
        self._item, self._previous = item, None
        response.output.append(item)
        if response.stored:
            self._previous = self._conversation.add(item)
        index = len(response.output) - 1
        await self._emit(OutputItemAdded(response, index, item, self._previous))
        if response.stored:
            await self._emit(ItemAdded(item, self._previous))

    async def _close(self) -> None:
        """Close the open part and item, whatever ended them. Cancelled in between, it goes on where it was."""
        item = self._item
        if item and not self._ends:
            place = self._place()
            item.status = "completed" if self.response.status in ("in_progress", "completed") else "incomplete"
            part_done = ContentPartDone(place, item.parts[0]) if item.kind == "message" else None
            done = part_done or ArgumentsDone(place, item.call_id, item.name, item.arguments)
            kept = [ItemDone(item, self._previous)] if self.response.stored else []
            self._ends = [done, *kept, OutputItemDone(self.response, place.output_index, item, self._previous)]
        while self._ends:
            await self._emit(self._ends.pop(0))
        if item and self.response.status == "cancelled" and item.kind == "message" and self.response.audio_output:
            # What was written and never became sound was not said: the next turn does not know of it.
            part = item.parts[0]
            part.text = cut_to(part.text, [w.text for w in part.words], len(part.words))
        self._item = None

    def _place(self) -> ContentPosition:
        assert self._item
        return ContentPosition(self.response.id, self._item.id, len(self.response.output) - 1)
