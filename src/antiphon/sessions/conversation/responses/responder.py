"""The responses of one conversation: the one under way, those out of band, and the preemptive one.

However a response ends, its audio stops with it, and what was not heard of it is cut from the history once its items
are closed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import anyio
import anyio.abc
import anyio.lowlevel

from antiphon.contracts import AudioPart, ConversationStream
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPart,
    ConversationConfig,
    ConversationEvent,
    CreateResponse,
    Item,
    Response,
    ResponseAudioDelta,
)
from antiphon.events.transcription import TranscriptionEvent
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.native_turns import NativeResponse
from antiphon.sessions.conversation.responses.generation import (
    FAILURES,
    ResponseGeneration,
    ResponseRequest,
    ResponseSource,
    request_for,
    wants_audio,
)
from antiphon.sessions.conversation.responses.heard import HeardResponses
from antiphon.sessions.conversation.responses.response import ResponseTask
from antiphon.turns.floor import Floor

log = logging.getLogger(__name__)

# Responses out of band that a conversation may have under way: each holds KV and takes rows of the model's steps.
MAX_OUT_OF_BAND = 4


class Responder:
    """Begins and ends the responses of one conversation. Call `open` before anything else, `close` at the end.

    Besides the one response of the conversation, `active`, clients may ask for responses out of band: these are not
    stored in the history, run at the same time, and each have a model stream of their own.

    - `config`: the session replaces it; it counts for responses that begin afterwards.
    - `context`: the model, and what else a conversation is assembled from.
    - `heard`: gets the audio of the responses, and truncates their items.
    - `floor`: is told when a response of the conversation begins, and when its last event is out.
    """

    def __init__(
        self,
        config: ConversationConfig,
        context: ConversationContext,
        history: ConversationHistory,
        emit: EmitConversation,
        heard: HeardResponses,
        floor: Floor,
    ) -> None:
        self.config = config
        self._context = context
        self._history = history
        self._emit = emit
        self._heard = heard
        self._floor = floor
        self._stream: ConversationStream | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self.active: ResponseTask | None = None
        # The response that nobody has asked for yet, and the user's item that it answers.
        self._unasked: tuple[ResponseTask, str | None] | None = None
        self._out_of_band: set[ResponseTask] = set()
        # The response that is generated before it is asked for. Of equal requests it answers any.
        self._preemptive: ResponseTask | None = None
        # Whether the model's stream has taken in audio of a turn that may yet be dropped.
        self._holds_growing = False
        # The turn that had a delta last, and its text so far.
        self._partial = (-1, "")

    @property
    def is_busy(self) -> bool:
        """Whether the model's stream is producing a response, be it a preemptive one."""
        return bool(self.active or self._preemptive)

    async def open(self, group: anyio.abc.TaskGroup) -> None:
        """Open the model's stream for the conversation; it generates in tasks of `group`. Raises Refused where the
        model has no room for another conversation.
        """
        self._stream = await self._context.model.open(self._context.owner)
        self._group = group

    async def close(self) -> None:
        """End the preemptive response, wait for its end and close the model's stream. To be called once no response of
        the conversation is under way; also where `open` failed.
        """
        await self.drop_preemptive()
        if self._stream:
            self._stream.close()

    def cancel_all(self, reason: str) -> None:
        """Cancel all responses with `reason`, those out of band and the preemptive one included. Returns at once; their
        tasks close them in order.
        """
        self.cancel_preemptive()
        for task in self._all():
            task.cancel(reason)

    async def interrupt(self, reason: str) -> None:
        """Cancel the conversation's response with `reason`, and the preemptive one, and silence what was sent. Does not
        wait for their end.
        """
        self.cancel_preemptive()
        if self.active:
            self.active.cancel(reason)
        await self._heard.silence()

    def cancel(self, response_id: str | None) -> None:
        """Cancel the response with this id, out of band or not; None is the conversation's own. Does not wait for its
        end. Raises RemoteProtocolError where no such response is under way.
        """
        if response_id is None:
            found = self.active
        else:
            found = next((a for a in self._all() if a.response.id == response_id), None)
        if found is None:
            raise RemoteProtocolError("response_cancel_not_active", "Cancellation failed: no active response found")
        found.cancel("client_cancelled")

    def _all(self) -> list[ResponseTask]:
        return [*([self.active] if self.active else []), *self._out_of_band]

    # --- a response ---------------------------------------------------------------------------------------------------

    def begin(self, command: CreateResponse, *, unasked: bool = False) -> ResponseTask | None:
        """Begin a response and return it: the caller has to `run` it. A failure of the model becomes a failed response.

        `unasked`: the turn has ended, and the client has not asked. Its request for just that, before it has said
        something new, is then the response under way, and None is returned.

        Raises RemoteProtocolError where a stored response is asked for while the conversation has one under way, or
        another response while it has MAX_OUT_OF_BAND of them.
        """
        if not command.stored and len(self._out_of_band) >= MAX_OUT_OF_BAND:
            raise RemoteProtocolError(
                "too_many_responses",
                f"Conversation already has {MAX_OUT_OF_BAND} responses out of band in progress.",
            )
        if command.stored and self.active:
            is_plain = replace(command, metadata=None, event_id=None) == CreateResponse()
            if is_plain and self._unasked == (self.active, self._newest_user_item()):
                self._unasked = None
                return None
            raise RemoteProtocolError(
                "conversation_already_has_active_response",
                f"Conversation already has an active response in progress: {self.active.response.id}.",
            )
        # As it is now: what is configured or created until its task runs is for the next one.
        config, items = self.config, list(self._history.items)
        task = self._start(command, lambda response: self._make(response, command, config, items))
        if command.stored:
            self._unasked = (task, self._newest_user_item()) if unasked else None
        return task

    def _newest_user_item(self) -> str | None:
        return next((i.id for i in reversed(self._history.items) if i.role == "user"), None)

    async def begin_unasked(self, source: NativeResponse) -> ResponseTask | None:
        """Begin a response of a native model's turn and return it: the caller has to `run` it. Waits until the response
        before it is closed. Where the turn was cut by then, because it was interrupted, `source` is dropped: a client
        that has asked for it is told of its end, any other never learns of it.
        """
        while self.active:
            await self.active.ended.wait()
            await anyio.lowlevel.checkpoint()

        if source.is_cut and not (source.due and source.due.request):
            await source.drop()
            return None

        async def give_source(_: Response) -> ResponseSource:
            return source

        request = source.due.request if source.due else None
        task = self._start(request or CreateResponse(), give_source)
        if source.is_cut:
            task.cancel(source.cut_reason)
        return task

    def _start(self, command: CreateResponse, make: Callable[[Response], Awaitable[ResponseSource]]) -> ResponseTask:
        config = self.config
        response = Response(
            self._context.new_id("resp_"),
            wants_audio(config, self._context.model.profile, command),
            command.voice or config.voice,
            config.max_tokens if command.max_tokens is None else command.max_tokens,
            command.metadata,
            command.stored,
            request=command,
        )
        task = self._take_preemptive(command, response) or self._new_task()
        task.ask(response, make)
        if command.stored:
            self.active = task
            self._floor.response_began()
        else:
            self._out_of_band.add(task)
        self._heard.response_began(response.id)
        return task

    def _new_task(self) -> ResponseTask:
        return ResponseTask(self._context, self._history, self._emit_counted)

    def _take_preemptive(self, command: CreateResponse, response: Response) -> ResponseTask | None:
        """The preemptive response, where it was begun for the same request."""
        task = self._preemptive
        if task is None or not response.stored:
            return None
        with suppress(RemoteProtocolError):
            if task.answers(self._request_for(command, response.voice, response.max_tokens)):
                self._preemptive = None
                return task
        return None

    async def run(self, task: ResponseTask) -> None:
        """Run a response that has begun to its last event, and truncate its items to what was heard."""
        try:
            await task.run()
        finally:
            self._out_of_band.discard(task)
            if self.active is task:
                self.active = None
                self._floor.response_ended()
        await self._heard.response_closed(task.response.id)

    async def _emit_counted(self, event: TranscriptionEvent | ConversationEvent) -> None:
        if isinstance(event, ResponseAudioDelta):
            self._heard.add(event)
        await self._emit(event)

    async def _make(
        self, response: Response, command: CreateResponse, config: ConversationConfig, items: list[Item]
    ) -> ResponseGeneration:
        """Begin to generate a response. One of the conversation waits for the end of a preemptive one, since the
        model's stream gives one response at a time.
        """
        profile, voice, most = self._context.model.profile, response.voice, response.max_tokens
        request = request_for(config, self._history, profile, command, voice, most, items)
        assert self._group
        assert self._stream
        if not response.stored:
            generation = ResponseGeneration(await self._context.model.open(self._context.owner), *request)
            self._group.start_soon(self._generate_out_of_band, generation)
            return generation
        await self.drop_preemptive()
        generation = ResponseGeneration(self._stream, *request)
        self._group.start_soon(generation.run)
        return generation

    async def _generate_out_of_band(self, generation: ResponseGeneration) -> None:
        try:
            await generation.run()
        finally:
            generation.model_stream.close()

    def _request_for(
        self, command: CreateResponse, voice: str | None, max_tokens: int | None, items: list[Item] | None = None
    ) -> ResponseRequest:
        profile = self._context.model.profile
        return request_for(self.config, self._history, profile, command, voice, max_tokens, items)

    # --- before it is asked for ---------------------------------------------------------------------------------------

    async def begin_preemptive(self, text: str, own: Item | None, audio: AudioPart | None = None) -> None:
        """Begin the preemptive response to a turn that may have ended with the transcript `text`.

        `own` is the turn's item where the history has one already; it is replaced by `text`. `audio` is the turn's
        audio, for a model that accepts media; it must be the same object that the turn's item will hold, or the
        response is not recognized as the one asked for.
        """
        assert self._stream
        assert self._group
        others = [i for i in self._history.items if i is not own]
        request = self._request_for(
            CreateResponse(),
            self.config.voice,
            self.config.max_tokens,
            [*others, Item("", parts=[ContentPart("input_audio", text, media=audio)])],
        )
        await self.drop_preemptive()
        task = self._preemptive = self._new_task()
        task.begin_preemptive(ResponseGeneration(self._stream, *request), self._group)

    def cancel_preemptive(self) -> None:
        """Cancel the preemptive response, and return at once. It ends within one step of the model; what the model's
        stream is asked for next waits for that.
        """
        if self._preemptive:
            self._preemptive.cancel_preemptive()

    async def drop_preemptive(self) -> None:
        """End the preemptive response and wait for its end, also when the caller is cancelled: the model's stream is
        free afterwards. Does nothing where there is none.
        """
        task, self._preemptive = self._preemptive, None
        if task:
            await task.drop()

    async def hear(self, turn: int, delta: str, *, prefills: bool) -> None:
        """Take in more of a turn's transcript; if it `prefills`, let the model prepare with the transcript so far, so
        that its response begins sooner. Does not wait for the computation. Failures are logged and not raised.
        """
        self._partial = (turn, self._partial[1] + delta if self._partial[0] == turn else delta)
        if prefills:
            await self._prefill([Item("", parts=[ContentPart("input_audio", self._partial[1].strip())])])

    async def prefill_audio(self, audio: AudioPart) -> None:
        """Let the model take in the audio so far of a turn that goes on. Waits for its encoder; failures are logged and
        not raised. `audio`: a part that grows.
        """
        self._holds_growing = True
        await self._prefill([Item("", parts=[ContentPart("input_audio", media=audio)])])

    async def drop_growing(self) -> None:
        """Give back what the model's stream holds of a turn that was dropped: its audio leaves the KV. Does nothing
        where a response is under way, whose messages will not have it.
        """
        if self._holds_growing and not self.is_busy:
            await self._prefill([])
        self._holds_growing = False

    async def _prefill(self, more: list[Item]) -> None:
        assert self._stream
        messages = self._history.messages(self.config.instructions, [*self._history.items, *more])
        try:
            await self._stream.prefill(messages, self.config.tools)
        except FAILURES as error:
            # Where the failure lasts, the response to the same messages will report it.
            log.warning("a turn was not prefilled: %s", error)
