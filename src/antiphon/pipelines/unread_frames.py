"""The unread frames of a video session, and the order in which they are read: at once for a question, otherwise in
turns with other sessions.

Reading uses one core as long as frames are waiting. A frame that no question waits for is read only while no question
waits for any frame, and across all sessions only one such frame is read at a time. If other sessions wait for their
turn, each read is followed by a pause of the same length, which leaves half of the time to the models that answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import anyio

from antiphon.contracts import ImageReader
from antiphon.errors import MediaError, ModelError, Refused
from antiphon.pipelines.frame_notes import FrameReading
from antiphon.signals import Signal
from antiphon.vision.images import EncodedImage

log = logging.getLogger(__name__)
# Maximum number of unread frames of a session, and of their bytes. If there are more, the oldest frames count as frames
# without text.
MAX_UNREAD, MAX_UNREAD_BYTES = 16, 32 << 20


class ReadAhead:
    """Reads frames for all sessions of a process. If no question waits for a frame, frames are read one at a time.

    `clock` returns monotonic seconds.
    """

    def __init__(self, reader: ImageReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._clock = reader, clock
        # The lock is fair, so sessions take turns.
        self._turn = anyio.Lock()
        # The number of frames that questions wait for.
        self._num_asked = 0
        self._answered = Signal()

    async def read_now(self, reading: FrameReading, image: EncodedImage) -> None:
        """Read a frame for which a question waits. If this fails, logs the reason, and the frame has no text."""
        self._num_asked += 1
        try:
            await self._read(reading, image)
        finally:
            self._num_asked -= 1
            self._answered.notify()

    async def _read(self, reading: FrameReading, image: EncodedImage) -> None:
        try:
            reading.lines = await self._reader.read(image)
        except (ModelError, Refused, MediaError) as error:
            log.warning("the text on a frame was not read: %s", error)
            reading.lines = ()

    async def read_in_turn(
        self, take: Callable[[], tuple[FrameReading, EncodedImage] | None], on_read: Callable[[], None]
    ) -> None:
        """Wait for the caller's turn, read the frame that `take` returns, if any, and pause."""
        async with self._turn:
            while self._num_asked:
                await self._answered.wait()
            taken = take()
            if taken is None:
                return
            began_s = self._clock()
            await self._read(*taken)
            on_read()
            if self._turn.statistics().tasks_waiting:
                await anyio.sleep(self._clock() - began_s)


class UnreadFrames:
    """One session's unread frames, the newest first. `on_read` is called after each read.

    It holds at most MAX_UNREAD files. For one event loop, in which one task calls `read_next`, and one `read_first`.
    """

    def __init__(self, read_ahead: ReadAhead, on_read: Callable[[], None]) -> None:
        self._read_ahead, self._on_read = read_ahead, on_read
        # The waiting frames. The last one is read next.
        self._waiting: list[tuple[FrameReading, EncodedImage]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, reading: FrameReading, image: EncodedImage) -> None:
        """Add the newest frame, which will be read shortly, from its decoded pixels. Of older frames only the files are
        kept.
        """
        for _, waiting in self._waiting:
            waiting.release()
        self._waiting.append((reading, image))
        while len(self._waiting) > MAX_UNREAD or sum(len(i.data) for _, i in self._waiting) > MAX_UNREAD_BYTES:
            self._waiting.pop(0)[0].lines = ()

    def keep(self, held: Collection[FrameReading]) -> None:
        """Drop the frames whose readings are not in `held`, without reading them."""
        ids = {id(reading) for reading in held}
        self._waiting = [(reading, image) for reading, image in self._waiting if id(reading) in ids]

    async def read_next(self) -> None:
        """Wait for this session's turn, and read its newest frame, if a frame is left at that time."""

        def take() -> tuple[FrameReading, EncodedImage] | None:
            return self._waiting.pop() if self._waiting else None

        await self._read_ahead.read_in_turn(take, self._on_read)

    async def read_first(self, wanted: Collection[FrameReading]) -> None:
        """Read the frames of these readings now, the newest first. Does not wait for a frame that is being read
        already.
        """
        ids = {id(reading) for reading in wanted}
        while index := next((i for i in range(len(self._waiting), 0, -1) if id(self._waiting[i - 1][0]) in ids), None):
            reading, image = self._waiting.pop(index - 1)
            try:
                await self._read_ahead.read_now(reading, image)
            finally:
                if reading.lines is None:
                    # The question was cancelled, so the frame waits again.
                    self._waiting.append((reading, image))
                self._on_read()
