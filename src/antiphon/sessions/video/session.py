"""One live video session: it takes frames, audio and questions, and returns answers.

One task handles the commands in order. Frames go to the video model as they arrive. A question cuts off the previous
answer, and is answered from the frames that are kept at that time. Each answer has its own task, so that frames are
handled meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass

import anyio
import anyio.abc
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import (
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    TextDelta,
    VideoFrame,
    VideoModel,
    VideoQuestion,
    VideoStream,
    VoiceOptions,
)
from antiphon.errors import EngineError, MediaError, ModelError, Refused, RemoteProtocolError
from antiphon.events.video import (
    AnswerAudioDelta,
    AnswerDone,
    AnswerStarted,
    AnswerTextDelta,
    AppendFrame,
    AppendVideoAudio,
    AskQuestion,
    FinishVideo,
    FrameInfo,
    FrameReceived,
    VideoCommand,
    VideoConfig,
    VideoEnded,
    VideoEvent,
    VideoFailed,
)
from antiphon.shares.threads import IMAGE_THREADS, in_thread
from antiphon.signals import Signal
from antiphon.vision.frame_filters import BlockFilter, EvsFilter, FrameFilter, sample_frames
from antiphon.vision.images import MAX_FRAME_PIXELS, EncodedImage

log = logging.getLogger(__name__)

# Maximum number of waiting commands, and of their bytes. When a maximum is reached, `put` waits, so that the socket is
# not read.
MAX_WAITING, MAX_WAITING_BYTES = 32, 16 << 20
# Maximum samples of audio that wait for a question: 4 MiB as PCM16, 131 s. If more audio arrives, all of it is dropped,
# and the client gets an error.
MAX_AUDIO_SAMPLES = (4 << 20) // 2
FAILURES = (ModelError, EngineError, Refused, RemoteProtocolError)
EmitVideo = Callable[[VideoEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """A frame that may be used to answer questions.

    - `number`: the frame's number for the video model, counted from 0 over the kept frames.
    - `at_s`: its time in seconds since the session's first frame.
    - `info`: the client's description of it, repeated in events.
    - `num_bytes`: the size of its file.
    """

    number: int
    at_s: float
    info: FrameInfo
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SeenFrame:
    """A frame that another host may let its model see: the encoded image, the client's description of it, and its time
    in seconds since the session's first frame.
    """

    image: bytes
    info: FrameInfo
    at_s: float


@dataclass(frozen=True, slots=True)
class VideoState:
    """The state of a session from which another host continues it.

    - `now_s`, `first_pts_ms`: the time of the latest frame, and the client's time of the first, see VideoTime. None: no
      frame came.
    - `num_kept`: how many frames were kept, on all hosts.
    """

    now_s: float | None = None
    first_pts_ms: float | None = None
    num_kept: int = 0


class VideoTime:
    """The time of one session, in seconds since its first frame. `now_s` is the time of the latest frame.

    `clock` returns monotonic seconds. `before` is the state of the session on another host.
    """

    def __init__(self, clock: Callable[[], float], before: VideoState = VideoState()) -> None:
        self._clock = clock
        # The clock's time at the arrival of the newest frame.
        self._frame_came_s = clock()
        self.now_s = before.now_s or 0.0
        self._first_frame_s = None if before.now_s is None else self._frame_came_s - self.now_s
        self.first_pts_ms = before.first_pts_ms

    @property
    def has_begun(self) -> bool:
        """Whether a frame has arrived."""
        return self._first_frame_s is not None

    def frame(self, info: FrameInfo) -> float:
        """Return the time of a frame that has just arrived: by the client's timestamp if it has one, else by its
        arrival. Advances `now_s` to that time, never back.
        """
        self._frame_came_s = now_s = self._clock()
        if self._first_frame_s is None:
            self._first_frame_s, self.first_pts_ms = now_s, info.pts_ms
        if info.pts_ms is not None and self.first_pts_ms is not None:
            at_s = (info.pts_ms - self.first_pts_ms) / 1000
        else:
            at_s = now_s - self._first_frame_s
        self.now_s = max(self.now_s, at_s)
        return at_s

    def sound(self, num_samples: int) -> float:
        """Return the start time of audio that has just arrived: now minus its length, but not before the newest frame.

        So the audio and the frames of a file get the right times if they are sent in the order of their times.
        """
        since_frame_s = 0.0 if self._first_frame_s is None else self._clock() - self._frame_came_s
        return self.now_s + max(0.0, since_frame_s - num_samples / SAMPLE_RATE_HZ)


class QuestionSound:
    """The audio since the last question, at most MAX_AUDIO_SAMPLES. `num_samples` is its length, `at_s` its start."""

    def __init__(self) -> None:
        self._audio: list[Pcm] = []
        self.num_samples, self.at_s = 0, 0.0

    def append(self, pcm: Pcm, time: VideoTime) -> float:
        """Append audio that has just arrived, and return its start time. Each chunk continues the previous one."""
        if not self._audio:
            self.at_s = time.sound(len(pcm))
        at_s = self.at_s + self.num_samples / SAMPLE_RATE_HZ
        self._audio.append(pcm)
        self.num_samples += len(pcm)
        return at_s

    def take(self) -> Pcm | None:
        """Remove and return all of the audio, or None if there is none."""
        pcm = np.concatenate(self._audio) if self._audio else None
        self._audio, self.num_samples = [], 0
        return pcm


class VideoSession:
    """One client's video session. `put` queues its commands, and `run` handles them until the session ends.

    The caller owns `video_model`. `emit` is awaited with every event, in order, and the session waits until it returns.
    `new_id` makes an id with a prefix. `measure` is called with "first_video_text" and the seconds from a question to
    the first text of its answer. `owner` is the owner of the session, see `VideoModel.open`. `clock` returns monotonic
    seconds. Everything runs in one event loop.

    `before` is the state of the session on another host, which has stored the frames `seen`. `newest` holds the newest
    frames that were kept, up to its `maxlen`, for a further host.

    `num_frames` counts the frames that were handled, `num_kept` those that were kept.
    """

    def __init__(
        self,
        config: VideoConfig,
        video_model: VideoModel,
        emit: EmitVideo,
        *,
        new_id: Callable[[str], str],
        measure: Callable[[str, float], None] = lambda kind, seconds: None,
        owner: Hashable | None = None,
        clock: Callable[[], float] = time.monotonic,
        before: VideoState = VideoState(),
        seen: Sequence[SeenFrame] = (),
        num_newest: int = 0,
    ) -> None:
        self._config = config
        self._video_model = video_model
        self._emit = emit
        self._new_id = new_id
        self._measure = measure
        self._owner = owner
        self._clock = clock
        self._send, self._receive = anyio.create_memory_object_stream[VideoCommand](MAX_WAITING)
        self._stream: VideoStream | None = None
        # Bound: the configuration's `max_frames`. At the limit the oldest frame is dropped.
        self._kept: deque[KeptFrame] = deque()
        self._filter: FrameFilter | None = None
        if config.filter:
            self._filter = (BlockFilter if config.filter == "blocks" else EvsFilter)(config.threshold)
        self._time, self._sound = VideoTime(clock, before), QuestionSound()
        self._seen = seen
        self.newest = deque[SeenFrame](maxlen=num_newest)
        self._answering = anyio.CancelScope()
        self._answered = anyio.Event()
        self._answered.set()
        self._num_waiting = self._waiting_bytes = 0
        self._has_ended = False
        self._handled = Signal()
        self.num_frames = self.num_kept = 0
        # The number of frames that were kept only on other hosts.
        self._num_before = before.num_kept

    @property
    def state(self) -> VideoState:
        """The state from which another host continues the session."""
        now_s = self._time.now_s if self._time.has_begun else None
        return VideoState(now_s, self._time.first_pts_ms, self._num_before + self.num_kept)

    async def put(self, command: VideoCommand) -> None:
        """Queue one command. Waits while MAX_WAITING commands or MAX_WAITING_BYTES wait.

        After the session has ended, returns at once and drops the command.
        """
        while self._waiting_bytes > MAX_WAITING_BYTES and not self._has_ended:
            await self._handled.wait()
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._num_waiting += 1
            self._waiting_bytes += _weight(command)
            await self._send.send(command)

    async def settled(self) -> None:
        """Wait until all commands that were put are handled and the video model has processed the frames, for example
        has read the text on them. Also returns if the session ends. For files, which do not arrive in real time.
        """
        async with anyio.create_task_group() as group:
            group.start_soon(self._settle, group.cancel_scope)
            while not self._has_ended:
                await self._handled.wait()
            group.cancel_scope.cancel()

    async def _settle(self, done: anyio.CancelScope) -> None:
        while self._num_waiting:
            await self._handled.wait()
        if self._stream:
            await self._stream.settled()
        done.cancel()

    def close(self) -> None:
        """End the input. `run` then handles the waiting commands and returns. An answer under way is cut off."""
        self._send.close()

    @property
    def num_bytes(self) -> int:
        """Memory of the waiting commands, of the kept frames' files, and of the audio for the next question."""
        return self._waiting_bytes + sum(frame.num_bytes for frame in self._kept) + 4 * self._sound.num_samples

    @property
    def idle(self) -> bool:
        """True if no answer is under way. The answer to a question that waits in the queue has not begun."""
        return self._answered.is_set()

    async def run(self) -> None:
        """Handle commands until FinishVideo, after which VideoEnded is emitted, or until the session is closed.

        If a frame or an answer fails, an event reports it. Raises Refused if the video model has no room for a session.
        """
        try:
            await self._run()
        finally:
            self._send.close()
            self._receive.close()
            self._has_ended = True
            self._handled.notify()

    async def _run(self) -> None:
        self._stream = await self._video_model.open(self._config.instructions, self._owner)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._stream.run)
                for frame in self._seen:
                    # The client has their results already, and no further host counts them again.
                    with suppress(MediaError, *FAILURES):
                        await self._keep(frame, EncodedImage(frame.image, MAX_FRAME_PIXELS))
                        self._num_before -= 1
                async for command in self._receive:
                    await self._handle(command, group)
                    self._num_waiting -= 1
                    self._waiting_bytes -= _weight(command)
                    self._handled.notify()
                    if isinstance(command, FinishVideo):
                        break
                group.cancel_scope.cancel()
        finally:
            self._stream.close()

    async def _handle(self, command: VideoCommand, group: anyio.abc.TaskGroup) -> None:
        match command:
            case AppendFrame(image, info, is_known):
                event = await self._append_frame(image, info)
                if not is_known:
                    await self._emit(event)
            case AppendVideoAudio(pcm):
                await self._append_audio(pcm)
            case AskQuestion(text):
                await self._interrupt()
                if not self._kept:
                    await self._emit(VideoFailed("No frames buffered", refuses="question"))
                    return
                self._answered = anyio.Event()
                group.start_soon(self._answer, *self._question(text))
            case FinishVideo():
                await self._answered.wait()
                await self._emit(VideoEnded())

    # --- frames and audio ---------------------------------------------------------------------------------------------

    async def _append_frame(self, file: bytes, info: FrameInfo) -> FrameReceived | VideoFailed:
        """Keep a frame, unless the filter drops it or it is not an image. Returns the event that reports the result."""
        self.num_frames += 1
        image, frame = EncodedImage(file, MAX_FRAME_PIXELS), SeenFrame(file, info, self._time.frame(info))
        self._forget()
        try:
            if self._filter:
                pixels = await in_thread(image.overview, places=IMAGE_THREADS)
                if not self._filter.keeps(pixels):
                    return FrameReceived(info, False, len(self._kept), "filtered")
            dropped = await self._keep(frame, image)
        except (MediaError, *FAILURES) as error:
            return VideoFailed("Frame decode failed", str(error), refuses="frame")
        return FrameReceived(info, True, len(self._kept), None, dropped)

    async def _keep(self, frame: SeenFrame, image: EncodedImage) -> FrameInfo | None:
        """Keep a frame, and return the description of the frame that it replaces. Raises MediaError and FAILURES."""
        assert self._stream
        await self._stream.append_frame(VideoFrame(self.num_kept, frame.at_s, image))
        dropped = None
        if len(self._kept) >= self._config.max_frames:
            oldest = self._kept.popleft()
            self._stream.drop_frame(oldest.number)
            dropped = oldest.info
        self._kept.append(KeptFrame(self.num_kept, frame.at_s, frame.info, len(frame.image)))
        self.num_kept += 1
        self.newest.append(frame)
        self._stream.select_frames(tuple(frame.number for frame in self._sampled()))
        return dropped

    def _forget(self) -> None:
        """Drop frames older than `max_memory_s`, and have the model forget everything before that time."""
        assert self._stream
        if self._config.max_memory_s is not None:
            before_s = self._time.now_s - self._config.max_memory_s
            self._stream.forget(before_s)
            while self._kept and self._kept[0].at_s < before_s:
                self._kept.popleft()

    async def _append_audio(self, pcm: Pcm) -> None:
        if self._sound.num_samples + len(pcm) > MAX_AUDIO_SAMPLES:
            self._sound.take()
            await self._emit(VideoFailed("Audio buffer overflow", refuses="audio"))
            return
        if self._config.uses_audio and len(pcm):
            assert self._stream
            self._stream.append_audio(pcm, self._sound.append(pcm, self._time))

    # --- answers ------------------------------------------------------------------------------------------------------

    def _sampled(self) -> list[KeptFrame]:
        """Return the frames from which a question that is asked now would be answered."""
        kept = list(self._kept)
        return [kept[i] for i in sample_frames(len(kept), self._config.num_frames)]

    def _question(self, text: str) -> tuple[VideoQuestion, tuple[FrameInfo, ...]]:
        """Return a question with its frames and all audio since the last one, and the client's info on the frames."""
        frames = self._sampled()
        numbers, infos = tuple(frame.number for frame in frames), tuple(frame.info for frame in frames)
        return VideoQuestion(text, self._time.now_s, numbers, self._sound.take(), self._sound.at_s), infos

    async def _interrupt(self) -> None:
        """Cancel the answer under way, and wait until it has ended. None of its events follow."""
        self._answering.cancel()
        await self._answered.wait()

    async def _answer(self, question: VideoQuestion, frames: tuple[FrameInfo, ...]) -> None:
        with anyio.CancelScope() as self._answering:
            await self._send_answer(question, frames)
        self._answered.set()

    async def _send_answer(self, question: VideoQuestion, frames: tuple[FrameInfo, ...]) -> None:
        assert self._stream
        config, profile = self._config, self._video_model.profile
        voice = None
        if config.audio_output and profile.voices:
            voice = VoiceOptions(config.voice if config.voice in profile.voices else profile.voices[0])
        options = ReplyOptions(**asdict(config.sampling))
        asked_s, text, is_spoken = self._clock(), "", False
        token_counts: dict[str, int] = {}
        await self._emit(AnswerStarted(self._new_id("video-"), frames))
        try:
            async with aclosing(self._stream.answer(question, options, voice)) as chunks:
                async for chunk in chunks:
                    match chunk:
                        case TextDelta(delta):
                            if not text:
                                self._measure("first_video_text", self._clock() - asked_s)
                            text += delta
                            if config.text_output:
                                await self._emit(AnswerTextDelta(delta))
                        case ResponseAudio(pcm):
                            is_spoken = True
                            await self._emit(AnswerAudioDelta(pcm, profile.sample_rate_hz))
                        case ReplyDone():
                            token_counts = {
                                "prompt_tokens": chunk.prompt_tokens,
                                "cached_tokens": chunk.cached_tokens,
                                "completion_tokens": chunk.completion_tokens,
                            }
                        case _:
                            # Ignores a tool call, because no tools were offered.
                            continue
        except FAILURES as error:
            log.error("a question about a video failed: %s", error)
            await self._emit(VideoFailed("Query processing failed", str(error), ends_answer=True, partial_text=text))
            return
        await self._emit(AnswerDone(text, is_spoken, token_counts, question.text))


def _weight(command: VideoCommand) -> int:
    """Return the bytes of media in a command."""
    match command:
        case AppendFrame(image):
            return len(image)
        case AppendVideoAudio(pcm):
            return pcm.nbytes
        case _:
            return 0
