"""Audio as rows of Qwen3-ASR's decoder: 13 rows a second, from encoder windows of 8 s, each encoded independently."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError

log = logging.getLogger(__name__)

Features = npt.NDArray[np.float32]
# The number of frames at the end that change when more audio arrives. torch.stft reads 400 samples around every 160th,
# and replaces missing audio by mirrored audio.
EDGE_FRAMES = 2


class WindowedAudioEncoder:
    """The model's audio encoder with its feature extractor. Called in the model's thread.

    It is stateless; streams keep the rows of their windows. `window_frames`: the mel frames of an encoder window, 800.
    """

    def __init__(self, model: Any) -> None:
        """`model`: a Qwen3ASRModel of `transformers` on its device. Only its encoder and projection are used."""
        config = model.config.audio_config
        self._model = model
        extractor: Any = Qwen3ASRFeatureExtractor
        self._extract = extractor(feature_size=config.num_mel_bins, n_window=config.n_window)
        self._chunk = 2 * int(config.n_window)
        self.window_frames = int(config.n_window_infer)

    def features(self, pcm: Pcm) -> Features:
        """Return the log-mel spectrogram of audio: float32 [bins, frames of 10 ms]. Thread-safe.

        `pcm`: float32 [num_samples], mono, 16 kHz, of any length. The floor of all frames is 8 decades below the
        loudest one, so louder audio at the end may change frames at the start.
        """
        made = self._extract(pcm, sampling_rate=SAMPLE_RATE_HZ, padding="longest", n_window=0, return_tensors="np")
        found: Features = made["input_features"][0]
        return found

    @torch.inference_mode()
    def encode(self, windows: Sequence[Features]) -> list[torch.Tensor]:
        """Return the decoder's rows [n, width] of encoder windows, float32 [bins, frames], up to `window_frames` each.

        Windows are padded to the length of the longest one, rounded up to whole chunks of 1 s, and masked. So the rows
        of a window depend neither on the padding nor on other windows.
        """
        lengths = [w.shape[1] for w in windows]
        most = -(-max(lengths) // self._chunk) * self._chunk
        padded = np.stack([np.pad(w, ((0, 0), (0, most - w.shape[1]))) for w in windows])
        mask = torch.arange(most) < torch.tensor(lengths)[:, None]
        rows = [self._rows(length) for length in lengths]
        # Passed as a tensor on the host, because each layer reads it there. If the encoder computed it, each layer
        # would wait for the device.
        bounds = torch.tensor([0, *rows]).cumsum(0, dtype=torch.int32)
        device, dtype = self._model.device, self._model.dtype
        out = self._model.get_audio_features(
            torch.from_numpy(padded).to(device, dtype), mask.long().to(device), cu_seqlens=bounds
        ).pooler_output
        found: tuple[torch.Tensor, ...] = out.split(rows)
        return list(found)

    def _rows(self, frames: int) -> int:
        """Return the number of rows for a window's frames: three convolutions halve each of its chunks."""
        whole, left = divmod(frames, self._chunk)
        return whole * _halved(self._chunk) + _halved(left)


def _halved(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


class _Request(NamedTuple):
    windows: Sequence[Features]
    done: Future[list[torch.Tensor]]


class EncoderBatch:
    """Encodes in the model's thread. On a GPU, the requests of all sessions before the next step form one batch.

    On a CPU the windows are encoded one by one: a batch would not be faster there, and would need padding.
    """

    def __init__(self, thread: ModelThread, encoder: WindowedAudioEncoder, most: int) -> None:
        """`most`: limit of windows in a batch; 1 on a CPU."""
        self._thread, self._encoder, self._most = thread, encoder, most
        # Bound: one request for each session.
        self._requests: deque[_Request] = deque()

    async def encode(self, windows: Sequence[Features]) -> list[torch.Tensor]:
        """Return the same as WindowedAudioEncoder.encode. Raises ModelError if that fails, Refused and ModelLost."""
        if not windows:
            return []
        request = _Request(windows, Future())
        self._requests.append(request)
        try:
            await self._thread.call(self._serve)
            return await asyncio.wrap_future(request.done)
        except asyncio.CancelledError:
            request.done.cancel()
            raise

    def _serve(self) -> None:
        """Serve all pending requests, in the model's thread. A failing request does not affect the others."""
        asked = [self._requests.popleft() for _ in range(len(self._requests))]
        asked = [r for r in asked if r.done.set_running_or_notify_cancel()]
        if self._most > 1:
            try:
                made = self._batches([w for r in asked for w in r.windows])
            except Exception:
                log.warning("encoding %d requests one by one, because their batch failed", len(asked), exc_info=True)
            else:
                for request in asked:
                    request.done.set_result([next(made) for _ in request.windows])
                return
        for request in asked:
            try:
                request.done.set_result([self._encoder.encode([w])[0] for w in request.windows])
            except Exception as error:
                failed = ModelError(f"{type(error).__name__}: {error}")
                failed.__cause__ = error
                request.done.set_exception(failed)

    def _batches(self, windows: Sequence[Features]) -> Iterator[torch.Tensor]:
        """Return the rows of each window, in the order of `windows`. Batches are sorted by length to reduce padding."""
        order = sorted(range(len(windows)), key=lambda number: windows[number].shape[1])
        made: dict[int, torch.Tensor] = {}
        for at in range(0, len(order), self._most):
            numbers = order[at : at + self._most]
            made |= zip(numbers, self._encoder.encode([windows[n] for n in numbers]), strict=True)
        return iter([made[number] for number in range(len(windows))])
