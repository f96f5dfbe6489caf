"""The responses of one conversation: the one under way, those out of band, and the preemptive one.

However a response ends, its audio stops with it, and what was not heard of it is cut from the history once its items
are closed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import anyio.lowlevel

from antiphon.contracts import AudioPart, ConversationModel, ConversationStream
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
    PlaybackCleared,
    Response,
    ResponseAudioDelta,
)
from antiphon.events.transcription import TranscriptionEvent
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.playout import Playout
from antiphon.sessions.conversation.preemptive import PreemptiveResponse
from antiphon.sessions.conversation.response import (
    FAILURES,
    EmitConversation,
    ResponseGeneration,
    ResponseRequest,
    ResponseSource,
    ResponseTask,
    speaks,
    wanted,
)

log = logging.getLogger(__name__)


class Responder:
    """Begins, ends and truncates the responses of one conversation. Call `open` before anything else, `close` at the
    end.

    Besides the one response of the conversation, `active`, clients may ask for responses out of band: these are not
    stored in the history, run at the same time, and each have a model stream of their own.

    - `config`: the session replaces it; it counts for responses that begin afterwards.
    - `new_id`: makes an id with the given prefix.
    - `measure`: takes a measurement's name and its seconds.
    - `playback`: what plays the responses in place of the client, None where nobody reports what was heard.
    - `now`: the number of samples at 16 kHz that the microphone has given.
    - `over`: is awaited with each response task that has ended, after its items are closed and truncated.
    """

    def __init__(
        self,
        config: ConversationConfig,
        partner: ConversationModel,
        conversation: ConversationHistory,
        emit: EmitConversation,
        sounding: Playout,
        *,
        new_id: Callable[[str], str],
        measure: Callable[[str, float], None],
        playback: PlaybackTracker | None,
        now: Callable[[], int],
        over: Callable[[ResponseTask], Awaitable[None]],
    ) -> None:
        self.config = config
        self._partner = partner
        self._conversation = conversation
        self._emit = emit
        self._sounding = sounding
        self._new_id = new_id
        self._measure = measure
        self._playback = playback
        self._now = now
        self._over = over
        self._talk: ConversationStream | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self.active: ResponseTask | None = None
        self._beside: set[ResponseTask] = set()
        self.ahead = PreemptiveResponse()
        # Truncations, in milliseconds heard, that wait until their response is closed.
        self._cut: list[tuple[ContentPosition, int]] = []

    async def open(self, group: anyio.abc.TaskGroup) -> None:
        """Open the model's stream for the conversation; responses run as tasks of `group`. Raises Refused where the
        model has no room for another conversation.
        """
        self._talk = await self._partner.open()
        self._group = group

    async def close(self) -> None:
        """End the preemptive response, wait for its end and close the model's stream. To be called once no response of
        the conversation is under way; also where `open` failed.
        """
        await self.ahead.drop()
        if self._talk:
            self._talk.close()

    def cancel_all(self) -> None:
        """Cancel all responses, those out of band and the preemptive one included, as `client_cancelled`. Returns at
        once; their tasks close them in order.
        """
        self.ahead.forget()
        for answering in self._all():
            answering.cancel("client_cancelled")

    def stop(self, response_id: str | None) -> None:
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
        return [*([self.active] if self.active else []), *self._beside]

    # --- a response ---------------------------------------------------------------------------------------------------

    def begin(self, asked: CreateResponse) -> None:
        """Begin a response in a task of its own, and return at once. A failure of the model becomes a failed response.

        Raises RemoteProtocolError where a stored response is asked for while the conversation has one under way.
        """
        if asked.stored and self.active:
            raise RemoteProtocolError(
                "conversation_already_has_active_response",
                f"Conversation already has an active response in progress: {self.active.response.id}.",
            )
        self._start(asked, lambda response: self._make(response, asked))

    async def tell(self, made: ResponseSource, void: Callable[[], bool]) -> None:
        """Begin a response of a native model's turn, which nobody asked for. Waits until the response before it is
        closed. Where `void()` is true by then, because the turn was interrupted, `made` is dropped and the client never
        learns of it.
        """
        while self.active:
            await self.active.over.wait()
            await anyio.lowlevel.checkpoint()

        if void():
            await made.drop()
            return

        async def made_already(_: Response) -> ResponseSource:
            return made

        self._start(CreateResponse(), made_already)

    def _start(self, asked: CreateResponse, make: Callable[[Response], Awaitable[ResponseSource]]) -> None:
        config = self.config
        response = Response(
            self._new_id("resp_"),
            speaks(config, self._partner.profile, asked),
            asked.voice or config.voice,
            config.max_tokens if asked.max_tokens is None else asked.max_tokens,
            asked.metadata,
            asked.stored,
        )
        answering = ResponseTask(
            response,
            make,
            self._conversation,
            self._partner.profile.sample_rate_hz,
            self._said,
            self._new_id,
            self._measure,
        )
        if asked.stored:
            self.active = answering
        else:
            self._beside.add(answering)
        assert self._group
        self._group.start_soon(self._answer, answering)

    async def _answer(self, answering: ResponseTask) -> None:
        try:
            await answering.run()
        finally:
            self._beside.discard(answering)
            if self.active is answering:
                self.active = None
        await self._cut_off(answering.response.id)
        await self._over(answering)

    async def _said(self, output: TranscriptionEvent | ConversationEvent) -> None:
        if isinstance(output, ResponseAudioDelta):
            self._sounding.said(output, self._now())
        await self._emit(output)

    async def _make(self, response: Response, asked: CreateResponse) -> ResponseGeneration:
        """Begin to generate a response, or take over the preemptive one where it was begun for the same request."""
        wanted = self._wanted(asked, response.voice, response.max_tokens)
        assert self._group
        assert self._talk
        if not response.stored:
            making = ResponseGeneration(await self._partner.open(), *wanted)
            self._group.start_soon(self._make_beside, making)
            return making
        if ahead := await self.ahead.take(wanted):
            return ahead
        making = ResponseGeneration(self._talk, *wanted)
        self._group.start_soon(making.run)
        return making

    async def _make_beside(self, making: ResponseGeneration) -> None:
        try:
            await making.run()
        finally:
            making.talk.close()

    def _wanted(
        self, asked: CreateResponse, voice: str | None, max_tokens: int | None, items: list[Item] | None = None
    ) -> ResponseRequest:
        return wanted(self.config, self._conversation, self._partner.profile, asked, voice, max_tokens, items)

    # --- its audio ----------------------------------------------------------------------------------------------------

    async def silence(self) -> None:
        """Stop playback of all responses and report a `PlaybackCleared` for each that was cut off.

        What was not heard is cut from the history: at once for a response that is closed, after its end for one under
        way. Without a `playback` nothing is cut; the client truncates by itself.
        """
        self._sounding.silenced(self._now())
        cut = self._playback.silence() if self._playback else []
        for response_id in dict.fromkeys(place.response_id for place, _ in cut):
            await self._emit(PlaybackCleared(response_id))
            await self.cut([c for c in cut if c[0].response_id == response_id])

    async def cut(self, heard: list[tuple[ContentPosition, int]]) -> None:
        """Truncate items to the milliseconds of each that were heard, and report an `ItemTruncated` for each. Items of
        a response under way are truncated once it is closed; items that were deleted meanwhile are passed over.
        """
        self._cut += heard
        for response_id in dict.fromkeys(place.response_id for place, _ in heard):
            if all(a.response.id != response_id for a in self._all()):
                await self._cut_off(response_id)

    async def _cut_off(self, response_id: str) -> None:
        mine = [c for c in self._cut if c[0].response_id == response_id]
        self._cut = [c for c in self._cut if c[0].response_id != response_id]
        for place, heard_ms in mine:
            if any(i.id == place.item_id for i in self._conversation.items):
                kept_ms = self._conversation.truncate(place.item_id, place.content_index, heard_ms, again=True)
                await self._emit(ItemTruncated(place.item_id, place.content_index, kept_ms))

    # --- before it is asked for ---------------------------------------------------------------------------------------

    async def expect(self, text: str, mine: Item | None, sound: AudioPart | None = None) -> None:
        """Begin the preemptive response to a turn that may have ended with the transcript `text`.

        `mine` is the turn's item where the history has one already; it is replaced by `text`. `sound` is the turn's
        audio, for a model that accepts media; it must be the same object that the turn's item will hold, or the
        response is not recognized as the one asked for.
        """
        assert self._talk
        assert self._group
        others = [i for i in self._conversation.items if i is not mine]
        wanted = self._wanted(
            CreateResponse(),
            self.config.voice,
            self.config.max_tokens,
            [*others, Item("", parts=[ContentPart("input_audio", text, media=sound)])],
        )
        await self.ahead.begin(self._talk, wanted, self._group)

    async def prefill(self, text: str) -> None:
        """Let the model prepare for a turn that goes on, with the transcript so far, so that its response begins
        sooner. Does not wait for the computation. Failures are logged and not raised.
        """
        assert self._talk
        said = Item("", parts=[ContentPart("input_audio", text)])
        messages = self._conversation.messages(self.config.instructions, [*self._conversation.items, said])
        try:
            await self._talk.prefill(messages, self.config.tools)
        except FAILURES as error:
            # Where the failure lasts, the response to the same messages will report it.
            log.warning("a turn was not prefilled: %s", error)
