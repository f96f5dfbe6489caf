"""The responses of one conversation: its own response under way, out-of-band responses, and a preemptive response.

When a response ends, for whatever reason, its audio stops. After its items are closed, the history is cut to the part
that was heard.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import anyio
import anyio.abc
import anyio.lowlevel

from antiphon.contracts import AudioPart, ReplyOptions
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ConversationConfig,
    ConversationEvent,
    CreateResponse,
    Item,
    Response,
    ResponseAudioDelta,
)
from antiphon.events.transcription import TranscriptionEvent
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation
from antiphon.sessions.conversation.history import ROOT, ConversationHistory
from antiphon.sessions.conversation.native_response import NativeResponse
from antiphon.sessions.conversation.responses.generation import (
    FAILURES,
    ModelStream,
    ResponseGeneration,
    ResponseRequest,
    ResponseSource,
    given,
    request_for,
    spoken_item,
    voice_options,
    wants_audio,
    with_hint,
)
from antiphon.sessions.conversation.responses.heard import HeardResponses
from antiphon.sessions.conversation.responses.kept import KeptResponse
from antiphon.sessions.conversation.responses.response import ResponseTask
from antiphon.sessions.conversation.responses.session_tools import SessionTools
from antiphon.turns.floor import Floor, Phase

log = logging.getLogger(__name__)

# Maximum number of out-of-band responses under way per conversation. Each holds KV and takes rows of the model's steps.
MAX_OUT_OF_BAND = 4
MakeSource = Callable[[Response], Awaitable[ResponseSource]]
Asked = tuple[ConversationConfig, CreateResponse]


class Responder:
    """Begins and ends the responses of one conversation. Call `open` before anything else, `close` at the end.

    `active` is the one response of the conversation itself. In addition, clients may request responses out of band.
    These are not stored in the history, run concurrently, and each have a separate model stream.

    - `config`: the configuration for responses that begin from now on. The session replaces it.
    - `context`: the model and the other dependencies of a conversation.
    - `heard`: gets the audio of the responses, and truncates their items.
    - `floor`: notified when a response of the conversation begins, and after its last event.
    - `tools`: the functions that tool servers carry out. Responses out of band do not have them.
    """

    def __init__(
        self,
        config: ConversationConfig,
        context: ConversationContext,
        history: ConversationHistory,
        emit: EmitConversation,
        heard: HeardResponses,
        floor: Floor,
        tools: SessionTools,
    ) -> None:
        self.config = config
        self._tools = tools
        self._context = context
        self._history = history
        self._emit = emit
        self._heard = heard
        self._floor = floor
        self._stream = ModelStream(context)
        self._group: anyio.abc.TaskGroup | None = None
        self.active: ResponseTask | None = None
        # The newest response of the conversation itself since the user's last turn ended.
        self._answer: ResponseTask | None = None
        # A response that was not requested, if one is under way, and the id of the user's item that it answers.
        self._unasked: tuple[ResponseTask, str | None] | None = None
        # The out-of-band responses under way, in order; the values mean nothing.
        self._out_of_band: dict[ResponseTask, None] = {}
        # The response that is generated before it is requested. It will be used for a request that equals its own.
        self._preemptive: ResponseTask | None = None
        # What is left of a response that was ended by the sound of speech, until the speech has words.
        self.kept: KeptResponse | None = None
        # Whether the model's stream holds audio of a turn that may still be dropped.
        self._holds_growing = False
        # The turn with the latest delta, and its text so far.
        self._partial = (-1, "")

    @property
    def is_busy(self) -> bool:
        """Whether the model's stream is producing a response, preemptive or not, or waits to go on with one."""
        return bool(self.active or self._preemptive or (self.kept and self.kept.is_busy))

    @property
    def out_of_band(self) -> dict[str, CreateResponse]:
        """The requests for the out-of-band responses under way that the client has not cancelled, by response id."""
        responses = [task.response for task in self._out_of_band]
        return {r.id: r.request for r in responses if r.reason != "client_cancelled"}

    async def open(self, group: anyio.abc.TaskGroup) -> None:
        """Open the model's stream for the conversation. Responses are generated in tasks of `group`. Raises Refused if
        the model has no room for another conversation.
        """
        await self._stream.open()
        self._group = group

    async def close(self) -> None:
        """End the preemptive response, wait for its end and close the model's stream. Call it when no response of the
        conversation is under way, and also if `open` failed.
        """
        await self.drop_preemptive()
        self._stream.close()

    def park(self) -> bool:
        """Close the model's stream, which frees its KV, unless a response is produced. Returns whether it is closed."""
        return not (self.is_busy or self._out_of_band) and self._stream.close()

    async def reopen(self) -> None:
        """Open the model's stream again after `park`. Raises Refused if the model has no room."""
        await self._stream.open()

    def cancel_all(self, reason: str) -> None:
        """Cancel all responses with `reason`, including the preemptive and out-of-band ones. Returns at once. The tasks
        of the responses then close them in order.
        """
        self.cancel_preemptive()
        self.cancel_kept()
        for task in self._all():
            task.cancel(reason)

    async def interrupt(self, reason: str) -> None:
        """Cancel the conversation's response with `reason`, cancel the preemptive response, and stop playback. Does not
        wait for the end of the responses.
        """
        self.cancel_preemptive()
        self.cancel_kept()
        if self.active:
            self.active.cancel(reason)
        await self._heard.silence()

    def cancel(self, response_id: str | None) -> None:
        """Cancel the response with this id, which may be out of band. None means the conversation's own response. Does
        not wait for its end. Raises RemoteProtocolError if no such response is under way.
        """
        self.cancel_kept()
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
        """Begin a response and return it. The caller has to `run` it. A failure of the model becomes a failed response.

        `unasked`: the turn has ended, but the client has not requested a response. If the client then sends a plain
        request before the user says something new, the response under way counts as the requested one, and None is
        returned.

        Raises RemoteProtocolError if a stored response is requested while one is under way, or an out-of-band response
        while MAX_OUT_OF_BAND of them are under way.
        """
        if not command.stored and len(self._out_of_band) >= MAX_OUT_OF_BAND:
            message = f"Conversation already has {MAX_OUT_OF_BAND} responses out of band in progress."
            raise RemoteProtocolError("too_many_responses", message)
        if command.stored and self.active:
            is_plain = replace(command, metadata=None, event_id=None) == CreateResponse()
            if is_plain and self._unasked == (self.active, self._history.newest_user_item()):
                self._unasked = None
                return None
            message = f"Conversation already has an active response in progress: {self.active.response.id}."
            raise RemoteProtocolError("conversation_already_has_active_response", message)
        # Copied now, because changes made before the task runs are for the next response.
        config, items = self.config, list(self._history.items)
        task = self._start(command, lambda response: self._make(response, command, config, items))
        if command.stored:
            self._unasked = (task, self._history.newest_user_item()) if unasked else None
        return task

    def turn_ended(self) -> None:
        """Record that a turn of the user has ended, which no response has answered yet."""
        self._answer = None

    def is_false_start(self, onset_s: float, most_s: float) -> bool:
        """Whether the user, who speaks since `onset_s` seconds of audio, goes on with the last turn.

        True if the response to that turn has not begun, or became audible at most `most_s` before and is not over.
        False if that response contains a function call, because the client may have carried it out.
        """
        if self._answer is None:
            return True
        response = self._answer.response
        is_under_way = self._answer is self.active and response.status == "in_progress"
        if any(item.kind == "function_call" for item in response.output):
            return False
        if (began_s := self._heard.began_s(response.id)) is None:
            return is_under_way
        return onset_s - began_s <= most_s and (is_under_way or self._heard.goes_on)

    def retract(self) -> None:
        """Hide the response to the user's last turn from the model, because it began before the user had finished."""
        for item in self._answer.response.output if self._answer else ():
            item.retracted = True

    # --- the rest of a response ---------------------------------------------------------------------------------------

    def keep(self, turn: int) -> None:
        """Keep what is left of the newest response, which the speech of `turn` is about to end. A no-op for a response
        that has more than one message or calls a function, and if it is not known how much was heard.
        """
        task = self._answer
        if task is None or task.cancelled or task.response.status not in ("in_progress", "completed"):
            return
        output = task.response.output
        if len(output) != 1 or output[0].kind != "message":
            return
        heard_s = self._heard.heard_s(output[0].id)
        if heard_s is not None:
            task.keeps = task is self.active
            self.kept = KeptResponse(turn, task, output[0], heard_s)

    def keeps(self, turn: int) -> bool:
        """Whether the response that the speech of `turn` has ended was kept, and not given up."""
        return self.kept is not None and self.kept.turn == turn and not self.kept.is_cancelled

    def take_kept(self, turn: int) -> KeptResponse | None:
        """Remove and return what is left of the response that the speech of `turn` has ended, unless it was given up.
        The caller has to pass it to `say_rest`.
        """
        if not self.keeps(turn):
            return None
        kept, self.kept = self.kept, None
        return kept

    def cancel_kept(self) -> None:
        """Give up the rest of the response that was kept. Returns at once."""
        if self.kept:
            self.kept.cancel()

    async def drop_kept(self) -> None:
        """Give up the rest of the response that was kept, and wait for the end of its generation."""
        kept, self.kept = self.kept, None
        if kept:
            await kept.drop()

    async def say_rest(self, kept: KeptResponse) -> ResponseTask | None:
        """Begin a response that says the rest of another one, from the sample at which it was stopped, and return it.
        The caller has to `run` it. Waits until the first response is closed. If the floor is taken by then, or if
        nothing is left to say, the rest is dropped and None is returned.
        """
        await self._drop_guess()
        while self.active:
            await self.active.ended.wait()
            await anyio.lowlevel.checkpoint()
        item = kept.item
        if any(i is item for i in self._history.items):
            if kept.cut_ms is not None:
                await self._heard.truncate_as_asked(item.id, 0, kept.cut_ms)
            pcm = self._heard.unheard(item.id, item.parts[0].audio_s)
            is_free = self._floor.phase is Phase.SILENT and not (self._floor.response_due or self.active)
            if pcm is not None and (len(pcm) or kept.task.kept_source) and is_free and not kept.is_cancelled:
                task = self._start(kept.task.response.request, given(kept.rest(pcm)))
                task.continues = item.id
                return task
        await kept.drop()
        return None

    @property
    def answer_id(self) -> str:
        """The id of the newest response since the user's last turn ended, without fillers; "" if there is none."""
        return self._answer.response.id if self._answer else ""

    def begin_filler(self, text: str, calls: Sequence[Item]) -> ResponseTask | None:
        """Begin a response that says the filler `text` ("": the model words it) while these calls have no results, and
        return it. The caller has to `run` it. Its message comes before the calls in the history, as words do that the
        model says before a call. Returns None if responses are not spoken, or if the first call was deleted.
        """
        config, profile, items = self.config, self._context.model.profile, list(self._history.items)
        command, say = CreateResponse(tool_choice="none"), self._context.say
        if not wants_audio(config, profile, command) or not any(item is calls[0] for item in items):
            return None

        async def make(response: Response) -> ResponseSource:
            if text and say:
                voice = voice_options(config, profile, response.voice)
                return self._generate(ResponseGeneration(say(text), (), ReplyOptions(), voice))
            return await self._make(response, command, config, with_hint(items, calls, text))

        task = self._start(command, make, is_filler=True)
        task.is_filler, task.after = True, self._history.before(calls[0].id) or ROOT
        return task

    async def begin_unasked(self, source: NativeResponse) -> ResponseTask | None:
        """Begin a response from a native model's turn and return it. The caller has to `run` it. Waits until the
        previous response is closed. If the turn was interrupted by then, `source` is dropped and None is returned. If
        the client has requested the turn, the response begins all the same, and is reported as cancelled.
        """
        while self.active:
            await self.active.ended.wait()
            await anyio.lowlevel.checkpoint()
        if source.is_cut and not (source.due and source.due.request):
            await source.drop()
            return None
        request = source.due.request if source.due else None
        task = self._start(request or CreateResponse(), given(source))
        if source.is_cut:
            task.cancel(source.cut_reason)
        return task

    def _start(self, command: CreateResponse, make: MakeSource, *, is_filler: bool = False) -> ResponseTask:
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
        task = (None if is_filler else self._take_preemptive(command, response)) or self._new_task()
        task.ask(response, make)
        if command.stored:
            self.active = task
            self._answer = self._answer if is_filler else task
            self._floor.response_began()
        else:
            self._out_of_band[task] = None
        self._heard.response_began(response.id)
        return task

    def _new_task(self) -> ResponseTask:
        return ResponseTask(self._context, self._history, self._emit_counted)

    def _take_preemptive(self, command: CreateResponse, response: Response) -> ResponseTask | None:
        """Return the preemptive response if its request equals this one, else None."""
        task = self._preemptive
        if task is None or not response.stored:
            return None
        with suppress(RemoteProtocolError):
            if task.answers(self._request_for(command, response.voice, response.max_tokens)):
                self._preemptive = None
                return task
        return None

    async def run(self, task: ResponseTask) -> None:
        """Run a response from its beginning to its last event, and truncate its items to the part that was heard."""
        try:
            await task.run()
        finally:
            self._out_of_band.pop(task, None)
            if self.active is task:
                self.active = None
                self._floor.response_ended()
        await self._heard.response_closed(task.response.id)

    async def _emit_counted(self, event: TranscriptionEvent | ConversationEvent) -> None:
        if isinstance(event, ResponseAudioDelta):
            config = self.config
            can_pause = self._heard.can_pause(reports=config.reports_ducking)
            self._heard.add(event, keeps=config.allows_backchannels and not can_pause)
        await self._emit(event)

    async def _make(
        self, response: Response, command: CreateResponse, config: ConversationConfig, items: list[Item]
    ) -> ResponseGeneration:
        """Begin to generate a response. The conversation's own response waits for the end of a preemptive one, because
        the model's stream produces one response at a time.
        """
        profile, voice, most = self._context.model.profile, response.voice, response.max_tokens
        if response.stored:
            config, command = self._with_server_tools(config, command)
        request = request_for(config, self._history, profile, command, voice, most, items)
        if not response.stored:
            return self._generate(ResponseGeneration(await self._context.model.open(self._context.owner), *request))
        await self.drop_preemptive()
        return self._generate(ResponseGeneration(await self._stream.open(), *request))

    def _generate(self, generation: ResponseGeneration) -> ResponseGeneration:
        """Run a generation in a task. The streams of responses out of band, and of fillers, are closed at its end."""

        async def run() -> None:
            try:
                await generation.run()
            finally:
                if not self._stream.is_this(generation.model_stream):
                    generation.model_stream.close()

        assert self._group
        self._group.start_soon(run)
        return generation

    def _request_for(
        self, command: CreateResponse, voice: str | None, max_tokens: int | None, items: list[Item] | None = None
    ) -> ResponseRequest:
        profile = self._context.model.profile
        config, command = self._with_server_tools(self.config, command)
        return request_for(config, self._history, profile, command, voice, max_tokens, items)

    def _with_server_tools(self, config: ConversationConfig, command: CreateResponse) -> Asked:
        """Return the configuration and the request with the functions of the tool servers."""
        tools = self._tools.of_request(command, config)
        return replace(config, tools=self._tools.of_config(config)), replace(command, tools=tools)

    # --- before a request ---------------------------------------------------------------------------------------------

    async def begin_preemptive(self, text: str, own: Item | None, audio: AudioPart | None = None) -> None:
        """Begin the preemptive response to a turn that may have ended with the transcript `text`.

        `own` is the turn's item, if the history has one already. `text` is used instead of its text. `audio` is the
        turn's audio, for a model that accepts media. It must be the object that the turn's item will hold, or the
        response is not recognized as the requested one.
        """
        assert self._group
        others = [i for i in self._history.items if i is not own]
        request = self._request_for(
            CreateResponse(),
            self.config.voice,
            self.config.max_tokens,
            [*others, spoken_item(own, text, audio)],
        )
        await self.drop_preemptive()
        stream = await self._stream.open()
        task = self._preemptive = self._new_task()
        task.begin_preemptive(ResponseGeneration(stream, *request), self._group)

    def cancel_preemptive(self) -> None:
        """Cancel the preemptive response. Returns at once. It ends within one step of the model, and the next request
        to the model's stream waits for that.
        """
        if self._preemptive:
            self._preemptive.cancel_preemptive()

    async def drop_preemptive(self) -> None:
        """End the preemptive response, give up the response that was kept, and wait for their end, even if the caller
        is cancelled. After that, the model's stream is free. A no-op if neither exists.
        """
        await self.drop_kept()
        await self._drop_guess()

    async def _drop_guess(self) -> None:
        task, self._preemptive = self._preemptive, None
        if task:
            await task.drop()

    async def hear(self, turn: int, delta: str, own: Item | None, *, prefills: bool) -> None:
        """Add `delta` to a turn's transcript. With `prefills`, have the model prefill the transcript so far, so that
        the response begins sooner. `own`: the turn's item, if there is one. Does not wait for the computation. Failures
        are logged, not raised.
        """
        self._partial = (turn, self._partial[1] + delta if self._partial[0] == turn else delta)
        if prefills:
            await self._prefill([spoken_item(own, self._partial[1].strip())])

    async def prefill_audio(self, audio: AudioPart, own: Item | None) -> None:
        """Have the model prefill the audio so far of a turn that continues. `audio` is a part that grows, `own` the
        turn's item, if there is one. Waits for the model's encoder. Failures are logged, not raised.
        """
        self._holds_growing = True
        await self._prefill([spoken_item(own, media=audio)])

    async def drop_growing(self) -> None:
        """Remove the audio of a dropped turn from the KV of the model's stream. A no-op if a response is under way,
        because its messages do not contain that audio anyway.
        """
        if self._holds_growing and not self.is_busy:
            await self._prefill([])
        self._holds_growing = False

    async def _prefill(self, more: list[Item]) -> None:
        messages = self._history.messages(self.config.instructions, [*self._history.items, *more])
        try:
            await (await self._stream.open()).prefill(messages, self._tools.of_config(self.config))
        except FAILURES as error:
            # If the failure persists, the response to the same messages will report it.
            log.warning("a turn was not prefilled: %s", error)
