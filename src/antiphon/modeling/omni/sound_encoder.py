"""The audio encoders of Qwen2.5-Omni and Qwen3-Omni, for windows of sound of all sessions in one pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from antiphon.audio import Pcm
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.gathered import GatheredCalls, served
from antiphon.modeling.sound.window_encoder import MelWindow, WindowEncoder
from antiphon.shares.places import Places

# Limit of windows, of all owners together, that wait for the thinker's thread. On a GPU, they are encoded in one pass,
# which delays the next step of all sessions by a few milliseconds. On a CPU, each is a pass.
MAX_WAITING_GPU, MAX_WAITING_CPU = 16, 2


class SoundFrames(NamedTuple):
    """The log-mel frames of a window, float32 [bins, frames]. `padded`: incomplete chunks are padded to full ones."""

    frames: Pcm
    padded: bool


class SoundEncoder:
    """Encodes windows between two steps. On a GPU, those that wait form one pass; API keys take turns for its places.

    `chunk_frames`, `window_frames`: the number of frames in a chunk and in a window.
    """

    def __init__(self, thinker: Any, thread: ModelThread, *, together: bool | None = None) -> None:
        """`thinker`: a model of `transformers`. `thread`: the thread that steps it.

        `together`: whether windows that wait form one pass. None: only on a GPU.
        """
        config, tower = thinker.config.audio_config, thinker.model.audio_tower
        self._model = thinker
        self.chunk_frames = 2 * int(config.n_window)
        # Qwen2.5-Omni's windows are single chunks. Its encoder has other layers.
        self.windows: WindowEncoder | None = None
        self.window_frames = self.chunk_frames
        if hasattr(config, "n_window_infer"):
            self.windows = WindowEncoder(
                tower, nn.Sequential(tower.proj1, tower.act, tower.proj2), most=MAX_WAITING_GPU
            )
            self.window_frames = self.windows.window_frames
        self.together = thinker.device.type != "cpu" if together is None else together
        self._places = Places(MAX_WAITING_GPU if self.together else MAX_WAITING_CPU)
        self._calls = GatheredCalls[SoundFrames, torch.Tensor](thread, self._serve)

    def capture(self) -> None:
        """Capture the passes as CUDA graphs, which takes seconds. Does nothing on a CPU and for Qwen2.5-Omni."""
        if self.windows:
            self.windows.capture()

    async def encode(self, windows: Sequence[SoundFrames]) -> list[torch.Tensor]:
        """Return the rows of each window, float [n, width]. Waits for places and for the engine.

        Raises ModelError if the encoder fails, and Refused after the thread is closed.
        """
        tasks = [asyncio.ensure_future(self._rows(window)) for window in windows]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _rows(self, window: SoundFrames) -> torch.Tensor:
        async with self._places.held():
            return await self._calls.call(window)

    def _serve(self, requests: Sequence[SoundFrames]) -> Sequence[torch.Tensor | ModelError]:
        encode = self._encode_windows if self.windows else self._encode_chunks
        # Copies, because conversations keep the rows of a window. As views, they would keep those of the whole batch.
        return served(lambda some: [rows.clone() for rows in encode(some)], requests, together=self.together)

    def _encode_windows(self, requests: Sequence[SoundFrames]) -> list[torch.Tensor]:
        assert self.windows
        return self.windows.encode([_window(request, self.chunk_frames) for request in requests])

    @torch.inference_mode()
    def _encode_chunks(self, requests: Sequence[SoundFrames]) -> list[torch.Tensor]:
        """Encode windows with Qwen2.5-Omni's encoder, whose rows do not depend on padding."""
        lengths = [request.frames.shape[1] for request in requests]
        given = np.zeros((len(requests), len(requests[0].frames), max(lengths)), np.float32)
        for into, request in zip(given, requests, strict=True):
            into[:, : request.frames.shape[1]] = request.frames
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        device, dtype = self._model.device, self._model.dtype
        made = self._model.get_audio_features(torch.from_numpy(given).to(device, dtype), mask.long().to(device))
        rows: torch.Tensor = made.last_hidden_state
        # A convolution halves the frames, and pooling halves them again.
        return list(torch.split(rows, [(length + 1) // 2 // 2 for length in lengths]))


def _window(request: SoundFrames, chunk_frames: int) -> MelWindow:
    """Return the frames of a window in chunks."""
    frames = request.frames
    bins, count = frames.shape
    if count < chunk_frames and not request.padded:
        return MelWindow(frames[None], count)
    padded = np.pad(frames, ((0, 0), (0, -count % chunk_frames)))
    return MelWindow(np.ascontiguousarray(padded.reshape(bins, -1, chunk_frames).swapaxes(0, 1)), count)
