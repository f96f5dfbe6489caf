"""token2wav, the released step from codes to sound: flow matching and a vocoder, from the makers' own package and weights.

Neither is needed: without them MiniCPM-o says what it speaks as text. The package (`minicpmo-utils`, its module `stepaudio2`) wants a GPU and pins an older
`transformers`, so it is no dependency; docs/models.md says how to put it beside this one.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
import wave
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.audio import SAMPLE_RATE_HZ, Pcm

log = logging.getLogger(__name__)

WEIGHTS = "assets/token2wav"
# Whose voice it is where a session brings none.
VOICE = "assets/HT_ref_audio.wav"


def load(folder: Path) -> Token2Wav | None:
    """token2wav of a checkpoint's folder; None, and a word in the log why, where it cannot be had."""
    if not (folder / WEIGHTS).is_dir():
        log.warning("%s has no %s: what it speaks comes as text", folder, WEIGHTS)
        return None
    try:
        made = import_module("stepaudio2").Token2wav(str(folder / WEIGHTS))
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        log.warning("token2wav does not load (%s): what it speaks comes as text; see docs/models.md", error)
        return None
    voice = folder / VOICE
    return Token2Wav(made, voice if voice.is_file() else None)


class Token2Wav:
    """See Vocoder. One set of weights; each turn's state is put in and taken out, one call at a time."""

    def __init__(self, made: Any, voice: Path | None) -> None:
        self._made, self._voice = made, voice
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="antiphon-voices-")
        # The state before the first code, by the file of the voice.
        self._fresh: dict[str, tuple[Any, Any]] = {}

    @property
    def lookahead(self) -> int:
        """See Vocoder."""
        return int(self._made.flow.pre_lookahead_len)

    def open(self, reference: Pcm | None) -> Any:
        """See Vocoder. None where there is no voice: nothing is heard then."""
        path = self._file(reference)
        if path is None:
            return None
        with self._lock:
            if path not in self._fresh:
                self._fresh[path] = _cloned(self._made.set_stream_cache(path))
            return (path, *_cloned(self._fresh[path]))

    def sound(self, state: Any, codes: Sequence[int], *, last: bool) -> tuple[Pcm, Any]:
        """See Vocoder."""
        if state is None:
            return np.zeros(0, np.float32), None
        made, path = self._made, state[0]
        with self._lock:
            made.stream_cache, made.hift_cache_dict = state[1:]
            made._stream_prompt = path
            data = made.stream(list(codes), prompt_wav=path, last_chunk=last)
            state = (path, made.stream_cache, made.hift_cache_dict)
        return np.frombuffer(data, "<i2").astype(np.float32) / 32768.0, state

    def _file(self, reference: Pcm | None) -> str | None:
        if reference is None:
            return str(self._voice) if self._voice else None
        pcm = (np.clip(reference, -1, 1) * 32767).astype("<i2").tobytes()
        path = Path(self._folder.name) / f"{hashlib.sha256(pcm).hexdigest()[:16]}.wav"
        if not path.is_file():
            with wave.open(str(path), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(SAMPLE_RATE_HZ)
                file.writeframes(pcm)
        return str(path)


def _cloned(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: _cloned(v) for k, v in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_cloned(v) for v in state)
    return state
