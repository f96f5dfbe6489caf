"""A backchannel detector: one call for each 40 ms of the user's audio, with the state of the response.

The graph's names, shapes and classes are those of the card of pipecat-ai/backchannel-detector (BSD-2), and can be set
in config.json for other versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import OverlapSound
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.modeling.onnx_stream import Array, OnnxStream, graph_file, read_config


class BackchannelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a graph: the object in config.json."""

    # The milliseconds of audio of one step.
    chunk_ms: int = 40
    # The milliseconds of each frame in it.
    frame_ms: int = 20
    # The .onnx file in the folder.
    file: str = "backchannel-fp32.onnx"
    # The input for the audio, float32 [1, num_samples].
    audio: str = "chunk"
    # The input for the response, float32 [1, num_frames, 8].
    response: str = "bot_state"
    # The output with the classes' probabilities, float32 [1, num_frames, num_classes].
    output: str = "intent"
    # The classes, in the order of the output.
    classes: tuple[str, ...] = ("continuer", "assessment", "negative", "floor_take", "non_speech")
    # The classes of backchannels.
    backchannels: tuple[str, ...] = ("continuer", "assessment")
    # The classes that take the floor.
    floor: tuple[str, ...] = ("negative", "floor_take")
    # The probability from which a sound counts. It is not published; this value is a choice.
    threshold: float = 0.6
    # By the name of each state input, the output that is its next value; None: see OnnxStream.
    states: dict[str, str] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if a value is outside its range."""
        if not 0 < self.frame_ms <= self.chunk_ms or self.chunk_ms % self.frame_ms or not 0 < self.threshold < 1:
            raise ValueError("`chunk_ms` has to be a multiple of `frame_ms`, and `threshold` in (0, 1)")
        if not {*self.backchannels, *self.floor} <= {*self.classes}:
            raise ValueError("`backchannels` and `floor` have to be among the `classes`")


@dataclass(frozen=True, slots=True)
class _Job:
    """Whole chunks of an overlap: float32 [num_chunks, samples], and the response in their frames."""

    stream: OverlapStream
    chunks: Pcm
    response: Array


class OverlapStream:
    """A BackchannelStream. `state` is read and written in the lane's worker."""

    def __init__(self, lane: Lane[_Job, list[OverlapSound]], shape: BackchannelShape, state: dict[str, Array]) -> None:
        self._lane = lane
        self._chunk = shape.chunk_ms * SAMPLE_RATE_HZ // 1000
        self._frames = shape.chunk_ms // shape.frame_ms
        self.state = state
        self._pcm = np.zeros(0, np.float32)
        self._response = np.zeros((0, 8), np.float32)

    async def feed(self, pcm: Pcm, response: Array) -> list[OverlapSound]:
        """Return how the speech sounds after each chunk that `pcm` completes. See `BackchannelStream.feed`."""
        self._pcm = np.concatenate((self._pcm, pcm))
        self._response = np.concatenate((self._response, response))
        num = len(self._pcm) // self._chunk
        if num == 0:
            return []
        job = _Job(self, self._pcm[: num * self._chunk].reshape(num, self._chunk), self._response[: num * self._frames])
        self._pcm, self._response = self._pcm[num * self._chunk :], self._response[num * self._frames :]
        return await self._lane.run(job)


class SoundBackchannelDetector:
    """A BackchannelDetector. Its lane has one thread, which computes on one core."""

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions) -> None:
        """Load the graph of a folder with a config.json. Raises ModelError if it does not load or has another shape."""
        self.id = model_id
        self.shape = read_config(folder, model_id, BackchannelShape)
        self.frame_samples = self.shape.frame_ms * SAMPLE_RATE_HZ // 1000
        self.threshold = self.shape.threshold
        self._graph = OnnxStream(graph_file(folder, model_id, self.shape.file), model_id, self.shape.states)
        if {self.shape.audio, self.shape.response} != {*self._graph.free}:
            raise ModelError(f"{model_id}: the inputs have to be {self.shape.audio}, {self.shape.response} and states")
        if self.shape.output not in self._graph.outputs:
            raise ModelError(f"{model_id}: the graph has no output {self.shape.output}")
        self.lane: Lane[_Job, list[OverlapSound]] = Lane(
            "backchannel", self._work, max_queue=options.max_queue, observe=options.observe
        )

    def open(self) -> OverlapStream:
        """Return the stream of a new overlap. Its state begins with zeros."""
        return OverlapStream(self.lane, self.shape, self._graph.state)

    def _work(self, jobs: Sequence[_Job]) -> list[list[OverlapSound]]:
        return [self._sounds(job) for job in jobs]

    def _sounds(self, job: _Job) -> list[OverlapSound]:
        shape, found = self.shape, []
        frames = shape.chunk_ms // shape.frame_ms
        for k, chunk in enumerate(job.chunks):
            response = job.response[None, k * frames : (k + 1) * frames]
            values, job.stream.state = self._graph.step(
                {shape.audio: np.clip(chunk, -1, 1)[None], shape.response: response}, job.stream.state
            )
            last = dict(zip(shape.classes, values[shape.output].reshape(-1, len(shape.classes))[-1], strict=True))
            found.append(
                OverlapSound(float(sum(last[c] for c in shape.backchannels)), float(sum(last[c] for c in shape.floor)))
            )
        return found
