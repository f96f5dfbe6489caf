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
from antiphon.contracts.playback import PlaybackTracker
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPart,
    ContentPosition,
    ConversationConfig,
    ConversationEvent,
    CreateResponse,
    Item,
    ItemTruncated,
    Response,
    ResponseAudioDelta,
)
from antiphon.events.playback import PlaybackCleared, PlaybackHoldChanged
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
from antiphon.sessions.conversation.responses.playout import Playout
from antiphon.sessions.conversation.responses.preemptive_budget import PreemptiveBudget
from antiphon.sessions.conversation.responses.response import ResponseTask
from antiphon.turns.floor import Floor

log = logging.getLogger(__name__)

# Responses out of band that a conversation may have under way: each holds KV and takes rows of the model's steps.
MAX_OUT_OF_BAND = 4
# Why a response is cancelled that the end of its session cuts off.
SESSION_ENDED = "session_ended"


class Responder:
    """Begins, ends and truncates the responses of one conversation. Call `open` before anything else, `close` at the
    end.

    Besides the one response of the conversation, `active`, clients may ask for responses out of band: these are not
    stored in the history, run at the same time, and each have a model stream of their own.

    - `config`: the session replaces it; it counts for responses that begin afterwards.
    - `context`: the model, and what else a conversation is assembled from.
    - `floor`: is told when a response of the conversation begins, and when its last event is out.
    - `playback`: what plays the responses in place of the client, None where nobody reports what was heard.
    - `now`: the number of samples at 16 kHz that the microphone has given.
    - `on_ended`: is awaited with each response task that has ended, after its items are closed and truncated.
    """

    def __init__(
        self,
        config: ConversationConfig,
        context: ConversationContext,
        conversation: ConversationHistory,
        emit: EmitConversation,
        playout: Playout,
        floor: Floor,
        *,
        playback: PlaybackTracker | None,
        now: Callable[[], int],
        on_ended: Callable[[ResponseTask], Awaitable[None]],
    ) -> None:
        self.config = config
        self._context = context
        self._model = model = context.model
        self._conversation = conversation
        self._emit = emit
        self._playout = playout
        self._floor = floor
        self._new_id = context.new_id
        self._count = context.count
        self._playback = playback
        self._now = now
        self._on_ended = on_ended
        self._owner = context.owner
        self._stream: ConversationStream | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self.active: ResponseTask | None = None
        # The response that nobody has asked for yet, and the user's item that it answers.
        self._unasked: tuple[ResponseTask, str | None] | None = None
        self._out_of_band: set[ResponseTask] = set()
        # What is heard is paused, because somebody speaks over it.
        self._is_held = False
        # The response that is generated before it is asked for. Of equal requests it answers any.
        self._preemptive: ResponseTask | None = None
        self._budget = PreemptiveBudget(model.profile.max_preemptive)
        # Whether the model's stream has taken in audio of a turn that may yet be dropped.
        self._holds_growing = False
        # The turn that had a delta last, and its text so far.
        self._partial = (-1, "")
        # Truncations, in milliseconds heard, that wait until their response is closed.
        self._truncations: list[tuple[ContentPosition, int]] = []

    @property
    def is_busy(self) -> bool:
        """Whether the model's stream is producing a response, be it a preemptive one."""
        return bool(self.active or self._preemptive)

    async def open(self, group: anyio.abc.TaskGroup) -> None:
        """Open the model's stream for the conversation; responses run as tasks of `group`. Raises Refused where the
        model has no room for another conversation.
        """
        self._stream = await self._model.open(self._owner)
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
        await self.silence()

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

    def begin(self, command: CreateResponse, *, unasked: bool = False) -> None:
        """Begin a response in a task of its own, and return at once. A failure of the model becomes a failed response.

        `unasked`: the turn has ended, and the client has not asked. Its request for just that, before it has said
        something new, is then the response under way.

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
                return
            raise RemoteProtocolError(
                "conversation_already_has_active_response",
                f"Conversation already has an active response in progress: {self.active.response.id}.",
            )
        # As it is now: what is configured or created until its task runs is for the next one.
        config, items = self.config, list(self._conversation.items)
        self._start(command, lambda response: self._make(response, command, config, items))
        if command.stored:
            assert self.active
            self._unasked = (self.active, self._newest_user_item()) if unasked else None

    def _newest_user_item(self) -> str | None:
        return next((i.id for i in reversed(self._conversation.items) if i.role == "user"), None)

    async def begin_unasked(self, source: NativeResponse) -> None:
        """Begin a response of a native model's turn. Waits until the response before it is closed. Where the turn was
        cut by then, because it was interrupted, `source` is dropped: a client that has asked for it is told of its end,
        any other never learns of it.
        """
        while self.active:
            await self.active.ended.wait()
            await anyio.lowlevel.checkpoint()

        if source.is_cut and not (source.due and source.due.request):
            await source.drop()
            return

        async def give_source(_: Response) -> ResponseSource:
            return source

        request = source.due.request if source.due else None
        self._start(request or CreateResponse(), give_source)
        if source.is_cut and self.active:
            self.active.cancel(source.cut_reason)

    def _start(self, command: CreateResponse, make: Callable[[Response], Awaitable[ResponseSource]]) -> None:
        config = self.config
        response = Response(
            self._new_id("resp_"),
            wants_audio(config, self._model.profile, command),
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
        assert self._group
        self._group.start_soon(self._run, task)

    def _new_task(self) -> ResponseTask:
        return ResponseTask(self._context, self._conversation, self._emit_counted)

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

    async def _run(self, task: ResponseTask) -> None:
        try:
            await task.run()
        finally:
            self._out_of_band.discard(task)
            if self.active is task:
                self.active = None
                self._floor.response_ended()
        await self._truncate_pending(task.response.id)
        await self._on_ended(task)

    async def _emit_counted(self, event: TranscriptionEvent | ConversationEvent) -> None:
        if isinstance(event, ResponseAudioDelta):
            self._playout.add(event, self._now())
        await self._emit(event)

    async def _make(
        self, response: Response, command: CreateResponse, config: ConversationConfig, items: list[Item]
    ) -> ResponseGeneration:
        """Begin to generate a response. One of the conversation waits for the end of a preemptive one, since the
        model's stream gives one response at a time.
        """
        profile, voice, most = self._model.profile, response.voice, response.max_tokens
        request = request_for(config, self._conversation, profile, command, voice, most, items)
        assert self._group
        assert self._stream
        if not response.stored:
            generation = ResponseGeneration(await self._model.open(self._owner), *request)
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
        return request_for(self.config, self._conversation, self._model.profile, command, voice, max_tokens, items)

    # --- its audio ----------------------------------------------------------------------------------------------------

    async def silence(self) -> None:
        """Stop playback of all responses and report a `PlaybackCleared` for each that was cut off.

        What was not heard is cut from the history: at once for a response that is closed, after its end for one under
        way. Without a `playback` nothing is cut; the client truncates by itself.
        """
        self._playout.stop(self._now())
        self._is_held = False
        stopped = self._playback.silence() if self._playback else []
        for response_id in dict.fromkeys(place.response_id for place, _ in stopped):
            await self._emit(PlaybackCleared(response_id))
            await self.truncate([c for c in stopped if c[0].response_id == response_id])

    async def hold(self, held: bool) -> None:
        """Pause what is heard of the responses, or let it go on, because somebody speaks over them. A client that plays
        by itself is told where it wants to be. Repeating the present state does nothing; `silence` ends a hold.
        """
        if held == self._is_held:
            return
        self._is_held = held
        self._playout.hold(held)
        self._count("ducks" if held else "ducks_without_interruption", 1)
        if self._playback:
            self._playback.hold(held)
        if self.config.reports_ducking:
            await self._emit(PlaybackHoldChanged(held))

    async def truncate(self, heard: list[tuple[ContentPosition, int]]) -> None:
        """Truncate items to the milliseconds of each that were heard, and report an `ItemTruncated` for each. Items of
        a response under way are truncated once it is closed; items that were deleted meanwhile are passed over.
        """
        self._truncations += heard
        for response_id in dict.fromkeys(place.response_id for place, _ in heard):
            if all(a.response.id != response_id for a in self._all()):
                await self._truncate_pending(response_id)

    async def _truncate_pending(self, response_id: str) -> None:
        due = [c for c in self._truncations if c[0].response_id == response_id]
        self._truncations = [c for c in self._truncations if c[0].response_id != response_id]
        for place, heard_ms in due:
            if any(i.id == place.item_id for i in self._conversation.items):
                kept_ms = self._conversation.truncate(place.item_id, place.content_index, heard_ms, from_whole=True)
                await self._emit(ItemTruncated(place.item_id, place.content_index, kept_ms))

    # --- before it is asked for ---------------------------------------------------------------------------------------

    async def begin_preemptive(self, text: str, own: Item | None, audio: AudioPart | None = None) -> None:
        """Begin the preemptive response to a turn that may have ended with the transcript `text`.

        `own` is the turn's item where the history has one already; it is replaced by `text`. `audio` is the turn's
        audio, for a model that accepts media; it must be the same object that the turn's item will hold, or the
        response is not recognized as the one asked for. Nothing is begun where the model's budget for such responses is
        spent.
        """
        if not self._budget.take(self._now()):
            return
        assert self._stream
        assert self._group
        others = [i for i in self._conversation.items if i is not own]
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
        messages = self._conversation.messages(self.config.instructions, [*self._conversation.items, *more])
        try:
            await self._stream.prefill(messages, self.config.tools)
        except FAILURES as error:
            # Where the failure lasts, the response to the same messages will report it.
            log.warning("a turn was not prefilled: %s", error)
