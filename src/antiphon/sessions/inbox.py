"""The hand-over from a socket to its session: bounded in seconds of audio, closable. One reader, one writer."""

from __future__ import annotations

from collections import deque

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.errors import Refused
from antiphon.events.conversation import ConversationCommand, CreateItem
from antiphon.events.duplex import AppendFrames
from antiphon.events.transcription import AppendAudio, TranscriptionCommand
from antiphon.signals import Signal

# Inputs without sound weigh something too, or a flood of them would be free.
CONTROL_SAMPLES = SAMPLE_RATE_HZ // 100
# What is written or shown weighs by its size: the default backlog is 16 MiB of it.
BYTES_A_SAMPLE = 35


class Inbox:
    """Inputs in order. Bound: `max_backlog_s` seconds of unread audio.

    When full, `put` waits (the socket is then not read, which slows a file and loses nothing), or with `live` raises
    Refused (a live caller must not fall behind).
    """

    def __init__(self, max_backlog_s: float, *, live: bool = False) -> None:
        self._most = int(max_backlog_s * SAMPLE_RATE_HZ)
        self._live = live
        self._waiting: deque[TranscriptionCommand | ConversationCommand] = deque()
        self._samples = 0
        self._closed = False
        self._changed = Signal()

    @property
    def backlog_s(self) -> float:
        """Seconds of audio put and not yet taken."""
        return self._samples / SAMPLE_RATE_HZ

    async def put(self, item: TranscriptionCommand | ConversationCommand) -> None:
        """Hand over one input. Waits, or raises Refused, while the backlog is full."""
        while self._samples >= self._most and not self._closed:
            if self._live:
                raise Refused(f"{self.backlog_s:.0f} s of audio are waiting", self.backlog_s)
            await self._changed.wait()
        self._waiting.append(item)
        self._samples += _weight(item)
        self._changed.notify()

    async def get(self) -> TranscriptionCommand | ConversationCommand | None:
        """The next input, waiting for it; None when the inbox is closed and empty."""
        while not self._waiting:
            if self._closed:
                return None
            await self._changed.wait()
        item = self._waiting.popleft()
        self._samples -= _weight(item)
        self._changed.notify()
        return item

    def close(self) -> None:
        """No more inputs; what waits can still be read."""
        self._closed = True
        self._changed.notify()


def _weight(item: TranscriptionCommand | ConversationCommand) -> int:
    if isinstance(item, AppendAudio):
        return len(item.pcm)
    if isinstance(item, CreateItem):
        return CONTROL_SAMPLES + sum(len(p.text) + len(p.image) for p in item.item.parts) // BYTES_A_SAMPLE
    if isinstance(item, AppendFrames):
        return CONTROL_SAMPLES + sum(map(len, item.frames)) // BYTES_A_SAMPLE
    return CONTROL_SAMPLES
