"""The header of a WAV file: PCM16 or G.711, mono."""

from __future__ import annotations

import struct

UNKNOWN_SIZE = 0xFFFFFFFF
# Format tags, and the bytes of a sample of each.
PCM, FLOAT, ALAW, ULAW = 1, 3, 6, 7
_WIDTHS = {PCM: 2, FLOAT: 4, ALAW: 1, ULAW: 1}


def wav_header(rate_hz: int, num_bytes: int = UNKNOWN_SIZE, *, tag: int = PCM, channels: int = 1) -> bytes:
    """Return the 44 bytes that precede `num_bytes` bytes of samples at `rate_hz`. `tag` is their format.

    Without `num_bytes`, both sizes are 0xFFFFFFFF, for a stream of unknown length. Players accept that.
    """
    frame_bytes = _WIDTHS[tag] * channels
    riff = UNKNOWN_SIZE if num_bytes == UNKNOWN_SIZE else num_bytes + 36
    samples = struct.pack("<HHIIHH", tag, channels, rate_hz, rate_hz * frame_bytes, frame_bytes, 8 * _WIDTHS[tag])
    head = struct.pack("<4sI4s4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16)
    return head + samples + struct.pack("<4sI", b"data", num_bytes)
