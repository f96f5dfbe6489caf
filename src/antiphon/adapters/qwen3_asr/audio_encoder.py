"""Audio as rows of Qwen3-ASR's decoder: 13 a second, from encoder windows of 8 s, each encoded independently."""

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
# Frames at the end that change when more audio comes: there the transform mirrors the audio it has not got (torch.stft,
# 400 samples around every 160th).
EDGE_FRAMES = 2


class WindowedAudioEncoder:
    """The model's audio encoder with its feature extractor. Called in the model's thread.

    It keeps nothing between calls: what a stream has encoded is kept by the stream. `window_frames`: the mel frames of
    an encoder window, 800.
    """

    def __init__(self, model: Any) -> None:
        """`model`: a Qwen3ASRModel of `transformers`, whose encoder and projection are used, on its device."""
        config = model.config.audio_config
        self._model = model
        extractor: Any = Qwen3ASRFeatureExtractor
        self._extract = extractor(feature_size=config.num_mel_bins, n_window=config.n_window)
        self._chunk = 2 * int(config.n_window)
        self.window_frames = int(config.n_window_infer)

    def features(self, pcm: Pcm) -> Features:
        """Return the log-mel spectrogram of audio: float32 [bins, frames of 10 ms]. From any thread.

        pcm: float32 [num_samples], mono, 16 kHz, of any length. All frames depend on the loudest one, 8 decades below
        which is the floor: louder audio at the end may change frames at the start.
        """
        made = self._extract(pcm, sampling_rate=SAMPLE_RATE_HZ, padding="longest", n_window=0, return_tensors="np")
        found: Features = made["input_features"][0]
        return found

    @torch.inference_mode()
    def encode(self, windows: Sequence[Features]) -> list[torch.Tensor]:
        """Return the decoder's rows [n, width] for encoder windows, float32 [bins, frames] of `window_frames` at most.

        Windows are padded to the longest one's chunks of 1 s and masked, so that their rows do not depend on the
        padding, and none sees another.
        """
        lengths = [w.shape[1] for w in windows]
        most = -(-max(lengths) // self._chunk) * self._chunk
        padded = np.stack([np.pad(w, ((0, 0), (0, most - w.shape[1]))) for w in windows])
        mask = torch.arange(most) < torch.tensor(lengths)[:, None]
        rows = [self._rows(length) for length in lengths]
        # Given on the host, where it is read: left to the encoder, each layer would wait for the device.
        bounds = torch.tensor([0, *rows]).cumsum(0, dtype=torch.int32)
        device, dtype = self._model.device, self._model.dtype
        out = self._model.get_audio_features(
            torch.from_numpy(padded).to(device, dtype), mask.long().to(device), cu_seqlens=bounds
        ).pooler_output
        found: tuple[torch.Tensor, ...] = out.split(rows)
        return list(found)

    def _rows(self, frames: int) -> int:
        """How many rows a window of so many frames has: three convolutions halve each chunk of it."""
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
    """Encodes in the model's thread, for all sessions that ask before the next step at once on a GPU.

    On a CPU the windows are encoded one after another: they gain nothing from each other, and would be padded.
    """

    def __init__(self, thread: ModelThread, encoder: WindowedAudioEncoder, most: int) -> None:
        """`most`: the windows of one batch; 1 on a CPU."""
        self._thread, self._encoder, self._most = thread, encoder, most
        # Bound: one for each session.
        self._requests: deque[_Request] = deque()

    async def encode(self, windows: Sequence[Features]) -> list[torch.Tensor]:
        """Return what WindowedAudioEncoder.encode does. Raises ModelError where it fails, Refused, ModelLost."""
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
        """Serve all requests that have come, in the model's thread. One that fails fails alone."""
        asked = [self._requests.popleft() for _ in range(len(self._requests))]
        asked = [r for r in asked if r.done.set_running_or_notify_cancel()]
        if self._most > 1:
            try:
                made = self._batches([w for r in asked for w in r.windows])
            except Exception:
                log.warning("%d requests are encoded one by one: together they failed", len(asked), exc_info=True)
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
        """Return the rows of each window, in their order. Those of about the same length are padded least."""
        order = sorted(range(len(windows)), key=lambda number: windows[number].shape[1])
        made: dict[int, torch.Tensor] = {}
        for at in range(0, len(order), self._most):
            numbers = order[at : at + self._most]
            made |= zip(numbers, self._encoder.encode([windows[n] for n in numbers]), strict=True)
        return iter([made[number] for number in range(len(windows))])
