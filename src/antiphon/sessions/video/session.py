"""A video session: frames and audio in, answers out. Frames go to the video model as they come. A question is answered
from the frames that are kept then, and cuts off the answer before it.

One task handles the commands in order; each answer is a task of its own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np

from antiphon.audio import Pcm
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
from antiphon.signals import Signal
from antiphon.vision.frame_filters import BlockFilter, EvsFilter, FrameFilter, sample_frames
from antiphon.vision.images import EncodedImage

log = logging.getLogger(__name__)

# How many commands may wait, and how many bytes of frames and audio. Beyond either `put` waits, so the socket is not
# read.
MAX_WAITING, MAX_WAITING_BYTES = 32, 16 << 20
# The most audio that may wait for a question: 4 MiB of PCM16, about 131 s.
MAX_SOUND_SAMPLES = (4 << 20) // 2
FAILURES = (ModelError, EngineError, Refused, RemoteProtocolError)
EmitVideo = Callable[[VideoEvent], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """A frame that questions may be answered from.

    - `number`: the frame's number for the video model, counted from 0 over the kept frames.
    - `at_s`: its time in seconds since the session's first frame.
    - `facts`: what the client said of it, given back in events.
    """

    number: int
    at_s: float
    facts: FrameInfo


class VideoSession:
    """One client's video session. `run()` it as a task, `put` each command, and `close` it to end it without waiting.

    - `emit`: is awaited for every event and may hold the session back.
    - `new_id`: returns a fresh id that begins with the given prefix.
    - `measure`: gets `first_video_text`, the seconds from a question to the first text of its answer.
    - `clock`: returns monotonic seconds, for frames without a time of their own.

    `num_frames` counts the frames that came, `num_kept` those that the filter kept. All of it runs in one event loop;
    images are decoded for the filter in worker threads.
    """

    def __init__(
        self,
        config: VideoConfig,
        watcher: VideoModel,
        emit: EmitVideo,
        *,
        new_id: Callable[[str], str],
        measure: Callable[[str, float], None] = lambda kind, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._watcher = watcher
        self._emit = emit
        self._new_id = new_id
        self._measure = measure
        self._clock = clock
        self._send, self._receive = anyio.create_memory_object_stream[VideoCommand](MAX_WAITING)
        self._watching: VideoStream | None = None
        self._kept: deque[KeptFrame] = deque()
        self._filter: FrameFilter | None = None
        if config.filter:
            self._filter = (BlockFilter if config.filter == "blocks" else EvsFilter)(config.threshold)
        self._count = 0
        self._began_s: float | None = None
        self._first_pts_ms: float | None = None
        self._now_s = 0.0
        self._sound: list[Pcm] = []
        self._num_samples = 0
        self._answering = anyio.CancelScope()
        self._answered = anyio.Event()
        self._answered.set()
        self._num_put = self._num_taken = self._waiting_bytes = 0
        self._over = False
        self._took = Signal()
        # Frames that came, and those of them that were kept.
        self.num_frames = self.num_kept = 0

    async def put(self, item: VideoCommand) -> None:
        """Add one command. Waits while 32 commands or more than 16 MiB of frames and audio wait to be handled. Once the
        session has ended, the command is dropped without an error.
        """
        while self._waiting_bytes > MAX_WAITING_BYTES and not self._over:
            await self._took.wait()
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._num_put += 1
            self._waiting_bytes += _weight(item)
            await self._send.send(item)

    async def settled(self) -> None:
        """Wait until every command that was put is handled and the video model knows all about the frames so far, such
        as the text on them. For files, which are not shown in real time; `run` has to run beside it.
        """
        while self._num_taken < self._num_put:
            await self._took.wait()
        if self._watching:
            await self._watching.settled()

    def close(self) -> None:
        """End the session: commands that already wait are handled, then an answer that is under way is cut off, and
        `run` returns. Does not wait.
        """
        self._send.close()

    @property
    def idle(self) -> bool:
        """Whether no answer is under way. A question that still waits in the queue does not count, since nothing has
        begun to answer it.
        """
        return self._answered.is_set()

    async def run(self) -> None:
        """Run the session until a FinishVideo is handled, which waits for the answer under way, or until `close`. Opens
        the video model's stream and closes it at the end. Raises Refused where the model has no room for a session.
        """
        try:
            await self._run()
        finally:
            self._send.close()
            self._receive.close()
            self._over = True
            self._took.notify()

    async def _run(self) -> None:
        self._watching = await self._watcher.open(self._config.instructions)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watching.run)
                async for item in self._receive:
                    await self._take(item, group)
                    self._num_taken += 1
                    self._waiting_bytes -= _weight(item)
                    self._took.notify()
                    if isinstance(item, FinishVideo):
                        break
                group.cancel_scope.cancel()
        finally:
            self._watching.close()

    async def _take(self, item: VideoCommand, group: anyio.abc.TaskGroup) -> None:
        match item:
            case AppendFrame(image, facts):
                await self._see(image, facts)
            case AppendVideoAudio(pcm):
                await self._hear(pcm)
            case AskQuestion(text):
                await self._interrupt()
                if not self._kept:
                    await self._emit(VideoFailed("No frames buffered"))
                    return
                self._answered = anyio.Event()
                group.start_soon(self._answer, self._question(text))
            case FinishVideo():
                await self._answered.wait()
                await self._emit(VideoEnded())

    # --- frames and audio ---------------------------------------------------------------------------------------------

    async def _see(self, file: bytes, facts: FrameInfo) -> None:
        assert self._watching
        image = EncodedImage(file)
        self.num_frames += 1
        at_s = self._place(facts)
        self._forget()
        try:
            if self._filter:
                pixels = await anyio.to_thread.run_sync(image.overview)
                if not self._filter.keeps(pixels):
                    await self._emit(FrameReceived(facts, False, len(self._kept), "filtered"))
                    return
            await self._watching.append_frame(VideoFrame(self._count, at_s, image))
        except (MediaError, *FAILURES) as error:
            await self._emit(VideoFailed("Frame decode failed", str(error)))
            return
        dropped = None
        if len(self._kept) >= self._config.max_frames:
            oldest = self._kept.popleft()
            self._watching.drop_frame(oldest.number)
            dropped = oldest.facts
        self._kept.append(KeptFrame(self._count, at_s, facts))
        self._count += 1
        self.num_kept += 1
        self._watching.select_frames(tuple(k.number for k in self._sampled()))
        await self._emit(FrameReceived(facts, True, len(self._kept), None, dropped))

    def _forget(self) -> None:
        """Drop the frames that are older than `max_memory_s`, here and in the video model."""
        assert self._watching
        if self._config.max_memory_s is not None:
            before_s = self._now_s - self._config.max_memory_s
            self._watching.forget(before_s)
            while self._kept and self._kept[0].at_s < before_s:
                self._kept.popleft()

    def _place(self, facts: FrameInfo) -> float:
        """Return a frame's time in seconds since the first frame: by its presentation time, or else by its arrival."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s, self._first_pts_ms = now_s, facts.pts_ms
        if facts.pts_ms is not None and self._first_pts_ms is not None:
            at_s = (facts.pts_ms - self._first_pts_ms) / 1000
        else:
            at_s = now_s - self._began_s
        self._now_s = max(self._now_s, at_s)
        return at_s

    async def _hear(self, pcm: Pcm) -> None:
        if self._num_samples + len(pcm) > MAX_SOUND_SAMPLES:
            self._sound, self._num_samples = [], 0
            await self._emit(VideoFailed("Audio buffer overflow"))
            return
        if self._config.uses_audio:
            self._sound.append(pcm)
            self._num_samples += len(pcm)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _sampled(self) -> list[KeptFrame]:
        """Return the frames that a question asked now would be answered from, oldest first."""
        kept = list(self._kept)
        return [kept[i] for i in sample_frames(len(kept), self._config.num_frames)]

    def _question(self, text: str) -> tuple[VideoQuestion, tuple[FrameInfo, ...]]:
        used = self._sampled()
        pcm = np.concatenate(self._sound) if self._sound else None
        self._sound, self._num_samples = [], 0
        return VideoQuestion(text, self._now_s, tuple(k.number for k in used), pcm), tuple(k.facts for k in used)

    async def _interrupt(self) -> None:
        """Cut off the answer under way and wait until its task has ended, so that no event of it follows."""
        self._answering.cancel()
        await self._answered.wait()

    async def _answer(self, asked: tuple[VideoQuestion, tuple[FrameInfo, ...]]) -> None:
        with anyio.CancelScope() as self._answering:
            await self._say(*asked)
        self._answered.set()

    async def _say(self, question: VideoQuestion, frames: tuple[FrameInfo, ...]) -> None:
        assert self._watching
        config, profile = self._config, self._watcher.profile
        voice = None
        if config.audio_output and profile.voices:
            voice = VoiceOptions(config.voice if config.voice in profile.voices else profile.voices[0])
        began_s, said, sounded = self._clock(), "", False
        counts: dict[str, int] = {}
        await self._emit(AnswerStarted(self._new_id("video-"), frames))
        try:
            async with aclosing(self._watching.answer(question, ReplyOptions(), voice)) as answers:
                async for answer in answers:
                    match answer:
                        case TextDelta(text):
                            if not said:
                                self._measure("first_video_text", self._clock() - began_s)
                            said += text
                            if config.text_output:
                                await self._emit(AnswerTextDelta(text))
                        case ResponseAudio(pcm):
                            sounded = True
                            await self._emit(AnswerAudioDelta(pcm, profile.sample_rate_hz))
                        case ReplyDone(_, prompt, cached, completion):
                            counts = {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion}
                        case _:
                            continue
        except FAILURES as error:
            log.error("a question about a video failed: %s", error)
            await self._emit(VideoFailed("Query processing failed", str(error), ends_answer=True, partial_text=said))
            return
        await self._emit(AnswerDone(said, sounded, counts))


def _weight(item: VideoCommand) -> int:
    match item:
        case AppendFrame(image):
            return len(image)
        case AppendVideoAudio(pcm):
            return pcm.nbytes
        case _:
            return 0
