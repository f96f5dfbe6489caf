"""The part that speaker encoders share: an ONNX network behind a lane with one thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime

from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import Pcm
from antiphon.contracts.speaker import SpeakerProfile
from antiphon.engine.lane import Lane
from antiphon.errors import ModelError


class VoiceEncoder(ABC):
    """A SpeakerModel. Its lane has one thread, which computes on one core.

    `profile`: the properties of the vectors, and the thresholds for comparing them. `lane`: where `embed` waits.
    """

    def __init__(self, graph: Callable[[], bytes], profile: SpeakerProfile, options: LaneModelOptions) -> None:
        """Load the network. `graph` reads the weights, and returns an ONNX graph with the input `frames`.

        Raises ModelError if the graph cannot be read or does not load.
        """
        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = session.inter_op_num_threads = 1
        session.log_severity_level = 3
        try:
            self._model = onnxruntime.InferenceSession(graph(), session, providers=["CPUExecutionProvider"])
        except Exception as error:
            # The errors that pickle and onnxruntime raise for a bad file have no common base class.
            raise ModelError(f"{profile.id} does not load: {error}") from error
        self.profile = profile
        self.lane: Lane[Pcm, Pcm] = Lane("speaker", self._work, max_queue=options.max_queue, observe=options.observe)

    async def embed(self, pcm: Pcm) -> Pcm:
        """Return the unit vector of a voice, float32 [profile.size], without what all voices have in common.

        `pcm`: float32 [num_samples], mono, 16 kHz, of any length. Waits in the lane. Raises Refused if the lane is
        full, and ModelError.
        """
        return await self.lane.run(pcm)

    def close(self) -> None:
        """Stop the lane's worker thread. Calls of `embed` that are waiting in the lane are cancelled."""
        self.lane.close()

    @abstractmethod
    def encode(self, pcm: Pcm) -> Pcm:
        """Return a unit vector, float32 [profile.size]. Runs in the caller's thread."""

    def vectors(self, frames: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the network's vectors, float32 [num_windows, profile.size]. `frames`: the network's input."""
        return np.asarray(self._model.run(None, {"frames": frames})[0])

    def _work(self, jobs: Sequence[Pcm]) -> list[Pcm]:
        return [self.encode(pcm) for pcm in jobs]
