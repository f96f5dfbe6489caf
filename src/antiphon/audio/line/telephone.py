"""Audio of telephone lines: packets put back into their order, and the tones of keys (DTMF)."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from antiphon.audio import Pcm

# The keys of a telephone, in rows and columns, and the frequencies of both in Hz (ITU-T Q.23).
_KEYS = ("123A", "456B", "789C", "*0#D")
_ROWS_HZ, _COLUMNS_HZ = (697, 770, 852, 941), (1209, 1336, 1477, 1633)
KEYS = "".join(_KEYS)
# Length of a tone, and of the pause after it, in seconds. Q.24 asks receivers for 40 ms of each.
TONE_S, PAUSE_S = 0.1, 0.06
# Amplitude of each of the two frequencies.
AMPLITUDE = 0.25
# If the number of a packet differs by more from the next one, the sender has begun a new sequence.
MAX_JUMP = 50


def tones(keys: str, rate_hz: int) -> Pcm:
    """Return the tones of these keys, each with a pause after it: float32 [num_samples] at `rate_hz`.

    Raises ValueError for a character that is not one of KEYS.
    """
    times_s = np.arange(round(TONE_S * rate_hz)) / rate_hz
    pause = np.zeros(round(PAUSE_S * rate_hz), np.float32)
    parts: list[Pcm] = []
    for key in keys:
        row = next((number for number, keys_of_row in enumerate(_KEYS) if key in keys_of_row), None)
        if row is None:
            raise ValueError(f"{key!r} is not a key of a telephone")
        pair_hz = _ROWS_HZ[row], _COLUMNS_HZ[_KEYS[row].index(key)]
        tone = AMPLITUDE * sum(np.sin(2 * np.pi * hz * times_s) for hz in pair_hz)
        parts += [np.asarray(tone, np.float32), pause]
    return np.concatenate(parts) if parts else pause[:0]


Packet = TypeVar("Packet")


class JitterBuffer(Generic[Packet]):
    """Puts numbered packets of audio back into their order. It uses no clock: later packets show what is missing.

    A packet that is missing when one with a number `depth` higher has arrived is replaced by None, so that the stream
    keeps its time. Packets that come twice, or after their replacement, are dropped.
    """

    def __init__(self, depth: int = 5) -> None:
        self._depth = depth
        self._waiting: dict[int, Packet] = {}
        # The number of the next packet to return.
        self._next: int | None = None
        # Whether the last packet was dropped.
        self.has_dropped = False

    def put(self, number: int, packet: Packet) -> list[Packet | None]:
        """Add a packet, and return the packets that are due now, in order. May return none, or several."""
        if self._next is None or abs(number - self._next) > MAX_JUMP:
            self._waiting.clear()
            self._next = number
        self.has_dropped = number < self._next or number in self._waiting
        if self.has_dropped:
            return []
        self._waiting[number] = packet
        due: list[Packet | None] = []
        while self._waiting:
            if self._next in self._waiting:
                due.append(self._waiting.pop(self._next))
            elif max(self._waiting) - self._next >= self._depth:
                due.append(None)
            else:
                break
            self._next += 1
        return due
