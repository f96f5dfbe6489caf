"""A stand-in for the released token2wav, without weights: it returns a tone of the right length for each code.

A server with this folder on its PYTHONPATH imports it instead of the released package. Inputs and outputs have the same
shapes: 25 codes a second, 24 kHz, and the codes of the lookahead yield no audio until the last call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

SAMPLES_PER_CODE, LOOKAHEAD = 960, 3


class Token2wav:
    """The same interface as the released class: the object has the state of one stream, which callers replace."""

    def __init__(self, folder: str) -> None:
        self.flow = SimpleNamespace(pre_lookahead_len=LOOKAHEAD)
        self.stream_cache: Any = None
        self.hift_cache_dict: dict[str, Any] = {}

    def set_stream_cache(self, prompt_wav: str) -> tuple[Any, dict[str, Any]]:
        """Return the state before the first code, in the voice of a file."""
        return {"count": 0}, {}

    def stream(self, codes: list[int], prompt_wav: str, last_chunk: bool = False) -> bytes:
        """Return the audio of the codes, 16-bit little-endian."""
        heard = codes if last_chunk else codes[:-LOOKAHEAD]
        t = np.arange(SAMPLES_PER_CODE) / 24_000
        tones = [0.3 * np.sin(2 * np.pi * (200 + 5 * code) * t) for code in heard]
        pcm = np.concatenate(tones) if tones else np.zeros(0)
        return (pcm * 32767).astype("<i2").tobytes()
