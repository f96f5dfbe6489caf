"""What a loudspeaker plays of a conversation: from events to samples, and from samples to what was heard of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from antiphon.client.events import AudioToPlay, ConversationEvent, Ducked, Interrupted

# How much is played of a piece before that is told, in milliseconds.
TOLD_MS = 100
# How loud a response is while somebody speaks over it, of 1.
DUCKED_GAIN = 0.2


class Playback:
    """A queue of audio to play, emptied by a device at its own pace.

    `told`: called with a piece of audio and the part of it (0 to 1) that was played so far: every 100 ms, and when it
    is over, which it is too where it is dropped. It is called by whoever takes or drops. Methods may be called from any
    thread.
    """

    def __init__(self, told: Callable[[AudioToPlay, float], object] = lambda *_: None) -> None:
        self._told = told
        self._lock = threading.Lock()
        # Pieces that wait; of the first one, so many bytes were taken.
        self._waiting: deque[AudioToPlay] = deque()
        self._taken = self._told_bytes = 0
        self._gain, self._target = 1.0, 1.0

    def follow(self, event: ConversationEvent) -> None:
        """Do what an event of the conversation asks of whoever plays it; most ask nothing."""
        match event:
            case AudioToPlay():
                with self._lock:
                    self._waiting.append(event)
            case Interrupted():
                self.clear()
            case Ducked():
                self._target = DUCKED_GAIN if event.on else 1.0

    def take(self, num_samples: int) -> bytes:
        """Return the next samples for the device, as PCM of 16 bits; silence where there is nothing to play."""
        out, told = bytearray(), list[tuple[AudioToPlay, float]]()
        with self._lock:
            while self._waiting and len(out) < 2 * num_samples:
                piece = self._waiting[0]
                data = piece.pcm[self._taken : self._taken + 2 * num_samples - len(out)]
                out += data
                self._taken += len(data)
                if self._taken >= len(piece.pcm):
                    told.append((self._waiting.popleft(), 1.0))
                    self._taken = self._told_bytes = 0
                elif self._taken - self._told_bytes >= 2 * piece.rate_hz * TOLD_MS // 1000:
                    told.append((piece, self._taken / len(piece.pcm)))
                    self._told_bytes = self._taken
        for piece, part in told:
            self._told(piece, part)
        return self._faded(bytes(out)) + bytes(2 * num_samples - len(out))

    def clear(self) -> None:
        """Drop what waits. Nothing of it is heard, but for what was taken of the first piece."""
        with self._lock:
            piece = self._waiting[0] if self._waiting else None
            part = self._taken / len(piece.pcm) if piece and piece.pcm else 0.0
            self._waiting.clear()
            self._taken = self._told_bytes = 0
            self._gain = self._target = 1.0
        if piece and part:
            self._told(piece, part)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be played."""
        return not self._waiting

    def _faded(self, pcm: bytes) -> bytes:
        """The samples at the gain they are to have, which they reach by their end."""
        if self._gain == self._target == 1.0 or not pcm:
            return pcm
        samples = np.frombuffer(pcm, "<i2")
        gains = np.linspace(self._gain, self._target, len(samples), dtype=np.float32)
        self._gain = self._target
        return (samples * gains).astype("<i2").tobytes()
