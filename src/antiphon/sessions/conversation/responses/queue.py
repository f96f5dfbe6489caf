"""Decides when responses begin: responses to the user's turns, to a client's requests, and to a long silence."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import anyio
import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import AudioPart
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPart,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    IdleTimeoutReached,
    Item,
    Response,
    UserTurnCommitted,
)
from antiphon.events.tools import CallOptions
from antiphon.events.transcription import OverlapDecided
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation, rejected
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.item_media import ItemMediaResolver
from antiphon.sessions.conversation.native_response import ANSWER_UNITS, NativeResponse
from antiphon.sessions.conversation.native_turns import NativeTurns
from antiphon.sessions.conversation.responses.heard import HeardResponses
from antiphon.sessions.conversation.responses.kept import KeptResponse
from antiphon.sessions.conversation.responses.pending_calls import PendingCalls
from antiphon.sessions.conversation.responses.responder import Responder
from antiphon.sessions.conversation.responses.response import ResponseTask
from antiphon.sessions.conversation.responses.server_calls import ServerCalls
from antiphon.sessions.conversation.responses.session_tools import SessionTools
from antiphon.sessions.conversation.responses.waiting_requests import AFTER_CALLS, WaitingRequests
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.text.said import MODEL, SYSTEM, USER, said_so_far
from antiphon.turns.floor import (
    BeginResponse,
    CancelActive,
    Floor,
    FloorCommand,
    Phase,
    RespondInstead,
    SilenceOutput,
)

MINUTE = 60 * SAMPLE_RATE_HZ
# The reason that the client gets for a response that is cancelled because its session ends.
SESSION_ENDED = "session_ended"
# The names of those who speak, in the text that a model gets of a conversation.
SPEAKERS: Mapping[str, str] = {"system": SYSTEM, "user": USER, "assistant": MODEL}
# What a conversation model may have got besides text.
Unstored = Literal["audio", "images"]


class ResponseQueue:
    """Begins each response of one conversation when nothing delays it any more, and runs it in a task.

    It owns six parts. `responder` has the responses under way. `native` has the turns of a native model, which also
    speaks the requested responses; it is None for any other model. `item_media` reads the images and audio of items.
    `tools` and `calls` have the functions that tool servers carry out, and their calls. `pending` has all calls whose
    results are not known yet. Call `open` first, `end` when no more audio arrives, and `close` last.

    - `floor`: decides when a response to the user's turns is due.
    - `heard`: reports how much audio is still to be played.
    - `listener`: reports how much audio has arrived.
    - `emit`: awaited with the events for the client.
    """

    def __init__(
        self,
        config: ConversationConfig,
        context: ConversationContext,
        history: ConversationHistory,
        floor: Floor,
        listener: TranscriptionSession,
        heard: HeardResponses,
        emit: EmitConversation,
    ) -> None:
        model = context.model
        self.tools = SessionTools(context.tool_servers, history, emit, context.new_id)
        self.responder = Responder(config, context, history, emit, heard, floor, self.tools)
        self.native: NativeTurns | None = None
        if model.native:
            self.native = NativeTurns(
                model.native,
                self._begin_native,
                emit,
                context.on_unit,
                context.clock,
                on_away=self._native_left,
                may_return=self._is_silent,
            )
            self._answer_s = ANSWER_UNITS * model.native.profile.unit_s
        self.item_media = ItemMediaResolver(
            history, context.image_reader, context.transcriber, emit, accepts_media=model.profile.accepts_media
        )
        self.calls = ServerCalls(self.tools, history, emit, context.new_id)
        self.pending = PendingCalls(self.calls, history, emit, context.new_id, self._say_filler)
        self._call_options = context.calls
        self._new_id = context.new_id
        self._history = history
        self._floor = floor
        self._listener = listener
        self._heard = heard
        self._emit = emit
        self._waiting = WaitingRequests()
        # The maximum of preemptive responses per minute, None for no limit, and the times of the latest ones, in
        # samples of the microphone.
        self._max_preemptive = model.profile.max_preemptive
        self._guessed: deque[int] = deque(maxlen=self._max_preemptive)
        # The scope of the idle timeout, and whether it was stopped by speech that may turn out to have no words.
        self._idle: anyio.CancelScope | None = None
        self._idle_is_held = False
        self._group: anyio.abc.TaskGroup | None = None
        # The second of audio at which the user's newest words were transcribed.
        self._words_s = -math.inf

    async def open(self, group: anyio.abc.TaskGroup) -> None:
        """Open the model's stream. Responses run as tasks of `group`. Raises Refused if the model has no room for
        another conversation, and ModelError if a native model fails.
        """
        await self.responder.open(group)
        self._group = group
        await self.calls.open()
        self.tools.open(group, self.responder.config.servers)
        options = self.responder.config.calls
        if self._history.is_restored and options and options.answers_results and (left := self.pending.left_over()):
            group.start_soon(self._carry_out, left, True)
        if self.native:
            await self.native.open(self.responder.config, self._recall, is_continued=self._history.is_restored)
            group.start_soon(self.native.run)

    def end(self) -> None:
        """Cancel all responses, because no more audio arrives. The responses to waiting requests begin as cancelled."""
        self._floor.close()
        if self.native:
            self.native.close()
        self.stop_idle()
        self.pending.cancel()
        self.tools.close()
        self.responder.cancel_all(SESSION_ENDED)

    async def close(self) -> None:
        """Close the model's stream. Call it when no response is under way, and also if `open` failed."""
        await self.responder.close()

    @property
    def takes_turns(self) -> bool:
        """Whether a native model takes turns by itself. False while its server is away, and for all other models."""
        return self.native is not None and not self.native.is_away

    @property
    def owed(self) -> list[CreateResponse]:
        """The conversation's responses that are under way, due to turns or to the results of calls, and all that wait,
        in order.
        """
        active = self.responder.active
        # A response that is being cancelled because it is due again counts once.
        is_under_way = active and active.response.status == "in_progress" and not active.is_filler
        is_again = self._floor.response_due and active and active.cancelled
        under_way = [active.response.request] if active and is_under_way and not is_again else []
        is_due = self._floor.response_due or self.pending.is_due or self.calls.is_running
        due = [CreateResponse()] if is_due else []
        if self.native and self.takes_turns:
            due += self.native.owed
        return [*under_way, *due, *self._waiting.owed]

    @property
    def closing(self) -> list[CreateResponse]:
        """The request of the response that has ended by itself, until it is closed."""
        active = self.responder.active
        ended = active is not None and active.response.status in ("completed", "incomplete", "failed")
        ended = ended and not (active and active.is_filler)
        return [active.response.request] if active and ended else []

    @property
    def unstored(self) -> list[Unstored]:
        """What the model has got and the items do not contain as text."""
        parts = [part for item in self._history.items for part in item.parts]
        heard = self._listener.audio_s > 0 if self.native else any(isinstance(p.media, AudioPart) for p in parts)
        seen = any(p.kind == "input_image" and (p.image or p.media) for p in parts)
        seen = seen or bool(self.native and self.native.has_images)
        found: list[tuple[Unstored, bool]] = [("audio", heard), ("images", seen)]
        return [kind for kind, is_found in found if is_found]

    def has_unresolved(self) -> bool:
        """Whether an item of the history has no transcript yet, or media of an item are not resolved."""
        return bool(self.item_media.unresolved) or self._floor.has_untranscribed()

    # --- requests of the client ---------------------------------------------------------------------------------------

    def resolve(self, item: Item, command: CreateItem | CreateResponse) -> None:
        """Begin to resolve the media of a command's item. Responses that need the item wait until that is done."""
        assert self._group
        if item.kind == "function_call_output":
            self.pending.answered(item.call_id)
        if self.item_media.begin(item):
            language = self.responder.config.transcription.language
            self._group.start_soon(self._resolve, item, command.event_id, language)

    async def _resolve(self, item: Item, event_id: str | None, language: str | None) -> None:
        await self.item_media.resolve(item, event_id, language)
        await self.go_on()

    async def ask(self, command: CreateResponse) -> None:
        """Begin a response, or add it to the waiting ones. If it can do neither, it emits a rejection and does not
        raise.
        """
        try:
            await self._ask(command)
        except RemoteProtocolError as error:
            await self._emit(rejected(error, command))

    async def _ask(self, command: CreateResponse) -> None:
        is_given = self.native or self._history.items or command.items or command.instructions
        if self.responder.config.duplex and not is_given:
            raise RemoteProtocolError("response_create_without_input", "There is nothing to answer.")
        self._waiting.check()
        for given in command.items or ():
            if isinstance(given, Item):
                self.resolve(given, command)
        if command.when_busy == "cut":
            await self.interrupt("client_cancelled")
        if self._has_to_wait(command):
            self._waiting.add(command)
        elif self.native and self.takes_turns:
            self.native.ask(command)
        else:
            self._begin(command)

    def approve(self, answer: Item) -> None:
        """Carry out the call that the client has approved, or drop it, and then begin the response that is due. Returns
        at once. Raises RemoteProtocolError if no call waits for this answer.
        """
        assert self._group
        self._group.start_soon(self._approve, self.calls.answer(answer))

    async def _approve(self, call: Item | None) -> None:
        if call:
            await self.calls.make(call)
        await self.go_on()

    def cancel(self, response_id: str | None) -> None:
        """Cancel the response with this id. None means the conversation's own response and its waiting requests. Does
        not wait for the end of the response. Raises RemoteProtocolError if no such response exists.
        """
        is_cut = self._cut_by_client() if response_id is None else self.pending.cut(response_id)
        if response_id is None and (self._withdraw() or is_cut) and self.responder.active is None:
            return
        if response_id is None or not is_cut:
            self.responder.cancel(response_id)

    def _withdraw(self) -> bool:
        """Cancel the waiting requests for the conversation's own responses. Returns whether any were waiting."""
        is_due = bool(self.native and self.native.withdraw())
        return self._waiting.withdraw() or is_due

    async def interrupt(self, reason: str) -> None:
        """Cancel the response with `reason`, and truncate it to the part that was heard. If the client cancels, the
        waiting responses are cancelled too.
        """
        if reason == "client_cancelled":
            self._waiting.withdraw()
            self._cut_by_client()
        elif reason == "turn_detected":
            self._cut()
        await self.responder.interrupt(reason)

    def _cut_by_client(self) -> bool:
        """Cut off all turns whose calls run, unless the client interrupts another response. Returns whether there were
        such turns.
        """
        active = self.responder.active
        return bool(active is None or active.is_filler) and self.pending.cut()

    def _cut(self) -> None:
        """Cut off the turn of the newest response, if the user interrupts it: no response is due to its calls."""
        if self.responder.active or self._heard.goes_on:
            self.pending.cut(self.responder.answer_id)

    def _has_to_wait(self, request: CreateResponse) -> bool:
        """Whether a request has to wait for a turn's transcript, for an item's media, or for another response. It waits
        for a response that is being closed after it was cancelled, and for any other response if `when_busy` says so.
        """
        active = self.responder.active
        makes_way = active is not None and (active.cancelled or active.is_filler)
        is_first = active is None or (request.when_busy == "refuse" and not (request.stored and makes_way))
        if self.native and self.takes_turns:
            return not is_first or (request.when_busy == "wait" and self.native.has_request)
        return not is_first or self.has_unresolved()

    # --- due responses ------------------------------------------------------------------------------------------------

    async def go_on(self, *, interrupts: bool = True) -> None:
        """Begin the response that is due, and the waiting responses. With `interrupts`, the due response may end a
        response that is under way.
        """
        await self.respond_if_due(interrupts=interrupts)
        while taken := self._waiting.take(self._has_to_wait):
            request, withdrawn = taken
            await self.ask(request)
            if self._floor.is_closed:
                self.responder.cancel_all(SESSION_ENDED)
            elif withdrawn and self.native and self.takes_turns:
                self.native.withdraw()
            elif withdrawn and self.responder.active:
                self.responder.cancel(None)
        if self.pending.is_due and self._floor.phase is Phase.SILENT and not self._has_to_wait(AFTER_CALLS):
            # A model that calls functions again and again would never speak.
            # So would one that has to.
            has_choice = self.responder.config.tool_choice in ("auto", "none")
            choice = None if has_choice else "auto"
            self._begin(replace(AFTER_CALLS, tool_choice=choice if self.calls.may_call else "none"), unasked=True)

    async def respond_if_due(self, *, interrupts: bool = True) -> None:
        """Begin the response that is due to the user's turns, if the floor allows it now."""
        active = self.responder.active
        may_cut = bool(active and not active.cancelled) and self.responder.config.interrupt_response and interrupts
        await self.obey(self._floor.go_on(is_resolved=not self.has_unresolved(), may_cut=may_cut))

    async def obey(self, commands: list[FloorCommand]) -> None:
        """Carry out the floor's commands in order."""
        for command in commands:
            match command:
                case CancelActive(reason):
                    self._cut()
                    assert self.responder.active
                    self.responder.active.cancel(reason)
                case SilenceOutput():
                    self._cut()
                    await self._heard.silence()
                case BeginResponse():
                    self._begin(CreateResponse(), unasked=True)
                case RespondInstead():
                    await self._emit(OverlapDecided(None, True, "turn_answered"))
                    await self.interrupt("turn_detected")

    def may_guess(self, turn: int) -> bool:
        """Return whether a preemptive response to a turn may begin, and count it against the model's budget. It may
        begin if no response is under way or waiting, all earlier speech has its transcript, and the budget is not
        spent.
        """
        if self.responder.active or self._waiting or self._floor.has_untranscribed(turn) or self._max_preemptive == 0:
            return False
        now = self._listener.now
        if self._max_preemptive and len(self._guessed) == self._max_preemptive and now - self._guessed[0] < MINUTE:
            return False
        if self._max_preemptive:
            self._guessed.append(now)
        return True

    def give_back(self, turn: int) -> None:
        """Say the rest of the response that the speech of `turn` has ended, because it was no reason to end it. A no-op
        if nothing of that response is left.
        """
        if kept := self.responder.take_kept(turn):
            assert self._group
            self._group.start_soon(self._say_rest, kept)

    async def _say_rest(self, kept: KeptResponse) -> None:
        if task := await self.responder.say_rest(kept):
            await self._run(task)
        else:
            await self.go_on()

    # --- a native model whose server is away --------------------------------------------------------------------------

    def note_words(self) -> None:
        """Note that a turn of the user has words, which a native model may be about to answer."""
        self._words_s = self._listener.audio_s

    async def _native_left(self, request: CreateResponse | None) -> None:
        """Answer what the native model did not: the request that is due, or the user's newest turn."""
        config = self.responder.config
        answers = config.create_response and config.transcription.vad is not None
        newest = next(reversed(self._history.messages()), None)
        is_recent = self._listener.audio_s - self._words_s <= self._answer_s
        if request:
            self._waiting.add(replace(request, when_busy="wait"))
        elif answers and is_recent and newest and newest.role == "user":
            self._floor.owe_response()
        await self.go_on()

    def _is_silent(self) -> bool:
        """Whether neither side speaks and nothing is to be answered, so that a native model may take turns again."""
        return not (self._listener.spoken_ms or self._is_busy() or self.owed or self._heard.left_s > 0)

    def _recall(self) -> str:
        messages = self._history.messages()
        return said_so_far((SPEAKERS[m.role], m.text) for m in messages if m.role in SPEAKERS)

    # --- a response and its end ---------------------------------------------------------------------------------------

    def _begin(self, command: CreateResponse, *, unasked: bool = False) -> None:
        task = self.responder.begin(command, unasked=unasked)
        if task:
            if command.stored and command.items is None:
                self.calls.response_began(after_calls=self.calls.is_due)
            assert self._group
            self._group.start_soon(self._run, task)

    async def _begin_native(self, source: NativeResponse) -> None:
        task = await self.responder.begin_unasked(source)
        if task:
            assert self._group
            self._group.start_soon(self._run, task)

    async def _run(self, task: ResponseTask) -> None:
        """Run a response to its end. Then begin the next response that is due, or start the idle timeout."""
        await self.responder.run(task)
        if task.response.stored:
            self._begin_idle()
            assert self._group
            self._group.start_soon(self._carry_out, task.response, not task.is_filler)
        await self.go_on()

    async def _carry_out(self, response: Response, fills: bool) -> None:
        """Wait for the results of a response's calls, with fillers if `fills`, and begin the response to them."""
        if self._floor.is_closed and response.status == "completed":
            return
        chosen = self.responder.config.calls
        options = (chosen or self._call_options) if fills else CallOptions()
        await self.pending.wait(response, options, of_client=chosen is not None)
        await self.go_on()

    def _say_filler(self, text: str, calls: Sequence[Item]) -> None:
        """Say a filler, unless somebody speaks or is about to. A conversation in text has none."""
        is_silent = self._floor.phase is Phase.SILENT and not (self.has_unresolved() or self._heard.left_s > 0)
        if is_silent and not self._waiting and (task := self.responder.begin_filler(text, calls)):
            assert self._group
            self._group.start_soon(self._run, task)

    # --- silence of the user ------------------------------------------------------------------------------------------

    def _begin_idle(self) -> None:
        """Restart the idle timeout. A no-op if none is configured, or if it does not apply to the turn detection."""
        self.stop_idle()
        self._idle_is_held = False
        timeout_ms, vad = self.responder.config.idle_timeout_ms, self.responder.config.transcription.vad
        may_wait = not self._floor.is_closed and vad and vad.eagerness is None
        if timeout_ms is not None and self._group and may_wait:
            self._idle = anyio.CancelScope()
            self._group.start_soon(self._wait_for_silence, timeout_ms / 1000, self._idle)

    def stop_idle(self) -> None:
        """Stop the idle timeout until a response has ended, or until `go_on_idle` is called."""
        if self._idle:
            self._idle.cancel()
            self._idle, self._idle_is_held = None, True

    def go_on_idle(self) -> None:
        """Restart the idle timeout if `stop_idle` has stopped it. Call it after speech that turned out to have no
        words.
        """
        if self._idle_is_held and not self._is_busy():
            self._begin_idle()

    def _is_busy(self) -> bool:
        calls = self.calls.is_running or self.calls.awaits_approval
        return bool(self.responder.active) or self._floor.user_speaks or self.has_unresolved() or calls

    async def _wait_for_silence(self, timeout_s: float, scope: anyio.CancelScope) -> None:
        """Request a response after a silence of `timeout_s`, counted from the end of playback."""
        with scope:
            await anyio.sleep(self._heard.clock_left_s)
            since_s, is_over = self._listener.audio_s, False
            while not is_over:
                await anyio.sleep(timeout_s)
                is_over = not self._is_busy()
            self._idle = None
            item = Item(self._new_id("item_"), parts=[ContentPart("input_audio")])
            await self._emit(IdleTimeoutReached(item.id, int(since_s * 1000), int(self._listener.audio_s * 1000)))
            previous = self._history.add(item)
            await self._emit(UserTurnCommitted(None, item.snapshot(), previous))
            if not self.responder.active:
                await self.ask(CreateResponse())
