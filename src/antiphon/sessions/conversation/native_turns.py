"""A native model in a conversation. The model gets the user's audio unit by unit, and each turn that it speaks becomes
a response.

One task appends units and steps the model. While the model speaks and no audio arrives, the task feeds silence, so that
the model's clock advances. After a commit or a request for a response, the task feeds silence until the model speaks.
In the last of ANSWER_UNITS silent units, the model is forced to speak. An interrupted model listens in its next step.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import anyio.abc

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_beginning
from antiphon.contracts import (
    AwayStep,
    ListenStep,
    NativeModel,
    NativeOptions,
    NativeStream,
    ReplyDone,
    ResponseAudio,
    SpeakStep,
    TextDelta,
    Unit,
)
from antiphon.errors import MediaError, ModelError, RemoteProtocolError
from antiphon.events.conversation import CommandRejected, ConversationConfig, ConversationEvent, CreateResponse, Item
from antiphon.events.duplex import DuplexConfig, ListenStepTaken
from antiphon.sessions.conversation.native_response import ANSWER_UNITS, DueResponse, NativeResponse
from antiphon.sessions.conversation.native_units import MAX_WAITING_UNITS, UnitClock, UnitDone, UnitQueue
from antiphon.shares.threads import FILE_THREADS, in_thread
from antiphon.signals import Signal
from antiphon.text.word_timing import spread_words

log = logging.getLogger(__name__)

# Seconds of a reference voice that are decoded. The rest of the file is ignored.
MAX_REFERENCE_S = 30
# Maximum characters of typed text that go with one unit, and of text that waits for its unit.
UNIT_CHARS, MAX_WAITING_CHARS = 128, 8000


class NativeTurns:
    """Feeds a native model and makes responses of its speech. Call `open`, then run `run` in the session's task group.

    - `on_turn`: awaited with each turn that the model begins to speak. The model is not stepped until it returns. It is
      also called, in a new task, with each requested answer that will not be spoken.
    - `emit`: awaited with a `CommandRejected` for frames that are not images and, for full-duplex clients, with a
      `ListenStepTaken` for each unit in which the model listens.
    - `on_unit`: called with the measurement of each unit whose result has come, also if the result is discarded.
    - `clock`: returns monotonic seconds. It paces the silence that is fed while the model speaks.
    - `on_away`: awaited when the model cannot be reached any more, with the request that is due, if there is one. From
      then on, until `is_away` is false again, the model of the conversation answers.
    - `may_return`: returns whether the model may take turns again after it was away.
    """

    def __init__(
        self,
        model: NativeModel,
        on_turn: Callable[[NativeResponse], Coroutine[Any, Any, None]],
        emit: Callable[[ConversationEvent], Awaitable[None]],
        on_unit: Callable[[UnitDone], None] = lambda unit: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_away: Callable[[CreateResponse | None], Awaitable[None]] | None = None,
        may_return: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model = model
        self._on_turn, self._on_away, self._may_return = on_turn, on_away, may_return
        self._emit, self._on_unit = emit, on_unit
        self._clock = clock
        self._units = UnitQueue(int(model.profile.unit_s * SAMPLE_RATE_HZ), model.profile.max_frames)
        self._stream: NativeStream | None = None
        self._changed = Signal()
        self._is_closed = False
        self._unit_clock = UnitClock(model.profile.unit_s)
        self._turn: NativeResponse | None = None
        # `_discards_step` is set by an interruption, after which the output of the current step is discarded.
        self._discards_step = self._reports_listening = False
        self._due: DueResponse | None = None
        # The task group in which requested answers that will not be spoken are reported. None before `run`.
        self._group: anyio.abc.TaskGroup | None = None
        self._text = ""
        # Whether the conversation began at another host, so that there may be something to answer.
        self._is_continued = False
        # Whether the model has spoken since the user's last turn began, and the number of units in which it may still
        # answer that turn by itself.
        self._has_spoken = False
        self._answer_units = 0
        self.model_id = model.profile.id
        # Whether the model got images.
        self.has_images = False
        # Whether a turn has begun whose response waits until the previous response is closed.
        self.is_waiting = False
        # Whether the model cannot be reached, so that it takes no turns.
        self.is_away = False

    async def open(
        self, config: ConversationConfig, recall: Callable[[], str] = lambda: "", *, is_continued: bool = False
    ) -> None:
        """Open the model's stream, and decode the first 30 s of the reference voice. Returns after both are done.
        `recall`: see `NativeOptions`. `is_continued`: the conversation began at another host.

        Raises Refused if the model has no room for another conversation, and ModelError if it fails or if the reference
        voice cannot be decoded.
        """
        # Listening steps are reported to full-duplex clients only.
        self._reports_listening = config.duplex is not None
        duplex = config.duplex or DuplexConfig()
        reference = None
        if duplex.voice_reference:
            try:
                reference = await in_thread(
                    decode_beginning,
                    io.BytesIO(duplex.voice_reference),
                    SAMPLE_RATE_HZ,
                    MAX_REFERENCE_S,
                    places=FILE_THREADS,
                )
            except MediaError as error:
                raise ModelError(f"the reference voice cannot be decoded: {error}") from None
        options = NativeOptions(
            config.instructions,
            config.voice,
            reference,
            listen_only_units=duplex.listen_only_units,
            sampling=duplex.sampling,
            recall=recall,
        )
        self._is_continued = is_continued
        self._stream = await self._model.open(options)
        if self._discards_step:
            self._stream.interrupt()

    async def append_audio(self, pcm: Pcm) -> None:
        """Queue audio for the model: float32 [num_samples], mono, 16 kHz, of any length. Waits while four units or more
        are queued, so that a slow model slows the client down. The array is kept, not copied.
        """
        arrived_s = self._clock()
        if self._due and self._due.request is None:
            # The user continues to speak, so the model decides by itself again when to answer.
            self._due = None
        elif self._due:
            self._due.is_paced = True
        while self._units.num_waiting >= MAX_WAITING_UNITS * self._units.unit_samples and not self._is_closed:
            await self._changed.wait()
        self._units.append(pcm, arrived_s)
        self._changed.notify()

    def append_frames(self, frames: tuple[bytes, ...]) -> None:
        """Queue encoded images, which go with the unit of the audio that arrives next. Does not wait. If a unit has
        more images than the model's profile allows, only the newest are used. A model without vision ignores images.
        """
        self.has_images = self.has_images or bool(frames)
        self._units.append_frames(frames)

    def append_item(self, item: Item) -> None:
        """Queue the text of an item, typed or transcribed, which goes with the next units. Does not wait.

        Raises RemoteProtocolError: `string_above_max_length` if more than MAX_WAITING_CHARS would wait, and
        `unsupported_content_type` for an image or for audio without a transcript, because the model can only hear the
        audio of `append_audio`.
        """
        given = [p for p in item.parts if p.kind in ("input_text", "input_audio", "input_image")]
        if unheard := next(
            (p.kind for p in given if p.kind == "input_image" or (p.kind != "input_text" and not p.text)), ""
        ):
            message = f"Content of type '{unheard}' is not supported in an item of this model."
            raise RemoteProtocolError("unsupported_content_type", message, "item.content")
        typed = "\n".join(p.text for p in given if p.text)
        self._check_room(typed, "item.content")
        self._text += f"\n{typed}" if self._text and typed else typed

    def _check_room(self, text: str, param: str) -> None:
        if len(self._text) + len(text) > MAX_WAITING_CHARS:
            message = f"At most {MAX_WAITING_CHARS} characters of text may wait for this model."
            raise RemoteProtocolError("string_above_max_length", message, param)

    def commit(self, *, answers: bool) -> None:
        """End the user's turn, and have the open unit padded with silence. Does not wait.

        With `answers`, silence is fed until the model speaks, unless more audio arrives.
        """
        if self._due is None:
            self._due = DueResponse(answers=answers)
            self._changed.notify()

    def ask(self, request: CreateResponse) -> None:
        """Have the model speak. Does not wait. If an answer to the last committed turn is due, it becomes the answer to
        this request.

        Raises RemoteProtocolError: `response_create_unsupported` for a response out of band or with its own items,
        `conversation_already_has_active_response`, `response_create_without_input`, `string_above_max_length`.
        """
        if not request.stored or request.items is not None:
            message = "This model has one conversation: responses out of band or of items of their own are not made."
            raise RemoteProtocolError("response_create_unsupported", message)
        due = self._turn.due if self._turn else self._due
        if (self._turn and due is None) or (due and due.request):
            message = "Conversation already has an active response in progress."
            raise RemoteProtocolError("conversation_already_has_active_response", message)
        if not (self._is_continued or self._units.num_received or self._text or request.instructions):
            raise RemoteProtocolError("response_create_without_input", "There is nothing to answer.")
        instructions = request.instructions if request.instructions and not self._turn else ""
        self._check_room(instructions, "response.instructions")
        if due is None:
            due = self._due = DueResponse(is_padded=not self._units.num_waiting)
        due.request, due.answers = request, True
        self._text += instructions
        self._changed.notify()

    @property
    def owed(self) -> list[CreateResponse]:
        """The response whose turn has begun but waits for the end of another response, and the answer that is due to a
        request or to a committed turn. For ANSWER_UNITS after a detected turn, an answer to that turn counts as due.
        """
        if self.is_waiting and self._turn:
            return [(self._turn.due and self._turn.due.request) or CreateResponse()]
        due = self._due
        is_due = due is not None and due.answers and not (self._turn and self._turn.due is due)
        if is_due or self._answer_units:
            return [(due and due.request) or CreateResponse()]
        return []

    @property
    def has_request(self) -> bool:
        """Whether a requested answer is due, or is being spoken."""
        due = self._turn.due if self._turn else self._due
        return due is not None and due.request is not None

    def turn_started(self) -> None:
        """Record that the user has begun to speak."""
        self._has_spoken, self._answer_units = False, 0

    def turn_ended(self) -> None:
        """Record that the user's detected turn has a transcript, so that the model is likely to answer it."""
        self._answer_units = 0 if self.is_away or self._has_spoken or self._turn else ANSWER_UNITS

    def withdraw(self) -> bool:
        """Drop the answer that is due, if the model has not begun it. A requested answer is reported as cancelled.
        Returns whether an answer was dropped.
        """
        return self._drop_due("client_cancelled") is not None and self._turn is None

    def _drop_due(self, reason: str, failure: str = "") -> DueResponse | None:
        """Clear the answer that is due and return it. If the client requested this answer, and the model does not speak
        it yet, the response ends: as failed if there is a `failure`, otherwise as cancelled with `reason`.
        """
        due, self._due = self._due, None
        if due and due.request and self._group and not (self._turn and self._turn.due is due):
            response = NativeResponse(lambda: None, due)
            response.cut_reason = reason
            if failure:
                response.fail(failure)
            response.end()
            self._group.start_soon(self._on_turn, response)
        return due

    def interrupt(self) -> None:
        """Give the user the floor: end the current turn, discard the output of the current step, listen in the next
        step, and drop any due answer. Returns at once. If it is called before `open`, it takes effect when the stream
        is opened.
        """
        self._discards_step = True
        self._drop_due("turn_detected")
        if self._turn:
            self._turn.cut_reason = "turn_detected"
            self._turn.end()
            self._turn = None
        if self._stream:
            self._stream.interrupt()

    def close(self) -> None:
        """Accept no more audio, and let `run` return after the current step, which also ends a turn that is being
        spoken. Does not wait.
        """
        self._is_closed = True
        self._changed.notify()

    async def run(self) -> None:
        """Feed and step the model until `close`, then close its stream. Call `open` first.

        Frames that are not images are rejected, and their unit is fed without them. Raises ModelError and EngineError,
        which end the session.
        """
        assert self._stream
        try:
            async with anyio.create_task_group() as self._group:
                await self._run_units(self._stream)
                self._drop_due("client_cancelled")
                self._end_turn()
        finally:
            self._group = None
            self._end_turn()
            self._stream.close()

    async def _run_units(self, stream: NativeStream) -> None:
        while (pcm := await self._next_unit()) is not None:
            text, self._text = self._text[:UNIT_CHARS], self._text[UNIT_CHARS:]
            try:
                await stream.append(Unit(pcm, self._units.take_frames(), text=text))
            except MediaError as error:
                await self._emit(CommandRejected("invalid_video_frames", str(error), "video_frames"))
                await stream.append(Unit(pcm, text=text))
            self._discards_step = False
            must_speak = self._must_speak()
            step = await stream.step(must_speak=must_speak)
            self._on_unit(self._unit_clock.done(self._clock()))
            if isinstance(step, AwayStep):
                await self._leave()
            elif self.is_away and not self._may_return():
                # Another model answers this turn, of which this one has heard a part only.
                if isinstance(step, SpeakStep):
                    stream.interrupt()
            elif not self._discards_step:
                self.is_away = False
                await self._apply(step)
            if must_speak and self._due and self._must_speak():
                log.warning("a native model said nothing although it had to")
                self._drop_due("", failure="the model said nothing")

    async def _next_unit(self) -> Pcm | None:
        """Return the next unit's audio, or None after `close`. A unit that is due while the model speaks, or while an
        answer is due, is padded with silence.
        """
        while not self._units.has_unit and not self._is_closed:
            due = self._due
            if due and not self._turn and not due.is_paced:
                break
            is_timed = self._turn or due
            left_s = self._unit_clock.left_s(self._clock(), is_committed=due is not None) if is_timed else None
            with anyio.move_on_after(left_s) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                break
        if self._is_closed:
            return None
        self._count_down()
        pcm, arrived_s = self._units.take()
        self._unit_clock.begin(self._clock(), arrived_s)
        self._changed.notify()
        return pcm

    def _count_down(self) -> None:
        """Count the next unit as one of the silent units of the due answer, unless the unit has audio."""
        due = self._due
        if due is None or self._turn or (self._units.has_unit and not due.is_paced):
            return
        if not due.is_padded:
            due.is_padded = True
        elif len(self._text) <= UNIT_CHARS:
            due.units_left -= 1
        if not due.answers:
            self._due = None

    def _must_speak(self) -> bool:
        """Whether the current unit is the last in which the answer that is due may begin."""
        return bool(self._due and self._due.units_left <= 0 and not self._turn)

    async def _leave(self) -> None:
        """Take no more turns, because the model cannot be reached."""
        self._end_turn()
        self._text, self._answer_units = "", 0
        due, self._due = self._due, None
        if not self.is_away or due:
            self.is_away = True
            if self._on_away:
                await self._on_away(due.request if due else None)
        if self._reports_listening:
            await self._emit(ListenStepTaken("model"))

    async def _apply(self, step: ListenStep | SpeakStep) -> None:
        match step:
            case ListenStep():
                self._end_turn()
                self._answer_units = max(0, self._answer_units - 1)
                if self._reports_listening:
                    await self._emit(ListenStepTaken("model"))
            case SpeakStep(text, pcm, end_of_turn):
                turn = self._turn
                self._has_spoken, self._answer_units = True, 0
                if turn is None:
                    turn = self._turn = NativeResponse(self.interrupt, self._due)
                    self.is_waiting = True
                    await self._on_turn(turn)
                    self.is_waiting = False
                turn.num_units += 1
                if turn.due is self._due and (text or len(pcm) or end_of_turn):
                    self._due = None
                if text:
                    await turn.put(TextDelta(text))
                if len(pcm):
                    length_s = len(pcm) / self._model.profile.sample_rate_hz
                    # The model gives no word times, so the words are spread over the unit's audio by their length.
                    await turn.put(ResponseAudio(pcm, tuple(spread_words(text.split(), turn.audio_s, length_s))))
                    turn.audio_s += length_s
                if end_of_turn:
                    await turn.put(ReplyDone("stop", 0, 0, turn.num_units))
                    self._end_turn()

    def _end_turn(self) -> None:
        if self._turn:
            self._turn.end()
            self._turn = None
