"""A natively duplex model's side of a conversation: what is heard goes to it unit by unit, what it says becomes answers.

One task appends and steps. While it speaks and nothing comes in, it is fed silence, so that its clock goes on; interrupting it makes its next step listen.
"""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
import anyio.to_thread
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_beginning
from antiphon.contracts import (
    ListenStep,
    NativeModel,
    NativeOptions,
    NativeStep,
    NativeStream,
    ReplyDone,
    ResponseAudio,
    ResponseChunk,
    SpeakStep,
    TextDelta,
    Unit,
)
from antiphon.errors import MediaError, ModelError
from antiphon.events.conversation import CommandRejected, ConversationConfig, ConversationEvent
from antiphon.events.duplex import DuplexConfig, ListenStepTaken
from antiphon.signals import Signal
from antiphon.text.word_timing import spread_words

# Bounds: units of sound that wait for the model, before whoever hears is held back; parts of a turn that nobody has taken.
MAX_WAITING_UNITS = 4
# Of a voice to speak with so much is heard.
MAX_REFERENCE_S = 30
MAX_WAITING = 64


class NativeResponse:
    """One turn the model speaks: an answer that is made whether it is asked for or not (see answering.Made)."""

    def __init__(self, dropped: Callable[[], None]) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[ResponseChunk](MAX_WAITING)
        self._dropped = dropped
        self._over = False
        # Interrupted before anybody was told of it: nobody is to be.
        self.void = False
        self.sound_s = 0.0
        self.num_units = 0

    async def put(self, answer: ResponseChunk) -> None:
        """More of it. Waits for the reader; once nobody reads it is dropped."""
        try:
            await self._send.send(answer)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._over = True

    def end(self) -> None:
        """The model has finished it."""
        self._over = True
        self._send.close()

    async def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Take what is said."""
        async for answer in self._receive:
            yield answer

    async def drop(self) -> None:
        """Nobody takes any more of it."""
        self._receive.close()
        if not self._over:
            self._over = True
            self._dropped()


class NativeTurns:
    """`open` it, then run it in the session's task group. `begins` gets each turn the model begins to speak; `emit` is told of each unit in which it
    says nothing, and of frames that cannot be seen.
    """

    def __init__(
        self,
        model: NativeModel,
        begins: Callable[[NativeResponse], Awaitable[None]],
        emit: Callable[[ConversationEvent], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._begins, self._emit = begins, emit
        self._clock = clock
        self._size = int(model.profile.unit_s * SAMPLE_RATE_HZ)
        self._talk: NativeStream | None = None
        self._heard: deque[Pcm] = deque()
        self._samples = 0
        # Samples that came and that were taken, and images with how much had come before them.
        self._came = self._taken = 0
        self._frames: deque[tuple[int, bytes]] = deque(
            maxlen=max(1, model.profile.max_frames) * (MAX_WAITING_UNITS + 1)
        )
        self._changed = Signal()
        self._closed = False
        self._began_s = 0.0
        self._turn: NativeResponse | None = None
        # Interrupted while a step was under way: what that step says is not said.
        self._void = self._tells = False
        # A turn has begun that the one before still keeps from being told.
        self.waiting = False

    async def open(self, config: ConversationConfig) -> None:
        """Raises Refused where the model has no room, ModelError, for a voice too that cannot be heard."""
        # Only a duplex client is told of each unit.
        self._tells = config.duplex is not None
        duplex = config.duplex or DuplexConfig()
        reference = None
        if duplex.voice_reference:
            try:
                reference = await anyio.to_thread.run_sync(
                    decode_beginning, io.BytesIO(duplex.voice_reference), SAMPLE_RATE_HZ, MAX_REFERENCE_S
                )
            except MediaError as error:
                raise ModelError(f"the voice to speak with cannot be heard: {error}") from None
        options = NativeOptions(
            config.instructions,
            config.voice,
            reference,
            listen_only_units=duplex.listen_only_units,
            temperature=duplex.temperature,
        )
        self._talk = await self._model.open(options)
        if self._void:
            self._talk.interrupt()

    async def hear(self, pcm: Pcm) -> None:
        """More sound, float32 [num_samples], 16 kHz. Waits while the model is behind."""
        while self._samples >= MAX_WAITING_UNITS * self._size and not self._closed:
            await self._changed.wait()
        self._heard.append(pcm)
        self._samples += len(pcm)
        self._came += len(pcm)
        self._changed.notify()

    def show(self, frames: tuple[bytes, ...]) -> None:
        """Images; they belong to the sound that follows. Of too many in a unit the newest are seen."""
        self._frames.extend((self._came, frame) for frame in frames)

    def interrupt(self) -> None:
        """The user has the floor: the model listens."""
        self._void = True
        if self._turn:
            self._turn.void = True
            self._turn.end()
            self._turn = None
        if self._talk:
            self._talk.interrupt()

    def close(self) -> None:
        """No more sound. What it says is not waited for."""
        self._closed = True
        self._changed.notify()

    async def run(self) -> None:
        """Until it is closed. Raises ModelError, EngineError."""
        assert self._talk
        talk = self._talk
        try:
            while (pcm := await self._next()) is not None:
                self._began_s = self._clock()
                try:
                    await talk.append(Unit(pcm, self._shown()))
                except MediaError as error:
                    await self._emit(CommandRejected("invalid_video_frames", str(error), "video_frames"))
                    await talk.append(Unit(pcm))
                self._void = False
                step = await talk.step()
                if not self._void:
                    await self._take(step)
        finally:
            if self._turn:
                self._turn.end()
            talk.close()

    async def _next(self) -> Pcm | None:
        """The next unit's sound; None when there is no more. What is missing of it is silence, if the model speaks and its time has come."""
        while self._samples < self._size and not self._closed:
            left_s = self._began_s + self._model.profile.unit_s - self._clock() if self._turn else None
            with anyio.move_on_after(left_s) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                break
        if self._closed:
            return None
        pcm = np.zeros(self._size, np.float32)
        at = 0
        while self._heard and at < self._size:
            piece = self._heard.popleft()
            taken = piece[: self._size - at]
            pcm[at : at + len(taken)] = taken
            at += len(taken)
            if len(taken) < len(piece):
                self._heard.appendleft(piece[len(taken) :])
        self._samples -= at
        self._taken += at
        self._changed.notify()
        return pcm

    def _shown(self) -> tuple[bytes, ...]:
        """The images of the unit that was taken last."""
        shown = []
        while self._frames and (self._frames[0][0] < self._taken or not self._samples):
            shown.append(self._frames.popleft()[1])
        return tuple(shown[-self._model.profile.max_frames :]) if self._model.profile.max_frames else ()

    async def _take(self, step: NativeStep) -> None:
        match step:
            case ListenStep():
                self._end_turn()
                if self._tells:
                    await self._emit(ListenStepTaken("model"))
            case SpeakStep(text, pcm, end_of_turn):
                turn = self._turn
                if turn is None:
                    turn = self._turn = NativeResponse(self.interrupt)
                    self.waiting = True
                    await self._begins(turn)
                    self.waiting = False
                turn.num_units += 1
                if text:
                    await turn.put(TextDelta(text))
                if len(pcm):
                    length_s = len(pcm) / self._model.profile.sample_rate_hz
                    # The model does not say where its words lie in the unit's audio: by their letters.
                    await turn.put(ResponseAudio(pcm, tuple(spread_words(text.split(), turn.sound_s, length_s))))
                    turn.sound_s += length_s
                if end_of_turn:
                    await turn.put(ReplyDone("stop", 0, 0, turn.num_units))
                    self._end_turn()

    def _end_turn(self) -> None:
        if self._turn:
            self._turn.end()
            self._turn = None
