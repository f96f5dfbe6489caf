"""One response of a conversation, from its preemptive start to its last event.

A response may be generated before it is requested, hidden from the client. When it is requested, its chunks become
items and events. Whatever the reason for its end, its open items are closed in order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType

import anyio
import anyio.abc

from antiphon.contracts import (
    ReplyDone,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPart,
    ContentPartAdded,
    ContentPartDone,
    ContentPosition,
    ConversationEvent,
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
from antiphon.events.tools import Tool
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory, cut_to
from antiphon.sessions.conversation.responses.generation import (
    FAILURES,
    ResponseGeneration,
    ResponseRequest,
    ResponseSource,
    RestOfResponse,
)
from antiphon.state_machine import transition

log = logging.getLogger(__name__)


class ResponseStage(Enum):
    """The progress of a response.

    - NEW: it has not begun.
    - PREEMPTIVE: the model generates it before it is requested, and the client does not know of it.
    - UNDER_WAY: it was requested, and its events are being sent.
    - CLOSED: its last event was sent, or it was dropped before it was requested.
    """

    NEW = auto()
    PREEMPTIVE = auto()
    UNDER_WAY = auto()
    CLOSED = auto()


class ResponseInput(Enum):
    """The inputs of the state machine: GUESSED (answers a turn that may have ended), ASKED, DROPPED, DONE."""

    GUESSED = auto()
    ASKED = auto()
    DROPPED = auto()
    DONE = auto()


# Any transition that is not listed raises LocalProtocolError.
TRANSITIONS: Mapping[ResponseStage, Mapping[ResponseInput, ResponseStage]] = MappingProxyType(
    {
        ResponseStage.NEW: {
            ResponseInput.GUESSED: ResponseStage.PREEMPTIVE,
            ResponseInput.ASKED: ResponseStage.UNDER_WAY,
        },
        ResponseStage.PREEMPTIVE: {
            ResponseInput.ASKED: ResponseStage.UNDER_WAY,
            ResponseInput.DROPPED: ResponseStage.CLOSED,
        },
        ResponseStage.UNDER_WAY: {ResponseInput.DONE: ResponseStage.CLOSED},
        ResponseStage.CLOSED: {},
    }
)


class ResponseTask:
    """One response of a conversation. `history` gets its items if it is stored, and `emit` is awaited with its events.

    Call `begin_preemptive` and then `ask` or `drop`, or `ask` alone. After `ask`, run `run` as a task.

    - `response`: set by `ask`. It has the response's id and settings, and gets its items, status and usage as they
      become known. Only this task writes to it.
    - `stage`: the progress of the response.
    - `ended`: set when `ResponseDone` was emitted.
    - `continues`: the id of the message whose rest this response says, if any. Set it before `run`.
    - `is_filler`: whether it is a filler. Its items then come after the item `after` of the history. Set both before
      `run`.
    - `keeps`: whether a cancel leaves the generation waiting, as `kept_source`, instead of ending it.
    - `unsaid`: text that was generated before a cancel, but never became audio. Read-only.

    The context's `measure` gets `first_answer_sound`, the seconds from `ask` to the first audio. The context's `count`
    gets the outcomes of preemptive responses.
    """

    response: Response

    def __init__(self, context: ConversationContext, history: ConversationHistory, emit: EmitConversation) -> None:
        self.stage = ResponseStage.NEW
        self.ended = anyio.Event()
        self._history = history
        self._emit = emit
        self._context = context
        # The generation that began before the request, if any.
        self._guess: ResponseGeneration | None = None
        self._make: Callable[[Response], Awaitable[ResponseSource]] | None = None
        self._scope = anyio.CancelScope()
        self._item: Item | None = None
        self._previous: str | None = None
        # The events that close the open item, as far as they are not emitted yet.
        self._closing_events: list[ConversationEvent] = []
        # The functions that the model may call, by their names.
        self._tools: Mapping[str, Tool] = {}
        self._has_audio = False
        self._asked_s = 0.0
        self.continues = self.unsaid = ""
        self.is_filler, self.after = False, ""
        self.keeps = False
        self.kept_source: ResponseGeneration | RestOfResponse | None = None

    def _move(self, happened: ResponseInput) -> None:
        self.stage = transition(TRANSITIONS, self.stage, happened)

    # --- before a request ---------------------------------------------------------------------------------------------

    def begin_preemptive(self, guess: ResponseGeneration, group: anyio.abc.TaskGroup) -> None:
        """Generate the response in a task of `group`, hidden from the client. Returns at once."""
        self._move(ResponseInput.GUESSED)
        self._guess = guess
        self._context.count("preemptive_begun", 1)
        group.start_soon(guess.run)

    def answers(self, request: ResponseRequest) -> bool:
        """Whether this is a preemptive response to exactly this request that was not cancelled. A response that began
        from a wrong guess is never heard.
        """
        guess = self._guess if self.stage is ResponseStage.PREEMPTIVE else None
        return guess is not None and guess.request == request and not guess.cancelled

    def cancel_preemptive(self) -> None:
        """End the generation within one step of the model. Returns at once. `drop` still has to be called."""
        assert self._guess
        self._guess.cancel()

    async def drop(self) -> None:
        """End a preemptive response, and wait for its end, even if the caller is cancelled. After that, the model's
        stream is free.
        """
        self._move(ResponseInput.DROPPED)
        assert self._guess
        await self._guess.drop()
        self._context.count("preemptive_dropped", 1)
        self._context.count("preemptive_dropped_tokens", self._guess.num_tokens)

    # --- after a request ----------------------------------------------------------------------------------------------

    def ask(self, response: Response, make: Callable[[Response], Awaitable[ResponseSource]]) -> None:
        """Accept the request for the response, which `run` then sends as `response`. If no generation has begun, `make`
        returns the source to read from. `make` may raise the errors of a model.
        """
        if self.stage is ResponseStage.PREEMPTIVE:
            self._context.count("preemptive_used", 1)
        self._move(ResponseInput.ASKED)
        self.response, self._make = response, make
        self._asked_s = time.monotonic()

    def cancel(self, reason: str) -> None:
        """End the response within one step of the model, with `reason` unless it already has a reason. Returns at once.
        `run` still closes the open item and emits `ResponseDone`.
        """
        if not self.response.reason:
            self.response.reason = reason
        self._scope.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether the response was cancelled. It may still be closing its items, after which `ended` is set."""
        return self._scope.cancel_called

    async def run(self) -> None:
        """Emit the response from `ResponseCreated` to `ResponseDone`, which is always the last event.

        If the model fails or refuses the request, the response's status reports that, and nothing is raised.
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
        self._move(ResponseInput.DONE)
        self.ended.set()

    async def _read_source(self) -> None:
        assert self._make
        source: ResponseSource = self._guess or await self._make(self.response)
        if isinstance(source, ResponseGeneration):
            self._tools = {tool.name: tool for tool in source.request[1].tools}
        try:
            async for chunk in source.stream():
                await self._apply(chunk)
        finally:
            if self.keeps and self.cancelled and isinstance(source, ResponseGeneration | RestOfResponse):
                source.hold(True)
                self.kept_source = source
            else:
                await source.drop()

    async def drop_kept(self) -> None:
        """End the generation that a cancel has left waiting, or will leave, and wait for its end."""
        self.keeps = False
        if self.kept_source:
            await self.kept_source.drop()

    async def _apply(self, chunk: ResponseChunk) -> None:
        response, emit = self.response, self._emit
        match chunk:
            case TextDelta(text):
                item = await self._message()
                item.parts[0].add(text)
                await emit(ResponseTextDelta(self._place(), text, response.audio_output))
            case ResponseAudio(pcm, words):
                item, rate_hz = await self._message(), self._context.model.profile.sample_rate_hz
                if not self._has_audio:
                    self._has_audio = True
                    self._context.measure("first_answer_sound", time.monotonic() - self._asked_s)
                item.parts[0].add(words=words, audio_s=len(pcm) / rate_hz)
                await emit(ResponseAudioDelta(self._place(), pcm, rate_hz, words))
            case ToolCallStarted(call_id, name):
                await self._close()
                call = Item(self._context.new_id("item_"), "function_call", "assistant", "in_progress", call_id=call_id)
                call.name = name
                if tool := self._tools.get(name):
                    call.server, call.needs_approval = tool.server, tool.needs_approval
                await self._open(call)
            case ToolCallDelta(arguments):
                assert self._item
                self._item.arguments += arguments
                if not self._item.needs_approval:
                    await emit(ArgumentsDelta(self._place(), self._item.call_id, arguments, self._item.server))
            case ReplyDone(reason):
                response.usage = Usage(chunk.prompt_tokens, chunk.cached_tokens, chunk.completion_tokens)
                if reason == "length":
                    response.status, response.reason = "incomplete", "max_output_tokens"

    async def _message(self) -> Item:
        """Return the message that is being generated. Begins one if none is open."""
        if self._item and self._item.kind == "message":
            return self._item
        await self._close()
        kind = "output_audio" if self.response.audio_output else "output_text"
        item = Item(
            self._context.new_id("item_"),
            "message",
            "assistant",
            "in_progress",
            [ContentPart(kind)],  # type: ignore[arg-type]
            continues=self.continues,
        )
        self.continues = ""
        await self._open(item)
        await self._emit(ContentPartAdded(self._place(), item.parts[0].snapshot()))
        return item

    async def _open(self, item: Item) -> None:
        response = self.response
        self._item, self._previous = item, None
        response.output.append(item)
        if response.stored:
            self._previous = self._history.add(item, self.after or None)
        index = len(response.output) - 1
        await self._emit(OutputItemAdded(response.id, index, item.snapshot(), self._previous))
        if response.stored:
            await self._emit(ItemAdded(item.snapshot(), self._previous))

    async def _close(self) -> None:
        """Close the open part and item, even if they are incomplete. If a call was cancelled, the next one continues
        where it stopped.
        """
        item = self._item
        if item and not self._closing_events:
            place = self._place()
            is_whole = self.response.status in ("in_progress", "completed")
            # The call of a tool server is in progress until its result is known.
            item.status = "incomplete" if not is_whole else "in_progress" if item.server else "completed"
            shown = item.snapshot(produced=True)
            done: list[ConversationEvent] = []
            if item.kind == "message":
                done.append(ContentPartDone(place, shown.parts[0]))
            elif not item.needs_approval:
                done.append(ArgumentsDone(place, item.call_id, item.name, item.arguments, item.server))
            # The history's item reflects a truncation, if there was one.
            # A request for an approval is done when it is whole, though it is not answered.
            if self.response.stored and (item.status == "in_progress") == item.needs_approval:
                done.append(ItemDone(item.snapshot(), self._previous))
            self._closing_events = [
                *done,
                OutputItemDone(self.response.id, place.output_index, shown, self._previous),
            ]
        while self._closing_events:
            await self._emit(self._closing_events.pop(0))
        if item and self.response.status == "cancelled" and item.kind == "message" and self.response.audio_output:
            # Text that never became audio was not said, so the model must not find it in the history at the next turn.
            part, made = item.parts[0], item.parts[0].produced()
            said = cut_to(made.text, [w.text for w in made.words], len(made.words))
            self.unsaid = made.text[len(said) :]
            if part.whole:
                part.whole = (said, *part.whole[1:])
            else:
                part.text = said
        self._item = None

    def _place(self) -> ContentPosition:
        assert self._item
        return ContentPosition(self.response.id, self._item.id, len(self.response.output) - 1)
