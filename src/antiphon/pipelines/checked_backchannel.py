"""A backchannel detector whose failures are counted and logged once. An overlap goes on without it."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.contracts import BackchannelDetector, BackchannelStream, OverlapSound
from antiphon.errors import ModelError, Refused
from antiphon.pipelines.turn_blend import LATE_S, DetectorFailures


class CheckedBackchannel:
    """A BackchannelDetector around another one."""

    def __init__(self, detector: BackchannelDetector, failures: DetectorFailures) -> None:
        self.id, self.frame_samples, self.threshold = detector.id, detector.frame_samples, detector.threshold
        self._detector, self._failures = detector, failures

    def open(self) -> CheckedStream:
        """Return the stream of a new overlap."""
        return CheckedStream(self.id, self._detector.open(), self._failures)


class CheckedStream:
    """A BackchannelStream around another one."""

    def __init__(self, name: str, stream: BackchannelStream, failures: DetectorFailures) -> None:
        self._name, self._stream, self._failures = name, stream, failures

    async def feed(self, pcm: Pcm, response: npt.NDArray[np.float32]) -> list[OverlapSound]:
        """Return the stream's sounds. Raises Refused and ModelError, also for a value that is no probability."""
        began_s = time.monotonic()
        try:
            found = await self._stream.feed(pcm, response)
        except (ModelError, Refused) as error:
            self._failures.add(self._name, "error", str(error))
            raise
        if time.monotonic() - began_s > LATE_S:
            self._failures.add(self._name, "late", f"more than {1000 * LATE_S:g} ms")
        # Sums of rounded probabilities may be slightly above 1.
        if not all(-1e-3 <= p <= 1.001 for sound in found for p in (sound.backchannel, sound.floor)):
            self._failures.add(self._name, "not_a_number")
            raise ModelError(f"{self._name} answered no probability")
        return found
