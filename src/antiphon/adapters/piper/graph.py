"""The graph of a Piper voice (VITS), divided so that a sentence is heard while it is computed.

The published graph maps phonemes to the audio of a whole sentence. Here it is run in stages. All stages but the last
are run once for a sentence: they find how long each phoneme is, and compute latents, one for each frame. The last one,
the decoder, has only convolutions, and is run on pieces of the latents, each with the frames around it that the
convolutions reach. So the pieces join into the audio of the whole sentence.

The stages meet where the graph draws noise. The noise is drawn here instead, so that a seed gives the same audio. They
are found by the kinds of operators, because the names in the graphs of different versions differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx.utils import Extractor

from antiphon.audio import Pcm
from antiphon.errors import ModelError

Array = NDArray[Any]
Floats = NDArray[np.float32]

NOISE = "RandomNormalLike"
# The number of frames of the trial that measures how far the decoder reaches.
TRIAL_FRAMES = 96


@dataclass(slots=True)
class _Stage:
    """A part of the graph. `noise`: the name of a tensor that is drawn before it, and of one that has its shape."""

    noise: tuple[str, ...] = ()
    # The names of its inputs, in order.
    inputs: dict[str, None] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    session: Any = None


@dataclass(frozen=True, slots=True)
class Sentence:
    """What the first stages computed. durations: int64 [phoneme ids], in frames. latents: float32 [1, C, frames].

    `rest`: the decoder's other inputs, which are the same for all frames.
    """

    durations: NDArray[np.int64]
    latents: Floats
    rest: Mapping[str, Array]

    @property
    def num_frames(self) -> int:
        """The number of frames of the sentence."""
        return int(self.latents.shape[2])


class VoiceGraph:
    """A voice's graph, which computes on one core. Threads may share it.

    - `frame_samples`: the samples of a frame.
    - `reach`: the frames on either side of a frame that its audio depends on.
    """

    def __init__(self, path: Path, *, speakers: int) -> None:
        """Divide and load the graph. `speakers`: how many the voice has. Takes about a second.

        Raises ModelError if the graph is not that of a Piper voice.
        """
        model = onnx.shape_inference.infer_shapes(onnx.load(str(path)))
        self._has_speakers = speakers > 1
        rounded = [node.output[0] for node in model.graph.node if node.op_type == "Ceil"]
        first = _first_convolution(model.graph)
        if first is None or len(rounded) != 1:
            lacks = "no decoder" if first is None else f"{len(rounded)} tensors that may be its durations"
            raise ModelError(f"{path.name} is not the graph of a Piper voice: it has {lacks}")
        (self._durations,) = rounded
        self._latents, self._audio = first.input[0], model.graph.output[0].name
        *self._stages, self._decoder = _divided(model, first, {self._durations, self._audio})
        self.frame_samples, self.reach = self._measured()

    def sentence(
        self, ids: tuple[int, ...], scales: tuple[float, float, float], speaker: int | None, random: np.random.Generator
    ) -> Sentence:
        """Compute the durations and the latents of a sentence.

        Args:
            ids: The phoneme ids.
            scales: The variation of the sound, the slowness, and the variation of the durations.
            speaker: The speaker's number; None for the only one.
            random: Draws the noise.
        """
        values: dict[str, Array] = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array(scales, np.float32),
        }
        if self._has_speakers:
            values["sid"] = np.array([speaker or 0], np.int64)
        for stage in self._stages:
            if stage.noise:
                drawn, like = stage.noise
                values[drawn] = random.standard_normal(values[like].shape, np.float32)
            given = {name: values[name] for name in stage.inputs}
            values |= zip(stage.outputs, stage.session.run(stage.outputs, given), strict=True)
        rest = {name: values[name] for name in self._decoder.inputs if name != self._latents}
        return Sentence(values[self._durations].reshape(-1).astype(np.int64), values[self._latents], rest)

    def audio(self, sentence: Sentence, start: int, end: int) -> Pcm:
        """Return the audio of the frames from `start` to `end` (exclusive) of a sentence."""
        low, high = max(0, start - self.reach), min(sentence.num_frames, end + self.reach)
        pcm = self._decoded(sentence.latents[:, :, low:high], sentence.rest)
        return pcm[(start - low) * self.frame_samples : (end - low) * self.frame_samples]

    def _decoded(self, latents: Floats, rest: Mapping[str, Array]) -> Pcm:
        (pcm,) = self._decoder.session.run([self._audio], {self._latents: latents, **rest})
        return np.asarray(pcm, np.float32).reshape(-1)

    def _measured(self) -> tuple[int, int]:
        """Return the samples of a frame, and how many frames away a change of one frame is heard."""
        random = np.random.default_rng(0)
        trial = self.sentence((1, 0, 2), (0.667, 1.0, 0.8), None, random)
        shape = (1, trial.latents.shape[1], TRIAL_FRAMES)
        latents = random.standard_normal(shape, np.float32)
        before, at = self._decoded(latents, trial.rest), TRIAL_FRAMES // 2
        latents[:, :, at] += 1
        changed = np.nonzero(self._decoded(latents, trial.rest) != before)[0] // (len(before) // TRIAL_FRAMES)
        return len(before) // TRIAL_FRAMES, int(max(at - changed[0], changed[-1] - at))


def _first_convolution(graph: Any) -> Any | None:
    """Return the decoder's first node: the convolution over frames before the first transposed one."""
    makers = {name: node for node in graph.node for name in node.output}
    waiting = [node for node in graph.node if node.op_type == "ConvTranspose"][:1]
    while waiting:
        node = waiting.pop(0)
        if node.op_type == "Conv" and next(a.ints[0] for a in node.attribute if a.name == "kernel_shape") > 1:
            return node
        # The convolution of the speaker's vector has a kernel of one, and ends this way.
        if node.op_type != "Conv":
            waiting += [makers[name] for name in node.input if name in makers]
    return None


def _divided(model: Any, first: Any, wanted: set[str]) -> list[_Stage]:
    """Return the loaded stages: up to each tensor of noise, and from the decoder's `first` node on.

    `wanted`: tensors that are read besides those that a later stage needs.
    """
    stages = [_Stage()]
    # The stage of each tensor that is not constant.
    stage_of = {one.name: 0 for one in model.graph.input}
    for node in model.graph.node:
        found = [name for name in node.input if name in stage_of]
        if node.op_type == NOISE:
            stages.append(_Stage(noise=(node.output[0], node.input[0])))
            stage_of[node.output[0]] = len(stages) - 1
            wanted.add(node.input[0])
        elif found:
            if node is first:
                stages.append(_Stage())
            at = len(stages) - 1 if node is first else max(stage_of[name] for name in found)
            given = [name for name in found if stage_of[name] < at or name in stages[at].noise]
            stages[at].inputs |= dict.fromkeys(given)
            stage_of |= dict.fromkeys(node.output, at)
            wanted.update(given)
    extractor = Extractor(model)
    for k, stage in enumerate(stages):
        stage.inputs |= dict.fromkeys(one.name for one in model.graph.input if not k)
        stage.outputs = [name for name in wanted if stage_of.get(name) == k and name not in stage.inputs]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        part = extractor.extract_model(list(stage.inputs), stage.outputs).SerializeToString()
        stage.session = onnxruntime.InferenceSession(part, options, providers=["CPUExecutionProvider"])
    return stages
