"""`antiphon watch`: answers questions about a clip, a camera or a stream."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread
import av
import av.container
from av.error import FFmpegError

from antiphon.errors import MediaError
from antiphon.events.video import (
    AnswerDone,
    AnswerTextDelta,
    AppendFrame,
    AskQuestion,
    FinishVideo,
    FrameInfo,
    VideoConfig,
    VideoEvent,
    VideoFailed,
)
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import LANGUAGE_ROLES, VIDEO_ROLES
from antiphon.sessions.video.session import VideoSession
from antiphon.settings import Settings

# JPEG quality of the frames: high enough that text stays legible.
QUALITY = 90
# The time for which a camera or stream is watched if --seconds is not given, in seconds.
LIVE_S = 10.0


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """The options of `antiphon watch`.

    - `source`: a file, a URL, or a camera's device (`/dev/video0`).
    - `questions`: asked in order after all frames.
    - `fps`: frames taken from the source per second.
    - `seconds`: how long to watch; None: the whole file, or LIVE_S of a camera or stream.
    """

    source: str
    questions: tuple[str, ...]
    fps: float = 1.0
    seconds: float | None = None


def check_source(source: str) -> None:
    """Check that a source can be opened. Blocks. Raises MediaError if it cannot, or has no pictures."""
    try:
        with _opened(source):
            return
    except (FFmpegError, OSError) as error:
        raise MediaError(f"{source} cannot be opened: {_reason(error)}") from None


async def watch(settings: Settings, request: WatchRequest) -> None:
    """Watch the source, ask the questions, and print the answers as they are generated.

    Raises MediaError if the source cannot be opened, StoreError, ModelError, Refused.
    """
    try:
        await _watch(settings, request)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _watch(settings: Settings, request: WatchRequest) -> None:
    models = await anyio.to_thread.run_sync(
        load, settings, store_of(settings.models), None, (*LANGUAGE_ROLES, *VIDEO_ROLES, "transcriber")
    )
    try:
        video_model = models.for_video
        if video_model is None:
            raise MediaError("--language-model none: there is no model to answer")
        printer = _AnswerPrinter()
        session = VideoSession(
            VideoConfig(audio_output=False, max_frames=256, filter="blocks"),
            video_model,
            printer.emit,
            new_id=lambda p: p,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            frames = _frames(request)
            while (found := await anyio.to_thread.run_sync(next, frames, None)) is not None:
                at_s, image = found
                await session.put(AppendFrame(image, FrameInfo(0.0, None, at_s * 1000)))
            await session.settled()
            for question in request.questions:
                print(f"{question}\n  ", end="", flush=True)
                printer.done = anyio.Event()
                await session.put(AskQuestion(question))
                await printer.done.wait()
                print()
            await session.put(FinishVideo())
    finally:
        models.close()


class _AnswerPrinter:
    """Prints a session's answers and errors; `done` is set when an answer is complete."""

    def __init__(self) -> None:
        self.done = anyio.Event()

    async def emit(self, output: VideoEvent) -> None:
        match output:
            case AnswerTextDelta(text):
                print(text, end="", flush=True)
            case AnswerDone():
                self.done.set()
            case VideoFailed(message, detail):
                print(f"{message}: {detail}" if detail else message, end="", flush=True)
                self.done.set()
            case _:
                return


def _is_live(source: str) -> bool:
    return source.startswith("/dev/") or "://" in source


def _frames(request: WatchRequest) -> Iterator[tuple[float, bytes]]:
    """Yield JPEG images at the requested rate, each with its time from the first one, in seconds. Raises MediaError."""
    try:
        with _opened(request.source) as container:
            first: float | None = None
            due = 0.0
            seconds = LIVE_S if request.seconds is None and _is_live(request.source) else request.seconds
            for frame in container.decode(video=0):
                if frame.time is None:
                    continue
                first = frame.time if first is None else first
                at_s = frame.time - first
                if seconds is not None and at_s > seconds:
                    return
                if at_s + 1e-3 < due:
                    continue
                due = at_s + 1 / request.fps
                file = io.BytesIO()
                frame.to_image().save(file, "JPEG", quality=QUALITY)  # type: ignore[no-untyped-call]
                yield at_s, file.getvalue()
    except (FFmpegError, OSError) as error:
        raise MediaError(f"{request.source} cannot be opened: {_reason(error)}") from None


@contextmanager
def _opened(source: str) -> Iterator[av.container.InputContainer]:
    with av.open(source, format="v4l2" if source.startswith("/dev/") else None) as container:
        if not container.streams.video:
            raise MediaError(f"{source} has no pictures")
        yield container


def _reason(error: Exception) -> str:
    """Return the error message of FFmpeg without the error number and the file's name."""
    return getattr(error, "strerror", None) or str(error)
