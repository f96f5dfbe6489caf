"""The queue of commands between a connection and its session. It is bounded in seconds of audio, and can be closed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.errors import Refused
from antiphon.events.conversation import ConversationCommand
from antiphon.events.size import OBJECT_BYTES, num_bytes
from antiphon.events.transcription import AppendAudio, TranscriptionCommand
from antiphon.signals import Signal

# Minimum cost in samples (10 ms) of a command without audio, so that a flood of commands is not free.
COMMAND_SAMPLES = SAMPLE_RATE_HZ // 100
# Bytes of a command without audio that cost as much as one sample of audio. The default backlog holds 16 MiB of such
# commands.
BYTES_PER_SAMPLE = 35


class Inbox:
    """Commands in the order of their arrival, for one writer and one reader in one event loop.

    It holds at most `max_backlog_s` seconds of unread audio. Other commands count as a length of audio too (see
    COMMAND_SAMPLES). When the inbox is full, `put` waits, so that the socket is not read: a client that sends a file is
    slowed down, and nothing is lost. With `live`, `put` raises Refused instead, because a live caller must not fall
    behind. `is_fed` returns whether a client is connected that can put commands.
    """

    def __init__(self, max_backlog_s: float, *, live: bool = False, is_fed: Callable[[], bool] = lambda: True) -> None:
        self._max_samples = int(max_backlog_s * SAMPLE_RATE_HZ)
        self._live = live
        self.is_fed = is_fed
        # The waiting commands, each with its memory in bytes and its cost in samples.
        self._waiting: deque[tuple[TranscriptionCommand | ConversationCommand, int, int]] = deque()
        self._num_samples = 0
        # Bytes of the waiting commands, and of the audio that the reader still keeps. The reader sets the latter.
        self._waiting_bytes = 0
        self.kept_bytes = 0
        self._closed = False
        self._changed = Signal()
        self._reader_waits = False
        # The numbers of commands that were put and read so far.
        self.num_put = self.num_taken = 0

    @property
    def num_bytes(self) -> int:
        """Memory in bytes of the waiting commands and of the audio that the reader still keeps."""
        return self._waiting_bytes + self.kept_bytes

    @property
    def backlog_s(self) -> float:
        """Seconds of audio that were put but not read yet. A command without audio counts as 10 ms or more."""
        return self._num_samples / SAMPLE_RATE_HZ

    @property
    def is_worked_off(self) -> bool:
        """Whether the reader has handled all commands that were put, and waits for the next one."""
        return self._reader_waits

    async def put(self, command: TranscriptionCommand | ConversationCommand) -> None:
        """Add one command. A single command may exceed the bound. While the backlog is full, waits or raises Refused.

        On a closed inbox it never waits, and the reader may ignore the command.
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
        """Wait for the next command, remove it and return it. Returns None if the inbox is closed and empty."""
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
        """Close the queue. A waiting `put` then returns, and `get` returns the remaining commands and then None."""
        self._closed = True
        self._changed.notify()
