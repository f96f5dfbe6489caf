"""Silero VAD v6 (ONNX): the probability of speech in each 32 ms frame, for many sessions in one batch.

The graph takes 64 samples of context before each 512-sample frame (github.com/snakers4/silero-vad, utils_vad.py). The
state of a session is its SileroStream. All sessions share the weights and the lane. The graph gets a filtered and
levelled copy of the audio, because it misses quiet speech and speech with a DC offset (`audio/leveller.py`). This
module does not decide where turns begin or end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.leveller import HighPass, Leveller
from antiphon.engine.lane import Lane

FRAME_SAMPLES = 512
CONTEXT_SAMPLES = 64
# Lower bound of the lane's queue limit. It is high, because every session may have a job in the queue, and a job takes
# only microseconds.
MIN_QUEUE = 1024
# After a loud voice, the recurrent state makes the graph treat a voice that is 40 dB softer as noise. Speech with an
# RMS of 0.0006 was missed if it followed speech with an RMS of 0.05. After a reset of state and gain, it is found. But
# a reset within noise or music makes false turns: 24 in five minutes instead of 2. So the state is reset only once
# after each voice, and only after STILL_FRAMES (a second) below STILL_RMS.
STILL_RMS = 0.001
STILL_FRAMES = 31
# From SPEECH_PROBABILITY on, a frame counts as voice; below SILENCE_PROBABILITY, it may count as still.
SPEECH_PROBABILITY, SILENCE_PROBABILITY = 0.5, 0.35
_RATE = np.array(SAMPLE_RATE_HZ, dtype=np.int64)


class SileroStream:
    """A VadStream: the recurrent state of one session, the graph's context, and the samples of an incomplete frame.

    The lane's worker reads and writes `high_pass`, `leveller`, `state` (float32 [2, 1, 128]) and `context` (float32
    [64]).
    """

    def __init__(self, lane: Lane[tuple[SileroStream, Pcm], list[float]]) -> None:
        self._lane = lane
        self.reset()

    def reset(self) -> None:
        """Reset all state, including the samples of an incomplete frame. Must not be called while `feed` is awaited."""
        self.state = np.zeros((2, 1, 128), np.float32)
        self.context = np.zeros(CONTEXT_SAMPLES, np.float32)
        self.high_pass, self.leveller = HighPass(), Leveller()
        self._rest = np.zeros(0, np.float32)
        self._still_frames, self._heard_voice = 0, False

    def frame_judged(self, frame: Pcm, probability: float) -> None:
        """Track the level after a voice, and reset `state` and the gain after STILL_FRAMES still frames in a row.

        Otherwise a voice that is much softer than the last one would count as noise. `frame` is filtered, without gain.
        Called for every frame, in order, in the lane's worker thread.
        """
        self._heard_voice = self._heard_voice or probability >= SPEECH_PROBABILITY
        still = probability < SILENCE_PROBABILITY and float(np.dot(frame, frame)) < STILL_RMS**2 * len(frame)
        self._still_frames = self._still_frames + 1 if still else 0
        if self._heard_voice and self._still_frames == STILL_FRAMES:
            self.state, self._heard_voice = np.zeros_like(self.state), False
            self.leveller.reset()

    async def feed(self, pcm: Pcm) -> list[float]:
        """Return the probabilities of speech, in [0, 1], of the frames that `pcm` completes, oldest first.

        `pcm`: float32 [num_samples], mono, 16 kHz, of any length. Samples after the last whole frame are kept for the
        next call. If `pcm` completes no frame, returns an empty list at once. Otherwise waits in the lane, and raises
        Refused if the lane is full. Calls of one stream must not overlap.
        """
        pcm = np.concatenate((self._rest, pcm))
        whole = len(pcm) // FRAME_SAMPLES * FRAME_SAMPLES
        self._rest = pcm[whole:]
        return await self._lane.run((self, pcm[:whole].reshape(-1, FRAME_SAMPLES))) if whole else []


class SileroDetector:
    """A VoiceActivityDetector: one ONNX session on one core, and a lane that computes up to 64 streams in one batch."""

    frame_samples = FRAME_SAMPLES

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions) -> None:
        """Load `silero_vad.onnx` from the folder. Raises an error of onnxruntime if the file does not load."""
        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = session.inter_op_num_threads = 1
        session.log_severity_level = 3
        self._model = onnxruntime.InferenceSession(
            str(folder / "silero_vad.onnx"), session, providers=["CPUExecutionProvider"]
        )
        self.lane: Lane[tuple[SileroStream, Pcm], list[float]] = Lane(
            "vad", self._work, max_batch=64, max_queue=max(MIN_QUEUE, options.max_queue), observe=options.observe
        )

    def open(self) -> SileroStream:
        """Return a new stream. It takes 1.3 kB and need not be closed."""
        return SileroStream(self.lane)

    def close(self) -> None:
        """Stop the lane's worker thread. Calls of `feed` that are waiting in the lane are cancelled."""
        self.lane.close()

    def _work(self, jobs: Sequence[tuple[SileroStream, Pcm]]) -> list[list[float]]:
        results: list[list[float]] = [[] for _ in jobs]
        # The n-th frames of all streams are one call. Within a stream, each frame needs the state after the previous
        # frame.
        for i in range(max(len(frames) for _, frames in jobs)):
            batch = [
                (stream, frames[i], out) for (stream, frames), out in zip(jobs, results, strict=True) if i < len(frames)
            ]
            probabilities = self._step([s for s, _, _ in batch], [f for _, f, _ in batch])
            for (_, _, out), probability in zip(batch, probabilities, strict=True):
                out.append(float(probability))
        return results

    def _step(self, streams: list[SileroStream], frames: list[Pcm]) -> npt.NDArray[np.float32]:
        filtered = [s.high_pass.filter(f) for s, f in zip(streams, frames, strict=True)]
        levelled = [s.leveller.level(f) for s, f in zip(streams, filtered, strict=True)]
        audio = np.stack([np.concatenate((s.context, f)) for s, f in zip(streams, levelled, strict=True)])
        state = np.concatenate([s.state for s in streams], axis=1)
        output, state = self._model.run(None, {"input": audio, "state": state, "sr": _RATE})
        for i, (stream, frame) in enumerate(zip(streams, filtered, strict=True)):
            stream.state = state[:, i : i + 1]
            stream.context = levelled[i][-CONTEXT_SAMPLES:]
            stream.frame_judged(frame, float(output[i, 0]))
        return np.asarray(output[:, 0], np.float32)
