"""The header of a WAV file: PCM16, mono."""

from __future__ import annotations

import struct

UNKNOWN_SIZE = 0xFFFFFFFF


def wav_header(rate_hz: int, num_bytes: int = UNKNOWN_SIZE) -> bytes:
    """Return the 44 bytes that precede `num_bytes` bytes of PCM16 mono data at `rate_hz`.

    Without `num_bytes`, both sizes are 0xFFFFFFFF, for a stream of unknown length. Players accept that.
    """
    riff = UNKNOWN_SIZE if num_bytes == UNKNOWN_SIZE else num_bytes + 36
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate_hz, rate_hz * 2, 2, 16, b"data", num_bytes
    )
