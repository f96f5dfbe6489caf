"""A native model's side of a conversation: it is fed the user's audio unit by unit, and each turn that it speaks
becomes a response.

One task appends units and steps the model. While the model speaks and no audio arrives, it is fed silence, so that its
clock goes on. An interrupted model listens in its next step.
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

# Units of audio that may wait for the model; with more of them `append_audio` waits, which holds back the client.
MAX_WAITING_UNITS = 4
# Seconds of a reference voice that are decoded; the rest of the file is ignored.
MAX_REFERENCE_S = 30
# Chunks of a response that may wait for its reader; with more of them the model waits.
MAX_WAITING_CHUNKS = 64


class NativeResponse:
    """One turn that a native model speaks: a `ResponseSource` that exists without having been asked for.

    `NativeTurns` puts chunks in while the model steps; a response task reads them. `on_dropped` is called when the
    reader leaves before the model has finished, which interrupts the model.
    """

    def __init__(self, on_dropped: Callable[[], None]) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[ResponseChunk](MAX_WAITING_CHUNKS)
        self._on_dropped = on_dropped
        self._is_finished = False
        # Whether the turn was interrupted. One that was before its response began is never reported to the client.
        self.is_cut = False
        self.audio_s = 0.0
        self.num_units = 0

    async def put(self, chunk: ResponseChunk) -> None:
        """Add a chunk. Waits while 64 chunks wait for the reader. Once the reader has left, chunks are discarded
        without an error, so that the model's task goes on.
        """
        try:
            await self._send.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._is_finished = True

    def end(self) -> None:
        """Mark the turn as finished by the model: the reader's stream ends after the chunks that still wait, and a
        later `drop` does not interrupt the model. May be called more than once.
        """
        self._is_finished = True
        self._send.close()

    async def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the turn's chunks in order as the model produces them, until `end`. For one reader. Raises nothing: a
        failure of the model ends the session through `NativeTurns.run`.
        """
        async for chunk in self._receive:
            yield chunk

    async def drop(self) -> None:
        """Stop reading: chunks that wait are discarded, and a turn that is not finished is interrupted. Does not wait
        for the model, which ends it with its current step.
        """
        self._receive.close()
        if not self._is_finished:
            self._is_finished = True
            self._on_dropped()


class NativeTurns:
    """Feeds a native model and makes responses of its turns. Call `open`, then run `run` in the session's task group.

    - `on_turn`: is awaited with each turn that the model begins to speak; the model is not stepped until it returns.
    - `emit`: is awaited with a `CommandRejected` for frames that are no images and, for full-duplex clients, with a
      `ListenStepTaken` for each unit in which the model listens.
    - `clock`: monotonic seconds, by which silence is fed while the model speaks.
    """

    def __init__(
        self,
        model: NativeModel,
        on_turn: Callable[[NativeResponse], Awaitable[None]],
        emit: Callable[[ConversationEvent], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._on_turn, self._emit = on_turn, emit
        self._clock = clock
        self._unit_samples = int(model.profile.unit_s * SAMPLE_RATE_HZ)
        self._stream: NativeStream | None = None
        self._queued: deque[Pcm] = deque()
        self._num_queued = 0
        # Samples that arrived and that went into units; images, each with the samples that had arrived before it.
        self._num_received = self._num_taken = 0
        self._frames: deque[tuple[int, bytes]] = deque(
            maxlen=max(1, model.profile.max_frames) * (MAX_WAITING_UNITS + 1)
        )
        self._changed = Signal()
        self._is_closed = False
        self._unit_began_s = 0.0
        self._turn: NativeResponse | None = None
        # Set by an interruption: what the step under way says is discarded.
        self._discards_step = self._reports_listening = False
        # Whether a turn has begun whose response waits for the one before it to be closed.
        self.is_waiting = False

    async def open(self, config: ConversationConfig) -> None:
        """Open the model's stream and decode the reference voice, of which the first 30 s are used. Waits for both.

        Raises Refused where the model has no room for another conversation, and ModelError where it fails or the
        reference voice cannot be decoded.
        """
        # Listening steps are reported to full-duplex clients only.
        self._reports_listening = config.duplex is not None
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
        self._stream = await self._model.open(options)
        if self._discards_step:
            self._stream.interrupt()

    async def append_audio(self, pcm: Pcm) -> None:
        """Queue audio for the model: float32 [num_samples], mono, 16 kHz, of any length. Waits while four units or more
        are queued, so that a model that falls behind holds back the client. The array is kept, not copied.
        """
        while self._num_queued >= MAX_WAITING_UNITS * self._unit_samples and not self._is_closed:
            await self._changed.wait()
        self._queued.append(pcm)
        self._num_queued += len(pcm)
        self._num_received += len(pcm)
        self._changed.notify()

    def append_frames(self, frames: tuple[bytes, ...]) -> None:
        """Queue encoded images, which go with the unit of the audio that arrives next. Does not wait. Where a unit has
        more of them than the model's profile allows, the newest are used; a model without vision ignores all.
        """
        self._frames.extend((self._num_received, frame) for frame in frames)

    def interrupt(self) -> None:
        """Give the user the floor: the turn being spoken ends, what the step under way says is discarded, and the next
        step listens. Returns at once. Before `open` it takes effect when the stream is opened.
        """
        self._discards_step = True
        if self._turn:
            self._turn.is_cut = True
            self._turn.end()
            self._turn = None
        if self._stream:
            self._stream.interrupt()

    def close(self) -> None:
        """Take no more audio and let `run` return after the step under way. Does not wait; a turn that is still being
        spoken is cut there.
        """
        self._is_closed = True
        self._changed.notify()

    async def run(self) -> None:
        """Feed and step the model until `close`, then close its stream. Needs an `open` before.

        Frames that are no images are rejected and their unit is fed without them. Raises ModelError and EngineError,
        which end the session.
        """
        assert self._stream
        stream = self._stream
        try:
            while (pcm := await self._next_unit()) is not None:
                self._unit_began_s = self._clock()
                try:
                    await stream.append(Unit(pcm, self._unit_frames()))
                except MediaError as error:
                    await self._emit(CommandRejected("invalid_video_frames", str(error), "video_frames"))
                    await stream.append(Unit(pcm))
                self._discards_step = False
                step = await stream.step()
                if not self._discards_step:
                    await self._apply(step)
        finally:
            if self._turn:
                self._turn.end()
            stream.close()

    async def _next_unit(self) -> Pcm | None:
        """Return the next unit's audio, None once closed. A unit that is due while the model speaks is filled with
        silence.
        """
        while self._num_queued < self._unit_samples and not self._is_closed:
            left_s = self._unit_began_s + self._model.profile.unit_s - self._clock() if self._turn else None
            with anyio.move_on_after(left_s) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                break
        if self._is_closed:
            return None
        pcm = np.zeros(self._unit_samples, np.float32)
        at = 0
        while self._queued and at < self._unit_samples:
            chunk = self._queued.popleft()
            part = chunk[: self._unit_samples - at]
            pcm[at : at + len(part)] = part
            at += len(part)
            if len(part) < len(chunk):
                self._queued.appendleft(chunk[len(part) :])
        self._num_queued -= at
        self._num_taken += at
        self._changed.notify()
        return pcm

    def _unit_frames(self) -> tuple[bytes, ...]:
        """Return the images of the unit that was taken last, the newest where there are too many."""
        frames = []
        while self._frames and (self._frames[0][0] < self._num_taken or not self._num_queued):
            frames.append(self._frames.popleft()[1])
        return tuple(frames[-self._model.profile.max_frames :]) if self._model.profile.max_frames else ()

    async def _apply(self, step: NativeStep) -> None:
        match step:
            case ListenStep():
                self._end_turn()
                if self._reports_listening:
                    await self._emit(ListenStepTaken("model"))
            case SpeakStep(text, pcm, end_of_turn):
                turn = self._turn
                if turn is None:
                    turn = self._turn = NativeResponse(self.interrupt)
                    self.is_waiting = True
                    await self._on_turn(turn)
                    self.is_waiting = False
                turn.num_units += 1
                if text:
                    await turn.put(TextDelta(text))
                if len(pcm):
                    length_s = len(pcm) / self._model.profile.sample_rate_hz
                    # The model gives no word times: the words are spread over the unit's audio by their letters.
                    await turn.put(ResponseAudio(pcm, tuple(spread_words(text.split(), turn.audio_s, length_s))))
                    turn.audio_s += length_s
                if end_of_turn:
                    await turn.put(ReplyDone("stop", 0, 0, turn.num_units))
                    self._end_turn()

    def _end_turn(self) -> None:
        if self._turn:
            self._turn.end()
            self._turn = None
