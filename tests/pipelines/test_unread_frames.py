"""The order of reading the text on frames: questions first, sessions in turns, and half of the time if several wait."""

from __future__ import annotations

import asyncio
import io

import anyio
import numpy as np
import pytest
from PIL import Image

from antiphon.contracts import ImageReader
from antiphon.pipelines.frame_notes import FrameReading
from antiphon.pipelines.unread_frames import MAX_UNREAD, ReadAhead, UnreadFrames
from antiphon.vision.images import EncodedImage


class SlowReader:
    """Reads a level a step of the `clock`; at most one at a time, as a lane of one thread."""

    def __init__(self) -> None:
        self.read_levels: list[int] = []
        self.go = asyncio.Semaphore(0)
        self.now_s = 0.0

    async def read(self, image: EncodedImage) -> tuple[str, ...]:
        self.read_levels.append(int(image.pixels(16)[0, 0, 0]))
        await self.go.acquire()
        self.now_s += 1.0
        return (str(self.read_levels[-1]),)


def frame(level: int) -> tuple[FrameReading, EncodedImage]:
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), level, np.uint8)).save(file, "PNG")
    return FrameReading(), EncodedImage(file.getvalue())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_a_question_waits_for_is_read_at_once_and_nothing_else_meanwhile() -> None:
    async def main() -> None:
        reader = SlowReader()
        ahead = ReadAhead(reader)
        mine, others = UnreadFrames(ahead, lambda: None), UnreadFrames(ahead, lambda: None)
        asked, newer = frame(10), frame(20)
        for one in (asked, newer):
            mine.put(*one)
        others.put(*frame(90))
        others.put(*frame(80))
        background = asyncio.create_task(others.read_next())
        await settle()
        question = asyncio.create_task(mine.read_first([asked[0]]))
        await settle()
        # The other session's frame is already being read; the question's frame does not wait for its turn.
        assert reader.read_levels == [80, 10]
        reader.go.release()
        await settle()
        following = asyncio.create_task(others.read_next())
        await settle()
        # No other frame is read while a question waits.
        assert reader.read_levels == [80, 10]
        reader.go.release()
        await asyncio.wait_for(question, 5)
        assert asked[0].lines == ("10",)
        assert newer[0].lines is None
        reader.go.release()
        await asyncio.wait_for(asyncio.gather(background, following), 5)
        assert reader.read_levels == [80, 10, 90]

    asyncio.run(main())


def test_where_several_sessions_wait_the_reader_rests_as_long_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = list[float]()

    async def main() -> None:
        reader = SlowReader()
        ahead = ReadAhead(reader, lambda: reader.now_s)
        sessions = [UnreadFrames(ahead, lambda: None) for _ in range(3)]
        for number, session in enumerate(sessions):
            session.put(*frame(10 + number))
            reader.go.release()

        async def sleep(seconds: float) -> None:
            rests.append(seconds)

        monkeypatch.setattr(anyio, "sleep", sleep)
        await asyncio.gather(*(session.read_next() for session in sessions))
        # In turns; no session waits after the last one.
        assert reader.read_levels == [10, 11, 12]

    asyncio.run(main())
    assert rests == [1.0, 1.0]


def test_a_question_that_is_broken_off_leaves_its_frame_to_be_read() -> None:
    async def main() -> None:
        reader = SlowReader()
        unread = UnreadFrames(ReadAhead(reader), lambda: None)
        wanted = frame(10)
        unread.put(*wanted)
        question = asyncio.create_task(unread.read_first([wanted[0]]))
        await settle()
        question.cancel()
        await asyncio.gather(question, return_exceptions=True)
        assert unread
        reader.go.release()
        await unread.read_next()
        assert wanted[0].lines == ("10",)

    asyncio.run(main())


def test_files_that_wait_are_bounded_and_the_oldest_count_as_without_text() -> None:
    reader: ImageReader = SlowReader()
    unread = UnreadFrames(ReadAhead(reader), lambda: None)
    frames = [frame(n) for n in range(MAX_UNREAD + 2)]
    for one in frames:
        unread.put(*one)
    assert [reading.lines for reading, _ in frames[:3]] == [(), (), None]
    unread.keep([frames[-1][0]])
    assert bool(unread)
    unread.keep([])
    assert not unread
