"""The queue of commands between a connection and its session: bounded in seconds of audio, closable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.errors import Refused
from antiphon.events.conversation import ConversationCommand
from antiphon.events.size import OBJECT_BYTES, num_bytes
from antiphon.events.transcription import AppendAudio, TranscriptionCommand
from antiphon.signals import Signal

# What a command without audio counts as at least, 10 ms: a flood of them must not be free.
COMMAND_SAMPLES = SAMPLE_RATE_HZ // 100
# Other commands count by the memory that they take, so that the default backlog holds 16 MiB of them.
BYTES_PER_SAMPLE = 35


class Inbox:
    """Commands in the order in which they came, for one writer and one reader in one event loop.

    Bound: `max_backlog_s` seconds of audio that was not read; other commands count as some. When it is full, `put`
    waits, so that the socket is not read, which slows down a file and loses nothing. With `live` it raises Refused: a
    caller that speaks must not fall behind. `is_fed`: says whether there is somebody who could put something: a client
    that has lost its connection may still go on where it was.
    """

    def __init__(self, max_backlog_s: float, *, live: bool = False, is_fed: Callable[[], bool] = lambda: True) -> None:
        self._max_samples = int(max_backlog_s * SAMPLE_RATE_HZ)
        self._live = live
        self.is_fed = is_fed
        # Each with its memory, and the samples that it counts as.
        self._waiting: deque[tuple[TranscriptionCommand | ConversationCommand, int, int]] = deque()
        self._num_samples = 0
        # The memory of commands that wait, and of what the reader keeps of the audio it has read, as it says.
        self._waiting_bytes = 0
        self.kept_bytes = 0
        self._closed = False
        self._changed = Signal()
        self._reader_waits = False
        # Commands that were put, and that were read, since the beginning.
        self.num_put = self.num_taken = 0

    @property
    def num_bytes(self) -> int:
        """The memory of what was put: of commands that wait, and of the audio that the reader still keeps."""
        return self._waiting_bytes + self.kept_bytes

    @property
    def backlog_s(self) -> float:
        """The seconds of audio that were put and not read yet, commands without audio included as 10 ms or more."""
        return self._num_samples / SAMPLE_RATE_HZ

    @property
    def is_worked_off(self) -> bool:
        """Whether the reader waits for the next command: it has dealt with all that was put."""
        return self._reader_waits

    async def put(self, command: TranscriptionCommand | ConversationCommand) -> None:
        """Add one command, which may exceed the bound by itself. While the backlog is full it waits, or raises Refused.

        On a closed inbox it never waits; whether such a command is read is up to the reader.
        """
        while self._num_samples >= self._max_samples and not self._closed:
            if self._live:
                raise Refused(f"{self.backlog_s:.0f} s of audio are waiting", self.backlog_s)
            await self._changed.wait()
        if isinstance(command, AppendAudio):
            # As `num_bytes` has it: the command and its array.
            size, num_samples = 2 * OBJECT_BYTES + command.pcm.nbytes, len(command.pcm)
        else:
            size = num_bytes(command)
            num_samples = COMMAND_SAMPLES + size // BYTES_PER_SAMPLE
        self._waiting.append((command, size, num_samples))
        self.num_put += 1
        self._waiting_bytes += size
        self._num_samples += num_samples
        self._reader_waits = False
        self._changed.notify()

    async def get(self) -> TranscriptionCommand | ConversationCommand | None:
        """Remove and return the next command. Waits for one; returns None once the inbox is closed and empty."""
        while not self._waiting:
            if self._closed:
                return None
            self._reader_waits = True
            try:
                await self._changed.wait()
            finally:
                self._reader_waits = False
        command, size, num_samples = self._waiting.popleft()
        self.num_taken += 1
        self._waiting_bytes -= size
        self._num_samples -= num_samples
        self._changed.notify()
        return command

    def close(self) -> None:
        """End the queue: a `put` that waits returns, and `get` returns what is left and then None."""
        self._closed = True
        self._changed.notify()
