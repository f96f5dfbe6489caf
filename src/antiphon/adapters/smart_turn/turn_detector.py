"""Smart Turn v3.2 (ONNX): how likely it is that somebody who has paused has said what they wanted to say.

The graph takes the log-mel of the last 8 s of the turn, as Whisper has it, of sound brought to zero mean and unit variance, with silence before
what is shorter (pipecat-ai 1.14, audio/turn/smart_turn; BSD-2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from faster_whisper.feature_extractor import FeatureExtractor

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError

SECONDS, FRAMES = 8, 800


class SmartTurn:
    """The loaded model and its lane."""

    def __init__(
        self,
        folder: Path,
        model_id: str,
        *,
        workers: int = 1,
        max_queue: int = 256,
        observe: Callable[[int, float, float], None] | None = None,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._model = onnxruntime.InferenceSession(
                str(folder / "smart-turn.onnx"), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            # Whatever the runtime raises over a file.
            raise ModelError(f"{model_id} does not load: {error}") from error
        self._features = FeatureExtractor(feature_size=80)
        self.lane: Lane[Pcm, float] = Lane("turn", self._work, workers=workers, max_queue=max_queue, observe=observe)

    async def complete(self, pcm: Pcm) -> float:
        """See TurnJudge."""
        return await self.lane.run(pcm)

    def _work(self, jobs: Sequence[Pcm]) -> list[float]:
        return [self._judge(pcm) for pcm in jobs]

    def _judge(self, pcm: Pcm) -> float:
        sound = np.zeros(SECONDS * SAMPLE_RATE_HZ, np.float32)
        last = pcm[-len(sound) :]
        sound[len(sound) - len(last) :] = last
        sound = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7)
        features = np.ascontiguousarray(self._features(sound, padding=0)[None, :, :FRAMES], np.float32)
        return float(self._model.run(None, {"input_features": features})[0].reshape(-1)[0])
