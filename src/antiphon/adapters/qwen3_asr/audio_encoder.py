"""Audio as rows of Qwen3-ASR's decoder: 13 rows a second, from encoder windows of 8 s, each encoded independently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from antiphon.audio import Pcm
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.gathered import GatheredCalls, served
from antiphon.modeling.sound.log_mel import FinishedWindow, GrowingMel, MelTransform
from antiphon.modeling.sound.window_encoder import MelWindow, WindowEncoder


class KnownWindow(NamedTuple):
    """A finished encoder window whose rows a stream already has: its frames, and the floor that they had."""

    window: FinishedWindow
    floor: float


class EncodedSound(NamedTuple):
    """The rows of a sound.

    `num_same`: the number of known encoder windows at the beginning whose rows are still right. `rows`: those of each
    window that follows, [n, width]. `finished`: those of these windows that are finished; the others are open.
    """

    num_same: int
    rows: Sequence[torch.Tensor]
    finished: Sequence[KnownWindow]


class WindowedAudioEncoder:
    """The model's audio encoder with its feature extractor. Called in the model's thread.

    It is stateless; streams keep the frames of their sound and the rows of their windows. `windows`: the encoder.
    """

    def __init__(self, model: Any) -> None:
        """`model`: a Qwen3ASRModel of `transformers` on its device. Only its encoder and projection are used."""
        extractor: Any = Qwen3ASRFeatureExtractor
        self._extract = extractor(feature_size=model.config.audio_config.num_mel_bins)
        self.windows = WindowEncoder(model.audio_tower, model.multi_modal_projector)
        self._mel = MelTransform(self._extract.mel_filters, self.windows.device)

    def open(self) -> GrowingMel:
        """Return the frames of a new sound."""
        windows = self.windows
        return GrowingMel(self._mel.bins, windows.chunk_frames, windows.window_frames, self._extract.min_length)

    def encode(self, requests: Sequence[SoundRequest]) -> list[EncodedSound | ModelError]:
        """Return the rows of the sounds of several streams, all of them in one transform and one pass of the encoder.

        The result is a ModelError for a sound that contains a NaN. If it raises an exception, the frames of some sounds
        may have been taken already, but none are wrong.
        """
        parts = [request.mel.new_part(request.pcm) for request in requests]
        for request, part, (frames, peaks) in zip(requests, parts, self._mel(parts), strict=True):
            request.mel.add(request.pcm, part, frames, peaks)
        same = [request.num_same() for request in requests]
        asked = [self._windows(request.mel, begin) for request, begin in zip(requests, same, strict=True)]
        made = iter(self.windows.encode([window for windows in asked for window in windows]))
        return [
            self._found(request.mel, begin, [next(made) for _ in windows])
            for request, begin, windows in zip(requests, same, asked, strict=True)
        ]

    def _found(self, mel: GrowingMel, begin: int, rows: list[torch.Tensor]) -> EncodedSound | ModelError:
        """Return the result of a request with the rows of its windows from number `begin` on."""
        if math.isnan(mel.floor):
            return ModelError("the sound is not a number")
        finished = [KnownWindow(window, mel.floor) for window in mel.finished[begin:]]
        if self.windows.together:
            # The engine keeps the rows of finished windows. As views, they would keep those of all streams.
            rows = [own.clone() if number < len(finished) else own for number, own in enumerate(rows)]
        return EncodedSound(begin, rows, finished)

    def _windows(self, mel: GrowingMel, begin: int) -> list[MelWindow]:
        size, chunks = self.windows.window_frames, self.windows.window_shape[0]
        return [
            MelWindow(mel.chunks[number * chunks :][:chunks], min(size, mel.num_frames - number * size), mel.floor)
            for number in range(begin, -(-mel.num_frames // size))
        ]


class SoundRequest(NamedTuple):
    """A stream's request: the whole sound so far, float32 [num_samples], and the windows whose rows it already has.

    `mel`: the frames of the stream's sound.
    """

    mel: GrowingMel
    pcm: Pcm
    known: Sequence[KnownWindow]

    def num_same(self) -> int:
        """Return the number of known windows at the beginning that are those of the sound now."""
        floor, count = self.mel.floor, 0
        for known, window in zip(self.known, self.mel.finished, strict=False):
            if known.window is not window or not window.is_same(known.floor, floor):
                break
            count += 1
        return count


class EncoderBatch:
    """Encodes in the model's thread. On a GPU, the requests of all sessions before the next step form one batch.

    On a CPU the requests are served one by one, because a batch would not be faster there.
    """

    def __init__(self, thread: ModelThread, encoder: WindowedAudioEncoder) -> None:
        self._encoder = encoder
        self._calls = GatheredCalls[SoundRequest, EncodedSound](thread, self._serve, followed=True)

    async def encode(self, mel: GrowingMel, pcm: Pcm, known: Sequence[KnownWindow]) -> EncodedSound:
        """Return the rows of a sound, see SoundRequest. Waits for the model's thread.

        Raises ModelError if the encoder fails, Refused and ModelLost.
        """
        return await self._calls.call(SoundRequest(mel, pcm, known))

    def _serve(self, requests: Sequence[SoundRequest]) -> Sequence[EncodedSound | ModelError]:
        return served(self._encoder.encode, requests, together=self._encoder.windows.together)
