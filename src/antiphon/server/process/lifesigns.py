"""Decides from what a WebSocket's client sends and takes whether it is still there. Pure; the caller gives the time.

A pong alone cannot tell. A ping waits behind what the client has yet to read: one that reads an answer at the pace at
which it is heard is minutes behind.
"""

from __future__ import annotations

import struct

# A client that gives no sign of life for SILENCE_S is gone. One that was sent more than it is known to have read has as
# much time as the slowest client, of mu-law in base64, takes to read that, and at most MAX_SILENCES of SILENCE_S.
SILENCE_S, MAX_SILENCES, SLOWEST_BYTES_PER_S = 60.0, 5, 10_000
# A ping is sent so often, for the proxies in between, too, which cut connections that are still.
PING_INTERVAL_S = 20.0


class LifeSigns:
    """The signs of life of one client: bytes that came from it, and bytes that it took after it had taken none."""

    def __init__(self, now_s: float, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._last_s = now_s
        self._sent = self._read = 0

    def seen(self, now_s: float) -> None:
        """Note a sign of life."""
        self._last_s = max(self._last_s, now_s)

    def sent(self, num_bytes: int) -> None:
        """Note what was sent to the client."""
        self._sent += num_bytes

    @property
    def ping(self) -> bytes:
        """The payload of a ping that is sent now. The pong, which repeats it, tells what was read before it."""
        return struct.pack("!Q", self._sent)

    def pong(self, payload: bytes) -> None:
        """Note the payload of a pong. It is a sign of life by itself, as all bytes are; any other payload tells nothing
        more.
        """
        if len(payload) == 8:
            self._read = min(self._sent, max(self._read, struct.unpack("!Q", payload)[0]))

    @property
    def gone_s(self) -> float:
        """When the client is gone if it gives no other sign until then, on the clock of `now_s`."""
        unread_s = (self._sent - self._read) / SLOWEST_BYTES_PER_S
        return self._last_s + min(max(self._silence_s, unread_s), MAX_SILENCES * self._silence_s)
