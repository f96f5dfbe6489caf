"""A turn detector made of two ONNX graphs: Whisper's encoder, or Smart Turn's, and a head over its frames.

The encoder takes the log-mel features of the end of the turn, float32 [1, 80, num_frames], and returns frames, float32
[1, num_steps, width]. The head takes these and returns one value. docs/turn-models.md says how to make both files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.modeling.onnx_stream import OnnxStream, graph_file, read_config
from antiphon.modeling.sound.turn_features import NUM_MELS, TurnFeatures
from antiphon.pipelines.turn_blend import logit, sigmoid


class _Config(msgspec.Struct, kw_only=True):
    """The object in config.json."""

    # The rate of the audio that the encoder takes, in samples a second. Only 16 kHz is supported.
    rate_hz: int = SAMPLE_RATE_HZ
    # The .onnx file of the encoder.
    encoder: str = "encoder.onnx"
    # The encoder's output with the frames; "": its only output.
    frames: str = ""
    # The .onnx file of the head.
    head: str = "head.onnx"
    # The head's output with the value; "": its only output.
    output: str = ""
    # Whether the value is a logit, not a probability.
    is_logit: bool = False
    # The model's own threshold of the probability, in (0, 1).
    threshold: float = 0.5
    # Whether the audio gets zero mean and unit variance, as for Smart Turn. Whisper's own encoder takes it as it is.
    is_normalized: bool = True
    # The languages that the head was made for, as ISO 639-1; empty: any.
    languages: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError("`threshold` has to be in (0, 1)")


def _only(names: Sequence[str], wanted: str, what: str) -> str:
    if wanted in names:
        return wanted
    if wanted or len(names) != 1:
        raise ModelError(f"{what}: expected {wanted or 'one'}; the graph has {', '.join(sorted(names))}")
    return names[0]


class EncoderHead:
    """A TurnDetector. Its lane has one thread, which computes on one core."""

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions) -> None:
        """Load both graphs of a folder. Raises ModelError if one does not load, or if they do not fit each other."""
        self._config = config = read_config(folder, model_id, _Config)
        self.languages = config.languages
        self._encoder = OnnxStream(graph_file(folder, model_id, config.encoder), model_id, {})
        self._head = OnnxStream(graph_file(folder, model_id, config.head), model_id, {})
        self._mels = _only(self._encoder.free, "", f"{model_id}: input of {config.encoder}")
        self._frames = _only([*self._encoder.outputs], config.frames, f"{model_id}: output of {config.encoder}")
        self._given = _only(self._head.free, "", f"{model_id}: input of {config.head}")
        self._output = _only([*self._head.outputs], config.output, f"{model_id}: output of {config.head}")
        num_frames = self._encoder.shape_of(self._mels)[-1:]
        if num_frames == () or not isinstance(num_frames[0], int):
            raise ModelError(f"{model_id}: {config.encoder} has to take a fixed number of frames")
        self._features = TurnFeatures(num_frames[0], is_normalized=config.is_normalized)
        # Finds graphs that do not fit each other before the first pause.
        self._value(np.zeros((1, NUM_MELS, num_frames[0]), np.float32))
        self.lane: Lane[Pcm, float] = Lane(
            f"turn-{model_id}", self._work, max_queue=options.max_queue, observe=options.observe
        )

    async def complete(self, pcm: Pcm) -> float:
        """Return the probability, in [0, 1], that the turn is complete.

        `pcm`: float32 [num_samples], mono, 16 kHz: the turn with its pause, of any length. Waits in the lane. Raises
        Refused if the lane is full, and ModelError.
        """
        return await self.lane.run(pcm)

    def _work(self, jobs: Sequence[Pcm]) -> list[float]:
        return [self._judge(pcm) for pcm in jobs]

    def _judge(self, pcm: Pcm) -> float:
        config = self._config
        if config.rate_hz != SAMPLE_RATE_HZ:
            raise ModelError(f"{self._head.id} takes audio of {config.rate_hz} Hz, and gets {SAMPLE_RATE_HZ} Hz")
        value = self._value(self._features(pcm))
        if not config.is_logit and not 0 <= value <= 1:
            raise ModelError(f"{self._head.id} computed {value}, which is no probability")
        # The server's threshold is one half of a probability.
        return sigmoid((value if config.is_logit else logit(value)) - logit(config.threshold))

    def _value(self, mels: np.ndarray) -> float:
        frames = self._encoder.step({self._mels: mels}, {})[0][self._frames]
        return float(self._head.step({self._given: frames}, {})[0][self._output].reshape(-1)[0])
