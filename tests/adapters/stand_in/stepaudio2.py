"""In place of the makers' token2wav, whose weights no registry has: a tone for each code, of the length that it has.

A server whose PYTHONPATH names this folder imports it as it would import the makers' package. What the package gets and
gives has the same shapes: 25 codes a second, 24 kHz, and the codes at the end of what is given, but for the last, have
no audio yet.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

SAMPLES_PER_CODE, LOOKAHEAD = 960, 3


class Token2wav:
    """As the makers' class is used: one stream's state is kept in the object, and put in from outside."""

    def __init__(self, folder: str) -> None:
        self.flow = SimpleNamespace(pre_lookahead_len=LOOKAHEAD)
        self.stream_cache: Any = None
        self.hift_cache_dict: dict[str, Any] = {}

    def set_stream_cache(self, prompt_wav: str) -> tuple[Any, dict[str, Any]]:
        """The state before the first code, in the voice of a file."""
        return {"count": 0}, {}

    def stream(self, codes: list[int], prompt_wav: str, last_chunk: bool = False) -> bytes:
        """The audio of the codes, 16-bit little-endian."""
        heard = codes if last_chunk else codes[:-LOOKAHEAD]
        t = np.arange(SAMPLES_PER_CODE) / 24_000
        tones = [0.3 * np.sin(2 * np.pi * (200 + 5 * code) * t) for code in heard]
        pcm = np.concatenate(tones) if tones else np.zeros(0)
        return (pcm * 32767).astype("<i2").tobytes()
