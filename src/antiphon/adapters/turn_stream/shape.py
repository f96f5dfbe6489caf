"""The shapes of streaming turn detectors: what a graph takes in one step, and which outputs say that a turn is over.

docs/turn-models.md has the sources. A config.json may override each field, for other versions of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.modeling.onnx_stream import read_config


class TurnStreamShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a graph: the object in config.json."""

    # The rate of the audio that the graph takes, in samples a second. Only 16 kHz is supported.
    rate_hz: int = SAMPLE_RATE_HZ
    # The milliseconds of audio of one step.
    chunk_ms: int = 0
    # The milliseconds of audio for which each output has one value; 0: one value for a step.
    frame_ms: int = 0
    # The input that takes the audio, float32 [1, num_samples]; "": the only input that is no state.
    audio: str = ""
    # By the name of each output with a probability that the turn is over: the model's own threshold, in (0, 1).
    outputs: dict[str, float] = {}
    # By the name of each state input, the output that is its next value; None: see OnnxStream.
    states: dict[str, str] | None = None
    # The .onnx file in the folder; "": the only one.
    file: str = ""
    # The languages that the model was made for, as ISO 639-1; empty: any.
    languages: frozenset[str] = frozenset()
    # The seconds of a turn that are computed at most, if nothing of it was computed before.
    history_s: float = 8.0

    def __post_init__(self) -> None:
        """Raise ValueError if there is no chunk, no output, or a value outside its range."""
        if self.chunk_ms <= 0 or not 0 <= self.frame_ms <= self.chunk_ms or self.history_s <= 0:
            raise ValueError("`chunk_ms` has to be above 0, and `frame_ms` at most as long")
        if not self.outputs or not all(0 < limit < 1 for limit in self.outputs.values()):
            raise ValueError("`outputs` has to name each output with its threshold, in (0, 1)")


class _Turn1Mini(TurnStreamShape, frozen=True, kw_only=True):
    chunk_ms: int = 160
    frame_ms: int = 20
    audio: str = "audio"
    outputs: dict[str, float] = msgspec.field(default_factory=lambda: {"probs": 0.5})
    languages: frozenset[str] = frozenset(("en",))


class _StreamingTurn(TurnStreamShape, frozen=True, kw_only=True):
    chunk_ms: int = 40
    outputs: dict[str, float] = msgspec.field(default_factory=lambda: {"eot": 0.6, "eot_late": 0.4})
    languages: frozenset[str] = frozenset(("en",))


class _Kind(msgspec.Struct):
    model_type: str = ""


# By `model_type`; any other folder states its whole shape.
SHAPES: Mapping[str, type[TurnStreamShape]] = MappingProxyType(
    {"turn-1-mini": _Turn1Mini, "streaming-turn": _StreamingTurn}
)


def read_shape(folder: Path, model_id: str) -> TurnStreamShape:
    """Return the shape that the folder's config.json describes. Raises ModelError if it describes none."""
    kind = read_config(folder, model_id, _Kind).model_type
    return read_config(folder, model_id, SHAPES.get(kind, TurnStreamShape))
