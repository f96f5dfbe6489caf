"""token2wav, the released conversion from codes to audio: flow matching and a vocoder.

The package and its weights are the released ones. They are optional: without them, MiniCPM-o returns its speech as text
only. The package (`minicpmo-utils`, with the module `stepaudio2`) needs a GPU and pins an older `transformers`, so it
is not a dependency of antiphon. docs/models.md explains how to install it along with antiphon.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
import wave
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.shares.fair_cache import FairCache
from antiphon.shares.places import current_owner

log = logging.getLogger(__name__)

# Paths in the checkpoint's folder: the weights, and the default voice.
WEIGHTS = "assets/token2wav"
DEFAULT_VOICE = "assets/HT_ref_audio.wav"
# Limit of cached voices. A turn keeps its own voice even if the cache evicts it.
MAX_VOICES = 16


def load(folder: Path, device: torch.device) -> Token2Wav | None:
    """Load token2wav from a checkpoint's folder onto a device. Takes several seconds.

    Returns None and logs a warning with the reason if the weights or the package are missing or do not load.
    """
    if not (folder / WEIGHTS).is_dir():
        log.warning("%s has no %s: speech is text only", folder, WEIGHTS)
        return None
    try:
        with _current(device):
            released = import_module("stepaudio2").Token2wav(str(folder / WEIGHTS))
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        log.warning("token2wav does not load (%s): speech is text only; see docs/models.md", error)
        return None
    voice = folder / DEFAULT_VOICE
    return Token2Wav(released, voice if voice.is_file() else None, device)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the thread's default GPU, which the package uses."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Token2Wav:
    """A CodeVocoder that wraps the released class, which holds the state of one stream.

    Each call swaps a stream's state in and out under a lock. So one set of weights serves all streams, one call at a
    time. The released class reads voices from files, so each reference voice is written once to a temporary folder,
    which is deleted with this object.
    """

    def __init__(self, released: Any, voice: Path | None, device: torch.device) -> None:
        """`released`: the package's Token2wav, on `device`. `voice`: the default voice's file; None: no default."""
        self._released, self._voice, self._device = released, voice, device
        self._lock = threading.Lock()
        self.folder = tempfile.TemporaryDirectory(prefix="antiphon-voices-")
        # The state before the first code of a turn, by the file of the voice.
        self._first_states = FairCache[str, tuple[Any, Any]](MAX_VOICES)

    @property
    def lookahead(self) -> int:
        """The lookahead in codes, from the flow's configuration."""
        return int(self._released.flow.pre_lookahead_len)

    def open(self, reference: Pcm | None) -> Any:
        """Return a new turn's state. Reading a voice is slow; voices are cached.

        Returns None if there is neither a reference nor a default voice. `decode` then returns no audio.
        """
        path = self._file(reference)
        if path is None:
            return None
        with self._lock, _current(self._device):
            first = self._first_states.get(current_owner.get(), path)
            if first is None:
                first = _cloned(self._released.set_stream_cache(path))
                self._first_states.put(current_owner.get(), path, first)
            return (path, *_cloned(first))

    def decode(self, state: Any, codes: Sequence[int], *, last: bool) -> tuple[Pcm, Any]:
        """Return the audio of the codes, float32 [num_samples], 24 kHz, and the new state.

        The package rounds the samples to 16 bits. Blocks while another stream decodes. Without a voice (`state` None)
        the audio is empty.
        """
        if state is None:
            return np.zeros(0, np.float32), None
        released, path = self._released, state[0]
        with self._lock, _current(self._device):
            released.stream_cache, released.hift_cache_dict = state[1:]
            # The package has no public way to set the voice that the state belongs to.
            released._stream_prompt = path
            data = released.stream(list(codes), prompt_wav=path, last_chunk=last)
            state = (path, released.stream_cache, released.hift_cache_dict)
        return np.frombuffer(data, "<i2").astype(np.float32) / 32768.0, state

    def _file(self, reference: Pcm | None) -> str | None:
        if reference is None:
            return str(self._voice) if self._voice else None
        pcm = (np.clip(reference, -1, 1) * 32767).astype("<i2").tobytes()
        path = Path(self.folder.name) / f"{hashlib.sha256(pcm).hexdigest()[:16]}.wav"
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
