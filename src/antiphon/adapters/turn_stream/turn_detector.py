"""A turn detector that takes a turn in chunks (turn-1-mini: 160 ms, streaming-turn: 40 ms) and keeps state.

The state begins with zeros at each turn. Audio that does not fill a chunk at the pause is padded with zeros and
computed on a copy of the state, so the judgement does not wait for the chunk. If a model has several outputs, the one
that is farthest above its own threshold counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.turn_stream.shape import read_shape
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import LearnEarly
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError
from antiphon.modeling.onnx_stream import Array, OnnxStream, graph_file
from antiphon.pipelines.turn_blend import logit, sigmoid


@dataclass(frozen=True, slots=True)
class _Job:
    """A turn so far: float32 [num_samples], and whether its judgement is needed now."""

    stream: StreamedTurn
    start: int
    pcm: Pcm
    is_judged: bool


class StreamedTurn:
    """A TurnStream. The lane's worker reads and writes the attributes.

    - `start`: the sample at which the turn begins, or None before the first turn.
    - `num_done`: the samples of the turn that `state` contains.
    - `last`: the probability after these samples.
    """

    def __init__(self, lane: Lane[_Job, float]) -> None:
        self._lane = lane
        self.start: int | None = None
        self.num_done = 0
        self.state: dict[str, Array] = {}
        self.last = 0.0

    async def follow(self, start: int, pcm: Pcm) -> None:
        """Compute the whole chunks of the turn so far. Raises what `complete` raises."""
        await self._lane.run(_Job(self, start, pcm, is_judged=False))

    async def complete(self, start: int, pcm: Pcm, early: LearnEarly | None = None) -> float:
        """Return the probability, in [0, 1], that the turn is complete. `pcm`: float32 [num_samples], 16 kHz.

        Waits in the lane. Raises Refused if the lane is full, and ModelError.
        """
        return await self._lane.run(_Job(self, start, pcm, is_judged=True))


class StreamedTurnDetector:
    """A StreamingTurnDetector. Its lane has one thread, which computes on one core."""

    def __init__(self, folder: Path, model_id: str, options: LaneModelOptions) -> None:
        """Load the graph of a folder whose config.json describes its shape. Raises ModelError if it does not load."""
        self.shape = read_shape(folder, model_id)
        self.languages = self.shape.languages
        self._graph = OnnxStream(graph_file(folder, model_id, self.shape.file), model_id, self.shape.states)
        free = [self.shape.audio] if self.shape.audio else list(self._graph.free)
        if len(free) != 1 or set(free) != set(self._graph.free):
            raise ModelError(f"{model_id}: expected one input for audio; the graph has {', '.join(self._graph.free)}")
        if unknown := self.shape.outputs.keys() - self._graph.outputs:
            raise ModelError(f"{model_id}: the graph has no output {', '.join(sorted(unknown))}")
        self._audio = free[0]
        self._chunk = self.shape.chunk_ms * SAMPLE_RATE_HZ // 1000
        self._frame = (self.shape.frame_ms or self.shape.chunk_ms) * SAMPLE_RATE_HZ // 1000
        self.lane: Lane[_Job, float] = Lane(
            f"turn-{model_id}", self._work, max_queue=options.max_queue, observe=options.observe
        )

    def open(self) -> StreamedTurn:
        """Return the stream of a new session."""
        return StreamedTurn(self.lane)

    async def complete(self, pcm: Pcm) -> float:
        """Return the probability, in [0, 1], that the turn is complete, without state. See `StreamedTurn.complete`."""
        return await self.open().complete(0, pcm)

    def _work(self, jobs: Sequence[_Job]) -> list[float]:
        return [self._judge(job) for job in jobs]

    def _judge(self, job: _Job) -> float:
        if self.shape.rate_hz != SAMPLE_RATE_HZ:
            raise ModelError(f"{self._graph.id} takes audio of {self.shape.rate_hz} Hz, and gets {SAMPLE_RATE_HZ} Hz")
        stream, pcm = job.stream, np.asarray(job.pcm, np.float32)
        if job.start != stream.start or len(pcm) < stream.num_done:
            stream.start, stream.state, stream.last = job.start, self._graph.state, 0.0
            # A long turn of which nothing was computed begins at a whole chunk.
            old = max(0, len(pcm) - int(self.shape.history_s * SAMPLE_RATE_HZ))
            stream.num_done = -(-old // self._chunk) * self._chunk
        try:
            while len(pcm) - stream.num_done >= self._chunk:
                values, stream.state = self._step(pcm[stream.num_done : stream.num_done + self._chunk], stream.state)
                stream.num_done += self._chunk
                stream.last = values[-1]
            rest = pcm[stream.num_done :]
            num_frames = len(rest) // self._frame
            if not job.is_judged or num_frames == 0:
                return stream.last
            padded = np.zeros(self._chunk, np.float32)
            padded[: len(rest)] = rest
            return self._step(padded, stream.state)[0][num_frames - 1]
        except ModelError:
            # A state with a value that is not a number would spoil all later steps.
            stream.start = None
            raise

    def _step(self, chunk: Pcm, state: dict[str, Array]) -> tuple[list[float], dict[str, Array]]:
        """Return the probability that the turn is over for each frame of a chunk, and the state after the chunk."""
        values, after = self._graph.step({self._audio: np.clip(chunk, -1, 1)[None]}, state)
        found: list[float] = []
        for name, limit in self.shape.outputs.items():
            above = [logit(float(p)) - logit(limit) for p in values[name].reshape(-1)]
            found = [max(pair) for pair in zip(found, above, strict=True)] if found else above
        return [sigmoid(value) for value in found], after
