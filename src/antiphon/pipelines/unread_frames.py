"""The frames of a video session whose text is still to be read, and when it is: for a question at once, else in turns.

A reader takes one core for as long as there is anything to read. Frames that no question waits for are read one at a
time over all sessions, and only while no question waits for a frame. Where several sessions wait for that, each such
read is followed by a rest of its own length: half of the time is left to the models that answer.
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
# Bound: frames of a session whose text is still to be read. Past it the oldest count as frames without text.
MAX_UNREAD, MAX_UNREAD_BYTES = 16, 32 << 20


class ReadAhead:
    """Reads frames for all sessions of a process; of those that no question waits for, one at a time.

    `clock` returns monotonic seconds.
    """

    def __init__(self, reader: ImageReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._clock = reader, clock
        # Taken in the order of asking, so that sessions have turns.
        self._turn = anyio.Lock()
        # Frames that questions wait for.
        self._num_asked = 0
        self._answered = Signal()

    async def read_now(self, reading: FrameReading, image: EncodedImage) -> None:
        """Read a frame that a question waits for. One that cannot be read has no text; the reason is logged."""
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
        """Wait for the caller's turn, and read the frame that `take` then gives, unless it gives none; then rest."""
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
    """One session's frames that are still to be read, the newest first. `on_read`: called when one has been.

    It holds at most MAX_UNREAD files. Used from one event loop; one task calls `read_next`, and one `read_first`.
    """

    def __init__(self, read_ahead: ReadAhead, on_read: Callable[[], None]) -> None:
        self._read_ahead, self._on_read = read_ahead, on_read
        # The last is read next.
        self._waiting: list[tuple[FrameReading, EncodedImage]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, reading: FrameReading, image: EncodedImage) -> None:
        """Add the newest frame. It is read soon, from the pixels that are there; those that wait keep only files."""
        for _, waiting in self._waiting:
            waiting.release()
        self._waiting.append((reading, image))
        while len(self._waiting) > MAX_UNREAD or sum(len(i.data) for _, i in self._waiting) > MAX_UNREAD_BYTES:
            self._waiting.pop(0)[0].lines = ()

    def keep(self, held: Collection[FrameReading]) -> None:
        """Drop the frames of other readings than these: they are not read."""
        ids = {id(reading) for reading in held}
        self._waiting = [(reading, image) for reading, image in self._waiting if id(reading) in ids]

    async def read_next(self) -> None:
        """Wait for this session's turn, and read the newest frame; nothing where none is left by then."""

        def take() -> tuple[FrameReading, EncodedImage] | None:
            return self._waiting.pop() if self._waiting else None

        await self._read_ahead.read_in_turn(take, self._on_read)

    async def read_first(self, wanted: Collection[FrameReading]) -> None:
        """Read the frames of these readings now, the newest first. One that is being read already is not waited for."""
        ids = {id(reading) for reading in wanted}
        while index := next((i for i in range(len(self._waiting), 0, -1) if id(self._waiting[i - 1][0]) in ids), None):
            reading, image = self._waiting.pop(index - 1)
            try:
                await self._read_ahead.read_now(reading, image)
            finally:
                if reading.lines is None:
                    # The question is over: it waits again.
                    self._waiting.append((reading, image))
                self._on_read()
