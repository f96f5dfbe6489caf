"""G.711 µ-law and A-law (ITU-T G.711), with tables of all 256 codes. The sample rate on the wire is 8 kHz."""

from __future__ import annotations

import numpy as np

from antiphon.audio import Pcm


def _ulaw_table() -> Pcm:
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    magnitude = (((code & 0x0F) << 3) + 0x84 << ((code >> 4) & 7)) - 0x84
    return (np.where(code & 0x80, -magnitude, magnitude) / 32768).astype(np.float32)


def _alaw_table() -> Pcm:
    code = np.arange(256, dtype=np.int32) ^ 0x55
    exponent, mantissa = (code >> 4) & 7, code & 0x0F
    magnitude = np.where(exponent == 0, (mantissa << 4) + 8, ((mantissa << 4) + 0x108) << np.maximum(exponent - 1, 0))
    return (np.where(code & 0x80, magnitude, -magnitude) / 32768).astype(np.float32)


_ULAW, _ALAW = _ulaw_table(), _alaw_table()


def _nearest(table: Pcm) -> tuple[Pcm, np.ndarray]:
    """Return the limits halfway between adjacent values, and the codes in ascending order of their values."""
    order = np.argsort(table, kind="stable")
    values = table[order]
    return ((values[1:] + values[:-1]) / 2).astype(np.float32), order.astype(np.uint8)


_TO_ULAW, _TO_ALAW = _nearest(_ULAW), _nearest(_ALAW)


def to_ulaw(pcm: Pcm) -> bytes:
    """Encode float32 in [-1, 1] to the nearest µ-law codes, one byte per sample. Louder samples are clipped."""
    borders, codes = _TO_ULAW
    return codes[np.searchsorted(borders, pcm)].tobytes()


def to_alaw(pcm: Pcm) -> bytes:
    """Encode float32 in [-1, 1] to the nearest A-law codes, one byte per sample. Louder samples are clipped."""
    borders, codes = _TO_ALAW
    return codes[np.searchsorted(borders, pcm)].tobytes()


def from_ulaw(data: bytes) -> Pcm:
    """Decode µ-law bytes to float32 in (-1, 1), one sample per byte. Every byte is a valid code."""
    return _ULAW[np.frombuffer(data, np.uint8)]


def from_alaw(data: bytes) -> Pcm:
    """Decode A-law bytes to float32 in (-1, 1), one sample per byte. Every byte is a valid code."""
    return _ALAW[np.frombuffer(data, np.uint8)]
