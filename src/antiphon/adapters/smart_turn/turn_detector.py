"""Smart Turn v3.2 (ONNX): the probability that a user who pauses has finished speaking.

The graph takes Whisper's log-mel spectrogram of the last 8 s of the turn. `turns/` acts on the probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import Pcm
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.modeling.sound.turn_features import TurnFeatures

# The input of the graph, in mel frames of 10 ms.
INPUT_FRAMES = 800
# The languages that v3.2 was trained for, as ISO 639-1 (its README).
LANGUAGES = frozenset(
    (
        *("ar", "bn", "da", "de", "en", "es", "fi", "fr", "hi", "id", "it", "ja"),
        *("ko", "mr", "nl", "no", "pl", "pt", "ru", "tr", "uk", "vi", "zh"),
    )
)


class SmartTurn:
    """A TurnDetector. Its lane has one thread, which computes on one core."""

    languages = LANGUAGES

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions) -> None:
        """Load `smart-turn.onnx` from the folder. Raises ModelError if it does not load."""
        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = session.inter_op_num_threads = 1
        session.log_severity_level = 3
        try:
            self._model = onnxruntime.InferenceSession(
                str(folder / "smart-turn.onnx"), session, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            # The errors that onnxruntime raises for a bad file have no common base class.
            raise ModelError(f"{model_id} does not load: {error}") from error
        self._features = TurnFeatures(INPUT_FRAMES)
        self.lane: Lane[Pcm, float] = Lane("turn", self._work, max_queue=options.max_queue, observe=options.observe)

    async def complete(self, pcm: Pcm) -> float:
        """Return the probability, in [0, 1], that the turn is complete.

        `pcm`: float32 [num_samples], mono, 16 kHz: the turn with its pause, of any length. Only the last 8 s are used,
        and each call computes all of them. Waits in the lane. Raises Refused if the lane is full, and ModelError.
        """
        return await self.lane.run(pcm)

    def _work(self, jobs: Sequence[Pcm]) -> list[float]:
        return [self._judge(pcm) for pcm in jobs]

    def _judge(self, pcm: Pcm) -> float:
        return float(self._model.run(None, {"input_features": self._features(pcm)})[0].reshape(-1)[0])
