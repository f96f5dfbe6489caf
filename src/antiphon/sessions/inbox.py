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

# The least that a command without audio counts as, 10 ms: a flood of commands must not be free.
COMMAND_SAMPLES = SAMPLE_RATE_HZ // 100
# Commands without audio count by the memory that they take, so that the default backlog holds 16 MiB of them.
BYTES_PER_SAMPLE = 35


class Inbox:
    """Commands in the order of their arrival, for one writer and one reader in one event loop.

    Bound: `max_backlog_s` seconds of unread audio; other commands count as audio too (COMMAND_SAMPLES). When the inbox
    is full, `put` waits, so that the socket is not read: a file is read more slowly, and nothing is lost. With `live`,
    `put` raises Refused instead, because a live caller must not fall behind. `is_fed` returns whether a client can
    still put commands: a client that has lost its connection may reconnect and continue.
    """

    def __init__(self, max_backlog_s: float, *, live: bool = False, is_fed: Callable[[], bool] = lambda: True) -> None:
        self._max_samples = int(max_backlog_s * SAMPLE_RATE_HZ)
        self._live = live
        self.is_fed = is_fed
        # Each command with its memory in bytes and its cost in samples.
        self._waiting: deque[tuple[TranscriptionCommand | ConversationCommand, int, int]] = deque()
        self._num_samples = 0
        # Memory of the waiting commands, and of the audio that the reader still keeps, which the reader sets.
        self._waiting_bytes = 0
        self.kept_bytes = 0
        self._closed = False
        self._changed = Signal()
        self._reader_waits = False
        # Commands that were put, and that were read, since the inbox was made.
        self.num_put = self.num_taken = 0

    @property
    def num_bytes(self) -> int:
        """Memory in bytes of the waiting commands and of the audio that the reader still keeps."""
        return self._waiting_bytes + self.kept_bytes

    @property
    def backlog_s(self) -> float:
        """Seconds of audio that were put and not read yet. A command without audio counts as 10 ms or more."""
        return self._num_samples / SAMPLE_RATE_HZ

    @property
    def is_worked_off(self) -> bool:
        """Whether the reader waits for the next command, having handled all that were put."""
        return self._reader_waits

    async def put(self, command: TranscriptionCommand | ConversationCommand) -> None:
        """Add one command, which may exceed the bound by itself. While the backlog is full, waits or raises Refused.

        On a closed inbox it never waits. Whether the reader still reads such a command is up to the reader.
        """
        while self._num_samples >= self._max_samples and not self._closed:
            if self._live:
                raise Refused(f"{self.backlog_s:.0f} s of audio are waiting", self.backlog_s)
            await self._changed.wait()
        if isinstance(command, AppendAudio):
            # Same as `num_bytes`: the command and its array.
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
        """Remove and return the next command. Waits for one. Returns None once the inbox is closed and empty."""
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
        """Close the queue: a waiting `put` returns, and `get` returns the remaining commands and then None."""
        self._closed = True
        self._changed.notify()
