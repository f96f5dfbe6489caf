"""One response under way: the chunks that a model gives become items and events, and whatever ends the response, what
is open is closed in order.

`ResponseGeneration` runs the model. It can begin before a response is asked for, hidden from the client
(`PreemptiveResponse`); `ResponseTask` reads from it, or from another `ResponseSource`, and is what the client sees.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

import anyio
import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ
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

# Chunks of a response that may wait for its reader; with more of them the model waits.
MAX_WAITING_CHUNKS = 64

EmitConversation = Callable[[TranscriptionEvent | ConversationEvent], Awaitable[None]]
FAILURES = (ModelError, EngineError, Refused, RemoteProtocolError)
MINUTE = 60 * SAMPLE_RATE_HZ
# The arguments of `ConversationStream.respond`. Two equal requests have the same response.
ResponseRequest = tuple[tuple[Message, ...], ReplyOptions, VoiceOptions | None]


def wants_audio(config: ConversationConfig, profile: ConversationProfile, command: CreateResponse) -> bool:
    """Return whether the response is to be spoken: the command asks for audio, or leaves it to a configuration that
    does, and the model has a voice.
    """
    return (config.audio_output if command.audio_output is None else command.audio_output) and bool(profile.voices)


def request_for(
    config: ConversationConfig,
    conversation: ConversationHistory,
    profile: ConversationProfile,
    command: CreateResponse,
    voice: str | None,
    max_tokens: int | None,
    items: list[Item] | None = None,
) -> ResponseRequest:
    """Return the request to the model for one response. What `command` leaves open is as the configuration has it.

    The messages are of the command's items, else of `items`, else of the history. `voice` is matched without regard to
    case; a name that the model does not have becomes its default voice. Raises RemoteProtocolError where the command
    refers to an item that is not in the history.
    """
    if command.items is not None:
        items = [conversation.get(i) if isinstance(i, str) else i for i in command.items]
    instructions = config.instructions if command.instructions is None else command.instructions
    options = ReplyOptions(
        max_tokens=max_tokens,
        tools=config.tools if command.tools is None else command.tools,
        tool_choice=config.tool_choice if command.tool_choice is None else command.tool_choice,
        parallel_tool_calls=(
            config.parallel_tool_calls if command.parallel_tool_calls is None else command.parallel_tool_calls
        ),
        truncation=config.truncation,
    )
    voices = profile.voices
    spoken = None
    if wants_audio(config, profile, command):
        named = (v for v in voices if voice and v.lower() == voice.lower())
        spoken = VoiceOptions(next(named, voices[0]), config.speed)
    return conversation.messages(instructions, items), options, spoken


class ResponseSource(Protocol):
    """What a response task reads a response from: a model that was asked for it, or a native model that began to speak.

    There is one reader, which calls `drop` when it has finished, however it finished.
    """

    def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the response's chunks in order, waiting for each. May be iterated once. Raises Refused, ModelError,
        EngineError and RemoteProtocolError, after the chunks that came before the failure.
        """
        ...

    async def drop(self) -> None:
        """Stop reading, and end the response where it has not ended. May be called after the stream is exhausted.
        Whether it waits for the end depends on the source.
        """
        ...


class ResponseGeneration:
    """The generation of one response by a conversation model, in a task of its own: run `run` in a task group.

    It may begin before the response is asked for. `messages`, `options` and `voice` are the arguments of
    `ConversationStream.respond` and stay readable as a request, so that a later request can be compared with it. The
    model waits while 64 chunks are not read.
    """

    def __init__(
        self,
        model_stream: ConversationStream,
        messages: tuple[Message, ...],
        options: ReplyOptions,
        voice: VoiceOptions | None,
    ) -> None:
        self.model_stream = model_stream
        self.request = (messages, options, voice)
        self._send, self._receive = anyio.create_memory_object_stream[ResponseChunk](MAX_WAITING_CHUNKS)
        self._scope = anyio.CancelScope()
        self._failure: Exception | None = None
        self._ended = anyio.Event()
        # Tokens so far, by the pieces of text that came; once the model has finished, as it has counted them.
        self.num_tokens = 0

    async def run(self) -> None:
        """Generate until the model has finished, or until `cancel`. Failures of the model are kept and raised by
        `stream`, so that they do not end the session's task group.
        """
        try:
            with self._scope:
                async with aclosing(self.model_stream.respond(*self.request)) as chunks:
                    async for chunk in chunks:
                        if isinstance(chunk, ReplyDone):
                            self.num_tokens = chunk.completion_tokens or self.num_tokens
                        else:
                            self.num_tokens += isinstance(chunk, TextDelta)
                        await self._send.send(chunk)
        except FAILURES as error:
            self._failure = error
        finally:
            self._send.close()
            self._ended.set()

    async def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the model's chunks in order, waiting for each; for one reader. Raises what the model raised, Refused,
        ModelError, EngineError or RemoteProtocolError, after its last chunk. A cancelled generation just ends.
        """
        async for chunk in self._receive:
            yield chunk
        if self._failure:
            raise self._failure

    async def drop(self) -> None:
        """Cancel the generation and wait for its end, also when the caller is cancelled: the model's stream is free for
        another response afterwards. `run` must have been started.
        """
        self.cancel()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        self._receive.close()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` or `drop` was called, after which the generation may be incomplete. Also true where it had
        finished before.
        """
        return self._scope.cancel_called

    def cancel(self) -> None:
        """End the generation within one step of the model, and return at once. Chunks that wait can still be read; no
        error is raised to the reader.
        """
        self._scope.cancel()


class PreemptiveBudget:
    """How many responses a conversation may begin in a minute before they are asked for; None: any number. Pure."""

    def __init__(self, max_per_minute: int | None) -> None:
        self._max = max_per_minute
        # When the last ones were begun, in samples of the microphone.
        self._begun: deque[int] = deque(maxlen=max_per_minute)

    def take(self, now: int) -> bool:
        """Return whether one may be begun at `now`, a number of samples at 16 kHz, and count it if so."""
        if self._max is None:
            return True
        if self._max == 0 or (len(self._begun) == self._max and now - self._begun[0] < MINUTE):
            return False
        self._begun.append(now)
        return True


class PreemptiveResponse:
    """Holds at most one response that is generated before it is asked for.

    It is true while it holds one, finished or not. What is held is used only for a request equal to its own, so a
    response that was begun on a wrong guess costs computation and is never heard. `count`: as ConversationContext has
    it.
    """

    def __init__(self, count: Callable[[str, int], None]) -> None:
        self._count = count
        self._generation: ResponseGeneration | None = None

    def __bool__(self) -> bool:
        return self._generation is not None

    async def begin(self, stream: ConversationStream, request: ResponseRequest, group: anyio.abc.TaskGroup) -> None:
        """Begin to generate the response to `request` in a task of `group`. One that was begun before is ended first,
        and its end is waited for, because `stream` gives one response at a time.
        """
        await self.drop()
        self._generation = ResponseGeneration(stream, *request)
        self._count("preemptive_begun", 1)
        group.start_soon(self._generation.run)

    async def claim(self, request: ResponseRequest) -> ResponseGeneration | None:
        """Hand over the response that was begun, where its request equals `request` and it was not cancelled; the
        caller then owns it. Otherwise end what was begun, wait for its end and return None.
        """
        generation = self._generation
        if generation and generation.request == request and not generation.cancelled:
            self._generation = None
            self._count("preemptive_used", 1)
            return generation
        await self.drop()
        return None

    def cancel(self) -> None:
        """Cancel what was begun, and return at once. It ends within one step of the model; the next `begin`, `claim` or
        `drop` waits for that.
        """
        if self._generation:
            self._generation.cancel()

    async def drop(self) -> None:
        """End what was begun and wait for its end, also when the caller is cancelled: the model's stream is free
        afterwards. Does nothing where nothing was begun.
        """
        generation, self._generation = self._generation, None
        if generation:
            await generation.drop()
            self._count("preemptive_dropped", 1)
            self._count("preemptive_dropped_tokens", generation.num_tokens)


class ResponseTask:
    """One response under way: it reads chunks, makes items of them and keeps what is open on the wire.

    - `response`: its id, settings and, as it goes on, its items, status and usage. Only this task writes to it.
    - `make`: gives the source to read from, whose audio is at `rate_hz` hertz. It may raise what a model raises.
    - `conversation`: gets the items of a stored response.
    - `measure`: takes `first_answer_sound`, the seconds from the task's creation to its first audio.
    - `ended`: is set when the response is closed and `ResponseDone` was emitted.
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
        # The events that close the open item and are not emitted yet.
        self._closing_events: list[ConversationEvent] = []
        self._rate_hz = rate_hz
        self._has_audio = False
        self._began_s = time.monotonic()
        self.ended = anyio.Event()

    def cancel(self, reason: str) -> None:
        """End the response within one step of the model, with `reason` unless it has one already. Returns at once; the
        task still closes the open item and emits `ResponseDone`.
        """
        if not self.response.reason:
            self.response.reason = reason
        self._scope.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether the response was cancelled. It may still be closing its items; `ended` is set once it has."""
        return self._scope.cancel_called

    async def run(self) -> None:
        """Emit the response from `ResponseCreated` to `ResponseDone`, which is last however it ends.

        A failure of the model, or a request that it refuses, is reported in the response's status and not raised.
        """
        response, emit = self.response, self._emit
        await emit(ResponseCreated(response.snapshot()))
        with self._scope:
            try:
                await self._read_source()
                if response.status == "in_progress":
                    response.status = "completed"
            except RemoteProtocolError as error:
                response.status, response.error, response.code = "failed", error.message, error.code
            except FAILURES as error:
                log.error("a response failed: %s", error)
                response.status, response.error = "failed", str(error)
        if response.status == "in_progress":
            response.status = "cancelled"
        await self._close()
        await emit(ResponseDone(response.snapshot()))
        self.ended.set()

    async def _read_source(self) -> None:
        source = await self._make(self.response)
        try:
            async for chunk in source.stream():
                await self._apply(chunk)
        finally:
            await source.drop()

    async def _apply(self, chunk: ResponseChunk) -> None:
        response, emit = self.response, self._emit
        match chunk:
            case TextDelta(text):
                item = await self._message()
                item.parts[0].text += text
                await emit(ResponseTextDelta(self._place(), text, response.audio_output))
            case ResponseAudio(pcm, words):
                item = await self._message()
                if not self._has_audio:
                    self._has_audio = True
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
                response.usage = Usage(chunk.prompt_tokens, chunk.cached_tokens, chunk.completion_tokens)
                if reason == "length":
                    response.status, response.reason = "incomplete", "max_output_tokens"

    async def _message(self) -> Item:
        """Return the message that is being generated, and begin one where there is none."""
        if self._item and self._item.kind == "message":
            return self._item
        await self._close()
        kind = "output_audio" if self.response.audio_output else "output_text"
        item = Item(
            self._new_id("item_"),
            "message",
            "assistant",
            "in_progress",
            [ContentPart(kind)],  # type: ignore[arg-type]
        )
        await self._open(item)
        await self._emit(ContentPartAdded(self._place(), item.parts[0].snapshot()))
        return item

    async def _open(self, item: Item) -> None:
        response = self.response
        self._item, self._previous = item, None
        response.output.append(item)
        if response.stored:
            self._previous = self._conversation.add(item)
        index = len(response.output) - 1
        await self._emit(OutputItemAdded(response.id, index, item.snapshot(), self._previous))
        if response.stored:
            await self._emit(ItemAdded(item.snapshot(), self._previous))

    async def _close(self) -> None:
        """Close the open part and item, whatever ended them. After a cancellation, a second call goes on where the
        first stopped.
        """
        item = self._item
        if item and not self._closing_events:
            place = self._place()
            item.status = "completed" if self.response.status in ("in_progress", "completed") else "incomplete"
            shown = item.snapshot()
            part_done = ContentPartDone(place, shown.parts[0]) if item.kind == "message" else None
            done = part_done or ArgumentsDone(place, item.call_id, item.name, item.arguments)
            kept = [ItemDone(shown, self._previous)] if self.response.stored else []
            self._closing_events = [
                done,
                *kept,
                OutputItemDone(self.response.id, place.output_index, shown, self._previous),
            ]
        while self._closing_events:
            await self._emit(self._closing_events.pop(0))
        if item and self.response.status == "cancelled" and item.kind == "message" and self.response.audio_output:
            # Text that never became audio was not said: the model must not find it in the next turn's history.
            part = item.parts[0]
            part.text = cut_to(part.text, [w.text for w in part.words], len(part.words))
        self._item = None

    def _place(self) -> ContentPosition:
        assert self._item
        return ContentPosition(self.response.id, self._item.id, len(self.response.output) - 1)
