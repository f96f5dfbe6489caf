"""What of the answers is still to be heard, if they are played as they come; and what the microphone may hear of them."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import Resampler
from antiphon.events.conversation import ResponseAudioDelta
from antiphon.turns.echo import EchoGuard


class Playout:
    """`clock`: monotonic seconds. `at` everywhere: the sample of the microphone's sound that is heard now."""

    def __init__(self, echo: EchoGuard, clock: Callable[[], float]) -> None:
        self._echo = echo
        self._clock = clock
        self._until_s = 0.0
        # What is said, on its way to the echo guard: the item, and its sound at the microphone's rate.
        self._reference: tuple[str, Resampler] | None = None

    @property
    def left_s(self) -> float:
        """Seconds of sound that were said and not heard yet."""
        return max(0.0, self._until_s - self._clock())

    def said(self, sound: ResponseAudioDelta, at: int) -> None:
        """More sound is on its way to whoever plays it."""
        self._until_s = max(self._clock(), self._until_s) + len(sound.pcm) / sound.rate_hz
        if self._reference is None or self._reference[0] != sound.at.item_id:
            self._reference = (sound.at.item_id, Resampler(sound.rate_hz, SAMPLE_RATE_HZ))
        self._echo.add_reference(self._reference[1].feed(sound.pcm), at)

    def silenced(self, at: int) -> None:
        """Whoever plays the answer has stopped."""
        self._until_s = 0.0
        self._echo.cut_reference(at)
