"""The units of a native model's session: the audio that waits for the model, and the clock of the session. Pure.

A unit's *time* is the moment at which its audio was complete, or at which silence took the place of audio that had not
arrived. A unit is *late* if its result comes more than a unit after its time: the model has lost the pace of the user.
A client may send ahead of real time. A unit's time is therefore at least CATCH_UP units after that of the unit before,
as far as the model was not faster: a file that is sent at once is not late while the model keeps the pace of speech.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from antiphon.audio import Pcm

# Units of audio that may wait for the model. At the limit, `NativeTurns.append_audio` waits, which slows the client
# down.
MAX_WAITING_UNITS = 4
# Tolerated delay of audio from a client that is sending, as a fraction of a unit.
LATE_UNITS = 0.5
# Minimum distance between the times of two units, as a fraction of a unit. It is below 1, so that after a delay on the
# way the clock returns to the times at which audio arrives.
CATCH_UP = 0.9


@dataclass(frozen=True, slots=True)
class UnitDone:
    """One unit whose result has come. Times are in seconds.

    - `unit_s`: the length of a unit.
    - `delay_s`: from the unit's time to its result.
    - `is_silent`: silence took the place of some of its audio, which had not arrived.
    - `is_early`: its audio arrived more than LATE_UNITS ahead of its time, so the client sends faster than real time.
    """

    unit_s: float
    delay_s: float
    is_silent: bool = False
    is_early: bool = False

    @property
    def is_late(self) -> bool:
        """Whether the result came more than a unit after the unit's time."""
        return self.delay_s > self.unit_s

    @property
    def counts(self) -> tuple[str, ...]:
        """The names under which the unit is counted: `done`, and what applies of `late`, `silent` and `early`."""
        found = (("late", self.is_late), ("silent", self.is_silent), ("early", self.is_early))
        return ("done", *(name for name, applies in found if applies))


class UnitClock:
    """The clock of a session. It decides when a unit is padded with silence because its audio has not arrived, and
    measures how long each unit's result takes. Times are monotonic seconds.

    A client that sends audio gets LATE_UNITS in addition to the unit's length, for network jitter. Otherwise the model
    would hear a pause in the user's speech, and each such pause would put it another unit ahead of the user.
    """

    def __init__(self, unit_s: float) -> None:
        self._unit_s = unit_s
        self._began_s, self._time_s = 0.0, -math.inf
        self._is_fed = self._is_early = False

    def begin(self, now_s: float, arrived_s: float | None) -> None:
        """Begin a unit at `now_s`. `arrived_s`: when its audio was complete; None: it was padded with silence."""
        nominal_s = self._time_s + CATCH_UP * self._unit_s
        self._began_s, self._is_fed = now_s, arrived_s is not None
        at_s = now_s if arrived_s is None else arrived_s
        self._is_early = self._is_fed and nominal_s - at_s > LATE_UNITS * self._unit_s
        self._time_s = min(now_s, max(at_s, nominal_s))

    def done(self, now_s: float) -> UnitDone:
        """Return the measurement of the unit that began last, whose result came at `now_s`."""
        return UnitDone(self._unit_s, now_s - self._time_s, not self._is_fed, self._is_early)

    def left_s(self, now_s: float, *, is_committed: bool) -> float:
        """Seconds until the next unit is due. `is_committed`: the client waits for an answer and may send no audio."""
        late_s = LATE_UNITS * self._unit_s if self._is_fed and not is_committed else 0.0
        return self._began_s + self._unit_s + late_s - now_s


class UnitQueue:
    """Queues audio, cut into units of `unit_samples`, and the images that arrived with each unit.

    `max_frames`: maximum images per unit. `num_waiting`: waiting samples. `num_received`: samples received so far.
    """

    def __init__(self, unit_samples: int, max_frames: int) -> None:
        self.unit_samples, self._max_frames = unit_samples, max_frames
        self.num_waiting = self.num_received = 0
        # Audio, each piece with the time at which it arrived.
        self._audio: deque[tuple[Pcm, float]] = deque()
        # Images, each with the number of samples received before it.
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=max(1, max_frames) * (MAX_WAITING_UNITS + 1))

    @property
    def has_unit(self) -> bool:
        """Whether the audio of a whole unit is waiting."""
        return self.num_waiting >= self.unit_samples

    def append(self, pcm: Pcm, at_s: float) -> None:
        """Append audio that arrived at `at_s`. The array is kept, not copied."""
        self._audio.append((pcm, at_s))
        self.num_waiting += len(pcm)
        self.num_received += len(pcm)

    def append_frames(self, frames: tuple[bytes, ...]) -> None:
        """Append images, which go with the unit of the audio that arrives next."""
        self._frames.extend((self.num_received, frame) for frame in frames)

    def take(self) -> tuple[Pcm, float | None]:
        """Remove and return a unit, padded with silence if needed, and the time at which its last audio arrived; None
        if it was padded.
        """
        pcm, at, arrived_s = np.zeros(self.unit_samples, np.float32), 0, 0.0
        while self._audio and at < self.unit_samples:
            chunk, arrived_s = self._audio.popleft()
            part = chunk[: self.unit_samples - at]
            pcm[at : at + len(part)] = part
            at += len(part)
            if len(part) < len(chunk):
                self._audio.appendleft((chunk[len(part) :], arrived_s))
        self.num_waiting -= at
        return pcm, arrived_s if at == self.unit_samples else None

    def take_frames(self) -> tuple[bytes, ...]:
        """Remove the images of the unit that was taken last, and return the newest `max_frames` of them."""
        frames, num_taken = [], self.num_received - self.num_waiting
        while self._frames and (self._frames[0][0] < num_taken or not self.num_waiting):
            frames.append(self._frames.popleft()[1])
        return tuple(frames[-self._max_frames :]) if self._max_frames else ()
