"""Silero VAD v6 (ONNX): the probability of speech in each 32 ms frame, for many sessions in one batch.

The graph takes 64 samples of context before each 512-sample frame (github.com/snakers4/silero-vad, utils_vad.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.engine.lane import Lane

FRAME_SAMPLES = 512
CONTEXT_SAMPLES = 64
# After a loud voice the recurrent state takes one 40 dB softer for noise (recordings of rms 0.0006 after ones of 0.05 went
# unheard; from a fresh state they are found). Starting afresh inside noise or music makes false turns, 24 in five minutes
# instead of 2; so it is done once after each voice, and only below this level.
STILL_RMS = 0.001
STILL_FRAMES = 31
SPOKEN, SILENT = 0.5, 0.35
_RATE = np.array(SAMPLE_RATE_HZ, dtype=np.int64)


class SileroStream:
    """One session's detector: the recurrent state, the context and the samples of an unfinished frame."""

    def __init__(self, lane: Lane[tuple[SileroStream, Pcm], list[float]]) -> None:
        self._lane = lane
        self.reset()

    def reset(self) -> None:
        """Forget everything heard."""
        self.state = np.zeros((2, 1, 128), np.float32)
        self.context = np.zeros(CONTEXT_SAMPLES, np.float32)
        self._rest = np.zeros(0, np.float32)
        self._hushed, self._spoke = 0, False

    def heard(self, frame: Pcm, probability: float) -> None:
        """Forget a voice once it has been followed by a second of stillness: the next one may be far softer."""
        self._spoke = self._spoke or probability >= SPOKEN
        still = probability < SILENT and float(np.dot(frame, frame)) < STILL_RMS**2 * len(frame)
        self._hushed = self._hushed + 1 if still else 0
        if self._spoke and self._hushed == STILL_FRAMES:
            self.state, self._spoke = np.zeros_like(self.state), False

    async def feed(self, pcm: Pcm) -> list[float]:
        """Probabilities of the frames that `pcm` completes; see SpeechStream."""
        pcm = np.concatenate((self._rest, pcm))
        whole = len(pcm) // FRAME_SAMPLES * FRAME_SAMPLES
        self._rest = pcm[whole:]
        return await self._lane.run((self, pcm[:whole].reshape(-1, FRAME_SAMPLES))) if whole else []


class SileroDetector:
    """The loaded model and its lane. `max_queue`: sessions that may wait at once."""

    frame_samples = FRAME_SAMPLES

    def __init__(
        self,
        folder: Path,
        model_id: str,
        *,
        max_queue: int = 1024,
        observe: Callable[[int, float, float], None] | None = None,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._model = onnxruntime.InferenceSession(
            str(folder / "silero_vad.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.lane: Lane[tuple[SileroStream, Pcm], list[float]] = Lane(
            "vad", self._work, max_batch=64, max_queue=max_queue, observe=observe
        )

    def open(self) -> SileroStream:
        return SileroStream(self.lane)

    def close(self) -> None:
        self.lane.close()

    def _work(self, jobs: Sequence[tuple[SileroStream, Pcm]]) -> list[list[float]]:
        results: list[list[float]] = [[] for _ in jobs]
        for i in range(max(len(frames) for _, frames in jobs)):
            turn = [
                (stream, frames[i], out) for (stream, frames), out in zip(jobs, results, strict=True) if i < len(frames)
            ]
            probabilities = self._step([s for s, _, _ in turn], [f for _, f, _ in turn])
            for (_, _, out), probability in zip(turn, probabilities, strict=True):
                out.append(float(probability))
        return results

    def _step(self, streams: list[SileroStream], frames: list[Pcm]) -> npt.NDArray[np.float32]:
        sound = np.stack([np.concatenate((s.context, f)) for s, f in zip(streams, frames, strict=True)])
        state = np.concatenate([s.state for s in streams], axis=1)
        output, state = self._model.run(None, {"input": sound, "state": state, "sr": _RATE})
        for i, (stream, frame) in enumerate(zip(streams, frames, strict=True)):
            stream.state = state[:, i : i + 1]
            stream.context = frame[-CONTEXT_SAMPLES:]
            stream.heard(frame, float(output[i, 0]))
        return np.asarray(output[:, 0], np.float32)
