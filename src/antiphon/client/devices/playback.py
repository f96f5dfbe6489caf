"""The queue of audio for a loudspeaker. It takes a conversation's events, and reports how much audio was played."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from antiphon.client.events import AudioToPlay, ConversationEvent, Ducked, Interrupted

# Interval of the reports, in milliseconds of audio played.
TOLD_MS = 100
# The volume of a response while somebody speaks over it; 1 is normal.
DUCKED_GAIN = 0.2


class Playback:
    """A queue of audio that a device empties at its own pace. Methods may be called from any thread.

    Args:
        on_played: Callback that gets a piece of audio and the part of it, from 0 to 1, that was played so far. It is
            called after every TOLD_MS of a piece, and when the piece ends or is dropped. It runs in the thread that
            calls `take` or `clear`.
    """

    def __init__(self, on_played: Callable[[AudioToPlay, float], object] = lambda *_: None) -> None:
        self._on_played = on_played
        self._lock = threading.Lock()
        # The queued pieces; how many bytes of the first piece were taken, and how many were reported as played.
        self._waiting: deque[AudioToPlay] = deque()
        self._taken = self._on_played_bytes = 0
        self._gain, self._target = 1.0, 1.0

    def follow(self, event: ConversationEvent) -> None:
        """Apply an event of the conversation: queue its audio, drop what is queued, or change the volume.

        Most events change nothing.
        """
        match event:
            case AudioToPlay():
                with self._lock:
                    self._waiting.append(event)
            case Interrupted():
                self.clear()
            case Ducked():
                self._target = DUCKED_GAIN if event.on else 1.0

    def take(self, num_samples: int) -> bytes:
        """Return the next `num_samples` for the device, as 16-bit PCM, padded with silence if the queue is empty."""
        out, played = bytearray(), list[tuple[AudioToPlay, float]]()
        with self._lock:
            while self._waiting and len(out) < 2 * num_samples:
                piece = self._waiting[0]
                data = piece.pcm[self._taken : self._taken + 2 * num_samples - len(out)]
                out += data
                self._taken += len(data)
                if self._taken >= len(piece.pcm):
                    played.append((self._waiting.popleft(), 1.0))
                    self._taken = self._on_played_bytes = 0
                elif self._taken - self._on_played_bytes >= 2 * piece.rate_hz * TOLD_MS // 1000:
                    played.append((piece, self._taken / len(piece.pcm)))
                    self._on_played_bytes = self._taken
        for piece, part in played:
            self._on_played(piece, part)
        return self._faded(bytes(out)) + bytes(2 * num_samples - len(out))

    def clear(self) -> None:
        """Drop the queued audio, and report how much of the first piece was played."""
        with self._lock:
            piece = self._waiting[0] if self._waiting else None
            part = self._taken / len(piece.pcm) if piece and piece.pcm else 0.0
            self._waiting.clear()
            self._taken = self._on_played_bytes = 0
            self._gain = self._target = 1.0
        if piece and part:
            self._on_played(piece, part)

    @property
    def is_empty(self) -> bool:
        """Whether no audio waits to be played."""
        return not self._waiting

    def _faded(self, pcm: bytes) -> bytes:
        """Return the samples with the gain faded to its target, which is reached at their end."""
        if self._gain == self._target == 1.0 or not pcm:
            return pcm
        samples = np.frombuffer(pcm, "<i2")
        gains = np.linspace(self._gain, self._target, len(samples), dtype=np.float32)
        self._gain = self._target
        return (samples * gains).astype("<i2").tobytes()
