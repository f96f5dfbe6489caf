"""A turn detector that combines several: the weighted mean of their logits. One failing detector does not count.

The server's turn detector is always a blend, even of one. A blend never stops a session: what is not judged is decided
by the words and the silence. The failures of a backchannel detector are counted in the same way (CheckedBackchannel).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio
import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.contracts import (
    BackchannelDetector,
    BackchannelStream,
    LearnEarly,
    OverlapSound,
    StreamingTurnDetector,
    TurnDetector,
    TurnStream,
    WordsTurnDetector,
)
from antiphon.errors import ModelError, Refused

log = logging.getLogger(__name__)

# Seconds after which a blend judges without the detectors that have not answered, and seconds after which it no longer
# waits for them.
LATE_S, GIVEN_UP_S = 0.05, 1.0
# Bound of the logit of a probability of 0 or 1.
MAX_LOGIT = 14.0


def logit(probability: float) -> float:
    """Return the logit of a probability in [0, 1], in [-MAX_LOGIT, MAX_LOGIT]."""
    bounded = min(1 - 1e-9, max(1e-9, probability))
    return min(MAX_LOGIT, max(-MAX_LOGIT, math.log(bounded / (1 - bounded))))


def sigmoid(value: float) -> float:
    """Return the probability, in (0, 1), that has this logit."""
    return 1 / (1 + math.exp(-min(MAX_LOGIT, max(-MAX_LOGIT, value))))


class DetectorFailures:
    """Counts the judgements that detectors did not make. The first of each kind is logged.

    `counts`: by the detector's name and the reason: "late" (after LATE_S), "not_a_number" or "error".
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, reason: str, detail: str = "", *, is_logged: bool = True) -> None:
        """Count a judgement that the detector `name` did not make, or made too late. `is_logged`: log the first one."""
        self.counts[name, reason] += 1
        if is_logged and self.counts[name, reason] == 1:
            log.warning("turns are decided without %s (%s)%s", name, reason, f": {detail}" if detail else "")


@dataclass(frozen=True, slots=True)
class BlendPart:
    """One detector of a blend, with its name and its weight, which is positive."""

    name: str
    detector: TurnDetector | WordsTurnDetector
    weight: float = 1.0

    @property
    def languages(self) -> frozenset[str]:
        """The languages that the detector was made for, as ISO 639-1; empty: any."""
        return frozenset(getattr(self.detector, "languages", ()))


class TurnBlend:
    """A StreamingTurnDetector made of others. `failures` counts what they did not judge."""

    def __init__(self, parts: Sequence[BlendPart], failures: DetectorFailures | None = None) -> None:
        """Raises ModelError if two of the parts have no language in common. Warns if their languages differ."""
        self.parts = tuple(parts)
        self.failures = failures or DetectorFailures()
        limited = [part for part in self.parts if part.languages]
        for i, one in enumerate(limited):
            for other in limited[i + 1 :]:
                if not one.languages & other.languages:
                    raise ModelError(
                        f"{one.name} ({', '.join(sorted(one.languages))}) and {other.name} "
                        f"({', '.join(sorted(other.languages))}) have no language in common"
                    )
        if len({part.languages for part in self.parts}) > 1:
            narrow = min(limited, key=lambda part: len(part.languages))
            names = ", ".join(part.name for part in self.parts)
            log.warning(
                "the blend of %s has different languages: outside %s, %s guesses",
                names, ", ".join(sorted(narrow.languages)), narrow.name,
            )  # fmt: skip

    def open(self) -> BlendStream:
        """Return the stream of a new session."""
        return BlendStream(self.parts, self.failures)

    async def complete(self, pcm: Pcm) -> float:
        """Return the probability, in [0, 1], that the turn is complete. See `BlendStream.complete`."""
        return await self.open().complete(0, pcm)


def _mean(found: Mapping[str, tuple[float, float]]) -> float:
    """Return the probability that has the mean logit of some probabilities, each with its weight."""
    if len(found) == 1:
        return next(iter(found.values()))[0]
    total = sum(weight for _, weight in found.values())
    return sigmoid(sum(weight * logit(p) for p, weight in found.values()) / total)


class _WholeTurn:
    """A TurnStream of a detector without state."""

    def __init__(self, detector: TurnDetector) -> None:
        self._detector = detector

    async def follow(self, start: int, pcm: Pcm) -> None:
        """Do nothing: the detector computes the whole turn when it judges it."""

    async def complete(self, start: int, pcm: Pcm, early: LearnEarly | None = None) -> float:
        """Return the detector's probability, and raise its errors."""
        return await self._detector.complete(pcm)


class BlendStream:
    """A TurnStream that asks the parts of a blend side by side."""

    def __init__(self, parts: Sequence[BlendPart], failures: DetectorFailures) -> None:
        self._failures = failures
        self._streams: list[tuple[BlendPart, TurnStream]] = []
        self._readers: list[tuple[BlendPart, WordsTurnDetector]] = []
        # What the parts found at the last pause by sound and by words, by name: probability and weight.
        self._heard: dict[str, tuple[float, float]] = {}
        self._read: dict[str, tuple[float, float]] = {}
        for part in parts:
            if isinstance(part.detector, WordsTurnDetector):
                self._readers.append((part, part.detector))
            elif isinstance(part.detector, StreamingTurnDetector):
                self._streams.append((part, part.detector.open()))
            else:
                self._streams.append((part, _WholeTurn(part.detector)))

    async def follow(self, start: int, pcm: Pcm) -> None:
        """Let each part compute the turn so far. Failures are counted, and nothing is raised."""
        for part, stream in self._streams:
            try:
                await stream.follow(start, pcm)
            except (ModelError, Refused) as error:
                self._failures.add(part.name, "error", str(error))

    async def complete(self, start: int, pcm: Pcm, early: LearnEarly | None = None) -> float:
        """Return the mean, weighted, of the logits of the parts that answer within GIVEN_UP_S, as a probability.

        After LATE_S, `early` gets the mean of those that have answered by then. Without `early`, it is the result. If
        none has answered by then, waits for the first. Raises ModelError if no part answers.
        """
        self._heard = found = dict[str, tuple[float, float]]()
        self._read = {}
        has_answer, is_over = anyio.Event(), anyio.Event()
        waiting = {part.name for part, _ in self._streams}

        async def ask(part: BlendPart, stream: TurnStream) -> None:
            probability = await self._asked(part, stream, start, pcm)
            waiting.discard(part.name)
            if probability is not None:
                found[part.name] = (probability, part.weight)
                has_answer.set()
            if not waiting:
                has_answer.set()
                is_over.set()

        if not self._streams:
            raise ModelError("no turn detector judges the pause before its words")
        async with anyio.create_task_group() as group:
            for part, stream in self._streams:
                group.start_soon(ask, part, stream)
            with anyio.move_on_after(LATE_S):
                await is_over.wait()
            for name in sorted(waiting):
                # A detector without others is waited for, so nothing is decided without it.
                is_missed = len(self._streams) > 1
                self._failures.add(name, "late", f"more than {1000 * LATE_S:g} ms", is_logged=is_missed)
            await has_answer.wait()
            if early and waiting and found:
                early(_mean(found | self._read))
                with anyio.move_on_after(GIVEN_UP_S):
                    await is_over.wait()
            group.cancel_scope.cancel()
        if not found:
            raise ModelError("no turn detector has judged the pause")
        return _mean(found | self._read)

    @property
    def reads(self) -> bool:
        """Whether a part judges by words."""
        return bool(self._readers)

    async def read(self, words: str) -> float | None:
        """Return the mean with the judgements of those parts that read, once the words of the turn are known.

        None if no part judges by words, or if none of them answers. What the other parts have judged of the last pause
        counts too. Raises nothing.
        """
        self._read = found = dict[str, tuple[float, float]]()
        for part, reader in self._readers:
            began_s = time.monotonic()
            try:
                with anyio.fail_after(GIVEN_UP_S):
                    probability = await reader.finished(words)
            except (ModelError, Refused, TimeoutError) as error:
                self._failures.add(part.name, "error", str(error) or f"no answer within {GIVEN_UP_S:g} s")
                continue
            if time.monotonic() - began_s > LATE_S:
                self._failures.add(part.name, "late", f"more than {1000 * LATE_S:g} ms")
            if probability is not None and self._is_probability(part, probability):
                found[part.name] = (probability, part.weight)
        return _mean(self._heard | found) if found else None

    def _is_probability(self, part: BlendPart, value: float) -> bool:
        """Return whether a part has answered a probability. If not, this is counted as a failure."""
        if not 0 <= value <= 1:
            self._failures.add(part.name, "not_a_number", f"it answered {value}")
            return False
        return True

    async def _asked(self, part: BlendPart, stream: TurnStream, start: int, pcm: Pcm) -> float | None:
        """Return a part's probability; None, counted as a failure, if there is none."""
        try:
            probability = await stream.complete(start, pcm)
        except (ModelError, Refused) as error:
            self._failures.add(part.name, "error", str(error))
            return None
        return probability if self._is_probability(part, probability) else None


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
